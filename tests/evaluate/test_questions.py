"""Questions as their files have them, and the prompts made of them."""

import json
import os
from pathlib import Path

import pytest

from jaxspec import UserError
from jaxspec.evaluate.questions import Question, prompt_for, read_questions


def write(path: Path, *rows: object) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return path


def test_spec_bench_and_mt_bench_have_turns_and_categories(tmp_path):
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["Write.", "Rewrite."], "reference": ["", ""]},
        {"question_id": 161, "category": "translation", "turns": ["Translate."]},
    ]
    assert read_questions(write(tmp_path / "question.jsonl", *rows)) == [
        Question("81", "writing", ("Write.", "Rewrite.")),
        Question("161", "translation", ("Translate.",)),
    ]


def test_gsm8k_is_named_after_its_folder_and_numbered_by_line(tmp_path):
    path = write(
        tmp_path / "gsm8k" / "test.jsonl", {"question": "1 + 1?", "answer": "#### 2"}, "\n", {"question": "2?"}
    )
    assert read_questions(path) == [Question("1", "gsm8k", ("1 + 1?",)), Question("3", "gsm8k", ("2?",))]


def test_human_eval_is_named_after_its_file(tmp_path):
    path = write(tmp_path / "HumanEval.jsonl", {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": "f()"})
    assert read_questions(path) == [Question("HumanEval/0", "HumanEval", ("def f():\n",))]


def test_a_prompt_may_be_chat_messages(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    (question,) = read_questions(write(tmp_path / "mine.jsonl", {"prompt": messages}))
    assert question == Question("1", "mine", ("Why?",), (messages[0],))
    assert prompt_for(question, [], is_chat=True) == messages


def test_only_the_first_lines_are_read_where_there_is_a_limit(tmp_path):
    path = write(tmp_path / "mine.jsonl", {"prompt": "a"}, {"prompt": "b\u2028c"}, "not JSON\n")
    assert [question.turns for question in read_questions(path, limit=2)] == [("a",), ("b\u2028c",)]


def test_a_later_turn_holds_what_was_said_before():
    question = Question("1", "mine", ("One?", "Two?"))
    assert prompt_for(question, [], is_chat=True) == [{"role": "user", "content": "One?"}]
    assert prompt_for(question, ["1."], is_chat=True) == [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "1."},
        {"role": "user", "content": "Two?"},
    ]
    assert prompt_for(question, [], is_chat=False) == "One?"
    assert prompt_for(question, ["1."], is_chat=False) == "One?\n1.\nTwo?"


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ("{", "line 2 is not JSON"),
        ([1], "line 2 holds a JSON list"),
        ({"text": "a", "id": 5}, "line 2 asks nothing: it has the fields text, id"),
        ({}, "line 2 asks nothing: it has the fields none"),
        ({"turns": []}, r"line 2: turns=\[\] must be a list of texts"),
        ({"turns": "a"}, 'line 2: turns="a" must be a list of texts'),
        ({"turns": ["a", " "]}, "none empty"),
        ({"prompt": ""}, 'line 2: prompt="" must be a text that is not empty'),
        ({"question": 7}, "line 2: question=7 must be a text"),
        ({"prompt": []}, r"line 2: prompt=\[\] must be a text, or a list of chat messages"),
        ({"prompt": [{"role": "user"}]}, "list of chat messages"),
        ({"prompt": [{"role": "assistant", "content": "a"}]}, "the last one of the user"),
        ({"prompt": [{"role": "user", "content": "a" * 100}, {"role": "king", "content": "b"}]}, "a…"),
        ({"prompt": "a", "category": 3}, "line 2: category=3 must be a text"),
    ],
    ids=str,
)
def test_a_bad_line_is_named_with_what_was_expected(tmp_path, row, says):
    with pytest.raises(UserError, match=says) as error:
        read_questions(write(tmp_path / "mine.jsonl", {"prompt": "good"}, row))
    assert "\n" not in str(error.value)


def test_a_file_without_questions_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"missing\.jsonl cannot be read"):
        read_questions(tmp_path / "missing.jsonl")
    with pytest.raises(UserError, match="holds no questions"):
        read_questions(write(tmp_path / "empty.jsonl", "\n\n"))
    (tmp_path / "latin.jsonl").write_bytes('{"prompt": "é"}\n'.encode("latin-1"))
    with pytest.raises(UserError, match="UTF-8"):
        read_questions(tmp_path / "latin.jsonl")


@pytest.mark.parametrize(
    ("file", "questions", "turns", "categories"),
    [
        ("spec_bench/question.jsonl", 480, 560, 13),
        ("mt_bench/question.jsonl", 80, 160, 8),
        ("gsm8k/test.jsonl", 1319, 1319, 1),
        ("humaneval/HumanEval.jsonl", 164, 164, 1),
        ("arena_hard/question_v0.1.jsonl", 500, 500, 1),
        ("prompts/prompts.jsonl", 15422, 15422, 1),
    ],
)
def test_the_published_files_are_read(file, questions, turns, categories):
    path = Path(os.environ.get("JAXSPEC_DATA", "")) / file
    if not path.is_file():
        pytest.skip(f"the published questions are not here: set JAXSPEC_DATA to a folder with {file}")
    read = read_questions(path)
    assert (len(read), sum(len(question.turns) for question in read)) == (questions, turns)
    assert len({question.category for question in read}) == categories
