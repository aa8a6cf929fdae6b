"""The target's key-value cache on the device: pages for accepted tokens, a pending buffer for the tree in flight."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache.pages import PageGeometry, locate
from jaxspec.mesh import DCP, PP, TP, rank, split
from pallas_kernels.kv_commit import commit_rows, kernel


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TargetCache:
    """Keys (index 0) and values (1) of every layer slot; `pp` is 1 in the view of a device.

    A verify never writes pages: the K/V of a tree waits in `pending` until the group's next visit has the accepted
    path. Trees, chains, dcp and pp all take this one way, and nothing is ever rolled back.
    """

    pages: Float[Array, "pp L 2 P S K D"]
    pending: Float[Array, "pp L 2 slots T K D"]

    @staticmethod
    def specs() -> "TargetCache":
        return TargetCache(pages=split(PP, None, None, None, DCP, TP), pending=split(PP, None, None, None, None, TP))

    def commit(
        self,
        first_slot: Int[Array, ""],
        nodes: Int[Array, "B A"],
        positions: Int[Array, "B A"],
        is_written: Bool[Array, "B A"],
        page_table: Int[Array, "B M"],
        geometry: PageGeometry,
        *,
        by_kernel: bool,
    ) -> "TargetCache":
        """Moves accepted rows of B slots from `pending` to the pages of their positions, on the rank that owns each.

        Args:
          by_kernel: with the kernel for Hopper GPUs, where it takes these shapes.
        """
        return self._write(self.pending[0], first_slot, nodes, positions, is_written, page_table, geometry, by_kernel)

    def put_pending(
        self, first_slot: Int[Array, ""], rows: Float[Array, "L 2 B T K D"], is_written: Bool[Array, ""]
    ) -> "TargetCache":
        """Keeps this round's tree K/V; unless `is_written`, nothing changes."""
        start = (0, 0, first_slot, 0, 0, 0)
        old = lax.dynamic_slice(self.pending[0], start, rows.shape)
        rows = jnp.where(is_written, rows.astype(old.dtype), old)
        return dataclasses.replace(self, pending=lax.dynamic_update_slice(self.pending[0], rows, start)[None])

    def put_rows(
        self,
        rows: Float[Array, "L 2 C K D"],
        positions: Int[Array, "C"],
        is_written: Bool[Array, "C"],
        page_row: Int[Array, "M"],
        geometry: PageGeometry,
        *,
        by_kernel: bool,
    ) -> "TargetCache":
        """Writes prompt K/V straight into pages."""
        nodes = jnp.arange(rows.shape[2])[None]
        rows = rows.astype(self.pages.dtype)[:, :, None]
        chunk = positions[None], is_written[None], page_row[None]
        return self._write(rows, 0, nodes, *chunk, geometry, by_kernel)

    def _write(self, rows, first_row, nodes, positions, is_written, page_table, geometry, by_kernel) -> "TargetCache":
        page, offset, is_mine = local_address(positions, page_table, geometry)
        *_, kv_heads, head_dim = rows.shape
        broken = kernel.unsupported(
            dtype=self.pages.dtype, pending_dtype=rows.dtype, kv_heads=kv_heads, head_dim=head_dim
        )
        commit = kernel.commit_rows if by_kernel and not broken else commit_rows
        pages = commit(self.pages[0], rows, first_row, nodes, page, offset, is_mine & is_written)
        return dataclasses.replace(self, pages=pages[None])


def local_address(
    positions: Int[Array, "B A"], page_table: Int[Array, "B M"], geometry: PageGeometry
) -> tuple[Int[Array, "B A"], Int[Array, "B A"], Bool[Array, "B A"]]:
    """Page, offset on the owning rank, and whether that is this rank; a position without a page is nobody's."""
    page, offset, is_inside = locate(positions, page_table, geometry.page_size)
    owner, local_offset = jnp.divmod(offset, geometry.local_size)
    return page, local_offset, is_inside & (owner == rank((DCP,)))
