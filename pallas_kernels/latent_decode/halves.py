"""The loop for many query rows: 64 a block, and two warpgroups that each add up half of the output's columns.

What decides its form is that a row of keys is 576 wide and that its first 512 are the values:

- An output of 64 x 512 float32 would be 256 registers of each thread of one warpgroup, more than a thread has. So each
  of two warpgroups has half of the columns, left or right, over every tile, and finds the weights of every other tile;
  they reach the other warpgroup through shared memory. Half the scores of every tile would be products of 32 columns,
  which shared memory bounds: 3 KiB are read for each, 24 cycles, where the tensor cores need 16.
- 64 query rows take 72 KiB and so does a tile, so 227 KiB hold two tiles. There is no room for weights: they lie where
  the rotary part was, which only the scores need.
- With two tiles, nothing but order hides the way to memory: one tile has to arrive while the other is worked on. So
  both warpgroups multiply the values of a tile as soon as there are weights, before any of them asks for the scores of
  a tile that is still on its way: its slot is free at once, and while it fills, the other slot's tile has its turn.
- A warpgroup of its own fetches a tile in parts, left, right and rotary, each once what was there is read.
- 128 heads are two sets of rows, and the second finds the keys in the L2 cache.
"""

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

    def multiply_keys(scores, tile, slot):
        """Adds the scores of a tile to an accumulator, part by part as they arrive."""
        # Opaque to the compiler, which would else keep 36 addresses of the queries in registers: it has none left.
        zero = lax.optimization_barrier(jnp.int32(0))
        for column, keys, arrived in (
            (0, halves_s.at[0], halves_in.at[slot]),
            (HALF, halves_s.at[1], halves_in.at[SLOTS + slot]),
            (LATENT, rope_s, rope_in.at[slot]),
        ):
            plgpu.barrier_wait(arrived)
            plgpu.wgmma(scores, q_s.at[zero, :, pl.ds(column, keys.shape[-1])], keys.at[slot].T)

    def tell_weights(scores, top, slot):
        """Weights of a tile for both warpgroups, its largest score or an earlier one, and their sum."""
        new_top = jnp.maximum(top, scores.max(axis=1))
        weights = jnp.exp2(scores * to_log2 - mosaic.over(new_top * to_log2, TILE))
        rope_s.at[slot][...] = weights.astype(rope_s.dtype)
        top_s.at[slot][...] = new_top
        plgpu.commit_smem()
        plgpu.barrier_arrive(is_ready.at[slot])
        return new_top, weights.sum(axis=1)

    def hear_top(slot):
        """Of a tile whose weights the other warpgroup finds, when there are."""
        plgpu.barrier_wait(is_ready.at[slot])
        return plgpu.load(top_s.at[slot], layout=mosaic.ROW)

    def shrink(top, new_top):
        return jnp.exp2((top - new_top) * to_log2)

    def release(tiles: Tiles, tile):
        @pl.when(tile + SLOTS < tiles.end)
        def _():
            plgpu.barrier_arrive(is_spent.at[me * SLOTS + tiles.slot_of(tile)])

    def add_values(tiles: Tiles, tile, acc, shrink):
        """What both warpgroups do with a tile's weights."""
        slot = tiles.slot_of(tile)
        values = halves_s.at[me, slot]
        block.clear_unused(tiles, tile, values)
        acc, _ = mosaic.add_product_of_shared(
            acc * mosaic.over(shrink, HALF), rope_s.at[slot], values, lambda: None, block.interpret
        )
        release(tiles, tile)
        return acc

    def attend_own(tiles: Tiles, tile, carry):
        """A tile whose weights are this warpgroup's to find, for both."""
        acc, top, total = carry
        slot = tiles.slot_of(tile)

        def multiply(scores):
            multiply_keys(scores, tile, slot)
            return scores[...]  # waits for the products

        scores = block.mask(tiles, tile, pl.run_scoped(multiply, plgpu.ACC((TILE, TILE), jnp.float32)))
        new_top, weight = tell_weights(scores, top, slot)
        less = shrink(top, new_top)
        return add_values(tiles, tile, acc, less), new_top, total * less + weight

    def attend_other(tiles: Tiles, tile, carry):
        """A tile whose weights the other warpgroup finds."""
        acc, top, total = carry
        new_top = hear_top(tiles.slot_of(tile))
        less = shrink(top, new_top)
        return add_values(tiles, tile, acc, less), new_top, total * less

    def attend_both(tiles: Tiles, tile, carry):
        """`attend_other`, and `attend_own` of the tile after it: its scores are multiplied while the other warpgroup
        still finds weights, and made weights while values are multiplied."""
        if block.interpret:  # which has no store to an accumulator
            return attend_own(tiles, tile + 1, attend_other(tiles, tile, carry))
        acc, top, total = carry
        slot, own_slot = tiles.slot_of(tile), tiles.slot_of(tile + 1)
        values = halves_s.at[me, slot]

        def run(scores_ref, acc_ref):
            multiply_keys(scores_ref, tile + 1, own_slot)
            other_top = hear_top(slot)
            less = shrink(top, other_top)
            block.clear_unused(tiles, tile, values)
            acc_ref[...] = acc * mosaic.over(less, HALF)
            plgpu.wgmma(acc_ref, rope_s.at[slot], values)
            scores = lax.optimization_barrier(plgpu.wgmma_accumulator_load(scores_ref, wait_n=1))
            new_top, weight = tell_weights(block.mask(tiles, tile + 1, scores), other_top, own_slot)
            acc_now = plgpu.wgmma_accumulator_load(acc_ref, wait_n=0)
            return lax.optimization_barrier((acc_now, other_top, new_top, total * less, weight))

        accumulators = plgpu.ACC((TILE, TILE), jnp.float32), plgpu.ACC(acc.shape, jnp.float32)
        acc, other_top, new_top, total, weight = pl.run_scoped(run, *accumulators)
        release(tiles, tile)
        less = shrink(other_top, new_top)
        return add_values(tiles, tile + 1, acc, less), new_top, total * less + weight

    def attend(tiles: Tiles):
        """Sum of weighted values, largest score, and sum of the weights that this warpgroup found."""
        start, end = tiles.start, tiles.end
        nothing = (
            mosaic.full((TILE, HALF), 0.0, mosaic.MATRIX),
            mosaic.full((TILE,), NO_KEYS, mosaic.ROW),
            mosaic.full((TILE,), 0.0, mosaic.ROW),
        )
        carry = lax.cond((me == 0) & (start < end), lambda: attend_own(tiles, start, nothing), lambda: nothing)
        first = start + 1 - me  # of the tiles whose weights the other finds
        pairs = lax.div(jnp.maximum(end - first, 0), 2)
        carry = lax.fori_loop(0, pairs, lambda i, carry: attend_both(tiles, first + 2 * i, carry), carry)
        last = first + 2 * pairs
        return lax.cond(last < end, lambda: attend_other(tiles, last, carry), lambda: carry)

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
