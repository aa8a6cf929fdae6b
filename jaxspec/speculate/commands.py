"""What the host tells the device: one packed int32 array a dispatch.

Commands for a slot take effect when its group enters stage 0 for the first time in the dispatch, and only there.
"""

import dataclasses
import enum

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int

from jaxspec.cache.slots import SlotTable, select_rows
from jaxspec.speculate.lane import LaneRows, zeros
from jaxspec.speculate.sampling import SamplingRows

NO_GROUP = -1


class SlotOp(enum.IntEnum):
    KEEP = 0
    RELEASE = 1  # the slot's request is gone; its pages may belong to another already
    ADMIT = 2  # a request whose last prompt chunk enters in this tick
    GRANT = 3  # more pages for the request that is there


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotCommands:
    """One row a slot; floats are carried as their bits. On the host the leaves are numpy arrays, filled in place."""

    op: Int[Array, "slots"]
    length: Int[Array, "slots"]
    remaining: Int[Array, "slots"]
    temperature: Int[Array, "slots"]
    top_p: Int[Array, "slots"]
    min_p: Int[Array, "slots"]
    top_k: Int[Array, "slots"]
    seed: Int[Array, "slots 2"]
    stop_ids: Int[Array, "slots E"]
    page_table: Int[Array, "slots M"]

    def rows(self, first: Int[Array, ""], count: int) -> "SlotCommands":
        return jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, first, count), self)

    def apply(self, table: SlotTable) -> SlotTable:
        """The rows of a group as they are from its entry on."""
        bits = lax.bitcast_convert_type
        is_gone = self.op == SlotOp.RELEASE
        admitted = dataclasses.replace(
            table,
            is_active=jnp.zeros_like(table.is_active),
            length=self.length,
            pending_count=jnp.zeros_like(table.pending_count),
            remaining=self.remaining,
            tokens=jnp.full_like(table.tokens, -1),
            stop_ids=self.stop_ids,
            sampling=SamplingRows(
                temperature=bits(self.temperature, jnp.float32),
                top_p=bits(self.top_p, jnp.float32),
                min_p=bits(self.min_p, jnp.float32),
                top_k=self.top_k,
                seed=bits(self.seed, jnp.uint32),
            ),
        )
        table = select_rows(self.op == SlotOp.ADMIT, admitted, table)
        return dataclasses.replace(
            table,
            is_active=table.is_active & ~is_gone,
            pending_count=jnp.where(is_gone, 0, table.pending_count),
            page_table=jnp.where((self.op == SlotOp.KEEP)[:, None], table.page_table, self.page_table),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Commands:
    """Everything the host sends with a dispatch.

    Attributes:
      entering: with one group in flight, which one; with all, 0 if groups enter. -1 where none does (a drain).
      slots: one row a slot.
      lane: one chunk an entry, or None for a program without a lane.
    """

    entering: Int[Array, ""]
    slots: SlotCommands
    lane: LaneRows | None

    @staticmethod
    def blank(slots: int, stop_ids: int, pages_per_slot: int, lane_entries: int, chunk: int) -> "Commands":
        """Numpy arrays that ask for nothing, to be filled in by the host."""
        return Commands(
            entering=zeros(),
            slots=SlotCommands(
                **{field.name: zeros(slots) for field in dataclasses.fields(SlotCommands)}
                | {"seed": zeros(slots, 2), "stop_ids": zeros(slots, stop_ids) - 1}
                | {"page_table": zeros(slots, pages_per_slot)}
            ),
            lane=LaneRows.empty(lane_entries, chunk, pages_per_slot) if lane_entries else None,
        )

    def pack(self) -> np.ndarray:
        return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(self)]).astype(np.int32)

    def unpack(self, packed: Int[Array, "size"]) -> "Commands":
        """The commands in `packed`, laid out like this (blank) one."""
        leaves, structure = jax.tree.flatten(self)
        ends = np.cumsum([leaf.size for leaf in leaves])
        parts = [packed[end - leaf.size : end].reshape(leaf.shape) for leaf, end in zip(leaves, ends, strict=True)]
        return jax.tree.unflatten(structure, parts)
