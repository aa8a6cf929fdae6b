"""A training run from its configuration to the published head: `train`."""

import dataclasses
import gc
import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
from flax import nnx
from jaxtyping import Int

from jaxspec.checkpoint.default_model import open_model
from jaxspec.checkpoint.json_file import read_json
from jaxspec.checkpoint.restore import restore_decoder
from jaxspec.checkpoint.staging import whole_file
from jaxspec.checkpoint.store import Checkpoint
from jaxspec.config import refuse_changes
from jaxspec.drafts.eagle3_config import Eagle3Config
from jaxspec.drafts.eagle3_head import unpack_head
from jaxspec.errors import UserError
from jaxspec.llm import LLM
from jaxspec.models.config import ModelConfig
from jaxspec.models.registry import read_config
from jaxspec.precision import DTYPES, choose_dtype
from jaxspec.progress import progress_bar
from jaxspec.train.answers import open_or_make
from jaxspec.train.config import TrainConfig, check
from jaxspec.train.dataset import HELDOUT, TRAIN, Dataset, heldout_batches, training_batches
from jaxspec.train.head import export_head, head_config, initial_tensors, most_frequent, trained_head
from jaxspec.train.loss import Sums
from jaxspec.train.report import Measurement, read_measurements, write_report
from jaxspec.train.step import Trainer, TrainState, build_trainer, train_layout, train_mesh

HEAD_DIRECTORY = "head"
_CONFIG, _INPUTS, _CHECKPOINTS, _METRICS = "config.json", "inputs.json", "checkpoints", "metrics.jsonl"
_KEPT_CHECKPOINTS = 2
_LOG_EVERY = 10
# What does not decide the parameters at the end, but for rounding.
_MAY_CHANGE = {
    "output",
    "data.max_num_seqs",
    "mesh.data",
    "mesh.tp",
    "training.evaluate_every",
    "training.evaluation_batches",
    "training.checkpoint_every",
}

type Say = Callable[[str], None]


def make_data(config: TrainConfig, say: Say) -> None:
    """The first part of `train`: makes the data where it is missing, and no head.

    Raises:
      UserError: the configuration does not fit the target or the data.
    """
    check(config, "the configuration")
    checkpoint, target = _open_target(config)
    _begin(config, target)
    _dataset(config, checkpoint, say)
    made = Dataset.open(config.data.path)
    say(f"{sum(len(made.source(split)) for split in (TRAIN, HELDOUT)):,} records are in {made.where}")


def train(config: TrainConfig, say: Say) -> Path:
    """Makes the data where it is missing, trains, and writes the head; goes on where a run before it stopped.

    Args:
      say: is told what happens, a line at a time.

    Returns:
      The directory of the head, as it is published.

    Raises:
      UserError: the configuration does not fit the target, the data or what `config.output` holds.
    """
    check(config, "the configuration")
    _check_output(config)
    exported = config.output / HEAD_DIRECTORY
    if exported.exists():
        say(f"this run is finished: the head is in {exported}")
        return exported

    checkpoint, target = _open_target(config)
    mesh = train_mesh(config.mesh)
    head, canonical = _begin(config, target)
    dataset = _dataset(config, checkpoint, say)
    _tell_what_is_cut(dataset, config.data.sequence_length, say)
    if canonical is None:
        ids = _vocabulary(head, dataset, say)
        canonical = initial_tensors(head, target, lambda name: checkpoint.read([name])[name], ids, config.seed)
    dtype = DTYPES[choose_dtype(config.dtype, mesh.devices.flat[0])]
    layout = train_layout(target, config.mesh, dtype)
    with progress_bar("loading weights", layout.layer_slots + 1, is_shown=True) as advance:
        graph, weights = restore_decoder(checkpoint, layout, mesh, advance)
    trainer = build_trainer(head, config.training, layout, mesh, (graph, nnx.get_partition_spec(weights)), canonical)
    size = sum(array.size for array in jax.tree.leaves(trainer.initial))
    say(f"training {size / 1e6:.1f} M parameters in float32, computing in {dtype.name}")
    try:
        _begin_output(config, {"data": dataset.digest(), "initial head": _digest(canonical)})
        state = _run(config, trainer, weights, dataset, say)
        export_head(exported, head, target, unpack_head(head, layout, trainer.arrays(state)))
    except OSError as error:
        raise UserError(f"cannot write {config.output} ({error}): free space there, and start again") from error
    say(f"the head is in {exported}, the curves and the report are in {config.output}")
    return exported


