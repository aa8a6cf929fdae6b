"""Attention of a chunk of prompt tokens as one Mosaic GPU kernel for Hopper.

A flash attention. A block has 64 query rows for each warpgroup that multiplies, and goes through the tiles of keys
that they see (`tiles.py`). One more warpgroup fetches the tiles by TMA, through the page table or from the chunk.
While a warpgroup turns the scores of one tile into weights, the tensor cores still add the values of the tile before.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels import mosaic, online_softmax
from pallas_kernels.chunk_prefill.plan import ROWS, TILE, Plan, unsupported
from pallas_kernels.chunk_prefill.tiles import Tiles
from pallas_kernels.context_decode.reference import NO_KEYS
from pallas_kernels.lse_merge import merge
from pallas_kernels.shapes import check_shapes


class Prefix(NamedTuple):
    """Tokens before the chunk, in pages.

    Attributes:
      pages: keys (index 0) and values (1) of every layer; read in place.
      layer: which layer.
      page_row: pages of the sequence, in order; entries beyond its length must be valid pages too.
      length: tokens of the prefix on this device, at most M * S.
    """

    pages: Float[Array, "L 2 P S K D"]
    layer: int | Int[Array, ""]
    page_row: Int[Array, "M"]
    length: Int[Array, ""]


class _Block(NamedTuple):
    """What a block computes: rows from `first_row` on of the set of heads `head`."""

    kv_head: Int[Array, ""]
    head: Int[Array, ""]
    first_row: Int[Array, ""]
    tiles: Tiles


def chunk_prefill(
    q: Float[Array, "C H D"],
    *,
    chunk: tuple[Float[Array, "C K D"], Float[Array, "C K D"]] | None,
    prefix: Prefix | None,
    scale: float,
    plan: Plan | None = None,
    interpret: bool | plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "C H D"], Float[Array, "C H"]]:
    """Row i attends to the whole prefix, and to rows 0..i of the chunk.

    Either part may be left out. Where the cache is split along the sequence, each rank calls this once with the
    prefix alone, for all query heads of its group, and once with the chunk alone, for its own; outputs and
    log-sum-exps are then merged.

    Args:
      q: of the C rows; query head h reads KV head `h*K//H`.
      chunk: keys and values of the C rows, which must be finite, or None.
      prefix: what precedes the chunk, or None.
      scale: factor on the scores.
      plan: how to cut the work; None takes what should be fastest.
      interpret: simulate the kernel on the CPU; None does where that is the default backend.

    Returns:
      Float32 output normalised by its own softmax, and the log-sum-exp of the scores; 0 and -1e30 without keys.

    Raises:
      ValueError: shapes or types that the kernel does not take (see `unsupported`), or shapes that don't go together.
    """
    given = {"q": (q, "C H D")}
    if chunk is not None:
        given |= {"the chunk's keys": (chunk[0], "C K D"), "the chunk's values": (chunk[1], "C K D")}
    if prefix is not None:
        given |= {
            "prefix.pages": (prefix.pages, "L 2 P S K D"),
            "prefix.page_row": (prefix.page_row, "M"),
            "prefix.length": (prefix.length, ""),
        }
    check_shapes(**given)
    c, h, d = q.shape
    broken = _unsupported(q, chunk, prefix, scale)
    if broken:
        raise ValueError(f"{broken}; use the reference (attention='reference') for this")
    interpret = mosaic.simulation(interpret)

    new = chunk or ()
    prefix_size = prefix.page_row.shape[0] * prefix.pages.shape[3] if prefix else 0
    plan = plan or Plan.of(c, h, _kv_heads(new, prefix), d, prefix_size + c * bool(new))
    return _planned(q, new, prefix, plan=plan, scale=scale, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("plan", "scale", "interpret"))
def _planned(q, new, prefix: Prefix | None, *, plan: Plan, scale: float, interpret):
    """Jitted, and told the layer as a number in memory, so that all layers are traced and compiled as one kernel."""
    c, h, d = q.shape
    packed, sets = plan.packed, h // plan.packed
    q = q.reshape(c, sets, packed, d).swapaxes(1, 2).reshape(c * packed, sets, d)
    padded = _pad(q, plan.rows), tuple(_pad(x, TILE) for x in new)
    output, lse = _call(plan, *padded, prefix, c, scale, interpret or None)
    lse = lse.swapaxes(1, 2)
    output, lse = (output[0], lse[0]) if plan.splits == 1 else merge(output, lse)
    output = output[: c * packed].reshape(c, packed, sets, d).swapaxes(1, 2).reshape(c, h, d)
    return output, lse[: c * packed].reshape(c, packed, sets).swapaxes(1, 2).reshape(c, h)


def _kv_heads(chunk: tuple[Array, ...], prefix: Prefix | None) -> int:
    return (prefix.pages if prefix else chunk[0]).shape[-2]


def _unsupported(q, chunk, prefix: Prefix | None, scale: float) -> str | None:
    """As `plan.unsupported`, and where the arguments disagree with each other."""
    if broken := mosaic.unsupported_scale(scale):
        return broken
    keys: dict[str, Array] = {}
    if chunk is not None:
        keys |= {"the chunk's keys": chunk[0], "the chunk's values": chunk[1]}
    if prefix is not None:
        keys["the cache"] = prefix.pages
    if not keys:
        return "neither a chunk nor a prefix is given: there must be keys"
    for name, x in keys.items():
        if x.dtype != q.dtype:
            return f"q is {q.dtype.name} and {name} {x.dtype.name}: both must be the same"
    return unsupported(
        dtype=q.dtype,
        heads=q.shape[1],
        kv_heads=_kv_heads(chunk or (), prefix),
        head_dim=q.shape[2],
        page_size=prefix.pages.shape[3] if prefix else None,
    )


def _call(
    plan: Plan,
    q: Float[Array, "R X D"],
    chunk: tuple[Array, ...],
    prefix: Prefix | None,
    tokens: int,
    scale: float,
    interpret: plgpu.InterpretGPUParams | None,
) -> tuple[Array, Array]:
    """Partial outputs f32[splits, R, X, D] and log-sum-exps f32[splits, X, R]; X are the sets of packed heads."""
    rows, sets, d = q.shape
    splits, stages, warpgroups, packed = plan.splits, plan.stages, plan.warpgroups, plan.packed
    to_log2 = scale * mosaic.LOG2_E
    kv_heads = _kv_heads(chunk, prefix)
    sets_per_kv_head = sets // kv_heads
    operands = [q, *chunk]
    part = TILE  # keys that one copy brings: a tile, or as much of it as is in one page
    if prefix:
        num_pages, page_size = prefix.pages.shape[2:4]
        part = math.gcd(page_size, TILE)
        operands += [
            prefix.pages.reshape(-1, *prefix.pages.shape[3:]),
            mosaic.first_page(prefix.layer, 2 * num_pages),
            prefix.page_row.astype(jnp.int32),
            jnp.reshape(prefix.length, 1).astype(jnp.int32),
        ]

    def body(q_ref, *refs):
        chunk_refs, others = refs[: len(chunk)], refs[len(chunk) :]
        pages_ref, first_ref, table_ref, length_ref, *rest = others if prefix else (None, None, None, None, *others)
        o_ref, lse_ref, q_s, k_s, v_s, o_s, lse_s, q_in, k_in, v_in, k_free, v_free, clean = rest
        me, split = lax.axis_index("warpgroup"), lax.axis_index("split")

        def token_of(row):
            return lax.div(row, packed)

        def find_block() -> _Block:
            """By each warpgroup for itself: what outlives a change of registers is spilled."""
            kv_head = lax.axis_index("kv_head")
            # The last rows see most keys: they come first, so that what is left at the end is short.
            first_row = (rows // plan.rows - 1 - lax.axis_index("rows")) * plan.rows
            length = length_ref[0] if prefix else jnp.int32(0)
            first, last = jnp.int32(-1), jnp.int32(-1)
            if chunk:
                first, last = token_of(first_row), jnp.minimum(token_of(first_row + plan.rows - 1), tokens - 1)
            tiles = Tiles.of(length, first, last, split, splits)
            return _Block(kv_head, kv_head * sets_per_kv_head + lax.axis_index("set"), first_row, tiles)

        def fetch(block: _Block):
            kv_head, head, first_row, tiles = block
            first_page = first_ref[0] if prefix else None
            for i in range(warpgroups):
                plgpu.copy_gmem_to_smem(q_ref.at[pl.ds(first_row + i * ROWS, ROWS), head], q_s.at[i], q_in.at[i])

            def pages_of(n):
                """Where the parts of tile n are; read ahead of the copies, for which it is an address."""
                begins = [tiles.first_of_prefix(n) + begin for begin in range(0, TILE, part)] if prefix else []
                return [table_ref[jnp.minimum(lax.div(begin, page_size), table_ref.shape[0] - 1)] for begin in begins]

            def copy(n, kind, where, into, arrived):
                """Keys (kind 0) or values (1) of tile n, in as many copies wherever they come from."""
                if prefix:

                    @pl.when(~tiles.is_of_chunk(n))
                    def from_pages():
                        for j, page in enumerate(where):
                            offset = lax.rem(tiles.first_of_prefix(n) + j * part, page_size)
                            source = pages_ref.at[first_page + kind * num_pages + page, pl.ds(offset, part), kv_head]
                            plgpu.copy_gmem_to_smem(source, into.at[pl.ds(j * part, part)], arrived)

                if chunk:

                    @pl.when(tiles.is_of_chunk(n))
                    def from_chunk():
                        for begin in range(0, TILE, part):
                            source = chunk_refs[kind].at[pl.ds(tiles.first_of_chunk(n) + begin, part), kv_head]
                            plgpu.copy_gmem_to_smem(source, into.at[pl.ds(begin, part)], arrived)

            def fetch_tile(n, _):
                where, slot = pages_of(n), lax.rem(n - tiles.start, stages)
                for kind, (into, arrived, free) in enumerate([(k_s, k_in, k_free), (v_s, v_in, v_free)]):

                    @pl.when(n - tiles.start >= stages)
                    def _(free=free):
                        plgpu.barrier_wait(free.at[slot])

                    copy(n, kind, where, into.at[slot], arrived.at[slot])

            lax.fori_loop(tiles.start, tiles.end, fetch_tile, None)

        def soften(block: _Block, n, scores, softmax, is_masked):
            """As `online_softmax.soften`, of what the rows see."""
            if is_masked:
                tiles = block.tiles
                row = block.first_row + me * ROWS + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=mosaic.ROW)
                of_chunk = tiles.is_of_chunk(n)
                begin = jnp.where(of_chunk, tiles.first_of_chunk(n) - 1, tiles.first_of_prefix(n) - tiles.length)
                # A sum, since a scalar can't choose between vectors.
                limit = token_of(row) * of_chunk.astype(jnp.int32) - begin
                key = plgpu.broadcasted_iota(jnp.int32, (ROWS, TILE), 1, layout=mosaic.MATRIX)
                # Every row sees some key of a tile: blocks don't straddle the diagonals of two.
                scores = jnp.where(key < mosaic.over(limit, TILE), scores, NO_KEYS)
            return online_softmax.soften(scores, softmax, to_log2, interpret)

        def finish(carry, values):
            acc, weights, softmax = carry
            total = softmax.total
            output = mosaic.add_product(acc, weights, values, interpret) * mosaic.over(1 / total, d)
            return output, softmax.top * scale + jnp.log(total)

        def write(block: _Block, output, lse):
            o_s.at[me][...] = output
            lse_s.at[me][...] = lse
            plgpu.commit_smem()
            here = pl.ds(block.first_row + me * ROWS, ROWS)
            plgpu.copy_smem_to_gmem(o_s.at[me], o_ref.at[split, here, block.head])
            plgpu.copy_smem_to_gmem(lse_s.at[me], lse_ref.at[split, block.head, here])
            plgpu.wait_smem_to_gmem(0)

        def multiply(block: _Block):
            tiles = block.tiles

            def slot_of(n):
                return lax.rem(n - tiles.start, stages)

            def await_keys(n):
                @pl.when(n < tiles.end)
                def _():
                    plgpu.barrier_wait(k_in.at[slot_of(n)])

            def release(n, free):
                """Nothing more is read of the slot. Told only where a tile follows that waits for it."""

                @pl.when(n + stages < tiles.end)
                def _():
                    plgpu.barrier_arrive(free.at[slot_of(n)])

            def step(n, carry, is_masked):
                """Values of tile n - 1 are added while the scores of tile n, whose keys are there, become weights."""
                acc, weights, softmax = carry
                plgpu.barrier_wait(v_in.at[slot_of(n - 1)])

                def meanwhile(scores):
                    release(n, k_free)
                    softened = lax.optimization_barrier(soften(block, n, scores, softmax, is_masked))
                    await_keys(n + 1)
                    return softened

                acc, weights, softmax, shrink = mosaic.dot_and_add_product(
                    q_s.at[me], k_s.at[slot_of(n)], acc, weights, v_s.at[slot_of(n - 1)], meanwhile, interpret
                )
                release(n - 1, v_free)
                # Rounded only now: until here the tensor cores read the weights before from these registers.
                return online_softmax.rescale(acc, shrink, interpret), weights.astype(q.dtype), softmax

            start, end = tiles.start, tiles.end
            acc, empty = mosaic.full((ROWS, d), 0.0, mosaic.MATRIX), online_softmax.nothing()
            plgpu.barrier_wait(q_in.at[me])

            @pl.when(start == end)
            def _():
                write(block, acc, empty.top)

            @pl.when(start < end)
            def _():
                await_keys(start)
                scores = mosaic.dot(q_s.at[me], k_s.at[0].T, TILE)
                release(start, k_free)
                weights, softmax, _ = soften(block, start, scores, empty, is_masked=True)
                await_keys(start + 1)
                carry = acc, weights.astype(q.dtype), softmax
                whole_end = jnp.clip(tiles.whole, start + 1, end)
                carry = lax.fori_loop(start + 1, whole_end, functools.partial(step, is_masked=False), carry)
                carry = lax.fori_loop(whole_end, end, functools.partial(step, is_masked=True), carry)

                last = slot_of(end - 1)
                plgpu.barrier_wait(v_in.at[last])
                if prefix:

                    @pl.when(tiles.is_partial(end - 1))
                    def _():
                        mosaic.clear_after(tiles.length - tiles.full * TILE, v_s.at[last], clean, me)

                write(block, *finish(carry, v_s.at[last]))

        mosaic.share_roles(me, warpgroups, plan.registers, lambda: fetch(find_block()), lambda: multiply(find_block()))

    barrier = plgpu.Barrier
    parts = TILE // part
    return plgpu.kernel(
        body,
        # Blocks that run at the same time share a KV head, whose keys are then in the L2 cache.
        grid=(kv_heads, rows // plan.rows, splits, sets_per_kv_head),
        grid_names=("kv_head", "rows", "split", "set"),
        num_threads=warpgroups + 1,
        thread_name="warpgroup",
        interpret=interpret,
        out_type=(
            jax.ShapeDtypeStruct((splits, rows, sets, d), jnp.float32),
            jax.ShapeDtypeStruct((splits, sets, rows), jnp.float32),
        ),
        scratch_types=(
            mosaic.operand((warpgroups, ROWS, d), q.dtype),
            mosaic.operand((stages, TILE, d), q.dtype),
            mosaic.operand((stages, TILE, d), q.dtype),
            plgpu.SMEM((warpgroups, ROWS, d), jnp.float32),
            plgpu.SMEM((warpgroups, ROWS), jnp.float32),
            barrier(num_barriers=warpgroups),
            barrier(num_arrivals=parts, num_barriers=stages),
            barrier(num_arrivals=parts, num_barriers=stages),
            barrier(num_arrivals=warpgroups, num_barriers=stages),
            barrier(num_arrivals=warpgroups, num_barriers=stages),
            barrier(),
        ),
        # A row's scores are in one warp, so no reduction needs the shared memory that would be set aside for it.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(*operands)


def _pad(x: Array, multiple: int) -> Array:
    return jnp.pad(x, [(0, -len(x) % multiple), (0, 0), (0, 0)])
