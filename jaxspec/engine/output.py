"""From tokens to text, and what a caller gets."""

import dataclasses
from collections.abc import Sequence as Items
from typing import Any

from jaxspec.engine.sequence import Sequence, Update
from jaxspec.tokenizer import StreamDecoder, Tokenizer


@dataclasses.dataclass(frozen=True)
class StreamToken:
    """One token as it is accepted; `text` is what it adds, and may be empty within a character of several tokens."""

    token_id: int
    text: str
    is_drafted: bool


@dataclasses.dataclass(frozen=True)
class StreamChunk:
    """What one round added; `finish_reason` is set on the last chunk.

    Text that could begin a stop string is held back until the next chunks show that it doesn't, and the bytes of a
    character that is cut off come with the last chunk, so `text` may be shorter or longer than that of `tokens`;
    together the chunks' `text` is the answer.
    """

    tokens: list[StreamToken]
    text: str
    finish_reason: str | None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """A finished request.

    Attributes:
      accepted_lengths: tokens that each round emitted, bonus included. The first token comes from the prefill, so
        `len(token_ids) == 1 + sum(accepted_lengths)`. (Where pages ran out and a request was computed again, the token
        of that prefill counts as a round of 1.)
      finish_reason: "stop" (an end token or a stop string) or "length".
      time_to_first_token_s: from its arrival, waiting for a slot included.
      tokens_per_second: of the tokens after the first; None where they took one round or none, which shows no speed.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    text: str
    token_ids: list[int]
    finish_reason: str
    accepted_lengths: list[int]
    time_to_first_token_s: float
    tokens_per_second: float | None

    @property
    def mean_accepted_length(self) -> float | None:
        """Tokens a round; None where the prefill's token was the only one."""
        return sum(self.accepted_lengths) / len(self.accepted_lengths) if self.accepted_lengths else None


class Transcript:
    """Text of one sequence: round by round as its tokens arrive, or, which costs far less, once at its end.

    A stop string ends it, which only shows round by round.
    """

    def __init__(self, sequence: Sequence, tokenizer: Tokenizer):
        self.sequence = sequence
        self.text = ""
        self._tokenizer = tokenizer
        self._decoder = StreamDecoder(tokenizer)
        self._stops: Items[str] = tuple(sequence.params.stop)
        self._shown = 0
        self._has_read = False

    @property
    def needs_every_round(self) -> bool:
        """Whether every round must be added, for the text may come to hold a stop string."""
        return bool(self._stops)

    def add(self, update: Update) -> StreamChunk:
        """Takes in a round; after the first none may be left out. At a stop string the sequence loses the rest."""
        tokens: list[StreamToken] = []
        stopped, self._has_read = False, True
        for index, token in enumerate(update.token_ids):
            before = len(self.text)
            self.text += self._decoder.add(token)
            stopped = self._cut_at_stop(before)
            tokens.append(StreamToken(token, self.text[before:], index < update.num_drafted))
            if stopped:
                self._drop(len(update.token_ids) - index - 1)
                break
        is_last = stopped or self.sequence.is_finished
        if is_last and not stopped:
            before = len(self.text)
            self.text += self._decoder.flush()
            stopped = self._cut_at_stop(before)
        if stopped:
            self.sequence.finish_reason = "stop"
        # A stop string may have begun: its possible beginning is held back.
        held = 0 if is_last else max((len(stop) - 1 for stop in self._stops), default=0)
        end = max(self._shown, len(self.text) - held)
        shown, self._shown = self.text[self._shown : end], end
        return StreamChunk(tokens, shown, ("stop" if stopped else self.sequence.finish_reason) if is_last else None)

    def _cut_at_stop(self, new_from: int) -> bool:
        found = [at for stop in self._stops if (at := self.text.find(stop, max(0, new_from - len(stop) + 1))) >= 0]
        if found:
            self.text = self.text[: min(found)]
        return bool(found)

    def _drop(self, count: int) -> None:
        """Takes back the last `count` tokens of the sequence."""
        if count:
            del self.sequence.token_ids[-count:]
            self.sequence.accepted_lengths[-1] -= count

    def output(self, prompt: Any) -> RequestOutput:
        sequence = self.sequence
        assert sequence.first_token_at is not None and sequence.finished_at is not None and sequence.finish_reason
        seconds, rest = sequence.finished_at - sequence.first_token_at, len(sequence.token_ids) - 1
        has_speed = len(sequence.accepted_lengths) > 1 and seconds > 0  # one round may arrive with the first token
        if not self._has_read:
            self.text = self._tokenizer.whole_text(sequence.token_ids)
        return RequestOutput(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=sequence.prompt,
            text=self.text,
            token_ids=sequence.token_ids,
            finish_reason=sequence.finish_reason,
            accepted_lengths=sequence.accepted_lengths,
            time_to_first_token_s=sequence.first_token_at - sequence.arrived_at,
            tokens_per_second=rest / seconds if has_speed else None,
        )
