"""The loop for few query rows: keys, not queries, are the rows of the products, so that queries need no padding to 64.

Scores of a tile are 64 keys x R queries, and the output, added up over the tiles, is 512 columns x R queries: that
takes 4 R registers of a thread of one warpgroup. So each of two warpgroups has all of the columns and every other tile,
with weights and a running maximum of its own; their results are joined at the end. A tile takes less time than in
`halves.py`, and what few queries leave of shared memory has room for weights.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels import mosaic
from pallas_kernels.context_decode.plan import TILE
from pallas_kernels.context_decode.reference import NO_KEYS
from pallas_kernels.context_decode.tiles import Tiles
from pallas_kernels.latent_decode.block import HALF, SLOTS, Block
from pallas_kernels.latent_decode.reference import KEY, LATENT

REDUCTION_BYTES = 2048  # 16 for each thread of a warpgroup: a query's scores are in all four warps
_REGISTERS = 224, 56  # of a thread that multiplies, and of one that fetches: together three times 168 at most
_QUERY = plgpu.Layout.WGMMA.reduce(0)  # a number for each query


def scratch(rows: int, dtype, parts: int) -> tuple:
    """What `run` gets: for queries of a dtype, and for tiles that come in so many copies."""
    results = plgpu.SMEM((2, HALF, rows), jnp.float32), mosaic.operand((2, rows, HALF), jnp.float32)
    barrier = plgpu.Barrier
    return (
        mosaic.operand((1, rows, KEY), dtype),
        plgpu.RefUnion(mosaic.operand((SLOTS, TILE, KEY), dtype), results),  # which wait for all reads
        mosaic.operand((2, rows, TILE), dtype),
        plgpu.SMEM((2, rows), jnp.float32),
        plgpu.SMEM((2, rows), jnp.float32),
        plgpu.SMEM((rows,), jnp.float32),
        barrier(),
        barrier(num_arrivals=parts, num_barriers=SLOTS),
        barrier(num_barriers=SLOTS),
        barrier(num_barriers=2),
        barrier(num_arrivals=2),
        barrier(num_arrivals=2),
    )


def run(
    block: Block, q_s, shared, weights_s, top_s, total_s, lse_s, q_in, keys_in, is_spent, turn, is_read, is_given
) -> None:
    """Warpgroup w works on the tiles in slot w."""
    keys_s, (given_s, o_s) = shared
    me, rows, to_log2 = block.me, block.plan.rows, block.to_log2

    def over(queries, height: int) -> Array:
        return lax.broadcast_in_dim(queries, (height, rows), [1])

    def bring_all(tiles: Tiles):
        def bring(tile, _):
            where, slot = block.pages_of(tile), tiles.slot_of(tile)

            @pl.when(tile - tiles.start >= SLOTS)
            def await_slot():
                plgpu.barrier_wait(is_spent.at[slot])

            block.fetch(tiles, tile, where, 0, keys_s.at[slot], keys_in.at[slot])

        lax.fori_loop(tiles.start, tiles.end, bring, None)

    def in_turn(tiles: Tiles, tile, reduce):
        """The compiler gives all warpgroups the same memory for reductions over warps, so one has it at a time.

        After the last tile come two turns more, in which the warpgroups sum up their weights.
        """
        pl.when(tile > tiles.start)(lambda: plgpu.barrier_wait(turn.at[me]))
        reduced = reduce()
        pl.when(tile <= tiles.end)(lambda: plgpu.barrier_arrive(turn.at[1 - me]))
        return reduced

    def attend(tiles: Tiles, i, carry):
        """This warpgroup's next tile."""
        acc, top, total = carry
        tile = tiles.start + me + SLOTS * i
        # Opaque to the compiler, which would else keep the addresses of all products in registers, over 100.
        zero = lax.optimization_barrier(jnp.int32(0))
        slot = me + zero
        keys, values = keys_s.at[slot], keys_s.at[slot, :, pl.ds(0, LATENT)]
        plgpu.barrier_wait(keys_in.at[me])
        scores = block.mask(tiles, tile, mosaic.dot(keys, q_s.at[zero].T, rows))
        new_top = jnp.maximum(top, in_turn(tiles, tile, lambda: scores.max(axis=0)))
        shrink = jnp.exp2((top - new_top) * to_log2)
        weights = jnp.exp2(scores * to_log2 - over(new_top * to_log2, TILE))
        weights_s.at[slot].T[...] = weights.astype(weights_s.dtype)
        block.clear_unused(tiles, tile, values)
        plgpu.commit_smem()
        acc, _ = mosaic.add_product_of_shared(
            acc * over(shrink, LATENT), values.T, weights_s.at[slot].T, lambda: None, block.interpret
        )

        @pl.when(tile + SLOTS < tiles.end)
        def release():
            plgpu.barrier_arrive(is_spent.at[me])

        return acc, new_top, total * over(shrink, TILE) + weights

    def join(acc, top, total):
        """Of both warpgroups, each for its half of the columns."""
        plgpu.barrier_arrive(is_read)
        plgpu.barrier_wait(is_read)
        top_s.at[me][...] = top
        total_s.at[me][...] = total
        left, right = acc[:HALF], acc[HALF:]
        own, given = lax.cond(me == 0, lambda: (left, right), lambda: (right, left))
        other = 1 - me
        given_s.at[other][...] = given
        plgpu.barrier_arrive(is_given)
        plgpu.barrier_wait(is_given)
        tops = top, plgpu.load(top_s.at[other], layout=_QUERY)
        totals = total, plgpu.load(total_s.at[other], layout=_QUERY)
        halves = own, plgpu.load(given_s.at[me], layout=mosaic.MATRIX)
        top = jnp.maximum(*tops)
        shares = [jnp.exp2((x - top) * to_log2) for x in tops]
        total = sum(x * share for x, share in zip(totals, shares, strict=True))
        return sum(x * over(share, HALF) for x, share in zip(halves, shares, strict=True)), top, total

    def fetch():
        block.fetch_queries(q_s, q_in)
        bring_all(block.find_tiles())

    def multiply():
        tiles = block.find_tiles()
        nothing = (
            mosaic.full((LATENT, rows), 0.0, mosaic.MATRIX),
            mosaic.full((rows,), NO_KEYS, _QUERY),
            mosaic.full((TILE, rows), 0.0, mosaic.MATRIX),
        )
        plgpu.barrier_wait(q_in)
        count = lax.div(jnp.maximum(tiles.end - tiles.start - me + 1, 0), SLOTS)
        acc, top, total_of_keys = lax.fori_loop(0, count, lambda i, carry: attend(tiles, i, carry), nothing)
        next_turn = tiles.start + me + SLOTS * count
        total = in_turn(tiles, next_turn, lambda: total_of_keys.sum(axis=0))
        output, top, total = join(acc, top, total)
        block.write(output, top, total, o_s, lse_s)

    mosaic.share_roles(me, 2, _REGISTERS, fetch, multiply)
