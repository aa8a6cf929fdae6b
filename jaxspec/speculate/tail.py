"""The tail: from the hidden states that leave the last stage to the trees that enter stage 0 in the next tick.

With placement "last" every stage runs it on what it holds, and only the last stage's decisions are published; its
weights are split over the axes of a stage. With "spread" the leaving rows are broadcast over the stages and its weights
are split over all axes. The code is the same: only the axes differ.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.cache import history
from jaxspec.cache.slots import SlotTable, select_rows
from jaxspec.drafts.interface import DraftContext
from jaxspec.mesh import PP, Collectives
from jaxspec.models.decoder import Decoder
from jaxspec.speculate.lane import LaneRows
from jaxspec.speculate.sampling import target_tokens
from jaxspec.speculate.state import StepSpec, StepState
from jaxspec.speculate.tick import Leaving
from jaxspec.speculate.trees import ancestor_bits, depths, walk

# Columns of the result of a tail before the emitted tokens.
EMITTED, FINISH, ACCEPTED, TOKENS = 0, 1, 2, 3
RUNNING, STOPPED, FULL = 0, 1, 2  # values of column FINISH


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What acceptance decided, a row a slot.

    Attributes:
      is_live: the slot decodes, or its prompt has just ended.
      path, accepted: nodes accepted, root first.
      emitted: the target's tokens after them; the first `kept` are the sequence's (a stop or the limit ends it early).
      finish: `RUNNING`, `STOPPED` or `FULL`.
      root_position: position of the tree's root, so that `emitted[j]` belongs at `root_position + 1 + j`.
    """

    is_live: Bool[Array, "B"]
    path: Int[Array, "B A"]
    accepted: Int[Array, "B"]
    emitted: Int[Array, "B A"]
    kept: Int[Array, "B"]
    finish: Int[Array, "B"]
    root_position: Int[Array, "B"]


def finish(
    spec: StepSpec,
    target: Decoder,
    draft_weights: Any,
    state: StepState,
    leaving: Leaving,
    tick: Int[Array, ""],
    collectives: Collectives,
    *,
    has_lane: bool,
    is_greedy: bool,
) -> tuple[StepState, Int[Array, "B columns"]]:
    """Acceptance and drafting for the group that leaves in this tick; what the host needs of it."""
    place = (tick + 1) % spec.pp
    group = state.ring.group[place]
    is_occupied = group >= 0
    batch = state.ring.trees.hidden.shape[1]
    first_slot = jnp.maximum(group, 0) * spec.slots_per_group
    rows = state.slots.rows(first_slot, batch)
    tail_axes = spec.layout.tail_axes
    trees, chunk, lane = leaving.trees, leaving.chunk, None
    if PP in tail_axes:
        trees = trees.from_last_stage(spec.pp, collectives)
    is_activated = jnp.zeros(batch, bool)
    if has_lane:
        lane = state.ring.lanes.at(place)
        if PP in tail_axes:
            chunk = chunk.from_last_stage(spec.pp, collectives)
        is_activated = (first_slot + jnp.arange(batch) == lane.slot) & (lane.length > 0) & is_occupied
        last = jnp.maximum(lane.length - 1, 0)
        roots, last_row = jax.tree.map(lambda nodes: nodes[:, 0], trees), jax.tree.map(lambda rows: rows[last], chunk)
        roots = select_rows(is_activated, last_row, roots)
        trees = jax.tree.map(lambda nodes, root: nodes.at[:, 0].set(root), trees, roots)

    final = target.final_hidden(trees.hidden)
    # A prompt's last token stands one position before `length`; its row takes the root's place.
    root_position = rows.length - is_activated
    is_live = (rows.is_active | is_activated) & is_occupied
    # Slots without a request are greedy: parameters of the last one would still be worked for.
    temperature = jnp.where(is_live, rows.sampling.temperature, 0.0)
    targets = collectives.publish(
        target_tokens(
            target.logits(final),
            root_position[:, None] + depths(rows.ancestors) + 1,
            dataclasses.replace(rows.sampling, temperature=temperature),
            vocab_size=spec.layout.config.vocab_size,
            axes=tail_axes,
            is_greedy=is_greedy,
            collectives=collectives,
        ),
        spec.pp,
    )
    verdict = judge(spec, rows, targets, is_live, root_position)

    rows = settle(rows, verdict, is_activated)
    tokens = record(state.history, rows, verdict, lane)
    tree, draft_state = spec.drafter.draft(
        draft_weights,
        state.draft,
        DraftContext(
            root=_last_emitted(verdict),
            length=rows.length,
            path=verdict.path,
            count=verdict.kept,
            emitted=verdict.emitted,
            hidden=final,
            taps=trees.taps,
            history=tokens,
            page_table=rows.page_table,
            sampling=rows.sampling,
            is_greedy=is_greedy,
            lane=lane,
            lane_hidden=target.final_hidden(chunk.hidden) if has_lane else None,
            lane_taps=chunk.taps if has_lane else None,
            target=target,
            tail_axes=tail_axes,
            attention=spec.attention,
            collectives=collectives,
        ),
        spec.tree,
    )
    planted = dataclasses.replace(
        rows,
        tokens=tree.tokens,
        parents=tree.parents,
        ancestors=ancestor_bits(tree.parents, spec.tree.max_depth),
    )
    rows = select_rows(verdict.is_live, planted, rows)
    before = state.slots.rows(first_slot, batch)
    slots = state.slots.with_rows(first_slot, select_rows(jnp.full(batch, is_occupied), rows, before))
    result = jnp.concatenate(
        [jnp.stack([verdict.kept, verdict.finish, verdict.accepted], axis=1), verdict.emitted], axis=1
    )
    ring = state.ring
    if lane is not None:
        # What has left must not be taken for a chunk when programs with a lane run again.
        gone = dataclasses.replace(lane, length=jnp.zeros_like(lane.length))
        ring = dataclasses.replace(ring, lanes=ring.lanes.with_row(place, gone))
    return dataclasses.replace(state, slots=slots, history=tokens, draft=draft_state, ring=ring), result


