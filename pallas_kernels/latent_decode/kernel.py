"""Latent (MLA) decode attention over pages, and over a tree after them, as one Mosaic GPU kernel for Hopper.

It computes what `reference.py` does and, with a tree, the merge of both parts. Query rows, T tokens times the heads,
are cut into blocks of 64; keys into tiles of 64 tokens, tiles into contiguous splits whose partial results are merged
by their log-sum-exp. The tree is the last tile.

What decides the form is that a row of keys is 576 wide and that its first 512 are the values:

- An output of 64 x 512 float32 would be 256 registers of each thread of one warpgroup, more than a thread has. So a
  block has two warpgroups, and each accumulates its half of the columns, left or right, over every tile.
- Each warpgroup computes the scores of every other tile, alone; the weights reach the other one through shared memory.
  Half the scores of every tile would be products of 32 columns, which shared memory bounds: 3 KiB are read for each,
  24 cycles, where the tensor cores need 16.
- A warpgroup turns the scores of its next tile into weights while its product of this one is under way, so that the
  chain from one running maximum to the next is never longer than a softmax.
- 64 query rows take 72 KiB and so does a tile, so 227 KiB hold two tiles, both in use. The tiles after them come in
  parts, left, right and rotary, each once its last reader is done. Of a half that is its owner, who refills it without
  asking. There is no room for weights: they lie where the rotary part was, which only the scores need, and that part
  alone waits for both.
- A block does 121 FLOP for each byte that it loads, whether its rows count or are padding: at the speed of the memory
  that is three fifths of what the tensor cores do, so few heads are bound by memory. 128 heads are two sets of rows,
  and the second finds the keys in the L2 cache, which has to give 4.5 TB/s for 550 TFLOP/s.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels import mosaic
from pallas_kernels.context_decode.plan import TILE
from pallas_kernels.context_decode.reference import NO_KEYS
from pallas_kernels.latent_decode.plan import Plan, unsupported
from pallas_kernels.latent_decode.reference import KEY, LATENT, ROPE
from pallas_kernels.lse_merge.kernel import merge_splits

_HALF = LATENT // 2
_SLOTS = 2  # tiles in shared memory; warpgroup w computes the scores of slot w


def latent_decode(
    q: Float[Array, "B T H 576"],
    pages: Float[Array, "L P S 576"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    scale: float,
    plan: Plan | None = None,
    interpret: bool | plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "B T H 512"], Float[Array, "B T H"]]:
    """Every query attends to the first `lengths[b]` tokens of its sequence that are on this device.

    Args:
      q, pages, layer, page_table, lengths, scale: as of the reference; `pages` is read in place.
      plan: how to cut the work; None takes what should be fastest.
      interpret: simulate the kernel on the CPU; None does where that is the default backend.

    Returns:
      Float32 output normalised by its own softmax, and the log-sum-exp of the scores; 0 and -1e30 without keys.

    Raises:
      ValueError: shapes or types that the kernel does not take (see `unsupported`).
    """
    return _decode(q, pages, layer, page_table, lengths, None, scale, plan, interpret)


def latent_tree_decode(
    q: Float[Array, "B T H 576"],
    pages: Float[Array, "L P S 576"],
    layer: int | Int[Array, ""],
    page_table: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    tree: Float[Array, "B T 576"],
    ancestors: UInt32[Array, "B T 2"],
    *,
    scale: float,
    plan: Plan | None = None,
    interpret: bool | plgpu.InterpretGPUParams | None = None,
) -> tuple[Float[Array, "B T H 512"], Float[Array, "B T H"]]:
    """`latent_decode` in which every query, a node of a tree, also attends to its ancestors and itself.

    Args:
      tree: rows of the T nodes, as those of a page.
      ancestors: bit n % 32 of word n // 32 of row t is set where node t sees node n, itself included.

    Returns:
      Float32 output of one softmax over prefix and tree, and its log-sum-exp.

    Raises:
      ValueError: shapes or types that the kernel does not take (see `unsupported`).
    """
    return _decode(q, pages, layer, page_table, lengths, (tree, ancestors), scale, plan, interpret)


def _decode(q, pages, layer, page_table, lengths, tree, scale, plan, interpret):
    b, t, h, _ = q.shape
    page_size = pages.shape[2]
    broken = unsupported(
        dtype=pages.dtype, tokens=t, heads=h, width=pages.shape[3], page_size=page_size
    ) or _inconsistent(q, pages, tree, scale)
    if broken:
        raise ValueError(f"{broken}; use the reference (attention='reference') for this")
    interpret = mosaic.simulation(interpret)

    tiles = -(-page_table.shape[1] * page_size // TILE) + (tree is not None)
    plan = plan or Plan.of(b, t * h, tiles)
    return _planned(q, pages, layer, page_table, lengths, tree, plan=plan, scale=scale, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("plan", "scale", "interpret"))
def _planned(q, pages, layer, page_table, lengths, tree, *, plan: Plan, scale: float, interpret):
    """Jitted, and told the layer as a number in memory, so that all layers are traced and compiled as one kernel."""
    b, t, h, width = q.shape
    padded = mosaic.pad(q.reshape(b, t * h, width), 1, plan.row_tiles * plan.rows)
    operands = [
        padded.reshape(b, plan.row_tiles, plan.rows, width),
        pages.reshape(-1, *pages.shape[2:]),
        mosaic.first_page(layer, pages.shape[1]),
        page_table.astype(jnp.int32),
        lengths.astype(jnp.int32),
    ]
    if tree is not None:
        rows, ancestors = tree
        operands += [mosaic.pad(rows, 1, TILE), mosaic.row_bits(ancestors, h, plan.row_tiles, plan.rows)]
    output, lse = _call(plan, operands, t, scale, interpret or None)
    output, lse = output.reshape(b, plan.splits, -1, LATENT), lse.reshape(b, plan.splits, -1)
    if plan.splits == 1:
        output, lse = output[:, 0, : t * h], lse[:, 0, : t * h]
    else:
        output, lse = merge_splits(output, lse, t * h, interpret=interpret)
    return output.reshape(b, t, h, LATENT), lse.reshape(b, t, h)


def _inconsistent(q, pages, tree, scale) -> str | None:
    if broken := mosaic.unsupported_scale(scale):
        return broken
    for name, x in [("q", q)] + ([("tree", tree[0])] if tree else []):
        if x.dtype != pages.dtype:
            return f"{name} is {x.dtype.name} and the cache {pages.dtype.name}: both must be the same"
        if x.shape[-1] != pages.shape[-1]:
            return f"{name} has rows of {x.shape[-1]} values and the cache of {pages.shape[-1]}: both must be the same"
    return None


def _call(plan: Plan, operands: list, nodes: int, scale: float, interpret):
    """Partial outputs f32[B, splits, row_tiles, rows, 512] and log-sum-exps f32[B, splits, row_tiles, rows]."""
    q, pages, _, page_table, _, *tree = operands
    b, row_tiles, rows, _ = q.shape
    page_size, pages_per_sequence = pages.shape[1], page_table.shape[1]
    part = min(page_size, TILE)  # tokens that one copy brings
    parts, tiles_per_page = TILE // part, page_size // part
    splits = plan.splits
    to_log2 = scale * mosaic.LOG2_E

    def body(q_ref, pages_ref, first_ref, table_ref, lengths_ref, *refs):
        tree_ref, bits_ref, *others = refs if tree else (None, None, *refs)
        o_ref, lse_ref, shared, top_s, total_s, lse_s, q_in, *barriers = others
        (q_s, halves_s, rope_s), o_s = shared
        left_in, right_in, rope_in, is_ready, is_spent, is_done = barriers
        sequence, split, row_tile = (lax.axis_index(name) for name in ("sequence", "split", "rows"))
        me = lax.axis_index("warpgroup")

        first_page, length = first_ref[0], lengths_ref[sequence]
        full, prefix = lax.div(length, TILE), pl.cdiv(length, TILE)
        count = prefix + 1 if tree else prefix
        start, end = lax.div(split * count, splits), lax.div((split + 1) * count, splits)

        def pages_of(tile):
            """Where the parts of a tile are; read ahead of the copies, for which it is an address."""
            slots = (lax.div(tile, tiles_per_page) * parts + j for j in range(parts))
            return [table_ref[sequence, jnp.minimum(slot, pages_per_sequence - 1)] for slot in slots]

        def fetch(tile, where, first_column, into, arrived):
            """Some columns of a tile, as many as there is room for."""
            columns = pl.ds(first_column, into.shape[1])

            def copy(sources):
                for j, source in enumerate(sources):
                    plgpu.copy_gmem_to_smem(source, into.at[pl.ds(j * part, part)], arrived)

            @pl.when(tile < prefix)
            def _():
                tokens = pl.ds(lax.rem(tile, tiles_per_page) * part, part)
                copy(pages_ref.at[first_page + page, tokens, columns] for page in where)

            if tree:

                @pl.when(tile == prefix)
                def _():
                    copy(tree_ref.at[sequence, pl.ds(j * part, part), columns] for j in range(parts))

        def present(tile):
            """How many tokens a tile has."""
            tokens = jnp.minimum(length - tile * TILE, TILE)
            return jnp.where(tile == prefix, nodes, tokens) if tree else tokens

        def mask(scores, tile):
            """What a query row does not see becomes -inf; whole tiles of the prefix pass as they are."""

            def masked():
                token = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 1, layout=mosaic.MATRIX)
                is_visible = token < present(tile)
                if tree:
                    words = mosaic.load_words([bits_ref.at[sequence, word, row_tile] for word in (0, 1)])
                    is_visible = is_visible & (mosaic.sees(words, token) | (tile < prefix))
                return jnp.where(is_visible, scores, -jnp.inf)

            return lax.cond(tile < full, lambda: scores, masked)

        def slot_of(tile):
            """Its number is also that of the warpgroup which computes the scores."""
            return lax.rem(tile - start, _SLOTS)

        def bring(tile, where):
            """A tile into its slot, in parts; each warpgroup its half once it no longer reads what was there."""
            slot = slot_of(tile)

            @pl.when(me == 0)
            def _():
                fetch(tile, where, 0, halves_s.at[0, slot], left_in.at[slot])

            @pl.when(me == 1)
            def _():
                fetch(tile, where, _HALF, halves_s.at[1, slot], right_in.at[slot])

                @pl.when(tile >= start + _SLOTS)
                def _():
                    plgpu.barrier_wait(is_spent.at[slot])

                fetch(tile, where, LATENT, rope_s.at[slot], rope_in.at[slot])

        def score(tile):
            slot = slot_of(tile)
            # Opaque to the compiler, which would else keep 36 addresses of the queries in registers: it has none left.
            zero = lax.optimization_barrier(jnp.int32(0))

            def run(acc):
                for column, keys, arrived in (
                    (0, halves_s.at[0], left_in),
                    (_HALF, halves_s.at[1], right_in),
                    (LATENT, rope_s, rope_in),
                ):
                    plgpu.barrier_wait(arrived.at[slot])
                    plgpu.wgmma(acc, q_s.at[zero, :, pl.ds(column, keys.shape[-1])], keys.at[slot].T)
                return acc[...]  # waits for the products

            return mask(pl.run_scoped(run, plgpu.ACC((TILE, TILE), jnp.float32)), tile)

        def soften(tile, scores, top):
            """Weights of a tile, for both warpgroups; returns the running maximum with it, and their sum."""
            slot = slot_of(tile)
            top = jnp.maximum(top, scores.max(axis=1))
            weights = jnp.exp2(scores * to_log2 - mosaic.over(top * to_log2, TILE))
            rope_s.at[slot][...] = weights.astype(q.dtype)
            top_s.at[slot][...] = top
            plgpu.commit_smem()
            plgpu.barrier_arrive(is_ready.at[slot])
            return top, weights.sum(axis=1)

        def await_top(tile):
            """The running maximum after the other warpgroup's tile, once its weights are there."""
            plgpu.barrier_wait(is_ready.at[slot_of(tile)])
            return plgpu.load(top_s.at[slot_of(tile)], layout=mosaic.ROW), mosaic.full((TILE,), 0.0, mosaic.ROW)

        def clean(tile):
            """A weight of 0 would let a NaN through that an earlier owner left in the page."""
            tokens = present(tile)

            @pl.when(tokens < TILE)
            def _():
                for column in range(0, _HALF, 64):
                    values_s = halves_s.at[me, slot_of(tile), :, pl.ds(column, 64)]
                    token = plgpu.broadcasted_iota(jnp.int32, (TILE, 64), 0, layout=mosaic.MATRIX)
                    values = plgpu.load(values_s, layout=mosaic.MATRIX)
                    values_s[...] = jnp.where(token < tokens, values, jnp.zeros_like(values))
                plgpu.commit_smem()

        def step(tile, carry):
            """Values of a tile; of the next one the weights, where they are this warpgroup's to find (`mine`)."""
            acc, top, total, mine = carry
            slot = slot_of(tile)
            is_mine, is_next_mine = slot == me, (slot != me) & (tile + 1 < end)
            where = pages_of(tile + _SLOTS)
            scores = lax.cond(
                is_next_mine, lambda: score(tile + 1), lambda: mosaic.full((TILE, TILE), 0.0, mosaic.MATRIX)
            )
            new_top, weight = lax.cond(is_mine, lambda: mine, lambda: await_top(tile))
            rescale = jnp.exp2((top - new_top) * to_log2)
            clean(tile)

            def meanwhile():
                return lax.cond(is_next_mine, lambda: soften(tile + 1, scores, new_top), lambda: mine)

            acc, mine = _multiply_add(
                acc * mosaic.over(rescale, _HALF), rope_s.at[slot], halves_s.at[me, slot], meanwhile, bool(interpret)
            )

            @pl.when(tile + _SLOTS < end)
            def _():
                pl.when(me == 0)(lambda: plgpu.barrier_arrive(is_spent.at[slot]))
                bring(tile + _SLOTS, where)

            return acc, new_top, total * rescale + weight, mine

        @pl.when(me == 0)
        def _():
            plgpu.copy_gmem_to_smem(q_ref.at[sequence, row_tile], q_s.at[0, pl.ds(0, rows)], q_in)

        for ahead in range(_SLOTS):
            pl.when(start + ahead < end)(functools.partial(bring, start + ahead, pages_of(start + ahead)))

        plgpu.barrier_wait(q_in)
        acc = mosaic.full((TILE, _HALF), 0.0, mosaic.MATRIX)
        none, no_weight = mosaic.full((TILE,), NO_KEYS, mosaic.ROW), mosaic.full((TILE,), 0.0, mosaic.ROW)
        mine = lax.cond((me == 0) & (start < end), lambda: soften(start, score(start), none), lambda: (none, no_weight))
        acc, top, total, _ = lax.fori_loop(start, end, step, (acc, none, no_weight, mine))

        # Each has summed the weights of its own tiles.
        total_s.at[me][...] = total
        plgpu.barrier_arrive(is_done)
        plgpu.barrier_wait(is_done)
        total = total + plgpu.load(total_s.at[1 - me], layout=mosaic.ROW)
        has_keys = total > 0
        divisor = jnp.where(has_keys, total, 1.0)
        here = (sequence, split, row_tile)
        o_s.at[me][...] = acc / mosaic.over(divisor, _HALF)

        @pl.when(me == 0)
        def _():
            lse_s[...] = jnp.where(has_keys, top * scale + jnp.log(divisor), NO_KEYS)

        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(o_s.at[me, pl.ds(0, rows)], o_ref.at[*here, :, pl.ds(me * _HALF, _HALF)])
        pl.when(me == 0)(lambda: plgpu.copy_smem_to_gmem(lse_s.at[pl.ds(0, rows)], lse_ref.at[here]))
        plgpu.wait_smem_to_gmem(0)

    def tiled(dtype, *shape):
        """As wgmma reads it from shared memory, and without bank conflicts."""
        columns = 128 // jnp.dtype(dtype).itemsize
        transforms = (plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(128))  # type: ignore[abstract]
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    loaded = (
        tiled(q.dtype, 1, TILE, KEY),
        tiled(q.dtype, 2, _SLOTS, TILE, _HALF),
        tiled(q.dtype, _SLOTS, TILE, ROPE),
    )
    barrier = plgpu.Barrier
    return plgpu.kernel(
        body,
        grid=(b, splits, row_tiles),
        grid_names=("sequence", "split", "rows"),
        num_threads=2,
        thread_name="warpgroup",
        interpret=interpret,
        out_type=(
            jax.ShapeDtypeStruct((b, splits, row_tiles, rows, LATENT), jnp.float32),
            jax.ShapeDtypeStruct((b, splits, row_tiles, rows), jnp.float32),
        ),
        scratch_types=(
            plgpu.RefUnion(loaded, tiled(jnp.float32, 2, TILE, _HALF)),  # the output waits for all that was loaded
            plgpu.SMEM((2, TILE), jnp.float32),
            plgpu.SMEM((2, TILE), jnp.float32),
            plgpu.SMEM((TILE,), jnp.float32),
            barrier(),
            *(barrier(num_arrivals=parts, num_barriers=_SLOTS) for _ in range(3)),
            barrier(num_barriers=_SLOTS),
            barrier(num_barriers=_SLOTS),
            barrier(num_arrivals=2),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*operands)


def _multiply_add(acc, lhs, rhs, meanwhile, is_simulated: bool):
    """acc + lhs @ rhs, in the registers of acc; and what `meanwhile` returns, which runs during the product."""

    def run(result):
        if not is_simulated:  # the interpreter has no store to an accumulator
            result[...] = acc
        plgpu.wgmma(result, lhs, rhs)
        other = meanwhile()
        product = result[...]  # waits for it
        return (acc + product if is_simulated else product), other

    return pl.run_scoped(run, plgpu.ACC(acc.shape, jnp.float32))
