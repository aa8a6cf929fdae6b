"""What the kernel takes, and how it cuts the work."""

import dataclasses

import jax.numpy as jnp

from pallas_kernels.context_decode.plan import DTYPES, MAX_TOKENS, TILE, round_up
from pallas_kernels.latent_decode.reference import KEY, LATENT, ROPE

MAX_HEADS = 128
_MAX_FLIPPED = 16  # query rows: their output is 4 registers each, of a thread
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
    if page_size < 8 or page_size % 8 or (page_size % TILE and TILE % page_size):
        return f"pages of {page_size} tokens on a device must have 8, 16, 32 or a multiple of {TILE}"
    return None


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the work is cut.

    Attributes:
      rows: query rows of a block that count, a multiple of 8; it multiplies 64 where it is not flipped.
      row_tiles: such sets of rows; each has its own blocks, which meet the same keys in the L2 cache.
      splits: parts of the keys.
    """

    rows: int
    row_tiles: int
    splits: int

    @property
    def is_flipped(self) -> bool:
        """Keys, not queries, are the rows of the products: so few queries need no padding."""
        return self.rows <= _MAX_FLIPPED

    @staticmethod
    def of(batch: int, rows: int, tiles: int) -> "Plan":
        """For so many query rows of a sequence over at most `tiles` tiles of keys."""
        row_tiles = -(-rows // TILE)
        plans = [
            Plan(rows=round_up(-(-rows // row_tiles), 8), row_tiles=row_tiles, splits=splits)
            for splits in range(1, max(1, min(tiles, _MULTIPROCESSORS)) + 1)
        ]
        return min(plans, key=lambda plan: _microseconds(plan, batch, tiles))


def _microseconds(plan: Plan, batch: int, tiles: int) -> float:
    """Roughly what it takes on an H200, where one block fits on a multiprocessor.

    A tile's time is fitted to former loops over 8 x 8,192 tokens: 30.2 µs for 16 rows in 16 splits and 49.9 for 128 in
    8, now 28.5 and 48.6. What a block's start and the merge add is known only as their sum.
    """
    tile, start = 1.95 if plan.is_flipped else 2.25, 10.0
    merge = 0.0 if plan.splits == 1 else 3.0 + 0.1 * plan.splits
    waves = -(-batch * plan.row_tiles * plan.splits // _MULTIPROCESSORS)
    return waves * (tiles / plan.splits * tile + start) + merge
