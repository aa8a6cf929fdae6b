"""A draft's key-value cache on the device: pages under the target's page table, of true rows alone.

A true row is computed from an accepted token and the target's own states; rows of drafted tokens never come here. A
draft is not context parallel: a device holds whole pages of the heads that it has. Only tails write and read them, each
the group (or chunk) that it finishes, so a page's new owner always writes after its old one.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache.pages import TRASH_PAGE, locate

type DraftPages = Float[Array, "L 2 P S K D"]


def write(
    pages: DraftPages,
    layer: int,
    page_table: Int[Array, "B M"],
    positions: Int[Array, "B A"],
    k: Float[Array, "B A K D"],
    v: Float[Array, "B A K D"],
    is_written: Bool[Array, "B A"],
) -> DraftPages:
    """Stores keys and values of one layer at their positions; the rest goes to the trash page as zeros."""
    page, offset, is_inside = locate(positions, page_table, pages.shape[3])
    keep = is_written & is_inside
    rows = jnp.where(keep[..., None, None, None], jnp.stack([k, v], axis=2), 0).astype(pages.dtype)
    # Advanced indices apart from each other put the row axes first.
    return pages.at[layer, :, jnp.where(keep, page, TRASH_PAGE), offset].set(rows)
