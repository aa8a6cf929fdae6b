"""What enters the pipeline in each dispatch, decided on the host; no device code.

The scheduler never waits for results: it plans dispatch n + 1 from what it has read of dispatches up to n - 1, and
grants pages for the worst that the rounds in flight can do. A sequence that ends stops by itself on the device; the
host learns it one dispatch later. When pages run out the youngest request goes back to the queue, with what it has
generated, and is computed again.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from jaxspec.cache.pages import PagePool
from jaxspec.engine.sequence import Sequence, Status, Update
from jaxspec.errors import UserError
from jaxspec.speculate.commands import NO_GROUP, Commands, SlotOp
from jaxspec.speculate.program import Variant
from jaxspec.speculate.state import StepSpec
from jaxspec.speculate.tail import ACCEPTED, EMITTED, FINISH, RUNNING, STOPPED, TOKENS


@dataclasses.dataclass(frozen=True)
class RingEntry:
    """What entered at one tick.

    Attributes:
      owners: the sequence in each occupied row of the group.
      activated: the one whose prompt ends with the chunk of this tick.
      has_chunk: a chunk entered.
    """

    owners: dict[int, Sequence]
    activated: Sequence | None
    has_chunk: bool

    @property
    def is_empty(self) -> bool:
        return not (self.owners or self.has_chunk)


@dataclasses.dataclass(frozen=True)
class Plan:
    """A dispatch: which program, what to tell it, and whose results come out, in order."""

    variant: Variant
    commands: Commands
    leaving: list[RingEntry | None]


def batch_buckets(slots_per_group: int) -> list[int]:
    """Batch sizes that programs are compiled for: 1, 4, 16, … and all slots of a group."""
    sizes = [1]
    while sizes[-1] < slots_per_group:
        sizes.append(min(4 * sizes[-1], slots_per_group))
    return sizes


class Scheduler:
    """Slots, pages and the order of things."""

    def __init__(self, spec: StepSpec):
        self.spec = spec
        self.pool = PagePool(spec.num_pages)
        self._waiting: deque[Sequence] = deque()
        self._prefilling: list[Sequence] = []
        self._slots: list[Sequence | None] = [None] * spec.num_slots
        self._to_release: set[int] = set()  # their request is gone for the host, not yet for the device
        self._to_grant: set[int] = set()  # they have pages that the device does not know of
        # What has entered and not left, oldest first.
        self._ring: deque[RingEntry | None] = deque([None] * (spec.pp - 1))
        self._is_solo = spec.pp == 1
        self._batch = 1
        self._was_idle = True
        self._is_greedy = True

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._prefilling or any(s is not None for s in self._slots))

    def add(self, sequence: Sequence) -> None:
        """Queues a request.

        Raises:
          UserError: it could never run, however long it waits.
        """
        self.check(sequence)
        self._was_idle |= not self.has_work
        self._waiting.append(sequence)

    def check(self, sequence: Sequence) -> None:
        spec, length = self.spec, len(sequence.prompt)
        wish = f"a prompt of {length} tokens and max_tokens={sequence.params.max_tokens} need"
        context = spec.pages_per_slot * spec.geometry.page_size
        pages = spec.geometry.pages_for(sequence.total_tokens)
        if length == 0:
            raise UserError("the prompt is empty: give at least one token")
        if sequence.total_tokens > context:
            raise UserError(
                f"{wish} a context of {sequence.total_tokens} tokens, but it is {context}: "
                "shorten the prompt, lower max_tokens or raise max_model_len"
            )
        if pages > spec.num_pages - 1:
            raise UserError(
                f"{wish} {pages} pages of {spec.geometry.page_size} tokens, but there are {spec.num_pages - 1}: "
                "shorten the prompt, lower max_tokens or raise num_pages"
            )
        if len(sequence.stop_ids) > spec.stop_ids:
            raise UserError(f"{len(sequence.stop_ids)} stop token ids are too many: give at most {spec.stop_ids}")

    def finish(self, sequence: Sequence, reason: str) -> None:
        """Ends a sequence: at its own end, or from outside (a stop string, a cancelled request)."""
        if sequence.is_finished:
            return
        self._withdraw(sequence)
        sequence.status, sequence.finish_reason = Status.FINISHED, reason
        sequence.finished_at = time.perf_counter()

    def cancel_all(self) -> None:
        """Ends every request, for a device that can't be told: nothing of this scheduler is used after it."""
        for sequence in [*self._waiting, *self._prefilling, *self._slots]:
            if sequence is not None:
                self.finish(sequence, "cancelled")

    def plan(self) -> Plan | None:
        """The next dispatch, or None where only results that are already on their way can change anything."""
        self._grant_ahead()
        self._start_prefills()
        running = [sequence for sequence in self._slots if sequence is not None]
        is_ring_live = any(entry is not None and not entry.is_empty for entry in self._ring)
        if not self._prefilling and all(self._must_end(sequence) for sequence in running):
            return self._dispatch(enters=False) if is_ring_live else None
        if not running and not is_ring_live:
            self._is_greedy = True
        # Once anything samples, all do until the engine is idle: to change back is another program to compile.
        self._is_greedy &= all(s.params.is_greedy for s in [*running, *self._prefilling, *self._waiting])
        mode = self._wanted_mode(running)
        if mode != (self._is_solo, self._batch):
            if is_ring_live:
                return self._dispatch(enters=False)
            self._is_solo, self._batch = mode
            self._ring = deque([None] * (self.spec.pp - 1))
        self._was_idle = False
        return self._dispatch(enters=True)

    def collect(self, plan: Plan, results: np.ndarray) -> Iterator[Update]:
        """Takes in a dispatch's results, `[entries, B, columns]` as in `tail.py`.

        Whoever reads an update may finish its sequence, and no later one of it comes.
        """
        arrived = [
            (sequence, rows[row], entry.activated is sequence)
            for entry, rows in zip(plan.leaving, results, strict=True)
            if entry is not None
            for row, sequence in entry.owners.items()
        ]
        for sequence, _, _ in arrived:
            sequence.entries_in_flight -= 1
        for sequence, row, is_prompt_end in arrived:
            if row[EMITTED] and not sequence.is_finished:
                yield self._take(sequence, row, is_prompt_end)

    def _take(self, sequence: Sequence, row: np.ndarray, is_prompt_end: bool) -> Update:
        count = int(row[EMITTED])
        tokens = row[TOKENS : TOKENS + count].tolist()
        if sequence.first_token_at is None:
            sequence.first_token_at = time.perf_counter()
        if sequence.token_ids or not is_prompt_end:
            sequence.accepted_lengths.append(count)
        sequence.token_ids.extend(tokens)
        if row[FINISH] != RUNNING:
            self.finish(sequence, "stop" if row[FINISH] == STOPPED else "length")
        return Update(sequence, tokens, num_drafted=min(count, int(row[ACCEPTED]) - 1))

    # Pages

    def _grant_ahead(self) -> None:
        """Pages for the worst case of every round in flight and of the next dispatch, the oldest request first."""
        running = [sequence for sequence in self._slots if sequence is not None]
        for sequence in sorted(running, key=lambda s: s.order):
            while sequence.slot is not None and (missing := self._pages_ahead(sequence) - len(sequence.pages)) > 0:
                if (pages := self.pool.grant(missing)) is not None:
                    sequence.pages += pages
                    self._to_grant.add(sequence.slot)
                else:
                    self._preempt(max(self._prefilling + [s for s in self._slots if s], key=lambda s: s.order))

    def _pages_ahead(self, sequence: Sequence) -> int:
        """Pages for its tokens after the rounds in flight and those of the next dispatch."""
        rounds = sequence.entries_in_flight + self.spec.rounds
        tokens = min(sequence.num_tokens + rounds * self.spec.path_length, sequence.total_tokens)
        return self.spec.geometry.pages_for(tokens)

    def _preempt(self, sequence: Sequence) -> None:
        self._withdraw(sequence)
        sequence.status = Status.WAITING
        self._waiting.appendleft(sequence)

    def _withdraw(self, sequence: Sequence) -> None:
        """Takes a sequence out of the queue, the lane, its slot and its pages.

        Another request may have the pages at once: the release is queued before anything of that request can enter.
        """
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        elif sequence.status is Status.PREFILLING:
            self._prefilling.remove(sequence)
        if sequence.slot is not None:
            self._slots[sequence.slot] = None
            self._to_release.add(sequence.slot)
            self._to_grant.discard(sequence.slot)
        self.pool.give_back(sequence.pages)
        sequence.pages, sequence.slot, sequence.cursor = [], None, 0

    def _start_prefills(self) -> None:
        """Moves requests from the queue to the lane while there are slots and pages for them."""
        while self._waiting and len(self._prefilling) < self._slots.count(None):
            sequence = self._waiting[0]
            if sequence.entries_in_flight:
                return  # it was preempted, and what is still on its way belongs to its context
            pages = self.pool.grant(self._pages_ahead(sequence))
            if pages is None:
                return
            self._waiting.popleft()
            sequence.context = sequence.prompt + sequence.token_ids
            sequence.pages, sequence.status = pages, Status.PREFILLING
            self._prefilling.append(sequence)

    # The ring

    def _must_end(self, sequence: Sequence) -> bool:
        """Its rounds in flight reach its limit whatever they accept: each emits a token or more."""
        return sequence.remaining <= sequence.entries_in_flight

    def _wanted_mode(self, running: list[Sequence]) -> tuple[bool, int]:
        """Whether one group is in flight instead of all, and how many slots of a group take part."""
        spec, per_group = self.spec, self.spec.slots_per_group
        wanted = self._num_wanted
        # Prompts are pipelined over the stages, so they want all places of the ring.
        is_solo = spec.pp == 1 or (not self._prefilling and len(self._groups_in_use) <= 1 and wanted <= per_group)
        highest = max((s.slot % per_group + 1 for s in running if s.slot is not None), default=1)
        batch = max(self.batch_for(wanted), self.batch_for(highest))
        # A smaller batch is another program to compile: it shrinks only where nothing was left to do.
        return is_solo, batch if self._was_idle and not running else max(batch, self._batch)

    def batch_for(self, num_sequences: int) -> int:
        """Slots of a group that take part where so many sequences are served."""
        per_group = self.spec.slots_per_group
        in_a_group = num_sequences if num_sequences <= per_group else -(-num_sequences // self.spec.pp)
        return next(size for size in batch_buckets(per_group) if size >= min(in_a_group, per_group))

    @property
    def _num_wanted(self) -> int:
        """Slots that everything in sight would fill."""
        busy = self.spec.num_slots - self._slots.count(None)
        return min(busy + len(self._prefilling) + len(self._waiting), self.spec.num_slots)

    @property
    def _groups_in_use(self) -> set[int]:
        return {slot // self.spec.slots_per_group for slot, s in enumerate(self._slots) if s is not None}

    def _dispatch(self, enters: bool) -> Plan:
        """Plans the entries of a dispatch; without `enters` it drains the ring."""
        spec = self.spec
        has_lane = bool(enters and self._prefilling) or any(e is not None and e.has_chunk for e in self._ring)
        variant = Variant(self._is_solo, has_lane, self._is_greedy, self._batch)
        commands = variant.blank_commands(spec)
        solo_group = min(self._groups_in_use, default=0)
        commands.entering[...] = NO_GROUP if not enters else solo_group if self._is_solo else 0
        leaving: list[RingEntry | None] = []
        for index in range(variant.entries(spec)):
            group = solo_group if self._is_solo else index % spec.pp
            is_first = index < (1 if self._is_solo else spec.pp)
            entry = self._enter(group, index, is_first, commands) if enters else None
            if self._is_solo:
                leaving.append(entry)
            else:
                self._ring.append(entry)
                leaving.append(self._ring.popleft())
        return Plan(variant, commands, leaving)

    def _enter(self, group: int, index: int, is_first: bool, commands: Commands) -> RingEntry:
        """A group's entry: its commands (in its first entry of a dispatch), and the chunk that rides along."""
        first_slot = group * self.spec.slots_per_group
        slots = range(first_slot, first_slot + self._batch)
        if is_first:
            for slot in self._to_release.intersection(slots):
                commands.slots.op[slot] = SlotOp.RELEASE
            for slot in self._to_grant.intersection(slots):
                sequence = self._slots[slot]
                assert sequence is not None
                commands.slots.op[slot] = SlotOp.GRANT
                commands.slots.page_table[slot, : len(sequence.pages)] = sequence.pages
            self._to_release.difference_update(slots)
            self._to_grant.difference_update(slots)
        chunk = self._next_chunk(group, slots, index, is_first, commands)
        owners = {slot - first_slot: s for slot in slots if (s := self._slots[slot]) is not None}
        for sequence in owners.values():
            sequence.entries_in_flight += 1
        activated = chunk if chunk is not None and chunk.status is Status.RUNNING else None
        return RingEntry(owners, activated, has_chunk=chunk is not None)

    def _next_chunk(self, group: int, slots: range, index: int, is_first: bool, commands: Commands) -> Sequence | None:
        """The next chunk that may enter with this group: a last chunk needs a slot of the group."""
        free = [slot for slot in slots if self._slots[slot] is None] if is_first and self._may_fill(group) else []
        for sequence in self._prefilling:
            rest = len(sequence.context) - sequence.cursor
            is_last = rest <= self.spec.chunk
            if is_last and not free:
                continue
            count = min(rest, self.spec.chunk)
            lane, end = commands.lane, sequence.cursor + count
            assert lane is not None
            lane.tokens[index, :count] = sequence.context[sequence.cursor : end]
            lane.start[index], lane.length[index] = sequence.cursor, count
            lane.page_row[index, : len(sequence.pages)] = sequence.pages
            if is_last:
                lane.slot[index] = free[0]
                self._admit(sequence, free[0], commands)
            else:
                lane.next_token[index] = sequence.context[end]
            sequence.cursor = end
            return sequence
        return None

    def _may_fill(self, group: int) -> bool:
        """While all requests fit into one group they gather in one, so that it can travel alone."""
        in_use = self._groups_in_use
        return self._num_wanted > self.spec.slots_per_group or len(in_use) > 1 or in_use <= {group}

    def _admit(self, sequence: Sequence, slot: int, commands: Commands) -> None:
        """The slot's row for a sequence whose last chunk enters in this tick."""
        row, params = commands.slots, sequence.params
        row.op[slot] = SlotOp.ADMIT
        row.length[slot] = len(sequence.context)
        row.remaining[slot] = sequence.remaining
        row.temperature[slot], row.top_p[slot], row.min_p[slot] = np.array(
            [params.temperature, params.top_p, params.min_p], np.float32
        ).view(np.int32)
        row.top_k[slot] = max(params.top_k, 0)
        row.seed[slot] = np.array([sequence.seed & 0xFFFFFFFF, sequence.seed >> 32], np.uint32).view(np.int32)
        row.stop_ids[slot, : len(sequence.stop_ids)] = sequence.stop_ids
        row.page_table[slot, : len(sequence.pages)] = sequence.pages
        self._prefilling.remove(sequence)
        self._slots[slot], sequence.slot, sequence.status = sequence, slot, Status.RUNNING
