"""`jaxspec bench acceptance` as a user calls it."""

import json

import pytest
from test_acceptance import DRAFTED
from test_cli import HEAD, fails, needs_model
from tiny import make_target

from jaxspec.checkpoint.staging import whole_file
from jaxspec.cli import main
from jaxspec.evaluate import command

QUESTIONS = [
    {"question_id": 1, "category": "echo", "turns": ["Say yes yes yes yes.", "Again."]},
    {"question_id": 2, "category": "facts", "turns": ["What is gravity?"]},
    {"question_id": 3, "category": "beyond the limit", "turns": ["Why?"]},
]


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return str(path)


def test_a_draft_is_measured_against_plain_decoding(prompts, tmp_path, capfd):
    pytest.importorskip("matplotlib")
    output = tmp_path / "new" / "results"
    sizes = ["--max-tokens", "6", "--max-num-seqs", "1", "--limit", "2", "--dtype", "float32"]
    options = ["--model", str(make_target(tmp_path)), "--draft", "ngram", "--tree", "chain:2", "--output", str(output)]
    assert main(["bench", "acceptance", prompts, *options, *sizes]) == 0
    assert sorted(path.name for path in output.iterdir()) == ["acceptance.json", "acceptance.png"]
    result = json.loads((output / "acceptance.json").read_text())
    assert (result["mesh"], result["dtype"], result["sampling"]["max_tokens"]) == ("1,1,1", "float32", 6)

    plain, drafted = result["runs"]
    assert [(run["draft"], run["tree"]) for run in result["runs"]] == [("none", "none"), ("ngram", "chain:2")]
    assert (plain["mean_accepted_length"], plain["by_position"]) == (1, [])
    for run in result["runs"]:
        assert [(each["id"], each["turn"]) for each in run["answers"]] == [("1", 1), ("2", 1), ("1", 2)]
        lengths = [length for each in run["answers"] for length in each["accepted_lengths"]]
        assert all(len(each["token_ids"]) == 1 + sum(each["accepted_lengths"]) for each in run["answers"])
        assert run["tokens"] == run["requests"] + sum(lengths)
        assert run["mean_accepted_length"] == sum(lengths) / len(lengths)
        assert run["mean_accepted_length"] == pytest.approx(1 + sum(run["by_position"]))
        assert run["tokens_per_second"] == run["tokens"] / run["seconds"]
        assert run["speed_up"] == run["tokens_per_second"] / plain["tokens_per_second"]
        assert {category: each["requests"] for category, each in run["by_category"].items()} == {"echo": 2, "facts": 1}
        assert sum(each["rounds"] for each in run["by_category"].values()) == run["rounds"]
        assert run["identical"] == 1
    assert [each["token_ids"] for each in drafted["answers"]] == [each["token_ids"] for each in plain["answers"]]
    first, _, second = plain["answers"]
    assert second["prompt_tokens"] > first["prompt_tokens"] + len(first["token_ids"]) - 1

    printed = capfd.readouterr().out.splitlines()
    assert printed[0].split() == ["draft", "tree", "tokens", "a", "round", "tokens/s", "speed-up", "identical"]
    assert printed[2].split()[:2] == ["ngram", "chain:2"] and printed[2].endswith("100.0%")


def test_without_matplotlib_there_is_no_picture_and_a_line_that_says_so(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(command, "_has_matplotlib", lambda: False)
    command._make_directory(tmp_path / "results")
    assert "acceptance.png will be missing" in capfd.readouterr().err
    command._write(tmp_path / "results", {"runs": []}, [DRAFTED])
    assert [path.name for path in (tmp_path / "results").iterdir()] == ["acceptance.json"]


def test_a_file_that_is_not_finished_leaves_the_one_before_it(tmp_path):
    (tmp_path / "acceptance.json").write_text("before")
    with pytest.raises(TypeError):
        command._write(tmp_path, {"runs": object()}, [DRAFTED])
    with pytest.raises(KeyboardInterrupt), whole_file(tmp_path / "acceptance.json") as partial:
        partial.write_text("half")
        raise KeyboardInterrupt
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "--draft"),
        (("--draft", "eagle9"), "eagle9"),
        (("--draft", "none"), "always measured"),
        (("--draft", "ngram", "--tree", "bush:3"), "bush:3"),
        (("--draft", "ngram", "--tree", "chain:2", "--tree", "dynamic:steps=2,topk=2,nodes=4"), "dynamic:steps=2"),
        (("--draft", "ngram", "--draft", HEAD, "--tree", "dynamic:steps=2,topk=2,nodes=4"), "dynamic:steps=2"),
        (("--draft", "ngram", "--mesh", "2,2"), "2,2"),
        (("--draft", "ngram", "--dtype", "int4"), "int4"),
        (("--draft", "ngram", "--limit", "0"), "limit=0"),
        (("--draft", "ngram", "--max-num-seqs", "0"), "max_num_seqs=0"),
        (("--draft", "ngram", "--top-p", "2"), "top_p=2"),
        (("--draft", "ngram", "--model", "no-such-model"), "no-such-model"),
    ],
    ids=lambda x: " ".join(x)[:60] if isinstance(x, tuple) else "",
)
def test_bad_options_are_one_line_and_nothing_is_written(prompts, tmp_path, capfd, arguments, says):
    output = tmp_path / "results"
    assert says in fails(capfd, "bench", "acceptance", prompts, "--output", str(output), *arguments)
    assert not output.exists()


def test_each_draft_is_measured_with_the_trees_that_go_with_it():
    dynamic = "dynamic:steps=2,topk=2,nodes=4"
    drafts = ["ngram", HEAD, "ngram"]
    assert command._pairs(drafts, ["chain:2", dynamic], "auto") == [
        ("ngram", "chain:2"),
        (HEAD, "chain:2"),
        (HEAD, dynamic),
    ]
    assert command._pairs(["ngram"], None, "auto") == [("ngram", "chain:4")]


@needs_model
def test_what_the_model_cannot_hold_is_found_before_it_runs(prompts, tmp_path, capfd):
    said = fails(capfd, "bench", "acceptance", prompts, "--draft", "ngram", "--max-tokens", "8000")
    assert "question 1 of echo" in said and "8192" in said
    (tmp_path / "file").touch()
    said = fails(capfd, "bench", "acceptance", prompts, "--draft", "ngram", "--output", str(tmp_path / "file"))
    assert "file cannot be made (File exists)" in said
