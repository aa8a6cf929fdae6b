"""What a dtype promises."""

import contextlib
from typing import Any

import jax
import numpy as np


def matmul_precision(dtype: np.dtype) -> contextlib.AbstractContextManager[Any]:
    """To trace programs of `dtype` in. float32 means float32: a GPU would otherwise multiply in TF32."""
    return jax.default_matmul_precision("highest") if dtype == np.float32 else contextlib.nullcontext()
