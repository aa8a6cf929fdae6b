"""Which dtypes there are to compute in, and what they promise."""

import contextlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(jnp.bfloat16)}


def choose_dtype(wanted: str, device: jax.Device) -> str:
    """A name of `DTYPES`; "auto" is bfloat16 on GPUs and float32 on CPUs."""
    if wanted != "auto":
        return wanted
    return "float32" if device.platform == "cpu" else "bfloat16"


def matmul_precision(dtype: np.dtype) -> contextlib.AbstractContextManager[Any]:
    """To trace programs of `dtype` in. float32 means float32: a GPU would otherwise multiply in TF32."""
    return jax.default_matmul_precision("highest") if dtype == np.float32 else contextlib.nullcontext()
