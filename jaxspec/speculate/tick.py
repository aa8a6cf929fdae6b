"""One tick: every stage runs its layers on what has reached it, then hidden states move one stage on.

At tick t stage s works on what entered at tick t - s. Every device runs the same program; what must not happen (rows
of an empty place, pages of another rank) is masked, never branched around.
"""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.cache.paged import TargetCache
from jaxspec.cache.slots import SlotTable
from jaxspec.mesh import PP, rank, to_next_stage
from jaxspec.models.decoder import Decoder
from jaxspec.speculate.attention import VisitAttention
from jaxspec.speculate.commands import SlotCommands
from jaxspec.speculate.lane import LaneRows
from jaxspec.speculate.state import StepSpec, StepState
from jaxspec.speculate.trees import depths

ROW_MULTIPLE = 8  # products of fewer rows are no faster, and one row is slower


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


@dataclasses.dataclass(frozen=True)
class Leaving:
    """Hidden states that have passed this device's stage; those of the last stage are the target's output."""

    hidden: Float[Array, "B T E"]
    lane_hidden: Float[Array, "C E"]


def advance(
    spec: StepSpec, target: Decoder, state: StepState, tick: Int[Array, ""], entry: Entry
) -> tuple[StepState, Leaving]:
    """Entry, commit, layers and relay of one tick."""
    batch = state.ring.hidden.shape[1]
    state = enter(spec, state, tick, entry)
    place = (tick - rank((PP,))) % spec.pp
    group = state.ring.group[place]
    is_occupied = group >= 0
    first_slot = jnp.maximum(group, 0) * spec.slots_per_group
    rows = state.slots.rows(first_slot, batch)
    cache = commit(spec, state, first_slot, rows, is_occupied)

    is_first = rank((PP,)) == 0
    hidden = jnp.where(is_first, target.embed(rows.tokens), state.ring.hidden[0])
    positions = rows.length[:, None] + depths(rows.ancestors)
    parts, part_positions = [hidden.reshape(-1, hidden.shape[-1])], [positions.reshape(-1)]
    lane = None
    if entry.lane is not None:
        lane = state.ring.lanes.at(place)
        parts.append(jnp.where(is_first, target.embed(lane.tokens), state.ring.lane_hidden[0]))
        part_positions.append(lane.start + jnp.arange(spec.chunk))
    attend = VisitAttention(spec.geometry, first_slot, is_occupied, rows.length, rows.page_table, rows.ancestors, lane)
    x, cache = target.stage(
        _pad_rows(jnp.concatenate(parts)), _pad_rows(jnp.concatenate(part_positions)), attend, cache
    )

    nodes = positions.size
    leaving = Leaving(x[:nodes].reshape(hidden.shape), state.ring.lane_hidden[0])
    ring = dataclasses.replace(state.ring, hidden=to_next_stage(leaving.hidden, spec.pp)[None])
    if lane is not None:
        leaving = dataclasses.replace(leaving, lane_hidden=x[nodes : nodes + spec.chunk])
        ring = dataclasses.replace(ring, lane_hidden=to_next_stage(leaving.lane_hidden, spec.pp)[None])
    return dataclasses.replace(state, cache=cache, ring=ring), leaving


def enter(spec: StepSpec, state: StepState, tick: Int[Array, ""], entry: Entry) -> StepState:
    """Puts a group and a chunk on the ring; host commands for the group's slots take effect here, and only here."""
    place, batch = tick % spec.pp, state.ring.hidden.shape[1]
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
    return state.cache.commit(first_slot, rows.path, positions, is_written, rows.page_table, spec.geometry)


def _pad_rows(x: Array) -> Array:
    return jnp.pad(x, ((0, -len(x) % ROW_MULTIPLE), *((0, 0),) * (x.ndim - 1)))