def _dataset(config: TrainConfig, checkpoint: Checkpoint, say: Say) -> Dataset:
    def start(context: int, chunk_size: int) -> LLM:
        return LLM(
            config.target,
            mesh=(1, config.mesh.tp, 1),
            dtype=config.dtype,
            max_num_seqs=config.data.max_num_seqs,
            max_model_len=context,
            chunk_size=chunk_size,
            report=say,
        )

    dataset = open_or_make(config.data, checkpoint, start, say)
    gc.collect()  # the model that answered: it and its engine refer to each other
    return dataset


def _open_target(config: TrainConfig) -> tuple[Checkpoint, ModelConfig]:
    checkpoint = open_model(config.target)
    target = read_config(checkpoint.config)
    if config.data.sequence_length > target.max_positions:
        raise UserError(
            f"data.sequence_length={config.data.sequence_length} must be at most the target's {target.max_positions}"
        )
    return checkpoint, target


def _begin(config: TrainConfig, target: ModelConfig) -> tuple[Eagle3Config, dict[str, np.ndarray] | None]:
    """What is trained, and its tensors where another run has made them."""
    if config.head.start_from is None:
        return head_config(config.head, target), None
    return trained_head(config.head.start_from, target)


def _tell_what_is_cut(dataset: Dataset, length: int, say: Say) -> None:
    if share := dataset.share_beyond(length):
        say(f"{share:.1%} of the training tokens stand beyond data.sequence_length={length} and are left out")


def _vocabulary(head: Eagle3Config, dataset: Dataset, say: Say) -> Int[np.ndarray, "V_d"]:
    if not head.has_head:
        return np.arange(head.draft_vocab_size)
    counts = dataset.token_counts(head.layer.vocab_size)
    ids = most_frequent(counts, head.draft_vocab_size)
    share = counts[ids].sum() / max(counts.sum(), 1)
    say(f"the draft vocabulary of {len(ids)} tokens covers {share:.2%} of {counts.sum():,} answer tokens")
    return ids


def _run(config: TrainConfig, trainer: Trainer, weights: Any, dataset: Dataset, say: Say) -> TrainState:
    training, length = config.training, config.data.sequence_length
    state = trainer.initial_state()
    batches = training_batches(dataset, training.batch_size, length, config.seed)
    heldout = heldout_batches(dataset, training.batch_size, length, training.evaluation_batches)
    metrics = config.output / _METRICS
    with _checkpoints(config.output) as manager:
        step, tokens = manager.latest_step() or 0, 0
        if step:
            say(f"going on after step {step} of {training.steps}")
            state, tokens = _restore(manager, step, state, batches, config.output)
        _forget_after(metrics, step)
        recent: list[Sums] = []
        since, tokens_since = time.perf_counter(), tokens
        with progress_bar("trained steps", training.steps, is_shown=True, done=step, say=say) as advance:
            while step < training.steps:
                for _ in range(training.accumulate):
                    arrays = next(batches)
                    tokens += int(np.count_nonzero(arrays["documents"]))
                    state, sums = trainer.step(state, weights, trainer.put(arrays))
                    recent.append(sums)
                step += 1
                is_last = step == training.steps
                if step % _LOG_EVERY == 0 or is_last:
                    jax.block_until_ready(recent)
                    speed = (tokens - tokens_since) / (time.perf_counter() - since)
                    measured = _measurement("train", step, tokens, speed, recent)
                    _append(metrics, measured)
                    recent, since, tokens_since = [], time.perf_counter(), tokens
                    advance(
                        0,
                        f"loss {sum(measured.loss):.3f}, {measured.accepted_length:.2f} tokens a round, "
                        f"{speed:,.0f} tokens/s",
                    )
                advance(1)
                if step % training.evaluate_every == 0 or is_last:
                    every = [trainer.evaluate(state.params, weights, trainer.put(arrays)) for arrays in heldout]
                    measured = _measurement("heldout", step, tokens, None, every)
                    _append(metrics, measured)
                    say(f"step {step} of {training.steps}: {measured}")
                    since, tokens_since = time.perf_counter(), tokens
                if step % training.checkpoint_every == 0 or is_last:
                    _require_finite(sums, step)
                    _save(manager, step, state, batches, tokens)
    write_report(config, read_measurements(metrics), config.output, say)
    return state


