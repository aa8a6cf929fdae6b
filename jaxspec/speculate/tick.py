"""One tick: every stage runs its layers on what has reached it, then hidden states move one stage on.

At tick t stage s works on what entered at tick t - s. Every device runs the same program; what must not happen (rows
of an empty place, pages of another rank) is masked, never branched around.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Shaped

from jaxspec.cache.paged import TargetCache
from jaxspec.cache.slots import SlotTable
from jaxspec.mesh import PP, XLA, Collectives, rank
from jaxspec.models.decoder import Decoder, pad_rows
from jaxspec.speculate.attention import PALLAS, New, VisitAttention
from jaxspec.speculate.commands import SlotCommands
from jaxspec.speculate.lane import LaneRows
from jaxspec.speculate.state import StepSpec, StepState, Streams
from jaxspec.speculate.taps import tap_observer
from jaxspec.speculate.trees import depths


@dataclasses.dataclass(frozen=True)
class Entry:
    """What enters stage 0 in a tick.

    Attributes:
      group: which group, or -1.
      commands: for its slots, with `has_commands` set in the first entry of a dispatch only.
      lane: a prompt chunk, or None in a program without a lane.
    """

    group: Int[Array, ""]
    commands: SlotCommands
    has_commands: Bool[Array, ""]
    lane: LaneRows | None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Leaving:
    """Rows that have passed this device's stage; those of the last stage are the target's output."""

    trees: Streams
    chunk: Streams


def advance(
    spec: StepSpec,
    target: Decoder,
    state: StepState,
    tick: Int[Array, ""],
    entry: Entry,
    collectives: Collectives = XLA,
) -> tuple[StepState, Leaving]:
    """Entry, commit, layers and relay of one tick."""
    batch = state.ring.trees.hidden.shape[1]
    state = enter(spec, state, tick, entry)
    place = (tick - rank((PP,))) % spec.pp
    group = state.ring.group[place]
    is_occupied = group >= 0
    first_slot = jnp.maximum(group, 0) * spec.slots_per_group
    rows = state.slots.rows(first_slot, batch)

    arrived = jax.tree.map(lambda x: x[0], (state.ring.trees, state.ring.chunk))
    positions = rows.length[:, None] + depths(rows.ancestors)
    parts, part_positions = [_entering(target, rows.tokens, arrived[0])], [positions.reshape(-1)]
    lane = None
    if entry.lane is not None:
        lane = state.ring.lanes.at(place)
        parts.append(_entering(target, lane.tokens, arrived[1]))
        part_positions.append(lane.start + jnp.arange(spec.chunk))
    attend = VisitAttention(
        cache=commit(spec, state, first_slot, rows, is_occupied),
        geometry=spec.geometry,
        first_slot=first_slot,
        is_occupied=is_occupied,
        lengths=rows.length,
        page_table=rows.page_table,
        ancestors=rows.ancestors,
        lane=lane,
        attention=spec.attention,
        collectives=collectives,
    )
    batched = jax.tree.map(_as_rows, *parts)
    observe = tap_observer(spec.drafter.taps, spec.layout)
    nothing: New = ()
    x, new, taps = target.stage(
        batched.hidden, _as_rows(*part_positions), attend, nothing, observe, batched.taps, collectives
    )
    cache, x = attend.written(new, x)
    passed, nodes = Streams(x, taps), positions.size
    trees = jax.tree.map(lambda new, old: new[:nodes].reshape(old.shape), passed, arrived[0])
    chunk = arrived[1]
    ring = dataclasses.replace(state.ring, trees=_add_axis(trees.to_next_stage(spec.pp, collectives)))
    if lane is not None:
        chunk = jax.tree.map(lambda new: new[nodes : nodes + spec.chunk], passed)
        ring = dataclasses.replace(ring, chunk=_add_axis(chunk.to_next_stage(spec.pp, collectives)))
    return dataclasses.replace(state, cache=cache, ring=ring), Leaving(trees, chunk)


def enter(spec: StepSpec, state: StepState, tick: Int[Array, ""], entry: Entry) -> StepState:
    """Puts a group and a chunk on the ring; host commands for the group's slots take effect here, and only here."""
    place, batch = tick % spec.pp, state.ring.trees.hidden.shape[1]
    first_slot = jnp.maximum(entry.group, 0) * spec.slots_per_group
    rows = state.slots.rows(first_slot, batch)
    commands = entry.commands.rows(first_slot, batch)
    is_applied = entry.has_commands & (entry.group >= 0)
    commands = dataclasses.replace(commands, op=jnp.where(is_applied, commands.op, 0))
    ring = dataclasses.replace(state.ring, group=state.ring.group.at[place].set(entry.group))
    if entry.lane is not None:
        ring = dataclasses.replace(ring, lanes=ring.lanes.with_row(place, entry.lane))
    return dataclasses.replace(state, slots=state.slots.with_rows(first_slot, commands.apply(rows)), ring=ring)


def commit(
    spec: StepSpec, state: StepState, first_slot: Int[Array, ""], rows: SlotTable, is_occupied: Bool[Array, ""]
) -> TargetCache:
    """The accepted path of the group's last round, from pending into pages; also for slots that have ended."""
    step = jnp.arange(spec.path_length)
    is_written = (step < rows.pending_count[:, None]) & is_occupied
    positions = (rows.length - rows.pending_count)[:, None] + step
    where = positions, is_written, rows.page_table, spec.geometry
    return state.cache.commit(first_slot, rows.path, *where, by_kernel=spec.attention == PALLAS)


def _entering(target: Decoder, tokens: Int[Array, "*R"], arrived: Streams) -> Streams:
    """The rows that this stage works on: embeddings on the first one, else what the stage before has sent."""
    hidden = jnp.where(rank((PP,)) == 0, target.embed(tokens), arrived.hidden)
    row_axes = hidden.ndim - 1
    return jax.tree.map(lambda x: lax.collapse(x, 0, row_axes), dataclasses.replace(arrived, hidden=hidden))


def _as_rows(*parts: Shaped[Array, "_ *S"]) -> Shaped[Array, "N *S"]:
    """One batch of rows, padded for the matrix products."""
    return pad_rows(jnp.concatenate(parts))


def _add_axis(streams: Streams) -> Streams:
    return jax.tree.map(lambda x: x[None], streams)
