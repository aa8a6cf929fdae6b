"""What a draft is measured by must not be what it has learned: which texts hold a measured question."""

import dataclasses
import re
import unicodedata
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
      turns: all words of each turn.
      runs: all `RUN` words in a row of them.
      ends: their last words, of as many as a short question has: it may stand below a document.
    """

    turns: frozenset[Words] = frozenset()
    runs: frozenset[Words] = frozenset()
    ends: frozenset[Words] = frozenset()


NOTHING = Measured()


def measured_by(questions: Iterable[Question]) -> Measured:
    """What users say in them, in earlier turns too."""
    said: list[Words] = []
    for question in questions:
        earlier = [message["content"] for message in question.context if message["role"] == "user"]
        said += [words(text) for text in (*earlier, *question.turns)]
    ends = {turn[-count:] for turn in said for count in range(SHORTEST_QUESTION, RUN)}
    return Measured(frozenset(said) - {()}, frozenset(run for turn in said for run in runs(turn)), frozenset(ends))


def holds_measured(text: str, asks: Iterable[str], measured: Measured) -> bool:
    """Whether a text is a measured turn or shares a run of words with one, or a short question that it asks ends one.

    Languages without spaces between words are compared as whole turns only.
    """
    if not measured.turns:
        return False  # texts are long and many
    said = words(text)
    is_one = said in measured.turns or any(_ends_one(question, measured) for question in asks)
    return is_one or not measured.runs.isdisjoint(runs(said))


def own_questions(text: str) -> list[str]:
    """What a text may ask above or below a document, or alone: its first and its last line, and what follows a colon
    there, for it may have a label like "Question:"; a last line like "Answer:" asks nothing.

    Not the last words of a line, for "how much money does he have left?" ends many questions; nor numbers alone, for
    [1, 2, 3, 4, 5] stands below many.
    """
    lines = [line for line in text.strip().splitlines() if line.strip()]
    while len(lines) > 1 and lines[-1].rstrip().endswith((":", "：")) and len(words(lines[-1])) <= 2:
        lines.pop()
    parts = [re.split("[:：]", line) for line in dict.fromkeys((*lines[:1], *lines[-1:]))]
    asked = [" ".join(part[at:]) for part in parts for at in range(len(part))]
    return [question for question in asked if re.search(r"[^\W\d_]", question)]


def runs(said: Words) -> set[Words]:
    return {said[at : at + RUN] for at in range(len(said) - RUN + 1)}


def words(text: str) -> Words:
    return tuple(re.findall(r"\w+", unicodedata.normalize("NFC", text).lower()))


def _ends_one(question: str, measured: Measured) -> bool:
    asked = words(question)
    return SHORTEST_QUESTION <= len(asked) < RUN and asked in measured.ends
