"""Prompts with long passages: what is kept apart stays apart."""

import importlib.util
import json
import random
import sys
from pathlib import Path

import pytest

from jaxspec.train.contamination import runs, words

TOOL = Path(__file__).parents[2] / "tools" / "make_passage_prompts.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("make_passage_prompts", TOOL)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def made(tool, tmp_path, monkeypatch):
    """Rows made of a text of random words, of two questions on it, and of two lines of German."""
    rng = random.Random(0)
    texts = [" ".join(f"w{rng.randrange(5000)}" for _ in range(80)) for _ in range(400)]
    (tmp_path / "text.txt").write_text("\n\n".join(texts))
    first, second = (" ".join(text.split()[10:16]) + "?" for text in (texts[0], texts[1]))
    questions = [{"prompt": first, "split": "train"}, {"prompt": second}, {"prompt": "No question."}]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions))
    (tmp_path / "german.txt").write_text("eins\n\nzwei\n")
    avoid = [{"prompt": f"Some document.\n{second}"}, {"prompt": texts[5]}]
    (tmp_path / "avoid.jsonl").write_text("".join(json.dumps(each) + "\n" for each in avoid))
    command = ["--texts", "text.txt", "--summaries", "200", "--questions", "questions.jsonl", "--german", "german.txt"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["tool", *command, "--avoid", "avoid.jsonl", "--output", "out.jsonl"])
    tool.main()
    return [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()], texts, (first, second)


def test_what_is_measured_by_is_in_no_prompt(made):
    rows, texts, (first, second) = made
    assert any(row["prompt"].endswith(first) and row["source"] == "documents" for row in rows)
    assert not any(row["prompt"].endswith(second) for row in rows)
    assert not any(runs(words(texts[5])) & runs(words(row["prompt"])) for row in rows)
    assert any(runs(words(texts[6])) & runs(words(row["prompt"])) for row in rows)


def test_held_out_passages_share_nothing_with_those_that_are_learned(made):
    rows, *_ = made
    learned = {run for row in rows if row["split"] == "train" for run in runs(words(row["prompt"]))}
    assert not any(learned & runs(words(row["prompt"])) for row in rows if row["split"] == "heldout")
    assert 2 <= sum(row["split"] == "heldout" for row in rows) <= 5


def test_wikitext_becomes_text_again(tool):
    assert tool.untokenised("a <unk> co @-@ op ( 3 @,@ 000 ) ,\nb") == "a co-op (3,000),\n\nb"
