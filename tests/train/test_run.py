"""Training from prompts to a head that drafts, on a tiny target: as a user runs it."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml
from flax import nnx
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file, save_file
from test_cli import fails
from tiny import make_target, write_prompts

from jaxspec import LLM, RequestOutput, SamplingParams
from jaxspec.checkpoint.default_model import open_model
from jaxspec.checkpoint.restore import restore_decoder
from jaxspec.cli import main
from jaxspec.drafts.registry import find_drafter
from jaxspec.errors import UserError
from jaxspec.models.registry import read_config
from jaxspec.train import run
from jaxspec.train.config import HeadConfig, TrainConfig, TrainMesh, read_train_config
from jaxspec.train.dataset import Batch, Dataset
from jaxspec.train.loss import step_sums
from jaxspec.train.step import train_layout, train_mesh
from jaxspec.train.unroll import read_target, unroll

STEPS = 100
HEAD_FILES = ("config.json", "model.safetensors")


@dataclasses.dataclass(frozen=True)
class Finished:
    directory: Path
    file: Path
    config: TrainConfig
    said: list[str]


def write_config(directory: Path, name: str, target: Path, prompts: Path, **changes) -> Path:
    content = {
        "target": str(target),
        "output": str(directory / name),
        "data": {
            "path": str(directory / "data"),
            "prompts": [str(prompts)],
            "temperatures": [0.0, 1.0],
            "max_tokens": 62,
            "max_num_seqs": 16,
            "sequence_length": 64,
            "heldout_every": 10,
        },
        "head": {"taps": [1, 2, 4], "draft_vocab_size": 192},
        "training": {
            "steps": STEPS,
            "batch_size": 8,
            "unroll_steps": 4,
            "learning_rate": 6e-3,
            "warmup_steps": 10,
            "clip": 1.0,
            "evaluate_every": 50,
            "checkpoint_every": 25,
        },
    } | changes
    path = directory / f"{name}.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Finished:
    """A run from nothing, through the command line."""
    directory = tmp_path_factory.mktemp("training")
    target, prompts = make_target(directory), write_prompts(directory / "prompts.jsonl", 160)
    file = write_config(directory, "run", target, prompts)
    config = read_train_config(file)
    said: list[str] = []
    run.train(config, said.append)
    return Finished(directory, file, config, said)


def another(finished: Finished, name: str, **changes) -> TrainConfig:
    return dataclasses.replace(finished.config, output=finished.directory / name, **changes)


def measurements(directory: Path):
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


def test_the_loss_falls_and_the_head_drafts_as_well_as_it_was_estimated_to(finished):
    measured = measurements(finished.config.output)
    heldout = [each for each in measured if each["split"] == "heldout"]
    assert [each["step"] for each in heldout] == [50, 100]
    assert sum(heldout[1]["loss"]) < 0.7 * sum(heldout[0]["loss"])
    assert heldout[1]["accepted_length"] > 3.2
    assert all(len(each["accuracy"]) == 4 and each["accuracy"][0] > 0.75 for each in heldout[1:])
    llm = LLM(
        finished.config.target,
        draft=str(finished.config.output / "head"),
        tree="chain:4",
        max_num_seqs=4,
        max_model_len=128,
    )
    outputs = llm.generate([[topic % 4, 40 + topic] for topic in range(8)], SamplingParams(max_tokens=40))
    lengths = [length for output in outputs for length in output.accepted_lengths]
    assert np.mean(lengths) > 2.7
    assert estimated(finished, outputs) == (sum(lengths), len(lengths))


def estimated(finished: Finished, outputs: list[RequestOutput]) -> tuple[int, int]:
    """Tokens and rounds as the training-time test counts them over texts that the engine has written."""
    checkpoint, mesh = open_model(finished.config.target), train_mesh(TrainMesh())
    layout = train_layout(read_config(checkpoint.config), TrainMesh(), np.dtype("float32"))
    graph, weights = restore_decoder(checkpoint, layout, mesh)
    drafter = find_drafter(str(finished.config.output / "head")).fit(layout.config)
    texts = [output.prompt_token_ids + output.token_ids for output in outputs]
    tokens = np.zeros((len(texts), 64), np.int32)
    is_text, is_answer = np.zeros(tokens.shape, np.int32), np.zeros(tokens.shape, bool)
    for row, (text, output) in enumerate(zip(texts, outputs, strict=True)):
        tokens[row, : len(text)], is_text[row, : len(text)] = text, 1
        is_answer[row, len(output.prompt_token_ids) : len(text)] = True
    positions = np.broadcast_to(np.arange(64, dtype=np.int32), tokens.shape)
    batch = Batch(*(jnp.asarray(x) for x in (tokens, is_text, positions, is_answer)))

    def measure(weights, head_weights):
        target, head = nnx.merge(graph, weights), drafter._head(head_weights, layout)
        taps, hidden = read_target(target, batch, head.config.taps)
        return step_sums(head, target, unroll(head, target, taps, batch, 4), hidden, batch, "kl", jnp.ones(4))[1]

    sharded = jax.shard_map(measure, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    with jax.default_matmul_precision("highest"):
        sums = jax.jit(sharded)(weights, drafter.restore(layout, mesh))
    return int(sums.emitted), int(sums.rounds)


def test_a_run_leaves_its_curves_its_report_and_says_what_it_does(finished):
    output = finished.config.output
    assert {path.name for path in output.iterdir()} == {
        "config.json",
        "checkpoints",
        "curves.png",
        "head",
        "inputs.json",
        "metrics.jsonl",
        "report.md",
    }
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")
    report = (output / "report.md").read_text()
    assert f"{STEPS} steps" in report and "tokens a round" in report and report.count("| 4 |") == 1
    assert any("304 prompts to answer, for 304 records" in line for line in finished.said)
    assert any(f"step {STEPS} of {STEPS}: loss" in line for line in finished.said)
    assert any("the draft vocabulary of 192 tokens covers 99" in line for line in finished.said)
    assert str(output / "head") in finished.said[-1]


def test_a_killed_run_goes_on_to_the_same_head_bit_for_bit(finished, monkeypatch):
    config = another(finished, "killed")
    measure, at = run._measurement, []

    def stop_at_60(split, step, *rest):
        at.append(step)
        if step == 60 and len(at) < 20 and at.count(60) == 1:
            raise KeyboardInterrupt
        return measure(split, step, *rest)

    monkeypatch.setattr(run, "_measurement", stop_at_60)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        run.train(config, said.append)
    assert not (config.output / "head").exists()
    with monkeypatch.context() as changed, pytest.raises(UserError, match="began with another input: data was"):
        changed.setattr(Dataset, "digest", lambda self: "of another dataset")
        run.train(config, said.append)
    run.train(config, said.append)
    assert f"going on after step 50 of {STEPS}" in said
    one, other = (path / "head" / "model.safetensors" for path in (finished.config.output, config.output))
    assert one.read_bytes() == other.read_bytes()
    untimed = [
        [each | {"tokens_per_second": None} for each in measurements(path)]
        for path in (finished.config.output, config.output)
    ]
    # A measurement over steps that were done twice begins where the run went on.
    assert [each for each in untimed[0] if each["split"] == "heldout"] == [
        each for each in untimed[1] if each["split"] == "heldout"
    ]
    assert [each["step"] for each in untimed[0]] == [each["step"] for each in untimed[1]]


def test_data_parallel_and_a_split_target_learn_the_same(finished):
    training = dataclasses.replace(finished.config.training, steps=12, warmup_steps=3)
    losses = []
    for name, mesh, accumulate in (("one", TrainMesh(), 1), ("four", TrainMesh(data=2, tp=2), 1)):
        config = another(finished, name, training=dataclasses.replace(training, accumulate=accumulate), mesh=mesh)
        run.train(config, lambda line: None)
        losses.append([each["loss"] for each in measurements(config.output)])
    np.testing.assert_allclose(losses[0], losses[1], rtol=2e-3)


def test_a_finished_run_stays_as_it_is_and_a_changed_one_is_refused(finished, capfd):
    head = finished.config.output / "head" / "model.safetensors"
    before = head.read_bytes()
    assert main(["train-draft", str(finished.file)]) == 0
    assert "this run is finished" in capfd.readouterr().err and head.read_bytes() == before
    assert main(["train-draft", str(finished.file), "--data-only"]) == 0
    assert f"records are in {finished.config.data.path}" in capfd.readouterr().err
    with pytest.raises(UserError, match="seed was 0 and is 1"):
        run.train(dataclasses.replace(finished.config, seed=1), lambda line: None)
    training = dataclasses.replace(finished.config.training, evaluate_every=7, checkpoint_every=9)
    run.train(dataclasses.replace(finished.config, training=training, mesh=TrainMesh(data=2)), lambda line: None)
    (finished.directory / "full").mkdir()
    (finished.directory / "full" / "file").touch()
    with pytest.raises(UserError, match="holds files but no config"):
        run.train(another(finished, "full"), lambda line: None)


def test_training_goes_on_from_a_trained_head(finished):
    before = Path(shutil.copytree(finished.config.output / "head", finished.directory / "before"))
    training = dataclasses.replace(finished.config.training, steps=1, learning_rate=1e-12, warmup_steps=0)
    config = another(finished, "further", training=training, head=HeadConfig(start_from=before))
    after = run.train(config, lambda line: None)
    assert [(after / name).read_bytes() == (before / name).read_bytes() for name in HEAD_FILES] == [True, True]
    found, wanted = (measurements(each.output)[-1]["accepted_length"] for each in (config, finished.config))
    assert found == pytest.approx(wanted, abs=0.05)  # it is rounded to bfloat16
    shutil.rmtree(after)
    tensors = load_file(before / "model.safetensors")
    save_file(tensors | {"norm.weight": 2 * tensors["norm.weight"]}, before / "model.safetensors")
    with pytest.raises(UserError, match="began with another input: initial head was"):
        run.train(config, lambda line: None)
    shutil.rmtree(before)
    with pytest.raises(UserError, match=r"head\.start_from=.*before"):
        run.train(config, lambda line: None)
    after.mkdir()
    assert run.train(config, lambda line: None) == after  # what is finished needs nothing any more


def test_data_alone_is_made_without_a_head(finished):
    text = finished.directory / "text.txt"
    text.write_text("w1 w2 w3 w4 " * 400)
    data = dataclasses.replace(finished.config.data, path=finished.directory / "alone", prompts=(), texts=(text,))
    config = another(finished, "never", data=data)
    said: list[str] = []
    with pytest.raises(UserError, match="sequence_length=64000 must be at most"):
        run.make_data(dataclasses.replace(config, data=dataclasses.replace(data, sequence_length=64000)), said.append)
    assert not data.path.exists()
    run.make_data(config, said.append)
    assert said[-1].endswith(f"records are in {data.path}") and not config.output.exists()
    again = dataclasses.replace(config, data=dataclasses.replace(data, also=(finished.directory / "." / "alone",)))
    with pytest.raises(UserError, match="would be learned from twice"):
        run.make_data(again, said.append)


def test_a_loss_that_is_not_finite_ends_a_run_before_it_is_kept(finished):
    training = dataclasses.replace(finished.config.training, steps=12, learning_rate=1e30, warmup_steps=3)
    config = another(finished, "diverged", training=training)
    with pytest.raises(UserError, match=r"the loss of step 1\d is not finite: lower training.learning_rate"):
        run.train(config, lambda line: None)
    assert not (config.output / "head").exists() and not any((config.output / "checkpoints").iterdir())


def test_a_damaged_checkpoint_is_named(finished):
    config = another(finished, "damaged")
    shutil.copytree(finished.config.output / "checkpoints", config.output / "checkpoints")
    shutil.copy(finished.config.output / "config.json", config.output)
    for path in (config.output / "checkpoints" / str(STEPS) / "state").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(UserError, match=f"the checkpoint of step {STEPS} in .* cannot be restored"):
        run.train(config, lambda line: None)


def test_errors_of_the_command_are_one_line(finished, tmp_path, capfd):
    assert "cannot be read" in fails(capfd, "train-draft", str(tmp_path / "none.yaml"))
    file = write_config(tmp_path, "long", Path(finished.config.target), finished.config.data.prompts[0])
    content = yaml.safe_load(file.read_text())
    content["data"]["sequence_length"] = 64 * 1000
    file.write_text(yaml.safe_dump(content))
    assert "sequence_length=64000 must be at most the target's 512" in fails(capfd, "train-draft", str(file))
    content["data"]["sequence_length"] = 64
    content["mesh"] = {"data": 8, "tp": 99}
    content["training"]["batch_size"] = 8
    file.write_text(yaml.safe_dump(content))
    assert "mesh data=8, tp=99 needs 792 devices but there are 8: choose a smaller mesh; at most 64" in fails(
        capfd, "train-draft", str(file)
    )
    assert not (tmp_path / "long").exists()
