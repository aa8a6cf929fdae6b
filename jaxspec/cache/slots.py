"""The slot table: everything the device knows of each sequence, the same on every device.

A group's rows change in two places only: when the group enters stage 0 (the host's commands) and in its tail. So
every stage reads rows that were written once, before this round's entry.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, UInt32

from jaxspec.speculate.sampling import SamplingRows
from jaxspec.speculate.trees import TreeSpec, ancestor_bits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotTable:
    """One row a slot. A = nodes on the longest path of a tree, E = stop ids a slot may have.

    Attributes:
      is_active: decodes in every round.
      length: accepted tokens that have KV; also the position of the tree's root.
      pending_count: how many of them still wait in the pending buffer.
      path: tree nodes of those, from the root.
      remaining: tokens that may still be emitted.
      page_table: pages in order, 0 where none is granted.
      tokens, parents, ancestors: the tree to verify next; its node 0 is the last emitted token. An empty node has
        token -1, which no target ever equals.
      stop_ids: tokens that end the sequence, padded with -1.
    """

    is_active: Bool[Array, "B"]
    length: Int[Array, "B"]
    pending_count: Int[Array, "B"]
    path: Int[Array, "B A"]
    remaining: Int[Array, "B"]
    page_table: Int[Array, "B M"]
    tokens: Int[Array, "B T"]
    parents: Int[Array, "B T"]
    ancestors: UInt32[Array, "B T 2"]
    stop_ids: Int[Array, "B E"]
    sampling: SamplingRows

    @staticmethod
    def empty(slots: int, pages_per_slot: int, stop_ids: int, tree: TreeSpec) -> "SlotTable":
        parents = jnp.tile(jnp.array(tree.parents, jnp.int32), (slots, 1))
        return SlotTable(
            is_active=jnp.zeros(slots, bool),
            length=jnp.zeros(slots, jnp.int32),
            pending_count=jnp.zeros(slots, jnp.int32),
            path=jnp.zeros((slots, tree.max_depth + 1), jnp.int32),
            remaining=jnp.zeros(slots, jnp.int32),
            page_table=jnp.zeros((slots, pages_per_slot), jnp.int32),
            tokens=jnp.zeros((slots, tree.num_nodes), jnp.int32),
            parents=parents,
            ancestors=ancestor_bits(parents, tree.max_depth),
            stop_ids=jnp.full((slots, stop_ids), -1, jnp.int32),
            sampling=SamplingRows.empty(slots),
        )

    def rows(self, first: Int[Array, ""], count: int) -> "SlotTable":
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, count), self)

    def with_rows(self, first: Int[Array, ""], rows: "SlotTable") -> "SlotTable":
        return jax.tree.map(lambda x, new: lax.dynamic_update_slice_in_dim(x, new, first, axis=0), self, rows)


def select_rows(condition: Bool[Array, "B"], yes, no):
    """Row by row one of two tables (or parts of them); `yes` may be one row for all."""

    def pick(a: Array, b: Array) -> Array:
        return jnp.where(condition.reshape(-1, *(1,) * (b.ndim - 1)), a, b)

    return jax.tree.map(pick, yes, no)
