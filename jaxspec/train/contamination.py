"""What a draft is measured by must not be what it has learned: which texts hold a measured question."""

import dataclasses
import re
from collections.abc import Iterable

from jaxspec.evaluate.questions import Question

type Words = tuple[str, ...]

# Words in a row that two texts hardly share by chance.
RUN = 12
SHORTEST_QUESTION = 4  # words; fewer end too many sentences by chance


@dataclasses.dataclass(frozen=True)
class Measured:
    """Questions that are kept for measuring.

    Attributes:
      runs: all `RUN` words in a row of them.
      ends: their last words, of as many as a short question has: it may stand below a document.
    """

    runs: frozenset[Words] = frozenset()
    ends: frozenset[Words] = frozenset()


NOTHING = Measured()


def measured_by(questions: Iterable[Question]) -> Measured:
    turns = [turn for question in questions for turn in question.turns]
    ends = {tuple(words(turn)[-count:]) for turn in turns for count in range(SHORTEST_QUESTION, RUN)}
    return Measured(frozenset(run for turn in turns for run in runs(turn)), frozenset(ends))


def holds_measured(text: str, asks: Iterable[str], measured: Measured) -> bool:
    """Whether a text shares a run of words with a measured question, or a short question that it asks ends one."""
    if not measured.ends:
        return False  # texts are long and many
    return any(_ends_one(question, measured) for question in asks) or not measured.runs.isdisjoint(runs(text))


def last_questions(text: str) -> list[str]:
    """What a text may ask below a document, or alone: its last line, and the same without a label like "Question:".

    Not the last words of a line, for "how much money does he have left?" ends many questions; nor numbers alone, for
    [1, 2, 3, 4, 5] stands below many.
    """
    line = text.strip().rpartition("\n")[2]
    return [question for question in (line, line.partition(":")[2]) if re.search(r"[^\W\d_]", question)]


def runs(text: str) -> set[Words]:
    said = words(text)
    return {tuple(said[at : at + RUN]) for at in range(len(said) - RUN + 1)}


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def _ends_one(question: str, measured: Measured) -> bool:
    asked = tuple(words(question))
    return SHORTEST_QUESTION <= len(asked) < RUN and asked in measured.ends
