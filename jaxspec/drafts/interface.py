"""What a drafter sees and gives.

A drafter is one file: a frozen dataclass with the two methods below. Its weights and its state (a draft's KV cache,
say) are pytrees that the engine hands in and takes back; the drafter itself holds sizes only. `docs/drafters.md`
says how each published drafter sits in this.
"""

import dataclasses
from typing import Any, Protocol

from jaxtyping import Array, Float, Int

from jaxspec.cache.history import History
from jaxspec.mesh import AxisNames
from jaxspec.models.decoder import Decoder
from jaxspec.speculate.lane import LaneRows
from jaxspec.speculate.sampling import SamplingRows
from jaxspec.speculate.trees import TreeSpec


@dataclasses.dataclass(frozen=True)
class DraftContext:
    """What a tail knows when the next trees are drafted: B slots of the group that has left the last stage.

    Rows of slots that don't decode hold anything, and what is drafted for them is ignored.

    Attributes:
      root: last emitted token, node 0 of the next tree.
      length: its position; tokens before it have KV.
      path, count: nodes of the tree just verified that were accepted, root first; none where a slot does not decode.
        Where a prompt has just ended, its last token is the one node.
      emitted: the target's tokens after those nodes, so `emitted[count - 1]` is `root`, and row j of the path stands
        at position `length - count + j`.
      hidden: the target's states at the nodes of that tree after the final norm.
      history, page_table: tokens at all positions up to `length`; pages of each slot, also for the draft's own KV.
      lane, lane_hidden: the prompt chunk that leaves with the group, and the states of its rows; None where there is
        none. Its rows extend the draft's KV too.
      target: for its embedding and head; call it with `tail_axes`.
    """

    root: Int[Array, "B"]
    length: Int[Array, "B"]
    path: Int[Array, "B A"]
    count: Int[Array, "B"]
    emitted: Int[Array, "B A"]
    hidden: Float[Array, "B T E"]
    history: History
    page_table: Int[Array, "B M"]
    sampling: SamplingRows
    lane: LaneRows | None
    lane_hidden: Float[Array, "C E"] | None
    target: Decoder
    tail_axes: AxisNames


@dataclasses.dataclass(frozen=True)
class DraftTree:
    """Trees to verify next. Empty nodes have token -1; siblings differ."""

    tokens: Int[Array, "B T"]
    parents: Int[Array, "B T"]


class Drafter(Protocol):
    """Proposes trees. Runs inside the tail, on every device, with the tail's collectives."""

    @property
    def default_tree(self) -> str: ...

    def check_tree(self, tree: TreeSpec) -> None:
        """Raises `UserError` for a tree that this drafter can't fill."""

    def draft(self, weights: Any, state: Any, context: DraftContext, tree: TreeSpec) -> tuple[DraftTree, Any]: ...
