"""One request on the host."""

import dataclasses
import enum
import time

from jaxspec.sampling_params import SamplingParams


class Status(enum.Enum):
    WAITING = "waiting"
    PREFILLING = "prefilling"  # its prompt is entering, chunk by chunk
    RUNNING = "running"  # its last chunk has entered: it has a slot
    FINISHED = "finished"


@dataclasses.dataclass(eq=False)
class Sequence:
    """A request and what has become of it.

    Attributes:
      order: of arrival; the largest is the youngest.
      prompt: token ids.
      seed: of its noise.
      stop_ids: tokens that end it, checked on the device.
      token_ids: generated so far.
      accepted_lengths: tokens that each round emitted; the prompt's own first token is not of a round.
      context: tokens whose K/V its prefill computes: the prompt, and after a preemption what it had generated too.
      cursor: how many of them have entered.
      pages: granted to it, in order.
      slot: where it decodes, or None.
      entries_in_flight: entries queued for it whose result has not been read.
    """

    order: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    stop_ids: list[int]
    token_ids: list[int] = dataclasses.field(default_factory=list)
    accepted_lengths: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str | None = None
    status: Status = Status.WAITING
    context: list[int] = dataclasses.field(default_factory=list)
    cursor: int = 0
    pages: list[int] = dataclasses.field(default_factory=list)
    slot: int | None = None
    entries_in_flight: int = 0
    arrived_at: float = dataclasses.field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    finished_at: float | None = None

    @property
    def total_tokens(self) -> int:
        """Positions that it fills at most."""
        return len(self.prompt) + self.params.max_tokens

    @property
    def num_tokens(self) -> int:
        """Positions filled as far as the host knows."""
        return len(self.prompt) + len(self.token_ids)

    @property
    def remaining(self) -> int:
        return self.params.max_tokens - len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status is Status.FINISHED


@dataclasses.dataclass(frozen=True)
class Update:
    """What one round added to a sequence.

    Attributes:
      token_ids: new tokens, at least one.
      num_drafted: how many of them, from the first, the drafter had proposed.
    """

    sequence: Sequence
    token_ids: list[int]
    num_drafted: int
