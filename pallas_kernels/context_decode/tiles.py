"""Which tiles of keys a block goes through."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Int

from pallas_kernels.context_decode.plan import TILE


class Tiles(NamedTuple):
    """The tiles of 64 keys that a block goes through: those of its sequence's prefix, then that of the tree.

    Attributes:
      first_page: of the layer.
      length: tokens of the prefix.
      start, end: of the block.
      slots: in shared memory.
    """

    first_page: Int[Array, ""]
    length: Int[Array, ""]
    start: Int[Array, ""]
    end: Int[Array, ""]
    slots: int

    @staticmethod
    def of(first_page, length, has_tree: bool, split, splits: int, slots: int) -> "Tiles":
        """Those of one of equal parts of a sequence."""
        count = pl.cdiv(length, TILE) + has_tree
        start, end = (lax.div(i * count, splits) for i in (split, split + 1))
        return Tiles(first_page, length, start, end, slots)

    @property
    def full(self):
        """Tiles of the prefix that are whole."""
        return lax.div(self.length, TILE)

    @property
    def prefix(self):
        return pl.cdiv(self.length, TILE)

    def slot_of(self, tile):
        return lax.rem(tile - self.start, self.slots)

    def present(self, tile):
        """How many keys a tile has; in that of the tree, zeros follow the nodes."""
        return jnp.where(tile < self.prefix, jnp.minimum(self.length - tile * TILE, TILE), TILE)
