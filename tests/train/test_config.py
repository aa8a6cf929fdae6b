"""Training configurations: the ones that are shipped, and what is wrong with others."""

from pathlib import Path

import pytest
import yaml

from jaxspec.errors import UserError
from jaxspec.train.config import LOSSES, read_train_config

SHIPPED = sorted((Path(__file__).parents[2] / "configs" / "train").glob("*.yaml"))
LEAST = {
    "target": "a-model",
    "output": "runs/a",
    "data": {"path": "runs/data", "prompts": ["prompts.jsonl"]},
    "head": {},
    "training": {"steps": 1000},
}


@pytest.fixture
def read(tmp_path):
    def read(content):
        path = tmp_path / "config.yaml"
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
        return read_train_config(path)

    return read


def with_(**sections):
    return LEAST | {name: LEAST.get(name, {}) | values for name, values in sections.items()}


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_shipped_configurations_are_right(path):
    assert read_train_config(path).training.loss in LOSSES


def test_defaults_and_numbers_as_yaml_writes_them(read):
    assert SHIPPED
    config = read(yaml.safe_dump(LEAST) + "seed: 3\n")
    assert (config.data.temperatures, config.mesh.tp, config.head.draft_vocab_size) == ((0.0, 1.0), 1, None)
    rates = read(with_(training={"learning_rate": "1e-4", "clip": 1, "warmup_steps": 5}))
    assert (rates.training.learning_rate, rates.training.clip) == (1e-4, 1.0)
    assert read(with_(head={"taps": [2, 15, 27]})).head.taps == (2, 15, 27)
    assert read(with_(head={"draft_vocab_size": None})).head.draft_vocab_size is None
    assert read(LEAST | {"head": None}) == read({key: value for key, value in LEAST.items() if key != "head"})
    assert read(with_(data={"avoid": ["a.jsonl"]})).data.avoid == (Path("a.jsonl"),)
    assert read(LEAST | {"output": "~/runs"}).output == Path.home() / "runs"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (with_(training={"step": 5}), "unknown key training.step: did you mean steps?"),
        (with_(training={"momentum": 1}), "unknown key training.momentum: it can have steps, batch_size"),
        ({"target": "a-model"}, "key output is missing"),
        (with_(training={"steps": "many"}), "training.steps='many' must be an integer, at least 1"),
        (with_(training={"steps": True}), "training.steps=True must be an integer"),
        (with_(training={"steps": 0}), "training.steps=0 must be an integer, at least 1"),
        (with_(training={"loss": "mse"}), "training.loss='mse' must be a text, one of kl, acceptance"),
        (with_(training={"learning_rate": float("inf")}), "training.learning_rate=inf must be a number"),
        (with_(training={"beta2": 1}), "training.beta2=1 must be a number, between 0 and 0.9999"),
        (with_(data={"sequence_length": 100}), "data.sequence_length=100 must be a multiple of 64"),
        ("a: 2024-13-45", "is not YAML"),
        (with_(training={"learning_rate": "fast"}), "training.learning_rate='fast' must be a number"),
        (with_(training={"warmup_steps": 1000}), "must be less than training.steps=1000"),
        (with_(training={"batch_size": 3}, mesh={"data": 2}), "training.batch_size=3 must divide"),
        (with_(head={"norm_output": 1}), "head.norm_output=1 must be true or false"),
        (with_(head={"taps": 3}), "head.taps=3 must be a list"),
        (with_(head={"taps": [1, -2]}), r"head.taps\[1\]=-2 must be an integer, at least 0"),
        (with_(head={"fc_norm": True, "norm_before_fc": True}), "choose one"),
        (with_(head={"start_from": "x", "num_layers": 2}), "head.start_from=x says what the head is"),
        (with_(data={"prompts": []}), "data names no prompts"),
        (with_(data={"avoid": "measured.jsonl"}), "data.avoid='measured.jsonl' must be a list"),
        (with_(data={"temperatures": []}), "data.temperatures is empty"),
        (LEAST | {"head": [1]}, "head must be keys with values"),
        ("- 1", "the file must be keys with values"),
        ("a: [", "is not YAML"),
    ],
    ids=lambda x: x[:40] if isinstance(x, str) else "",
)
def test_what_is_wrong_is_named(read, content, says):
    with pytest.raises(UserError, match=says):
        read(content)


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_train_config(tmp_path / "none.yaml")
