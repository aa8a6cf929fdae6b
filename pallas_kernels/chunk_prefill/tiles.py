"""Which tiles of keys a block of query rows goes through."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from pallas_kernels.chunk_prefill.plan import TILE


class Tiles(NamedTuple):
    """Tiles of a block, numbered in this order; what none of its rows sees is not among them.

        whole ones of the prefix | whole ones of the chunk | the chunk's on the diagonal | the prefix's last, if partial

    Attributes:
      length: tokens of the prefix.
      full: whole tiles of the prefix.
      of_chunk: tiles of the chunk.
      whole: tiles that every row sees all of, the first ones.
      start, end: tiles of this split of the keys.
    """

    length: Int[Array, ""]
    full: Int[Array, ""]
    of_chunk: Int[Array, ""]
    whole: Int[Array, ""]
    start: Int[Array, ""]
    end: Int[Array, ""]

    @staticmethod
    def of(length, first_token, last_token, split, splits: int) -> "Tiles":
        """For rows of the chunk's tokens `first_token` to `last_token`; without a chunk both are -1."""
        full, of_chunk = lax.div(length, TILE), pl.cdiv(last_token + 1, TILE)
        total = full + of_chunk + (lax.rem(length, TILE) > 0).astype(jnp.int32)
        per_split = pl.cdiv(total, splits)
        start = jnp.minimum(split * per_split, total)
        whole = full + lax.div(first_token + 1, TILE)
        return Tiles(length, full, of_chunk, whole, start, jnp.minimum(start + per_split, total))

    def is_of_chunk(self, n):
        return (n >= self.full) & (n < self.full + self.of_chunk)

    def is_partial(self, n):
        return n >= self.full + self.of_chunk

    def first_of_chunk(self, n):
        """The row of the chunk at which its tile n begins."""
        return (n - self.full) * TILE

    def first_of_prefix(self, n):
        """The token of the prefix at which its tile n begins."""
        return jnp.minimum(n, self.full) * TILE
