"""A dispatch: one jitted program of several rounds over the whole mesh.

With all groups in flight a dispatch is `rounds * pp` ticks, each with a tail. With one group it is `rounds` rounds of
pp ticks and one tail. Trip counts are static, and the host chooses among compiled variants where work really differs.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from jaxspec.mesh import AXES, XLA, split
from jaxspec.peers import PeerCollectives, Tables
from jaxspec.precision import matmul_precision
from jaxspec.speculate.commands import NO_GROUP, Commands
from jaxspec.speculate.lane import LaneRows
from jaxspec.speculate.state import StepSpec, StepState
from jaxspec.speculate.tail import finish
from jaxspec.speculate.tick import Entry, Leaving, advance


@dataclasses.dataclass(frozen=True)
class Variant:
    """What distinguishes the compiled programs of an engine.

    Attributes:
      is_solo: one group is in flight instead of all.
      has_lane: prompt chunks ride along.
      is_greedy: no slot samples.
      batch: B, slots of a group that take part: the first ones.
    """

    is_solo: bool
    has_lane: bool
    is_greedy: bool
    batch: int

    def entries(self, spec: StepSpec) -> int:
        """Groups that enter in a dispatch, and so results of one.

        While prompts enter a dispatch has one round, so that a request is admitted as soon as its prompt ends.
        """
        rounds = 1 if self.has_lane else spec.rounds
        return rounds if self.is_solo else rounds * spec.pp

    def blank_commands(self, spec: StepSpec) -> Commands:
        lane_entries = self.entries(spec) if self.has_lane else 0
        return Commands.blank(spec.num_slots, spec.stop_ids, spec.pages_per_slot, lane_entries, spec.chunk)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Results:
    """What the host reads of a dispatch.

    Attributes:
      rows: of each entry in order of leaving, columns as in `tail.py`.
      failures: where devices talk by peer stores, which ones did not answer, as `Peers.check` reads them.
    """

    rows: Int[Array, "entries B columns"]
    failures: Int[Array, "devices"] | None


type Step = Callable[[Any, Any, StepState, Array, Tables], tuple[StepState, Results]]


def build_step(
    spec: StepSpec, variant: Variant, mesh: Mesh, graph: Any, weight_specs: Any, draft_weight_specs: Any
) -> Any:
    """The program of a variant: (target weights, draft weights, state, packed commands, tables) -> (state, results).

    The tables are those of `Peers`, or none: then devices talk by XLA.

    Args:
      graph: the target's `nnx.GraphDef`.
      weight_specs, draft_weight_specs: how the weights of target and drafter are split.

    Returns:
      A jitted function that donates the state.
    """
    assert not (variant.is_solo and variant.has_lane and spec.pp > 1), "prompts are pipelined over all places"
    blank = variant.blank_commands(spec)

    def on_device(
        weights: Any, draft_weights: Any, state: StepState, packed: Array, tables: Tables
    ) -> tuple[StepState, Results]:
        failure = jax.new_ref(jnp.zeros(1, jnp.int32)) if tables else None
        collectives = XLA
        if failure is not None:
            own = {axes: table.reshape(-1) for axes, table in tables.items()}
            collectives = PeerCollectives(spec.layout.mesh, own, failure)
        target = nnx.merge(graph, weights)
        commands = blank.unpack(packed)

        def chunk_at(index: Array) -> LaneRows | None:
            return None if commands.lane is None else commands.lane.at(index)

        def tail(state: StepState, leaving: Leaving, tick: Array) -> tuple[StepState, Array]:
            return finish(
                spec,
                target,
                draft_weights,
                state,
                leaving,
                tick,
                collectives,
                has_lane=variant.has_lane,
                is_greedy=variant.is_greedy,
            )

        def all_groups_tick(state: StepState, tick: Array) -> tuple[StepState, Array]:
            entry = Entry(
                group=jnp.where(commands.entering >= 0, tick % spec.pp, NO_GROUP),
                commands=commands.slots,
                has_commands=tick < spec.pp,
                lane=chunk_at(tick),
            )
            state, leaving = advance(spec, target, state, tick, entry, collectives)
            return tail(state, leaving, tick)

        def one_group_round(state: StepState, round_: Array) -> tuple[StepState, Array]:
            def relay(tick: Array, carry: tuple[StepState, Leaving]) -> tuple[StepState, Leaving]:
                entry = Entry(
                    group=jnp.where(tick == 0, commands.entering, NO_GROUP),
                    commands=commands.slots,
                    has_commands=round_ == 0,
                    lane=chunk_at(round_),
                )
                return advance(spec, target, carry[0], tick, entry, collectives)

            before = Leaving(*jax.tree.map(lambda x: x[0], (state.ring.trees, state.ring.chunk)))
            state, leaving = lax.fori_loop(0, spec.pp, relay, (state, before))
            return tail(state, leaving, jnp.int32(spec.pp - 1))

        body = one_group_round if variant.is_solo else all_groups_tick
        with matmul_precision(spec.layout.dtype):
            state, rows = lax.scan(body, state, jnp.arange(variant.entries(spec)))
        return state, Results(rows, None if failure is None else jax.freeze(failure))

    state_specs = StepState.specs(spec)
    sharded = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(weight_specs, draft_weight_specs, state_specs, P(), P(*AXES)),
        out_specs=(state_specs, Results(rows=split(), failures=split(AXES))),
        check_vma=False,  # values that differ by stage are masked by hand, which the check does not follow
    )
    return jax.jit(sharded, donate_argnums=2)


def initial_state(spec: StepSpec, batch: int, mesh: Mesh) -> StepState:
    """An empty state, born sharded."""
    shapes = jax.eval_shape(lambda: StepState.empty(spec, batch))
    prefix = StepState.specs(spec)
    shardings = jax.tree.map(
        lambda spec_, part: jax.tree.map(lambda _: NamedSharding(mesh, spec_), part),
        prefix,
        shapes,
        is_leaf=lambda x: isinstance(x, P),
    )
    return jax.jit(lambda: StepState.empty(spec, batch), out_shardings=shardings)()
