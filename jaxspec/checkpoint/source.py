"""What every kind of model file is read as before it becomes a jaxspec checkpoint."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """A model somewhere on disk, in canonical form: Hugging Face names, `[out, in]` matrices, unpermuted query and key.

    Or a draft head, by the names of its own module and without a tokenizer. `read` brings one tensor into memory
    (float32, float16 or bfloat16; int64 for a table of tokens); nothing else here holds weights.
    """

    config: dict[str, Any]  # as a Hugging Face config.json
    tokenizer_files: Mapping[str, str | bytes]  # contents by file name: tokenizer.json, tokenizer_config.json
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[str], np.ndarray]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.shapes)
