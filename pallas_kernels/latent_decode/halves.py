"""The loop for many query rows: 64 a block, and two warpgroups that each add up half of the output's columns.

What decides its form is that a row of keys is 576 wide and that its first 512 are the values:

- An output of 64 x 512 float32 would be 256 registers of each thread of one warpgroup, more than a thread has. So each
  of two warpgroups has half of the columns, left or right, over every tile, and finds the weights of every other tile;
  they reach the other warpgroup through shared memory. Half the scores of every tile would be products of 32 columns,
  which shared memory bounds: 3 KiB are read for each, 24 cycles, where the tensor cores need 16.
- 64 query rows take 72 KiB and so does a tile, so 227 KiB hold two tiles. There is no room for weights: they lie where
  the rotary part was, which only the scores need.
- With two tiles, nothing but order hides the way to memory and the softmax. Tiles go in pairs, the first with the first
  warpgroup's weights. Those are found while the scores of the second tile are multiplied, and the second's while the
  first's values are. A slot is free when its values are added, half by half, and fills while the other's are.
- A warpgroup of its own fetches a tile in parts, left, right and rotary, each once what was there is read.
- 128 heads are two sets of rows, and the second finds the keys in the L2 cache.
"""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import mosaic
from pallas_kernels.context_decode.plan import TILE
from pallas_kernels.context_decode.reference import NO_KEYS
from pallas_kernels.context_decode.tiles import Tiles
from pallas_kernels.latent_decode.block import HALF, SLOTS, Block
from pallas_kernels.latent_decode.reference import KEY, LATENT, ROPE
from pallas_kernels.online_softmax import raise_top, rescale, shrink_of, weigh

REDUCTION_BYTES = 0  # a row's scores are in one warp
# Of a thread that multiplies, half of whose are the output, and of one that fetches: together no more than three times
# the 168 that a block starts with, beyond which an increase would wait forever.
_REGISTERS = 240, 24


def scratch(rows: int, dtype, parts: int) -> tuple:
    """What `run` gets: for queries of a dtype, and for tiles that come in so many copies."""
    loaded = (
        mosaic.operand((1, TILE, KEY), dtype),
        mosaic.operand((2, SLOTS, TILE, HALF), dtype),
        mosaic.operand((SLOTS, TILE, ROPE), dtype),
    )
    barrier = plgpu.Barrier
    return (
        plgpu.RefUnion(loaded, mosaic.operand((2, TILE, HALF), jnp.float32)),  # the output waits for all reads
        plgpu.SMEM((SLOTS, TILE), jnp.float32),
        plgpu.SMEM((2, TILE), jnp.float32),
        plgpu.SMEM((TILE,), jnp.float32),
        barrier(),
        barrier(num_arrivals=parts, num_barriers=2 * SLOTS),
        barrier(num_arrivals=parts, num_barriers=SLOTS),
        barrier(num_barriers=SLOTS),
        barrier(num_barriers=2 * SLOTS),
        barrier(num_arrivals=2),
    )