def judge(
    spec: StepSpec, rows: SlotTable, targets: Int[Array, "B T"], is_live: Bool[Array, "B"], root_position: Array
) -> Verdict:
    """Walks the trees, and ends sequences at a stop id or at their limit."""
    path, accepted = walk(targets, rows.tokens, rows.parents, rows.ancestors, spec.path_length)
    emitted = jnp.take_along_axis(targets, path, axis=1)
    step = jnp.arange(spec.path_length)
    is_stop = jnp.any(emitted[:, :, None] == rows.stop_ids[:, None, :], axis=-1) & (step < accepted[:, None])
    until_stop = jnp.min(jnp.where(is_stop, step + 1, spec.path_length + 1), axis=1)
    kept = jnp.minimum(jnp.minimum(accepted, until_stop), rows.remaining)
    finish = jnp.where(kept == until_stop, STOPPED, jnp.where(kept == rows.remaining, FULL, RUNNING))
    return Verdict(
        is_live=is_live,
        path=path,
        accepted=jnp.where(is_live, accepted, 0),
        emitted=emitted,
        kept=jnp.where(is_live, kept, 0),
        finish=jnp.where(is_live, finish, RUNNING),
        root_position=root_position,
    )


def settle(rows: SlotTable, verdict: Verdict, is_activated: Bool[Array, "B"]) -> SlotTable:
    """The group's rows after acceptance. What was pending has been committed by the visits of this round."""
    return dataclasses.replace(
        rows,
        is_active=verdict.is_live & (verdict.finish == RUNNING),
        length=jnp.where(verdict.is_live, verdict.root_position + verdict.kept, rows.length),
        # A prompt's K/V went straight into pages.
        pending_count=jnp.where(is_activated, 0, verdict.kept),
        path=verdict.path,
        remaining=rows.remaining - verdict.kept,
    )


def record(tokens: history.History, rows: SlotTable, verdict: Verdict, lane: LaneRows | None) -> history.History:
    """Adds the chunk's tokens and the emitted ones to the history."""
    if lane is not None:
        step = jnp.arange(len(lane.tokens))
        tokens = history.write(
            tokens, lane.page_row[None], (lane.start + step)[None], lane.tokens[None], (step < lane.length)[None]
        )
    step = jnp.arange(verdict.emitted.shape[1])
    positions = verdict.root_position[:, None] + 1 + step
    return history.write(tokens, rows.page_table, positions, verdict.emitted, step < verdict.kept[:, None])


def _last_emitted(verdict: Verdict) -> Int[Array, "B"]:
    last = jnp.maximum(verdict.kept - 1, 0)
    return jnp.take_along_axis(verdict.emitted, last[:, None], axis=1)[:, 0]
