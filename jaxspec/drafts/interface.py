"""What a drafter sees and gives.

A drafter is one file: a frozen dataclass that extends `Drafter`. Its weights and its state (a draft's KV cache, say)
are pytrees that the engine hands in and takes back; the drafter itself holds sizes only. `docs/drafters.md` says how
each published drafter sits in this.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxspec.cache.history import History
from jaxspec.errors import UserError
from jaxspec.mesh import AxisNames, Collectives
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import Decoder, DecoderLayout
from jaxspec.speculate.lane import LaneRows
from jaxspec.speculate.sampling import SamplingRows
from jaxspec.speculate.trees import TreeSpec

if TYPE_CHECKING:
    from jaxspec.speculate.state import StepSpec


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
      taps: the residual streams of those nodes that the drafter reads, in ascending order; None where it reads none.
      history, page_table: tokens at all positions up to `length`; pages of each slot, also for the draft's own KV.
      is_greedy: static; no slot samples.
      lane, lane_hidden, lane_taps: the prompt chunk that leaves with the group, and the states and taps of its rows;
        None where there is none. Its rows extend the draft's KV too.
      target: for its embedding and head; call it with `tail_axes`.
      attention: as of the target, `REFERENCE` or `PALLAS`.
      collectives: what a drafter talks across devices by.
    """

    root: Int[Array, "B"]
    length: Int[Array, "B"]
    path: Int[Array, "B A"]
    count: Int[Array, "B"]
    emitted: Int[Array, "B A"]
    hidden: Float[Array, "B T E"]
    taps: Float[Array, "B T taps E"] | None
    history: History
    page_table: Int[Array, "B M"]
    sampling: SamplingRows
    is_greedy: bool
    lane: LaneRows | None
    lane_hidden: Float[Array, "C E"] | None
    lane_taps: Float[Array, "C taps E"] | None
    target: Decoder
    tail_axes: AxisNames
    attention: str
    collectives: Collectives


@dataclasses.dataclass(frozen=True)
class DraftTree:
    """Trees to verify next. Empty nodes have token -1; siblings differ."""

    tokens: Int[Array, "B T"]
    parents: Int[Array, "B T"]


class Drafter:
    """Proposes trees. Its `draft` runs inside the tail, on every device, with the tail's collectives.

    The defaults are those of a drafter that has no weights, keeps no state and reads no taps.
    """

    default_tree: str

    def check_tree(self, tree: TreeSpec) -> None:
        """Raises `UserError` for a tree that this drafter can't fill."""
        raise NotImplementedError

    def draft(self, weights: Any, state: Any, context: DraftContext, tree: TreeSpec) -> tuple[DraftTree, Any]:
        """The next trees, and the state after them."""
        raise NotImplementedError

    # Weights

    def fit(self, target: ModelConfig, taps: Sequence[int] | None = None) -> "Drafter":
        """This drafter for a target; `taps` replace those that it would read.

        Raises:
          UserError: it was not made for such a target.
        """
        if taps is not None:
            raise UserError(f"taps {list(taps)} are for a draft that reads the target's layers, which this one doesn't")
        return self

    def abstract_weights(self, layout: DecoderLayout) -> Any:
        """Its weights as shapes with partition specs (an `nnx.State`); nothing is allocated."""
        return ()

    def restore(self, layout: DecoderLayout, mesh: Mesh) -> Any:
        """Its weights on the devices."""
        return ()

    # State

    def init_state(self, spec: "StepSpec") -> Any:
        """What it keeps between rounds, empty: global arrays."""
        return ()

    def state_specs(self, layout: DecoderLayout) -> Any:
        """How that is split; a prefix of its tree."""
        return ()

    # Taps

    @property
    def taps(self) -> tuple[int, ...]:
        """What it reads inside the target, as ascending R indices: i is the residual stream after i layers."""
        return ()
