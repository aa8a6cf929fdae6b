"""KV commit in place, all layers in one launch, as a Mosaic GPU kernel for Hopper.

It does what `reference.py` does, but a row that is not written moves nothing: page 0 keeps what it holds, where the
reference puts zeros. A block brings one node's rows of some layers into shared memory by one copy of the TMA and sends
them to their page by another, so it needs no registers and no arithmetic on addresses; a block of a row that is not
written ends at once.

It takes a cache that the caller donates (without that XLA copies it first, as for the reference), and rows of a
multiple of 16 bytes. For the reference XLA makes one fused gather and scatter for an H200, in place and without a
temporary too, but a thread of it finds the addresses of each element for itself, and writes the rows that are not
accepted as well, all to page 0: it takes two to eight times as long (docs/kernels.md).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels import mosaic
from pallas_kernels.shapes import check_shapes

_BOX = 256  # elements of a dimension that the TMA copies at once
_BLOCK_BYTES = 2**15  # of shared memory: several blocks on a multiprocessor, so that their waits overlap


def commit_rows(
    pages: Float[Array, "L 2 P S K D"],
    pending: Float[Array, "L 2 slots T K D"],
    first_slot: int | Int[Array, ""],
    nodes: Int[Array, "B A"],
    page: Int[Array, "B A"],
    offset: Int[Array, "B A"],
    is_written: Bool[Array, "B A"],
    *,
    interpret: bool | plgpu.InterpretGPUParams | None = None,
) -> Float[Array, "L 2 P S K D"]:
    """Writes `pending[:, :, first_slot + b, nodes[b, a]]` to `pages[:, :, page[b, a], offset[b, a]]`, in every layer.

    Args:
      pages: the cache; updated in place where it is donated.
      pending, first_slot, nodes, page, offset: as of the reference. No two written rows may have the same page and
        offset, and nothing moves a `first_slot` back that leaves too few slots.
      is_written: rows that are false touch no page; their node, page and offset are not read.
      interpret: simulate the kernel on the CPU; None does where that is the default backend.

    Raises:
      ValueError: shapes or types that the kernel does not take (see `unsupported`), or shapes that don't go together.
    """
    check_shapes(
        pages=(pages, "L 2 P S K D"),
        pending=(pending, "L 2 slots T K D"),
        nodes=(nodes, "B A"),
        page=(page, "B A"),
        offset=(offset, "B A"),
        is_written=(is_written, "B A"),
    )
    *_, kv_heads, head_dim = pages.shape
    broken = unsupported(dtype=pages.dtype, pending_dtype=pending.dtype, kv_heads=kv_heads, head_dim=head_dim)
    if len(nodes) > pending.shape[2]:
        broken = broken or f"{len(nodes)} sequences must be at most the {pending.shape[2]} slots of pending rows"
    if broken:
        raise ValueError(f"{broken}; use the reference for this")
    interpret = mosaic.simulation(interpret)

    lines, columns = _fold(kv_heads * head_dim)
    slabs = pages.shape[0] * pages.shape[1]  # keys and values of a layer are one each
    per_block = _slabs_per_block(slabs, kv_heads * head_dim * pages.dtype.itemsize)

    def body(pending_ref, first_ref, nodes_ref, page_ref, offset_ref, is_written_ref, pages_ref, rows_s, arrived):
        b, a = lax.axis_index("sequence"), lax.axis_index("row")
        some = pl.ds(lax.axis_index("slabs") * per_block, per_block)

        @pl.when(is_written_ref[b, a] != 0)
        def _():
            plgpu.copy_gmem_to_smem(pending_ref.at[some, first_ref[0] + b, nodes_ref[b, a]], rows_s, arrived)
            plgpu.barrier_wait(arrived)
            plgpu.copy_smem_to_gmem(rows_s, pages_ref.at[some, page_ref[b, a], offset_ref[b, a]])
            plgpu.wait_smem_to_gmem(0)

    ref = jax.new_ref(pages.reshape(slabs, *pages.shape[2:4], lines, columns))
    first = jnp.reshape(jnp.int32(first_slot), 1)
    tables = (x.astype(jnp.int32) for x in (first, nodes, page, offset, is_written))
    plgpu.kernel(
        body,
        grid=(*nodes.shape, slabs // per_block),
        grid_names=("sequence", "row", "slabs"),
        interpret=interpret or None,
        out_type=(),
        scratch_types=(plgpu.SMEM((per_block, lines, columns), pages.dtype), plgpu.Barrier()),
    )(pending.reshape(slabs, *pending.shape[2:4], lines, columns), *tables, ref)
    return jax.freeze(ref).reshape(pages.shape)


def unsupported(*, dtype, pending_dtype, kv_heads: int, head_dim: int) -> str | None:
    """Why the kernel does not take these, as the rule that they break, or None where it does.

    Args:
      dtype, pending_dtype: of the cache and of the pending buffer.
      kv_heads: on this device.
    """
    if jnp.dtype(dtype) != jnp.dtype(pending_dtype):
        pending_name, name = jnp.dtype(pending_dtype).name, jnp.dtype(dtype).name
        return f"pending rows are {pending_name} and the cache {name}: both must be the same"
    lines, columns = _fold(kv_heads * head_dim)
    if columns * jnp.dtype(dtype).itemsize % 16 or lines > _BOX:
        return f"rows of {kv_heads} x {head_dim} values must be 1 to {_BOX} times a power of two of 16 or more bytes"
    return None


def _fold(row: int) -> tuple[int, int]:
    """A row as lines and columns that one copy can bring."""
    columns = min(row & -row, _BOX)  # the largest power of two that divides it
    return row // columns, columns


def _slabs_per_block(slabs: int, row_bytes: int) -> int:
    """As many as fit, of equal parts."""
    most = min(_BOX, max(1, _BLOCK_BYTES // row_bytes))
    return max(n for n in range(1, min(slabs, most) + 1) if slabs % n == 0)