def run(block: Block, shared, top_s, total_s, lse_s, q_in, halves_in, rope_in, is_ready, is_spent, is_done) -> None:
    """Warpgroup w finds the weights of the tiles in slot w."""
    (q_s, halves_s, rope_s), o_s = shared
    me, to_log2 = block.me, block.to_log2

    def bring_all(tiles: Tiles):
        def bring(tile, _):
            where, slot = block.pages_of(tile), tiles.slot_of(tile)
            for half in range(2):
                here = half * SLOTS + slot

                @pl.when(tile - tiles.start >= SLOTS)
                def _(here=here):
                    plgpu.barrier_wait(is_spent.at[here])

                block.fetch(tiles, tile, where, half * HALF, halves_s.at[half, slot], halves_in.at[here])
            # Where it goes are the weights of the tile before, of which both warpgroups are done by now.
            block.fetch(tiles, tile, where, LATENT, rope_s.at[slot], rope_in.at[slot])

        lax.fori_loop(tiles.start, tiles.end, bring, None)

    def score(tiles: Tiles, tile):
        slot = tiles.slot_of(tile)
        # Opaque to the compiler, which would else keep 36 addresses of the queries in registers: it has none left.
        zero = lax.optimization_barrier(jnp.int32(0))

        def multiply_parts(acc):
            for column, keys, arrived in (
                (0, halves_s.at[0], halves_in.at[slot]),
                (HALF, halves_s.at[1], halves_in.at[SLOTS + slot]),
                (LATENT, rope_s, rope_in.at[slot]),
            ):
                plgpu.barrier_wait(arrived)
                plgpu.wgmma(acc, q_s.at[zero, :, pl.ds(column, keys.shape[-1])], keys.at[slot].T)
            return acc[...]  # waits for the products

        return block.mask(tiles, tile, pl.run_scoped(multiply_parts, plgpu.ACC((TILE, TILE), jnp.float32)))

    def add_values(tiles: Tiles, tile, acc, shrink, meanwhile):
        """What both warpgroups do with a tile's weights; and what `meanwhile` returns, which runs beside it."""
        slot = tiles.slot_of(tile)
        values = halves_s.at[me, slot]
        block.clear_unused(tiles, tile, values)
        acc, other = mosaic.add_product_of_shared(
            rescale(acc, shrink, block.interpret), rope_s.at[slot], values, meanwhile, block.interpret
        )

        @pl.when(tile + SLOTS < tiles.end)
        def _():
            plgpu.barrier_arrive(is_spent.at[me * SLOTS + slot])

        return acc, other

    def tell(slot, weights, top):
        """The other warpgroup, and the tensor cores."""
        rope_s.at[slot][...] = weights.astype(rope_s.dtype)
        top_s.at[slot][...] = top
        plgpu.commit_smem()
        plgpu.barrier_arrive(is_ready.at[slot])

    def hear(slot):
        """What the weights of a tile that the other warpgroup finds are relative to."""
        plgpu.barrier_wait(is_ready.at[slot])
        return plgpu.load(top_s.at[slot], layout=mosaic.ROW)

    def attend_own(tiles: Tiles, tile, carry):
        acc, top, total = carry
        scores = score(tiles, tile)
        new_top = raise_top(top, scores, to_log2, block.interpret)
        weights, shrink = weigh(scores, new_top, to_log2), shrink_of(top, new_top, to_log2)
        tell(tiles.slot_of(tile), weights, new_top)
        acc, weight = add_values(tiles, tile, acc, shrink, lambda: weights.sum(axis=1))
        return acc, new_top, total * shrink + weight

    def attend_other(tiles: Tiles, tile, carry):
        acc, top, total = carry
        new_top = hear(tiles.slot_of(tile))
        shrink = shrink_of(top, new_top, to_log2)
        acc, total = add_values(tiles, tile, acc, shrink, lambda: total * shrink)
        return acc, new_top, total

    def attend_other_and_own(tiles: Tiles, tile, carry):
        """Two tiles: this one's weights are the other's to find. While they are added, those of the next are found."""
        acc, top, total = carry
        scores = score(tiles, tile + 1)
        top_before = hear(tiles.slot_of(tile))
        new_top = raise_top(top_before, scores, to_log2, block.interpret)

        def find_weights():
            weights = weigh(scores, new_top, to_log2)
            tell(tiles.slot_of(tile + 1), weights, new_top)
            return weights.sum(axis=1)

        before, shrink = shrink_of(top, top_before, to_log2), shrink_of(top_before, new_top, to_log2)
        acc, weight = add_values(tiles, tile, acc, before, find_weights)
        acc, total = add_values(tiles, tile + 1, acc, shrink, lambda: total * before * shrink + weight)
        return acc, new_top, total

    def attend(tiles: Tiles):
        """Sum of weighted values, what weights are relative to, and sum of those that this warpgroup found."""
        own, other, other_and_own = (
            functools.partial(step, tiles) for step in (attend_own, attend_other, attend_other_and_own)
        )
        carry = (
            mosaic.full((TILE, HALF), 0.0, mosaic.MATRIX),
            mosaic.full((TILE,), NO_KEYS, mosaic.ROW),
            mosaic.full((TILE,), 0.0, mosaic.ROW),
        )

        pairs = lax.div(jnp.maximum(tiles.end - tiles.start, 0), 2)
        last = tiles.start + 2 * pairs

        def all_pairs(pair, single):
            done = lax.fori_loop(0, pairs, lambda i, carry: pair(tiles.start + 2 * i, carry), carry)
            return lax.cond(last < tiles.end, lambda: single(last, done), lambda: done)

        return lax.cond(
            me == 0,
            lambda: all_pairs(lambda tile, carry: other(tile + 1, own(tile, carry)), own),
            lambda: all_pairs(other_and_own, other),
        )

    def fetch():
        block.fetch_queries(q_s, q_in)
        bring_all(block.find_tiles())

    def multiply():
        tiles = block.find_tiles()
        plgpu.barrier_wait(q_in)
        acc, top, total = attend(tiles)
        total_s.at[me][...] = total
        plgpu.barrier_arrive(is_done)
        plgpu.barrier_wait(is_done)
        block.write(acc, top, total + plgpu.load(total_s.at[1 - me], layout=mosaic.ROW), o_s, lse_s)

    mosaic.share_roles(me, 2, _REGISTERS, fetch, multiply)
