"""Decode attention over pages, and over a tree after them, as one Mosaic GPU kernel for Hopper.

It computes what `reference.py` does and, with a tree, its merge with `tree_attention`. All query rows that share a KV
head are one operand of the tensor cores: T tokens times the group's heads. Keys are cut into tiles of 64 tokens, tiles
into contiguous splits, so that there are blocks for every multiprocessor; the partial results are merged by their
log-sum-exp: by the blocks themselves where they are few enough for a cluster, so that no other launch follows. The tree
is the last tile. Tiles come by TMA through the page table while earlier ones are multiplied, and while the scores of
one are made weights, the tensor cores still add the values of the one before. Where a block has a multiprocessor to
itself, a warpgroup of its own fetches, and two that share one set of rows take turns with the tiles.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels import mosaic, online_softmax
from pallas_kernels.context_decode import results
from pallas_kernels.context_decode.plan import TILE, Plan, round_up, unsupported
from pallas_kernels.context_decode.tiles import Tiles
from pallas_kernels.lse_merge.kernel import merge_splits
from pallas_kernels.shapes import check_shapes

_COPIED = 8  # a copy begins at, and takes, a multiple of so many rows


def context_decode(
    q: Float[Array, "B T H D"],
    pages: Float[Array, "L 2 P S K D"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    scale: float,
    plan: Plan | None = None,
    interpret: bool | plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Every query attends to the first `lengths[b]` tokens of its sequence that are on this device.

    Args:
      q, pages, layer, page_table, lengths, scale: as of the reference; `pages` is read in place.
      plan: how to cut the work; None takes what should be fastest.
      interpret: simulate the kernel on the CPU; None does where that is the default backend.

    Returns:
      Float32 output normalised by its own softmax, and the log-sum-exp of the scores; 0 and -1e30 without keys.

    Raises:
      ValueError: shapes or types that the kernel does not take (see `unsupported`), or shapes that don't go together.
    """
    return _decode(q, pages, layer, page_table, lengths, None, scale, plan, interpret)


