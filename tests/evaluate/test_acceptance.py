"""Statistics of made-up answers, and how they are told."""

import json

import pytest

from jaxspec import RequestOutput
from jaxspec.evaluate.acceptance import Answer, Run, acceptance, by_category, first_difference, shares_by_position
from jaxspec.evaluate.questions import Question
from jaxspec.evaluate.report import as_json, as_tables, draw


def answer(category: str, accepted_lengths: list[int], difference: int | None = None) -> Answer:
    output = RequestOutput(
        prompt=None,
        prompt_token_ids=[1, 2],
        text="",
        token_ids=list(range(1 + sum(accepted_lengths))),
        finish_reason="length",
        accepted_lengths=accepted_lengths,
        time_to_first_token_s=0.1,
        tokens_per_second=None,
    )
    return Answer(Question("7", category, ("Why?",)), 1, output, difference)


def run(draft: str, tree: str, depth: int, seconds: float, *answers: Answer) -> Run:
    return Run(draft, tree, "float32", "reference", "xla", depth, answers, seconds)


PLAIN = run("none", "none", 0, 4.0, answer("maths", [1] * 7), answer("prose", [1] * 2), answer("prose", []))
DRAFTED = run("ngram", "chain:3", 3, 2.0, answer("maths", [3, 1, 3]), answer("prose", [2]), answer("prose", [], 0))


def test_rounds_count_the_same_whichever_answer_they_are_of():
    total = acceptance(DRAFTED.answers, DRAFTED.depth)
    assert (total.requests, total.tokens, total.rounds) == (3, 12, 4)
    assert total.mean_accepted_length == 9 / 4
    assert total.by_position == (3 / 4, 2 / 4, 0)
    assert total.identical == 2 / 3


def test_the_shares_by_position_add_up_to_the_drafted_tokens_a_round():
    lengths = [1, 4, 2, 2, 5, 1, 3]
    shares = shares_by_position(lengths, depth=4)
    assert shares == (5 / 7, 3 / 7, 2 / 7, 1 / 7)
    assert 1 + sum(shares) == pytest.approx(sum(lengths) / len(lengths))


def test_each_category_has_its_own_statistics():
    each = by_category(DRAFTED)
    assert list(each) == ["maths", "prose"]
    assert each["maths"].mean_accepted_length == 7 / 3
    assert (each["prose"].mean_accepted_length, each["prose"].identical) == (2, 1 / 2)


def test_answers_of_one_token_have_no_rounds():
    total = acceptance([answer("prose", [])], depth=3)
    assert (total.rounds, total.mean_accepted_length, total.by_position) == (0, None, ())


@pytest.mark.parametrize(
    ("tokens", "others", "index"), [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [], None)]
)
def test_the_first_difference_is_a_token_or_an_end(tokens, others, index):
    assert first_difference(tokens, others) == index
    assert first_difference(others, tokens) == index


def test_the_tables_are_aligned():
    assert as_tables(PLAIN, [DRAFTED]).splitlines() == [
        "draft  tree     tokens a round  tokens/s  speed-up  identical",
        "none   none               1.00       3.0      1.00     100.0%",
        "ngram  chain:3            2.25       6.0      2.00      66.7%",
        "",
        "rounds that accept at least      1      2     3",
        "ngram chain:3                75.0%  50.0%  0.0%",
        "",
        "tokens a round by category  answers  ngram chain:3",
        "maths                             1           2.33",
        "prose                             2           2.00",
    ]


def test_the_json_holds_every_answer():
    plain, drafted = json.loads(json.dumps(as_json(PLAIN, [DRAFTED])))
    assert (plain["draft"], plain["speed_up"]) == ("none", 1)
    assert (drafted["tokens_per_second"], drafted["speed_up"], drafted["identical"]) == (6, 2, 2 / 3)
    assert drafted["by_category"]["prose"]["requests"] == 2
    assert [each["accepted_lengths"] for each in drafted["answers"]] == [[3, 1, 3], [2], []]
    assert [each["first_difference"] for each in drafted["answers"]] == [None, None, 0]


def test_runs_of_any_depth_share_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    deeper = run("heads/a", "dynamic:steps=5,topk=2,nodes=8", 5, 1.0, *DRAFTED.answers)
    silent = run("heads/b", "chain:1", 1, 1.0, *[answer(each.question.category, []) for each in DRAFTED.answers])
    draw([DRAFTED, deeper, silent], tmp_path / "picture")
    assert (tmp_path / "picture").read_bytes().startswith(b"\x89PNG")
