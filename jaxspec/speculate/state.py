"""What a step reads and replaces, and the sizes it is built for."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.cache.history import History
from jaxspec.cache.paged import TargetCache
from jaxspec.cache.pages import PageGeometry
from jaxspec.cache.slots import SlotTable
from jaxspec.mesh import PP, split
from jaxspec.models.decoder import DecoderLayout
from jaxspec.speculate.commands import NO_GROUP
from jaxspec.speculate.lane import LaneRows
from jaxspec.speculate.trees import TreeSpec


@dataclasses.dataclass(frozen=True)
class StepSpec:
    """Static sizes of the engine; every program of an engine shares them.

    Attributes:
      layout: the target on the mesh.
      slots_per_group: B at most; group g owns slots `[g*B, (g+1)*B)`. There are pp groups.
      chunk: C, prompt tokens a lane chunk may have.
      rounds: rounds of a dispatch.
      stop_ids: E, stop ids a request may have.
    """

    layout: DecoderLayout
    tree: TreeSpec
    geometry: PageGeometry
    num_pages: int
    pages_per_slot: int
    slots_per_group: int
    chunk: int
    rounds: int
    stop_ids: int = 16

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
class Ring:
    """What is on its way through the stages. Only hidden states travel; the rest is the same on every device.

    Place p on the ring holds what entered at the last tick t with t % pp == p, which stage s works on at tick t + s.

    Attributes:
      hidden, lane_hidden: rows that each stage will work on in the next tick.
      group: the group at each place, or -1.
      lanes: the chunk at each place.
    """

    hidden: Float[Array, "pp B T E"]
    lane_hidden: Float[Array, "pp C E"]
    group: Int[Array, "pp"]
    lanes: LaneRows

    @staticmethod
    def empty(spec: StepSpec, batch: int) -> "Ring":
        e, dtype = spec.layout.config.hidden_size, spec.layout.dtype
        return Ring(
            hidden=jnp.zeros((spec.pp, batch, spec.tree.num_nodes, e), dtype),
            lane_hidden=jnp.zeros((spec.pp, spec.chunk, e), dtype),
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
            draft=(),
        )

    @staticmethod
    def specs() -> "StepState":
        """How the leaves are split over the mesh; a prefix of the tree."""
        return StepState(
            cache=TargetCache.specs(),
            history=split(),
            slots=split(),
            ring=Ring(hidden=split(PP), lane_hidden=split(PP), group=split(), lanes=split()),
            draft=split(),
        )