def tree_decode(
    q: Float[Array, "B T H D"],
    pages: Float[Array, "L 2 P S K D"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    tree_k: Float[Array, "B T K D"],
    tree_v: Float[Array, "B T K D"],
    ancestors: UInt32[Array, "B T 2"],
    *,
    scale: float,
    plan: Plan | None = None,
    interpret: bool | plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """`context_decode` in which every query, a node of a tree, also attends to its ancestors and itself.

    Args:
      tree_k, tree_v: of the T nodes.
      ancestors: bit n % 32 of word n // 32 of row t is set where node t sees node n, itself included.

    Returns:
      Float32 output of one softmax over prefix and tree, and its log-sum-exp.

    Raises:
      ValueError: shapes or types that the kernel does not take (see `unsupported`), or shapes that don't go together.
    """
    return _decode(q, pages, layer, page_table, lengths, (tree_k, tree_v, ancestors), scale, plan, interpret)


def _decode(q, pages, layer, page_table, lengths, tree, scale, plan, interpret):
    given = {
        "q": (q, "B T H D"),
        "pages": (pages, "L 2 P S K D"),
        "page_table": (page_table, "B M"),
        "lengths": (lengths, "B"),
    }
    if tree is not None:
        given |= {"tree_k": (tree[0], "B T K D"), "tree_v": (tree[1], "B T K D"), "ancestors": (tree[2], "B T 2")}
    check_shapes(**given)
    b, t, h, d = q.shape
    page_size, kv_heads = pages.shape[3:5]
    group = h // kv_heads
    broken = unsupported(
        dtype=pages.dtype, tokens=t, heads=h, kv_heads=kv_heads, head_dim=d, page_size=page_size
    ) or _inconsistent(q, pages, tree, scale)
    if broken:
        raise ValueError(f"{broken}; use the reference (attention='reference') for this")
    interpret = mosaic.simulation(interpret)

    tiles = -(-page_table.shape[1] * page_size // TILE) + (tree is not None)
    # Blocks of a cluster are simulated at once, which not every machine has the threads for.
    plan = plan or Plan.of(b, t * group, kv_heads, d, tiles, may_cluster=not interpret)
    return _planned(q, pages, layer, page_table, lengths, tree, plan=plan, scale=scale, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("plan", "scale", "interpret"))
def _planned(q, pages, layer, page_table, lengths, tree, *, plan: Plan, scale: float, interpret):
    """Jitted, and told the layer as a number in memory, so that all layers are traced and compiled as one kernel."""
    b, t, h, d = q.shape
    num_pages, _, kv_heads = pages.shape[2:5]
    group = h // kv_heads
    grouped = q.reshape(b, t, kv_heads, group, d).swapaxes(1, 2).reshape(b, kv_heads, t * group, d)
    rows = [mosaic.pad(grouped, 2, plan.row_tiles * round_up(plan.rows, _COPIED))]
    bits: list[Array] = []
    nodes = 0
    if tree is not None:
        (k, v, ancestors), nodes = tree, t
        # One operand, for XLA makes each by another launch. Values are last: what is read after them must be zero.
        rows += [mosaic.pad(x.swapaxes(1, 2), 2, round_up(t, _COPIED)) for x in (k, v)]
        if t > 1:  # one node sees itself
            bits.append(mosaic.row_bits(ancestors, group, plan.row_tiles, plan.rows))
    operands = [
        jnp.concatenate(rows, axis=2),
        pages.reshape(-1, *pages.shape[3:]),
        mosaic.first_page(layer, 2 * num_pages),
        page_table.astype(jnp.int32),
        lengths.astype(jnp.int32),
        *bits,
    ]
    output, lse = _call(plan, operands, num_pages, nodes, scale, interpret or None)
    if output.shape[2] > 1:
        return merge_splits(output, lse, t, group, interpret=interpret)
    output = output.reshape(b, kv_heads, -1, d)[:, :, : t * group].reshape(b, kv_heads, t, group, d)
    lse = lse[..., : plan.rows].reshape(b, kv_heads, -1)[:, :, : t * group].reshape(b, kv_heads, t, group)
    return output.swapaxes(1, 2).reshape(b, t, h, d), lse.swapaxes(1, 2).reshape(b, t, h)


def _inconsistent(q, pages, tree, scale) -> str | None:
    if broken := mosaic.unsupported_scale(scale):
        return broken
    for name, x in [("q", q)] + ([("tree_k", tree[0]), ("tree_v", tree[1])] if tree else []):
        if x.dtype != pages.dtype:
            return f"{name} is {x.dtype.name} and the cache {pages.dtype.name}: both must be the same"
    return None


def _call(plan: Plan, operands: list, num_pages: int, nodes: int, scale: float, interpret):
    """The last two of `results.Outputs`: of all keys where a cluster merges the splits, else of each split."""
    all_rows, pages, _, page_table, _, *bits = operands
    b, kv_heads, _, d = all_rows.shape
    dtype, row_tiles, rows = all_rows.dtype, plan.row_tiles, plan.rows
    query_rows, node_rows = round_up(rows, _COPIED), round_up(nodes, _COPIED)  # of a tile, and of keys or values
    page_size, pages_per_sequence = pages.shape[1], page_table.shape[1]
    part = min(page_size, TILE)  # tokens that one copy brings
    parts, tiles_per_page = TILE // part, page_size // part
    splits, stages, warpgroups = plan.splits, plan.stages, plan.warpgroups
    turns, row_sets = plan.turns, plan.row_sets
    shapes = results.shapes(plan, b, kv_heads, d)
    to_log2 = scale * mosaic.LOG2_E

    def body(rows_ref, pages_ref, first_ref, table_ref, lengths_ref, *refs):
        bits_ref = refs[0] if bits else None
        outputs, scratch = refs[len(bits) : len(bits) + len(shapes)], refs[len(bits) + len(shapes) :]
        ((q_s, k_s, v_s), results_s), q_in, k_in, v_in, k_free, v_free, clean, is_read, *of_results = scratch
        sequence, head, split = (lax.axis_index(name) for name in ("sequence", "head", "split"))
        warpgroup = lax.axis_index("warpgroup")
        me, turn = lax.div(warpgroup, turns), lax.rem(warpgroup, turns)  # which set of rows, and which tiles of keys
        kinds = ((k_s, k_in, k_free), (v_s, v_in, v_free))

        def row_tile_of(row_set):
            return lax.axis_index("rows") * row_sets + row_set

        def find_tiles() -> Tiles:
            """By each warpgroup for itself: what outlives a change of registers is spilled."""
            return Tiles.of(first_ref[0], lengths_ref[sequence], nodes > 0, split, splits, stages)

        def pages_of(tile):
            """Where the parts of a tile are; read ahead of the copies, for which it is an address."""
            slots = (lax.div(tile, tiles_per_page) * parts + j for j in range(parts))
            return [table_ref[sequence, jnp.minimum(slot, pages_per_sequence - 1)] for slot in slots]

        def bring_queries(row_set):
            source = rows_ref.at[sequence, head, pl.ds(row_tile_of(row_set) * query_rows, query_rows)]
            plgpu.copy_gmem_to_smem(source, q_s.at[row_set, pl.ds(0, query_rows)], q_in.at[row_set])

        def bring(tiles: Tiles, tile, where, kind):
            """Keys (kind 0) or values (1) of a tile, in as many copies wherever they come from."""
            into, arrived, _ = kinds[kind]
            slot = tiles.slot_of(tile)

            def copy(sources):
                for j, source in enumerate(sources):
                    plgpu.copy_gmem_to_smem(source, into.at[slot, pl.ds(j * part, part)], arrived.at[slot])

            @pl.when(tile < tiles.prefix)
            def from_pages():
                tokens = pl.ds(lax.rem(tile, tiles_per_page) * part, part)
                copy(pages_ref.at[tiles.first_page + kind * num_pages + page, tokens, head] for page in where)

            if nodes:

                @pl.when(tile == tiles.prefix)
                def from_tree():
                    first = row_tiles * query_rows + kind * node_rows
                    # Not a constant, as which rows beyond the last are refused.
                    first = pl.multiple_of(first + (tile - tiles.prefix) * TILE, _COPIED)
                    copy(rows_ref.at[sequence, head, pl.ds(first + j * part, part)] for j in range(parts))

        def bring_all(tiles: Tiles):
            for row_set in range(row_sets):
                bring_queries(row_set)

            def bring_tile(tile, where):
                following = pages_of(tile + 1)
                for kind, (*_, free) in enumerate(kinds):

                    @pl.when(tile - tiles.start >= stages)
                    def _(free=free):
                        plgpu.barrier_wait(free.at[tiles.slot_of(tile)])

                    bring(tiles, tile, where, kind)
                return following

            lax.fori_loop(tiles.start, tiles.end, bring_tile, pages_of(tiles.start))

        def bring_first(tiles: Tiles):
            bring_queries(me)

            @pl.when(me == 0)
            def _():
                for tile in (tiles.start + i for i in range(stages)):

                    @pl.when(tile < tiles.end)
                    def _(tile=tile):
                        where = pages_of(tile)
                        bring(tiles, tile, where, 0)
                        bring(tiles, tile, where, 1)

        def release(tiles: Tiles, tile, where, kind):
            """Nothing more is read of the slot, into which what follows may come. Told only where a tile does."""

            @pl.when(tile + stages < tiles.end)
            def _():
                free = kinds[kind][-1].at[tiles.slot_of(tile)]
                plgpu.barrier_arrive(free)
                if not plan.producer:

                    @pl.when(me == 0)
                    def _():
                        plgpu.barrier_wait(free)
                        bring(tiles, tile + stages, where, kind)

        def attend(tiles: Tiles):
            """Sum of weighted values, and softmax, over the tiles of a block that has some."""
            # Long before they are needed: they come from memory.
            words: list[Array] = []
            if bits_ref is not None:
                words = mosaic.load_words([bits_ref.at[sequence, word, row_tile_of(me)] for word in (0, 1)])

            def mask(tile, scores):
                """What a query row does not see becomes -inf; whole tiles of the prefix pass as they are."""

                def masked():
                    token = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 1, layout=mosaic.MATRIX)
                    is_of_tree = tile == tiles.prefix
                    is_visible = token < jnp.where(is_of_tree, nodes, tiles.present(tile))
                    if words:
                        # Opaque to the compiler, which would else keep every bit in a register from the start.
                        is_seen = mosaic.sees(lax.optimization_barrier(words), token)
                        is_visible = is_visible & (is_seen | ~is_of_tree)
                    return jnp.where(is_visible, scores, -jnp.inf)

                return lax.cond(tile < tiles.full, lambda: scores, masked)

            def await_values(tile):
                """Zeros in the place of tokens that there are not."""
                slot, count = tiles.slot_of(tile), tiles.present(tile)
                plgpu.barrier_wait(v_in.at[slot])

                @pl.when(count < TILE)
                def _():
                    if turns > 1:  # nobody else reads this tile
                        mosaic.clear_rows(count, v_s.at[slot])
                        plgpu.commit_smem()
                    else:
                        mosaic.clear_after(count, v_s.at[slot], clean, me)

            def pages_after(tile):
                return () if plan.producer else pages_of(tile + stages)

            def step(tile, carry):
                """Values of the tile before are added while the scores of this one become weights."""
                acc, weights, softmax, value_pages, key_pages = carry
                slot, slot_before = tiles.slot_of(tile), tiles.slot_of(tile - turns)
                plgpu.barrier_wait(k_in.at[slot])
                if not plan.producer:
                    await_values(tile - 1)

                def meanwhile(scores):
                    release(tiles, tile, key_pages, 0)
                    softened = lax.optimization_barrier(
                        online_softmax.soften(mask(tile, scores), softmax, to_log2, interpret)
                    )
                    if plan.producer:
                        # Of the next step already. ptxas puts the wait for the running product ahead of the softmax,
                        # but not ahead of a loop, as this wait is.
                        await_values(tile)
                    return softened

                acc, weights, softmax, shrink = mosaic.dot_and_add_product(
                    queries, k_s.at[slot], acc, weights, v_s.at[slot_before], meanwhile, interpret
                )
                release(tiles, tile - turns, value_pages, 1)
                # Rounded only now: until here the tensor cores read the weights before from these registers.
                weights = weights.astype(dtype)
                acc = online_softmax.rescale(acc, shrink, interpret)
                return acc, weights, softmax, key_pages, pages_after(tile + 1)

            queries, start, end = q_s.at[me], tiles.start + turn, tiles.end
            if row_sets == 2 and not interpret:  # the interpreter multiplies no registers
                # From shared memory each wgmma of 64 rows, 64 keys and 16 columns would read 2 KiB of queries beside
                # 2 KiB of keys, which takes the 32 cycles of the product, and two sets of rows do it at the same time.
                queries = plgpu.load(queries, layout=mosaic.MATRIX)
            count = lax.div(end - start + turns - 1, turns)  # of the tiles that are this warpgroup's
            acc, softmax = nothing()
            first_pages, second_pages = pages_after(start), pages_after(start + 1)
            plgpu.barrier_wait(k_in.at[turn])
            scores = mosaic.dot(queries, k_s.at[turn].T, TILE)
            release(tiles, start, first_pages, 0)
            weights, softmax, _ = online_softmax.soften(mask(start, scores), softmax, to_log2, interpret)
            carry = acc, weights.astype(dtype), softmax, first_pages, second_pages
            if plan.producer:
                await_values(start)
            acc, weights, softmax, *_ = lax.fori_loop(1, count, lambda i, carry: step(start + i * turns, carry), carry)
            last = start + (count - 1) * turns
            if not plan.producer:
                await_values(last)
            return mosaic.add_product(acc, weights, v_s.at[tiles.slot_of(last)], interpret), softmax

        def nothing():
            return mosaic.full((TILE, d), 0.0, mosaic.MATRIX), online_softmax.nothing()

        def multiply():
            tiles = find_tiles()
            if not plan.producer:
                bring_first(tiles)
            plgpu.barrier_wait(q_in.at[me])
            acc, softmax = lax.cond(tiles.start + turn < tiles.end, lambda: attend(tiles), nothing)
            plgpu.barrier_arrive(is_read)
            plgpu.barrier_wait(is_read)
            where = sequence, head, split, me, row_tile_of(me), turn
            refs = results.Outputs(*outputs), results.Shared(*results_s), results.Barriers(*of_results)
            results.Results(plan, scale, *where, *refs).leave(acc, softmax.top, softmax.total)

        if plan.producer:
            mosaic.share_roles(warpgroup, warpgroups, plan.registers, lambda: bring_all(find_tiles()), multiply)
        else:
            multiply()

    barrier = plgpu.Barrier
    scratch: list[Any] = [
        # The output is written when queries, keys and values have been read: to the same place, for it needs much.
        plgpu.RefUnion(
            tuple(mosaic.operand((count, TILE, d), dtype) for count in (row_sets, stages, stages)),
            results.shared_memory(plan, d),
        ),
        barrier(num_barriers=row_sets),
        barrier(num_arrivals=parts, num_barriers=stages),
        barrier(num_arrivals=parts, num_barriers=stages),
        barrier(num_arrivals=row_sets, num_barriers=stages),
        barrier(num_arrivals=row_sets, num_barriers=stages),
        barrier(),
        barrier(num_arrivals=warpgroups),
        *results.barriers(plan),
    ]
    axes = dict(sequence=b, head=kv_heads, split=splits, rows=row_tiles // row_sets)
    clusters = {"split": axes.pop("split")} if plan.is_cluster else {}
    return plgpu.kernel(
        body,
        grid=tuple(axes.values()),
        grid_names=tuple(axes),
        cluster=tuple(clusters.values()),
        cluster_names=tuple(clusters),
        num_threads=warpgroups + plan.producer,
        thread_name="warpgroup",
        interpret=interpret,
        out_type=shapes,
        scratch_types=scratch,
        # A row's scores are in one warp, so no reduction needs the shared memory that would be set aside for it.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
    )(*operands)[-2:]