def _measurement(split: str, step: int, tokens: int, speed: float | None, sums: list[Sums]) -> Measurement:
    _require_finite(sums[-1], step)
    total = jax.tree.map(lambda *parts: sum(np.asarray(part, np.float64) for part in parts), *sums)
    return Measurement(
        split=split,
        step=step,
        tokens=tokens,
        tokens_per_second=speed,
        loss=(total.loss / np.maximum(total.learned, 1)).tolist(),
        accuracy=(total.correct / np.maximum(total.drafted, 1)).tolist(),
        accepted_length=float(total.emitted / total.rounds) if total.rounds else 1.0,
    )


def _require_finite(sums: Sums, step: int) -> None:
    if not np.isfinite(sums.loss).all():
        raise UserError(
            f"the loss of step {step} is not finite: lower training.learning_rate, or raise training.warmup_steps, and "
            "give another output"
        )


# What a run leaves behind


def _check_output(config: TrainConfig) -> None:
    """Requires a directory that is new, or that of a run that would end with the same parameters."""
    output, begun = config.output, config.output / _CONFIG
    if begun.is_file():
        stored = read_json(begun, "remove the directory, or give another output")
        where = f"{output} holds a run of another configuration"
        refuse_changes(stored, _as_json(config), where, "give another output, or remove the directory", _MAY_CHANGE)
    elif output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise UserError(f"output {output} holds files but no {_CONFIG}: give another one, or an empty directory")


def _begin_output(config: TrainConfig, inputs: Mapping[str, str]) -> None:
    """Writes what a run is made of, or requires that it has not changed since.

    Args:
      inputs: digests of what the configuration only names.
    """
    begun = config.output / _INPUTS
    if begun.is_file():
        stored = read_json(begun, "remove the directory, or give another output")
        where = f"{config.output} holds a run that began with another input"
        refuse_changes(stored, inputs, where, "give another output, or remove the directory")
    config.output.mkdir(parents=True, exist_ok=True)
    for name, content in ((_CONFIG, _as_json(config)), (_INPUTS, inputs)):
        with whole_file(config.output / name) as partial:
            partial.write_text(json.dumps(content, indent=1) + "\n")


def _digest(tensors: Mapping[str, np.ndarray]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(tensors[name]).tobytes())
    return digest.hexdigest()


def _as_json(config: TrainConfig) -> dict[str, Any]:
    as_json: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(config), default=str))
    return as_json


def _checkpoints(output: Path) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(max_to_keep=_KEPT_CHECKPOINTS)
    return ocp.CheckpointManager((output / _CHECKPOINTS).absolute(), options=options)


def _save(
    manager: ocp.CheckpointManager, step: int, state: TrainState, batches: grain.DatasetIterator, tokens: int
) -> None:
    tree = {"params": state.params, "optimizer": state.optimizer}
    manager.save(
        step,
        args=ocp.args.Composite(
            state=ocp.args.StandardSave(tree),
            data=grain.checkpoint.CheckpointSave(batches),
            tokens=ocp.args.JsonSave(tokens),
        ),
        force=True,
    )


def _restore(
    manager: ocp.CheckpointManager, step: int, like: TrainState, batches: grain.DatasetIterator, output: Path
) -> tuple[TrainState, int]:
    """The state at a step, and how many tokens it has read; `batches` is brought to where it was."""
    tree = {"params": like.params, "optimizer": like.optimizer}
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
    try:
        restored = manager.restore(
            step,
            args=ocp.args.Composite(
                state=ocp.args.StandardRestore(abstract),
                data=grain.checkpoint.CheckpointRestore(batches),
                tokens=ocp.args.JsonRestore(),
            ),
        )
    except Exception as error:  # Orbax and TensorStore raise many kinds for a damaged file
        raise UserError(
            f"the checkpoint of step {step} in {output} cannot be restored ({str(error).splitlines()[0]}): if its "
            "files are damaged, remove its directory to go on from the one before it"
        ) from error
    return TrainState(restored.state["params"], restored.state["optimizer"]), restored.tokens


def _append(path: Path, measured: Measurement) -> None:
    with path.open("a") as file:
        file.write(json.dumps(dataclasses.asdict(measured)) + "\n")


def _forget_after(path: Path, step: int) -> None:
    """Drops measurements of steps that are done again."""
    kept = [measured for measured in read_measurements(path) if measured.step <= step]
    with whole_file(path) as partial:
        partial.write_text("".join(json.dumps(dataclasses.asdict(measured)) + "\n" for measured in kept))
