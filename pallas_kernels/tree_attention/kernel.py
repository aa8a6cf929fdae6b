"""Attention among the nodes of a tree, and its join with what each dcp rank found in the prefix, as one Mosaic kernel.

It computes what `reference.py` does and the merge of that with the ranks' parts. A block takes one query head of one
sequence: at most 64 by 64 nodes, one tile of the tensor cores. The launch and the wait for the reads cost more than the
work does. So all reads start at once, and nothing is prepared by another launch that a copy engine can do: it finds
queries, keys and values where the projection left them, and gives zeros for the rows that a tile lacks. Few nodes take
a whole tile too: its two products take some hundred cycles, and products without tensor cores as many for few nodes and
far more for many.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels import mosaic
from pallas_kernels.context_decode.plan import TILE, copied_rows, round_up, unsupported
from pallas_kernels.context_decode.reference import NO_KEYS
from pallas_kernels.lse_merge import LSE_COLUMNS
from pallas_kernels.shapes import check_shapes

_TILE_ROWS = 8  # of a tile of wgmma operands in shared memory
_PART_ROWS = 4 * TILE  # of all parts in shared memory at once: what fits with a head_dim of 128


def tree_join(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    ancestors: UInt32[Array, "B T 2"],
    first_head: Int[Array, ""] | int,
    parts: Float[Array, "ranks B T own_H D+8"],
    *,
    scale: float,
    interpret: bool | plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "B T own_H D"]:
    """Every node attends to its ancestors, itself, and what the parts attended to: one softmax over all of it.

    Args:
      q, k, v: of the T nodes, all heads; query head h reads KV head `h*K//H`.
      ancestors: bit n % 32 of word n // 32 of row t is set where node t sees node n, itself included; T <= 64. More
        than 8 nodes that are no multiple of 8 are padded first, which copies all operands.
      first_head: of the own_H query heads that are computed; it may lie inside the group of a KV head.
      parts: float32 output and log-sum-exp of each rank for these heads, as `lse_merge.pack` puts them together; 0 and
        -1e30 for a rank without keys.
      scale: factor on the scores.
      interpret: simulate the kernel on the CPU; None does where that is the default backend.

    Returns:
      Output in the type of q; 0 for a node that sees nothing.

    Raises:
      ValueError: shapes or types that the kernel does not take, or shapes that don't go together.
    """
    check_shapes(
        q=(q, "B T H D"),
        k=(k, "B T K D"),
        v=(v, "B T K D"),
        ancestors=(ancestors, "B T 2"),
        parts=(parts, f"ranks B T own_H D+{LSE_COLUMNS}"),
    )
    t, h, d = q.shape[1:]
    broken = unsupported(
        dtype=q.dtype, tokens=t, heads=h, kv_heads=k.shape[2], head_dim=d, page_size=TILE
    ) or _inconsistent(q, k, v, first_head, parts, scale)
    if broken:
        raise ValueError(f"{broken}; use the reference (attention='reference') for this")
    interpret = mosaic.simulation(interpret)
    rows = copied_rows(t)
    q, k, v = (jnp.pad(x, ((0, 0), (0, rows - t), (0, 0), (0, 0))) for x in (q, k, v))
    parts = jnp.pad(parts, ((0, 0), (0, 0), (0, rows - t), (0, 0), (0, 0)))
    words = lax.bitcast_convert_type(ancestors, jnp.int32).swapaxes(1, 2)
    words = jnp.pad(words, ((0, 0), (0, 0), (0, TILE - t)))
    first = jnp.asarray(first_head, jnp.int32).reshape(1)
    return _call([first, q, k, v, words, parts], scale, interpret or None)[:, :t]


def _inconsistent(q, k, v, first_head, parts, scale) -> str | None:
    if broken := mosaic.unsupported_scale(scale):
        return broken
    for name, x in (("k", k), ("v", v)):
        if x.dtype != q.dtype:
            return f"{name} is {x.dtype.name} and q {q.dtype.name}: both must be the same"
    if parts.dtype != jnp.float32:
        return f"parts are {parts.dtype.name} and must be float32"
    heads, own = q.shape[2], parts.shape[3]
    last_first = heads - own
    if last_first < 0 or (isinstance(first_head, int) and not 0 <= first_head <= last_first):
        return f"first_head={first_head} and the {own} heads of parts must lie within the {heads} query heads"
    return None


@functools.partial(jax.jit, static_argnames=("scale", "interpret"))  # traced once for all layers
def _call(operands: list, scale: float, interpret) -> Float[Array, "B T8 own_H D"]:
    _, q, k, _, _, parts = operands
    b, rows, heads, d = q.shape
    ranks, _, _, own_heads, width = parts.shape
    group = heads // k.shape[2]
    # Registers hold 64 rows of a part. Where all parts fit, they lie close together and reading one runs on into the
    # next; else a slot is used again, and nothing may be read of it meanwhile.
    part_rows = round_up(rows, _TILE_ROWS)
    slots, slot_rows = ranks, part_rows
    if (slots - 1) * slot_rows + TILE > _PART_ROWS:
        slots, slot_rows = _PART_ROWS // TILE, TILE
    to_log2 = scale * mosaic.LOG2_E

    def body(first_ref, q_ref, k_ref, v_ref, words_ref, parts_ref, out_ref, q_s, k_s, v_s, p_s, parts_s, *arrived):
        q_in, k_in, v_in, part_in = arrived
        sequence, own = lax.axis_index("sequence"), lax.axis_index("head")
        head = first_ref[0] + own
        whole = pl.ds(0, TILE)

        def fetch_part(rank):
            slot = rank % slots
            target = parts_s.at[pl.ds(slot * slot_rows, part_rows)]
            plgpu.copy_gmem_to_smem(parts_ref.at[rank, sequence, pl.ds(0, part_rows), own], target, part_in.at[slot])

        plgpu.copy_gmem_to_smem(q_ref.at[sequence, whole, head], q_s, q_in)
        plgpu.copy_gmem_to_smem(k_ref.at[sequence, whole, lax.div(head, group)], k_s, k_in)
        plgpu.copy_gmem_to_smem(v_ref.at[sequence, whole, lax.div(head, group)], v_s, v_in)
        for rank in range(slots):
            fetch_part(rank)

        node = plgpu.broadcasted_iota(jnp.int32, (TILE, TILE), 1, layout=mosaic.MATRIX)
        is_visible = mosaic.sees(mosaic.load_words([words_ref.at[sequence, word] for word in (0, 1)]), node)

        plgpu.barrier_wait(q_in)
        plgpu.barrier_wait(k_in)
        scores = jnp.where(is_visible, mosaic.dot(q_s, k_s.T, TILE) * to_log2, NO_KEYS)
        top = scores.max(axis=1)
        weights = jnp.where(is_visible, jnp.exp2(scores - mosaic.over(top, TILE)), 0.0)
        total = weights.sum(axis=1)
        p_s[...] = weights.astype(q.dtype)
        plgpu.commit_smem()
        plgpu.barrier_wait(v_in)
        acc = mosaic.dot(p_s, v_s, d)

        for slot in range(slots):
            plgpu.barrier_wait(part_in.at[slot])
        for rank in range(ranks):
            slot = rank % slots
            if rank >= slots:
                plgpu.barrier_wait(part_in.at[slot])
            # 64 rows, as registers hold them; those beyond the nodes are another part's or nothing, and never stored.
            part = plgpu.load(parts_s.at[pl.ds(slot * slot_rows, TILE)], layout=mosaic.MATRIX)
            # The sentinel of no keys stays one and the same under the factor.
            lse = jnp.maximum(part[:, d:].max(axis=1) * mosaic.LOG2_E, NO_KEYS)
            new_top = jnp.maximum(top, lse)
            rescale, weight = jnp.exp2(top - new_top), jnp.exp2(lse - new_top)
            acc = acc * mosaic.over(rescale, d) + part[:, :d] * mosaic.over(weight, d)
            total = total * rescale + weight
            top = new_top
            if rank + slots < ranks:
                plgpu.commit_smem()
                fetch_part(rank + slots)

        # The queries are no longer needed.
        q_s[...] = (acc / mosaic.over(total, d)).astype(q.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(q_s, out_ref.at[sequence, whole, own])
        plgpu.wait_smem_to_gmem(0)

    def tiled(*shape, dtype=q.dtype, columns=64):
        """As wgmma, and registers in its layout, read shared memory without bank conflicts."""
        swizzle = columns * jnp.dtype(dtype).itemsize
        transforms = (plgpu.TilingTransform((_TILE_ROWS, columns)), plgpu.SwizzleTransform(swizzle))  # type: ignore[abstract]
        return plgpu.SMEM(shape, dtype, transforms=transforms)

    return plgpu.kernel(
        body,
        grid=(b, own_heads),
        grid_names=("sequence", "head"),
        interpret=interpret,
        out_type=jax.ShapeDtypeStruct((b, rows, own_heads, d), q.dtype),
        scratch_types=(
            tiled(TILE, d),
            tiled(TILE, d),
            tiled(TILE, d),
            tiled(TILE, TILE),
            tiled((slots - 1) * slot_rows + TILE, width, dtype=jnp.float32, columns=LSE_COLUMNS),
            plgpu.Barrier(),
            plgpu.Barrier(),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=slots),
        ),
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*operands)
