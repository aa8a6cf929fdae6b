"""KV commit as one gather and one scatter over all layers, in plain JAX."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int


def commit_rows(
    pages: Float[Array, "L 2 P S K D"],
    pending: Float[Array, "L 2 slots T K D"],
    first_slot: int | Int[Array, ""],
    nodes: Int[Array, "B A"],
    page: Int[Array, "B A"],
    offset: Int[Array, "B A"],
    is_written: Bool[Array, "B A"],
) -> Float[Array, "L 2 P S K D"]:
    """Writes `pending[:, :, first_slot + b, nodes[b, a]]` to `pages[:, :, page[b, a], offset[b, a]]`, in every layer.

    Args:
      pages: the cache; updated in place where it is donated.
      pending: keys and values of the tree nodes of all sequences.
      first_slot: of the B sequences, which all have slots.
      nodes: which node each row moves.
      page, offset: where to.
      is_written: rows that are false write zeros to page 0, which belongs to no sequence.
    """
    if nodes.size == 1:  # XLA updates a slice instead of scattering one row, and copies the cache around that
        nodes, page, offset, is_written = (jnp.pad(x, ((0, 0), (0, 1))) for x in (nodes, page, offset, is_written))
    of_these = lax.dynamic_slice_in_dim(pending, first_slot, len(nodes), axis=2)
    rows = jnp.take_along_axis(of_these, nodes[None, None, :, :, None, None], axis=3)
    rows = jnp.where(is_written[None, None, :, :, None, None], rows, 0)
    return pages.at[:, :, jnp.where(is_written, page, 0), offset].set(rows)
