"""The lane: the chunk of prompt tokens that rides along in a tick.

Its rows share the matrix products with the decode rows. Chunks of one prompt may enter in consecutive ticks; each
stage writes their K/V straight into pages, in order. The slot is chosen late: the last chunk rides with its slot's
group, and the tail takes the chunk's last row as the slot's first.
"""

import dataclasses
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Int

NO_SLOT = -1


def zeros(*shape: int) -> Any:
    """Of numpy: the host fills them in for every dispatch, and must not wait for the device that runs the last."""
    return np.zeros(shape, np.int32)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LaneRows:
    """One chunk, or (with a leading axis) one for each place on the ring or each tick of a dispatch.

    Attributes:
      tokens: prompt tokens, the first `length` of them valid; a length of 0 is no chunk.
      start: position of the first.
      next_token: the prompt token after the chunk, which a draft's KV needs; unused in a last chunk.
      slot: the slot that decodes on from here, or -1 for a chunk that is not its prompt's last.
      page_row: pages of the sequence.
    """

    tokens: Int[Array, "*ticks C"]
    start: Int[Array, "*ticks"]
    length: Int[Array, "*ticks"]
    next_token: Int[Array, "*ticks"]
    slot: Int[Array, "*ticks"]
    page_row: Int[Array, "*ticks M"]

    @staticmethod
    def empty(count: int, chunk: int, pages_per_slot: int) -> "LaneRows":
        return LaneRows(
            tokens=zeros(count, chunk),
            start=zeros(count),
            length=zeros(count),
            next_token=zeros(count),
            slot=zeros(count) + NO_SLOT,
            page_row=zeros(count, pages_per_slot),
        )

    def at(self, index: Int[Array, ""]) -> "LaneRows":
        return jax.tree.map(lambda x: x[index], self)

    def with_row(self, index: Int[Array, ""], row: "LaneRows") -> "LaneRows":
        return jax.tree.map(lambda x, new: x.at[index].set(new), self, row)
