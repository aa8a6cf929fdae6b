"""What both loops share: how keys come into shared memory, who sees them, and how results leave it."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int

from pallas_kernels import mosaic
from pallas_kernels.context_decode.plan import TILE
from pallas_kernels.context_decode.reference import NO_KEYS
from pallas_kernels.context_decode.tiles import Tiles
from pallas_kernels.latent_decode.plan import Plan
from pallas_kernels.latent_decode.reference import LATENT

HALF = LATENT // 2  # columns of the output that each of two warpgroups writes
SLOTS = 2  # tiles in shared memory


@dataclasses.dataclass(frozen=True)
class Block:
    """Some query rows of a sequence over some tiles of its keys.

    Attributes:
      plan: of all blocks.
      nodes: of the tree.
      scale: factor on the scores.
      interpret: how the kernel is simulated, or None.
      sequence, split, row_tile: which block.
      me: which warpgroup.
      o, lse: results in memory.
      q, pages, first, table, lengths, tree, bits: operands in memory; None without a tree, `bits` also for one node.
    """

    plan: Plan
    nodes: int
    scale: float
    interpret: Any
    sequence: Int[Array, ""]
    split: Int[Array, ""]
    row_tile: Int[Array, ""]
    me: Int[Array, ""]
    o: Any
    lse: Any
    q: Any
    pages: Any
    first: Any
    table: Any
    lengths: Any
    tree: Any = None
    bits: Any = None

    @property
    def to_log2(self) -> float:
        """Factor on the scores, for powers of two."""
        return self.scale * mosaic.LOG2_E

    def find_tiles(self) -> Tiles:
        """By each warpgroup for itself: what outlives a change of registers is spilled."""
        has_tree, length = self.tree is not None, self.lengths[self.sequence]
        return Tiles.of(self.first[0], length, has_tree, self.split, self.plan.splits, SLOTS)

    @property
    def part(self) -> int:
        """Tokens that one copy brings."""
        return min(self.pages.shape[1], TILE)

    @property
    def parts(self) -> int:
        return TILE // self.part

    def page_of(self, tile, i):
        slot = lax.div(tile, self.pages.shape[1] // self.part) * self.parts + i
        return self.table[self.sequence, jnp.minimum(slot, self.table.shape[1] - 1)]

    def pages_of(self, tile):
        """Where the parts of a tile are, read ahead of the copies, for which it is an address.

        None for eight, more than there are registers to keep: each is read when it is needed.
        """
        return [self.page_of(tile, i) for i in range(self.parts)] if self.parts < 8 else None

    def fetch_queries(self, into, arrived):
        plgpu.copy_gmem_to_smem(self.q.at[self.sequence, self.row_tile], into.at[0, pl.ds(0, self.plan.rows)], arrived)

    def fetch(self, tiles: Tiles, tile, where, first_column: int, into, arrived):
        """Some columns of a tile, as many as there is room for; in as many copies wherever they come from."""
        columns = pl.ds(first_column, into.shape[1])

        def copy(source, first):
            plgpu.copy_gmem_to_smem(source, into.at[pl.ds(first, self.part)], arrived)

        @pl.when(tile < tiles.prefix)
        def from_pages():
            tokens = pl.ds(lax.rem(tile, self.pages.shape[1] // self.part) * self.part, self.part)

            def copy_page(page, first):
                copy(self.pages.at[tiles.first_page + page, tokens, columns], first)

            if where is not None:
                for i, page in enumerate(where):
                    copy_page(page, i * self.part)
            else:  # in a loop that stays one, for its end is opaque to the compiler

                def copy_part(i, _):
                    copy_page(self.page_of(tile, i), pl.multiple_of(i * self.part, self.part))

                lax.fori_loop(0, lax.optimization_barrier(jnp.int32(self.parts)), copy_part, None)

        if self.tree is not None:

            @pl.when(tile == tiles.prefix)
            def from_tree():
                row = (tile - tiles.prefix) * TILE  # not a constant, as which rows beyond the nodes are refused
                for first in range(0, TILE, self.part):
                    copy(self.tree.at[self.sequence, pl.ds(row + first, self.part), columns], first)

    def mask(self, tiles: Tiles, tile, scores):
        """What a query does not see becomes -inf; whole tiles of the prefix pass as they are."""
        axis = int(self.plan.is_flipped)  # of the queries

        def masked():
            # Opaque to the compiler, which would else keep what it knows of positions in registers.
            zero = lax.optimization_barrier(jnp.int32(0))
            token = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1 - axis, layout=mosaic.MATRIX) + zero
            is_of_tree = tile == tiles.prefix
            is_visible = token < jnp.where(is_of_tree, self.nodes, tiles.present(tile))
            if self.bits is not None:
                queries = pl.ds(0, scores.shape[axis])
                words = [self.bits.at[self.sequence, word, self.row_tile, queries] for word in (0, 1)]
                sees = mosaic.sees(mosaic.load_words(words, axis), token, axis)
                is_visible = is_visible & (sees | ~is_of_tree)
            return jnp.where(is_visible, scores, -jnp.inf)

        return lax.cond(tile < tiles.full, lambda: scores, masked)

    def clear_unused(self, tiles: Tiles, tile, values):
        """Of a tile's values, in steps that take few registers."""
        tokens = tiles.present(tile)

        @pl.when(tokens < TILE)
        def clear():
            for column in range(0, values.shape[1], 64):
                mosaic.clear_rows(tokens, values.at[:, pl.ds(column, 64)])
            plgpu.commit_smem()

    def write(self, output, top, total, o_s, lse_s):
        """This warpgroup's half of the sum's columns, normalised, and the log-sum-exps."""
        me, rows, here = self.me, pl.ds(0, self.plan.rows), (self.sequence, self.split, self.row_tile)
        has_keys = total > 0
        divisor = jnp.where(has_keys, total, 1.0)
        output = output / lax.broadcast_in_dim(divisor, output.shape, [int(self.plan.is_flipped)])
        if self.plan.is_flipped:
            o_s.at[me].T[...] = plgpu.layout_cast(output, plgpu.Layout.WGMMA_TRANSPOSED)
        else:
            o_s.at[me][...] = output

        @pl.when(me == 0)
        def put_lse():
            lse_s[...] = jnp.where(has_keys, top * self.scale + jnp.log(divisor), NO_KEYS)

        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_s.at[me, rows], self.o.at[*here, :, pl.ds(me * HALF, HALF)])
        pl.when(me == 0)(lambda: plgpu.copy_smem_to_gmem(lse_s.at[rows], self.lse.at[here]))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
