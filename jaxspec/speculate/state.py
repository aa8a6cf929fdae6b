"""What a step reads and replaces, and the sizes it is built for."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache.history import History
from jaxspec.cache.paged import TargetCache
from jaxspec.cache.pages import PageGeometry
from jaxspec.cache.slots import SlotTable
from jaxspec.drafts.interface import Drafter
from jaxspec.mesh import PP, XLA, Collectives, split
from jaxspec.models.decoder import DecoderLayout
from jaxspec.speculate.commands import NO_GROUP
from jaxspec.speculate.lane import LaneRows
from jaxspec.speculate.trees import TreeSpec


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """Static sizes of the engine; every program of an engine shares them.

    Attributes:
      layout: the target on the mesh.
      drafter: what proposes its trees.
      slots_per_group: B at most; group g owns slots `[g*B, (g+1)*B)`. There are pp groups.
      chunk: C, prompt tokens a lane chunk may have.
      rounds: rounds of a dispatch.
      stop_ids: E, stop ids a request may have.
      attention: "pallas" attends with the kernels where they take the shapes, "reference" in plain JAX.
    """

    layout: DecoderLayout
    drafter: Drafter
    tree: TreeSpec
    geometry: PageGeometry
    num_pages: int
    pages_per_slot: int
    slots_per_group: int
    chunk: int
    rounds: int
    stop_ids: int = 16
    attention: str = "reference"

    @property
    def pp(self) -> int:
        return self.layout.mesh.pp

    @property
    def num_slots(self) -> int:
        return self.pp * self.slots_per_group

    @property
    def path_length(self) -> int:
        """A, nodes on the longest path of a tree."""
        return self.tree.max_depth + 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Streams:
    """What rows carry from stage to stage: the residual stream, and the taps that stages have passed so far.

    There are no taps (None) for a drafter that reads none: XLA:CPU has crashed on arrays of size 0.
    """

    hidden: Float[Array, "*R E"]
    taps: Float[Array, "*R taps E"] | None

    @staticmethod
    def empty(spec: StepSpec, *rows: int) -> "Streams":
        """Global arrays."""
        width, dtype, count = spec.layout.config.hidden_size, spec.layout.dtype, len(spec.drafter.taps)
        return Streams(
            hidden=jnp.zeros((*rows, width), dtype),
            taps=jnp.zeros((*rows, count, width), dtype) if count else None,
        )

    def to_next_stage(self, stages: int, collectives: Collectives = XLA) -> "Streams":
        return self._across(lambda rows: collectives.to_next_stage(rows, stages))

    def from_last_stage(self, stages: int, collectives: Collectives = XLA) -> "Streams":
        return self._across(lambda rows: collectives.broadcast_from_last_stage(rows, stages))

    def _across(self, collective: Callable[[Array], Array]) -> "Streams":
        """Both as one array: a collective costs the same whether it is small or very small."""
        if self.taps is None:
            return Streams(collective(self.hidden), None)
        joined = collective(jnp.concatenate([self.hidden[..., None, :], self.taps], axis=-2))
        return Streams(joined[..., 0, :], joined[..., 1:, :])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Ring:
    """What is on its way through the stages. Only streams travel; the rest is the same on every device.

    Place p on the ring holds what entered at the last tick t with t % pp == p, which stage s works on at tick t + s.

    Attributes:
      trees, chunk: rows that each stage will work on in the next tick: tree nodes, and a prompt chunk's.
      group: the group at each place, or -1.
      lanes: the chunk at each place.
    """

    trees: Streams
    chunk: Streams
    group: Int[Array, "pp"]
    lanes: LaneRows

    @staticmethod
    def empty(spec: StepSpec, batch: int) -> "Ring":
        return Ring(
            trees=Streams.empty(spec, spec.pp, batch, spec.tree.num_nodes),
            chunk=Streams.empty(spec, spec.pp, spec.chunk),
            group=jnp.full(spec.pp, NO_GROUP),
            lanes=LaneRows.empty(spec.pp, spec.chunk, spec.pages_per_slot),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepState:
    """Donated to every step."""

    cache: TargetCache
    history: History
    slots: SlotTable
    ring: Ring
    draft: Any

    @staticmethod
    def empty(spec: StepSpec, batch: int) -> "StepState":
        heads, config, dtype = spec.layout.heads, spec.layout.config, spec.layout.dtype
        layers = (spec.pp, spec.layout.layer_slots, 2)
        return StepState(
            cache=TargetCache(
                pages=jnp.zeros(
                    (*layers, spec.num_pages, spec.geometry.page_size, heads.kv_heads, config.head_dim), dtype
                ),
                pending=jnp.zeros(
                    (*layers, spec.num_slots, spec.tree.num_nodes, heads.kv_heads, config.head_dim), dtype
                ),
            ),
            history=jnp.zeros((spec.num_pages, spec.geometry.page_size), jnp.int32),
            slots=SlotTable.empty(spec.num_slots, spec.pages_per_slot, spec.stop_ids, spec.tree),
            ring=Ring.empty(spec, batch),
            draft=spec.drafter.init_state(spec),
        )

    @staticmethod
    def specs(spec: StepSpec) -> "StepState":
        """How the leaves are split over the mesh; a prefix of the tree."""
        return StepState(
            cache=TargetCache.specs(),
            history=split(),
            slots=split(),
            ring=Ring(trees=split(PP), chunk=split(PP), group=split(), lanes=split()),
            draft=spec.drafter.state_specs(spec.layout),
        )
