"""Which texts hold a question that is kept for measuring."""

import unicodedata

import pytest

from jaxspec.evaluate.questions import Question
from jaxspec.train.contamination import NOTHING, holds_measured, measured_by, own_questions

DOCUMENT = "Reba sang it first. Gladys Knight made it known in the same year, and many others have sung it since."
ASKED = "who sings i will never let you down?"
LONG = "Tom has nine apples and gives a third of them to each of two friends. How much money does he have left?"
TURNS = [
    (f"{DOCUMENT}\n{ASKED}",),
    ("Hello.", LONG),
    ("A list\n>>> f([1, 2, 3, 4, 5])",),
    ("谁唱了这首歌?",),
    (unicodedata.normalize("NFD", "The café"),),
]
EARLIER = [{"role": "user", "content": "An earlier question, of which nothing is asked now."}]
MEASURED = measured_by(
    [
        *(Question(str(index), "any", turns) for index, turns in enumerate(TURNS)),
        Question("e", "any", ("Go on.",), EARLIER),
    ]
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
        f"{ASKED}\n\n{DOCUMENT}",
        f"Question: {ASKED}\nAnswer:",
        f"Note: Question: {ASKED}",
        f"问题：{ASKED}",
        "Hello!",
        "谁唱了这首歌？",
        "The café?",
        "An earlier question, of which nothing is asked now.",
    ],
)
def test_a_text_with_a_measured_question_is_found(text):
    assert holds_measured(text, own_questions(text), MEASURED)
    assert not holds_measured(text, own_questions(text), NOTHING)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "let you down?",
        f"Listen.\n{ASKED}\nAnd who wrote it?",
        "Answer:",
        "Which song is it that Reba sang first? Hello!",
        "Ann had 20 dollars and lost 5. How much money does he have left?",
        "Gladys Knight made it known in the same year, and many",  # eleven words
        "Turn this list around.\n\n[1, 2, 3, 4, 5]",
    ],
)
def test_other_texts_are_not(text):
    assert not holds_measured(text, own_questions(text), MEASURED)
