"""How the elements of a GGUF tensor are stored, and how they become numbers."""

import dataclasses
from collections.abc import Callable

import ml_dtypes
import numpy as np

# The types that a file can name; those in `DECODERS` can be read.
TYPE_NAMES = {
    **{0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K"},
    **{12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S"},
    **{20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64"},
    **{29: "IQ1_M", 30: "BF16", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4"},
}


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Blocks of `block_bytes` hold `block_elements` each; `decode` takes u8[blocks, block_bytes]."""

    block_elements: int
    block_bytes: int
    decode: Callable[[np.ndarray], np.ndarray]


def _plain(dtype: type) -> Decoder:
    return Decoder(1, np.dtype(dtype).itemsize, lambda blocks: blocks.copy().view(dtype))


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at byte `start` of each block, f32[blocks, 1]."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """f32[blocks, 32]: low nibbles are elements 0..15 of a block, high nibbles 16..31."""
    elements = np.empty((packed.shape[0], 32), np.float32)
    elements[:, :16] = packed & 15
    elements[:, 16:] = packed >> 4
    return elements


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    """d, 16 bytes: d * (q - 8)."""
    elements = _nibbles(blocks[:, 2:])
    elements -= 8
    elements *= _half(blocks, 0)
    return elements


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    """d, m, 16 bytes: d * q + m."""
    elements = _nibbles(blocks[:, 4:])
    elements *= _half(blocks, 0)
    elements += _half(blocks, 2)
    return elements


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    """d, 32 signed bytes: d * q."""
    elements = blocks[:, 2:].copy().view(np.int8).astype(np.float32)
    elements *= _half(blocks, 0)
    return elements


DECODERS = {
    0: _plain(np.float32),
    1: _plain(np.float16),
    2: Decoder(32, 18, _q4_0),
    3: Decoder(32, 20, _q4_1),
    8: Decoder(32, 34, _q8_0),
    30: _plain(ml_dtypes.bfloat16),
}


def type_name(code: int) -> str:
    return TYPE_NAMES.get(code, f"type {code}")
