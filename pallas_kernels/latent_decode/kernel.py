"""Latent (MLA) decode attention over pages, and over a tree after them, as one Mosaic GPU kernel for Hopper.

It computes what `reference.py` does and, with a tree, the merge of both parts. Query rows, T tokens times the heads,
are cut into blocks of 64; keys into tiles of 64 tokens, tiles into contiguous splits whose partial results are merged
by their log-sum-exp. The tree is the last tile. How a block goes through its tiles depends on how many rows it has: see
`halves.py`, and for at most 16 `flipped.py`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels import mosaic
from pallas_kernels.context_decode.plan import TILE, copied_rows
from pallas_kernels.latent_decode import flipped, halves
from pallas_kernels.latent_decode.block import Block
from pallas_kernels.latent_decode.plan import Plan, unsupported
from pallas_kernels.latent_decode.reference import LATENT
from pallas_kernels.lse_merge.kernel import merge_splits
from pallas_kernels.shapes import check_shapes


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
      ValueError: shapes or types that the kernel does not take (see `unsupported`), or shapes that don't go together.
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
      ValueError: shapes or types that the kernel does not take (see `unsupported`), or shapes that don't go together.
    """
    return _decode(q, pages, layer, page_table, lengths, (tree, ancestors), scale, plan, interpret)


def _decode(q, pages, layer, page_table, lengths, tree, scale, plan, interpret):
    given = {
        "q": (q, "B T H row"),
        "pages": (pages, "L P S row"),
        "page_table": (page_table, "B M"),
        "lengths": (lengths, "B"),
    }
    if tree is not None:
        given |= {"tree": (tree[0], "B T row"), "ancestors": (tree[1], "B T 2")}
    check_shapes(**given)
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
        operands.append(mosaic.pad(rows, 1, copied_rows(t)))
        if t > 1:  # one node sees itself
            operands.append(mosaic.row_bits(ancestors, h, plan.row_tiles, plan.rows))
    output, lse = _call(plan, operands, t, scale, interpret or None)
    if plan.splits > 1:
        return merge_splits(output[:, None], lse[:, None], t, h, interpret=interpret)
    output, lse = output.reshape(b, -1, LATENT)[:, : t * h], lse.reshape(b, -1)[:, : t * h]
    return output.reshape(b, t, h, LATENT), lse.reshape(b, t, h)


def _inconsistent(q, pages, tree, scale) -> str | None:
    if broken := mosaic.unsupported_scale(scale):
        return broken
    for name, x in [("q", q)] + ([("tree", tree[0])] if tree else []):
        if x.dtype != pages.dtype:
            return f"{name} is {x.dtype.name} and the cache {pages.dtype.name}: both must be the same"
    return None


def _call(plan: Plan, operands: list, nodes: int, scale: float, interpret):
    """Partial outputs f32[B, splits, row_tiles, rows, 512] and log-sum-exps f32[B, splits, row_tiles, rows]."""
    q, pages = operands[:2]
    b, row_tiles, rows, _ = q.shape
    loop = flipped if plan.is_flipped else halves

    def body(*refs):
        o, lse, *scratch = refs[len(operands) :]
        sequence, split, row_tile, me = (lax.axis_index(name) for name in ("sequence", "split", "rows", "warpgroup"))
        block = Block(plan, nodes, scale, interpret, sequence, split, row_tile, me, o, lse, *refs[: len(operands)])
        loop.run(block, *scratch)

    return plgpu.kernel(
        body,
        grid=(b, plan.splits, row_tiles),
        grid_names=("sequence", "split", "rows"),
        num_threads=3,
        thread_name="warpgroup",
        interpret=interpret,
        out_type=(
            jax.ShapeDtypeStruct((b, plan.splits, row_tiles, rows, LATENT), jnp.float32),
            jax.ShapeDtypeStruct((b, plan.splits, row_tiles, rows), jnp.float32),
        ),
        scratch_types=loop.scratch(rows, q.dtype, parts=TILE // min(pages.shape[1], TILE)),
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=loop.REDUCTION_BYTES),
    )(*operands)
