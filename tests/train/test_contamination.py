"""Which texts hold a question that is kept for measuring."""

import pytest

from jaxspec.evaluate.questions import Question
from jaxspec.train.contamination import NOTHING, holds_measured, last_questions, measured_by

DOCUMENT = "Reba sang it first. Gladys Knight made it known in the same year, and many others have sung it since."
ASKED = "who sings i will never let you down?"
LONG = "Tom has nine apples and gives a third of them to each of two friends. How much money does he have left?"
MEASURED = measured_by(
    Question(str(index), "any", turns)
    for index, turns in enumerate([(f"{DOCUMENT}\n{ASKED}",), ("Hello.", LONG), ("A list\n>>> f([1, 2, 3, 4, 5])",)])
)


@pytest.mark.parametrize(
    "text",
    [
        ASKED,
        f"Context: Another document.\n\n{ASKED}",
        f"Another document.\n\nQuestion: {ASKED}",
        "**Q:** Who sings 'I will never let you down'?\n",
        f"Summarize: so it is. {DOCUMENT} The end.",
        LONG.upper().replace(" ", "\n"),
        "How much money does he have left?",
    ],
)
def test_a_text_with_a_measured_question_is_found(text):
    assert holds_measured(text, last_questions(text), MEASURED)
    assert not holds_measured(text, last_questions(text), NOTHING)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "let you down?",
        f"{ASKED}\nAnd who wrote it?",
        "Ann had 20 dollars and lost 5. How much money does he have left?",
        "Gladys Knight made it known in the same year, and many",  # eleven words
        "Turn this list around.\n\n[1, 2, 3, 4, 5]",
    ],
)
def test_other_texts_are_not(text):
    assert not holds_measured(text, last_questions(text), MEASURED)
