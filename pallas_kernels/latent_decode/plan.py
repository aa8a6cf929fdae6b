"""What the kernel takes, and how it cuts the work."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.context_decode.plan import DTYPES, MAX_TOKENS, TILE, round_up
from pallas_kernels.latent_decode.reference import KEY, LATENT, ROPE

MAX_HEADS = 128
_MULTIPROCESSORS = 132  # of an H100 or H200


def unsupported(*, dtype, tokens: int, heads: int, width: int, page_size: int) -> str | None:
    """Why the kernel does not take these, as the rule that they break, or None where it does.

    Args:
      dtype: of queries and cache.
      tokens: T.
      heads: query heads on this device.
      width: values of a row of the cache.
      page_size: tokens of a page on this device.
    """
    if jnp.dtype(dtype) not in DTYPES:
        return f"dtype={jnp.dtype(dtype).name} must be bfloat16 or float16, which the tensor cores multiply"
    if width != KEY:
        return f"rows of {width} values must have {LATENT} of the latent and {ROPE} of the rotary key"
    if not 1 <= tokens <= MAX_TOKENS:
        return f"{tokens} query tokens must be 1 to {MAX_TOKENS}, as many as there are ancestor bits"
    if not 1 <= heads <= MAX_HEADS:
        return f"{heads} query heads must be 1 to {MAX_HEADS}"
    if page_size % 8 or (page_size % TILE and TILE % page_size):
        return f"pages of {page_size} tokens on a device must have 8, 16, 32 or a multiple of {TILE}"
    return None


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the work is cut.

    Attributes:
      rows: query rows of a block that count, a multiple of 8; it multiplies 64.
      row_tiles: such sets of rows; each has its own blocks, which meet the same keys in the L2 cache.
      splits: parts of the keys.
    """

    rows: int
    row_tiles: int
    splits: int

    @staticmethod
    def of(batch: int, rows: int, tiles: int) -> "Plan":
        """For so many query rows of a sequence over at most `tiles` tiles of keys."""
        row_tiles = -(-rows // TILE)
        blocks = batch * row_tiles  # one fits on a multiprocessor
        overhead = 3  # what a block costs beside its tiles: first fetch and last store

        def cost(splits: int) -> float:
            merging = splits / 32  # which are read at once
            return -(-blocks * splits // _MULTIPROCESSORS) * (-(-tiles // splits) + overhead) + merging

        return Plan(
            rows=round_up(-(-rows // row_tiles), 8),
            row_tiles=row_tiles,
            splits=min(range(1, max(1, min(tiles, _MULTIPROCESSORS)) + 1), key=cost),
        )
