"""What a training run is made of, as `configs/train/*.yaml` say it."""

import dataclasses
from dataclasses import field
from pathlib import Path

from jaxspec.config import above, at_least, between, one_of, read_config
from jaxspec.errors import UserError

LOSSES = ("kl", "acceptance")
SEQUENCE_STEP = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Texts to learn from. Paths are relative to where the command runs.

    Attributes:
      path: where they are stored, as token ids; made if nothing is there, and shared by runs with the same settings.
      prompts: JSONL files of prompts that the target answers itself.
      temperatures: one answer of each prompt at each of them.
      max_tokens: of an answer.
      max_num_seqs: prompts that are answered at once.
      made_up: so many conversations that the target makes up itself, from the beginning of its chat template on (Xu
        et al. 2024, arXiv 2406.08464), of `max_tokens` each, at `made_up_temperature`.
      conversations: JSONL files with `messages`, used as they are.
      texts: plain text files, used as they are.
      seed: of the noise of sampled answers.
      sequence_length: tokens of a row; longer conversations are cut there, and texts into pieces of so many.
      heldout_every: of the prompts, conversations and pieces of a file one in so many is kept for the evaluation;
        where rows have a field `split`, those with `heldout` are.
      avoid: JSONL files of questions that are kept for measuring; prompts and conversations that hold one are left out
        (`contamination.py`).
      also: directories of finished data, made for the same target, that are learned from too.
    """

    path: Path
    prompts: tuple[Path, ...] = ()
    temperatures: tuple[float, ...] = field(default=(0.0, 1.0), metadata=between(0, 10))
    max_tokens: int = field(default=512, metadata=at_least(1))
    max_num_seqs: int = field(default=8, metadata=at_least(1))
    seed: int = field(default=0, metadata=between(0, 2**31 - 1))
    made_up: int = field(default=0, metadata=at_least(0))
    made_up_temperature: float = field(default=0.8, metadata=above(0))
    conversations: tuple[Path, ...] = ()
    texts: tuple[Path, ...] = ()
    sequence_length: int = field(default=1024, metadata=at_least(2))
    heldout_every: int = field(default=50, metadata=at_least(2))
    avoid: tuple[Path, ...] = ()
    also: tuple[Path, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """An EAGLE-3 head; its width and its attention heads are those of the target.

    Attributes:
      taps: residual streams of the target that it reads: i is the one after i layers. None: (2, n // 2, n - 3) of n.
      num_layers: of its own.
      draft_vocab_size: it drafts from the so many tokens that are most frequent in the answers, with an output head of
        its own. None: from all of them, with the target's output head.
      intermediate_size: of its feed-forward; None takes the target's.
      rope_theta: of its attention; None takes the target's.
      norm_before_residual, norm_before_fc, fc_norm, norm_output: as in `Eagle3Config`.
      start_from: a trained head to go on from, as `--draft` takes it; it says all the rest.
    """

    start_from: Path | None = None
    taps: tuple[int, ...] | None = field(default=None, metadata=at_least(0))
    num_layers: int = field(default=1, metadata=at_least(1))
    draft_vocab_size: int | None = field(default=None, metadata=at_least(1))
    intermediate_size: int | None = field(default=None, metadata=at_least(1))
    rope_theta: float | None = field(default=None, metadata=above(0))
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """Attributes:
    steps: of the optimiser.
    batch_size: rows of `sequence_length` tokens in a step, over all devices.
    accumulate: batches of which the gradients are averaged in each step; a step then reads so many batches.
    unroll_steps: draft steps of the training-time test.
    decay: weight of each draft step's loss against the one before it.
    loss: "kl" (Kullback-Leibler divergence of the draft from the target) or "acceptance" (minus the logarithm of
      the probability that a draft is accepted).
    learning_rate: after warm-up; then it falls on a cosine to `final_learning_rate`.
    clip: largest norm of the gradients.
    evaluate_every, checkpoint_every: steps; both also happen at the end.
    evaluation_batches: of held-out rows, at most.
    """

    steps: int = field(metadata=at_least(1))
    batch_size: int = field(default=32, metadata=at_least(1))
    accumulate: int = field(default=1, metadata=at_least(1))
    unroll_steps: int = field(default=7, metadata=between(1, 32))
    decay: float = field(default=0.8, metadata=above(0))
    loss: str = field(default="kl", metadata=one_of(*LOSSES))
    learning_rate: float = field(default=5e-4, metadata=above(0))
    final_learning_rate: float = field(default=0.0, metadata=at_least(0))
    warmup_steps: int = field(default=100, metadata=at_least(0))
    weight_decay: float = field(default=0.0, metadata=at_least(0))
    beta1: float = field(default=0.9, metadata=between(0, 0.9999))
    beta2: float = field(default=0.95, metadata=between(0, 0.9999))
    clip: float = field(default=0.5, metadata=above(0))
    evaluate_every: int = field(default=200, metadata=at_least(1))
    evaluation_batches: int = field(default=8, metadata=at_least(1))
    checkpoint_every: int = field(default=500, metadata=at_least(1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainMesh:
    """Devices: `data` times as many rows at once, each on `tp` devices that split the target."""

    data: int = field(default=1, metadata=at_least(1))
    tp: int = field(default=1, metadata=at_least(1))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Attributes:
    target: a known model, or a directory made by `jaxspec convert`.
    output: directory of checkpoints, metrics, curves, the report and the head.
    dtype: of the computation, as of `LLM`; parameters are trained in float32.
    """

    target: str
    output: Path
    data: DataConfig
    training: TrainingConfig
    head: HeadConfig = HeadConfig()
    mesh: TrainMesh = TrainMesh()
    dtype: str = field(default="auto", metadata=one_of("auto", "float32", "bfloat16"))
    seed: int = field(default=0, metadata=between(0, 2**31 - 1))


def read_train_config(path: Path) -> TrainConfig:
    """Raises `UserError` for a file that is not such a configuration, or contradicts itself."""
    config = read_config(path, TrainConfig)
    check(config, str(path))
    return config


def check(config: TrainConfig, where: str) -> None:
    """Raises `UserError` for keys that contradict each other; `where` begins its message."""
    data, training, mesh = config.data, config.training, config.mesh
    if not (data.prompts or data.made_up or data.conversations or data.texts):
        raise UserError(
            f"{where}: data names no prompts, conversations or texts: give files of at least one kind, or a number for "
            "data.made_up; finished data can be data.path, with the settings it was made with"
        )
    if data.prompts and not data.temperatures:
        raise UserError(
            f"{where}: data.temperatures is empty: give one for each answer of a prompt, for instance [0, 1]"
        )
    if training.batch_size % mesh.data:
        raise UserError(
            f"{where}: training.batch_size={training.batch_size} must divide over the mesh.data={mesh.data} groups of "
            "devices"
        )
    if training.warmup_steps >= training.steps:
        raise UserError(
            f"{where}: training.warmup_steps={training.warmup_steps} must be less than "
            f"training.steps={training.steps}: give fewer of the former"
        )
    if data.sequence_length % SEQUENCE_STEP:
        raise UserError(
            f"{where}: data.sequence_length={data.sequence_length} must be a multiple of {SEQUENCE_STEP}, the least "
            "number of rows that attention takes at once"
        )
    if config.head.start_from and dataclasses.replace(config.head, start_from=None) != HeadConfig():
        raise UserError(f"{where}: head.start_from={config.head.start_from} says what the head is: leave the rest out")
    if config.head.norm_before_fc and config.head.fc_norm:
        raise UserError(f"{where}: head.norm_before_fc and head.fc_norm normalise the same features: choose one")
