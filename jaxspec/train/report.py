"""What a training run tells: measurements as it goes, curves and a short report at its end."""

import dataclasses
import importlib.util
import json
from collections.abc import Callable, Sequence
from pathlib import Path

from jaxspec.checkpoint.staging import whole_file
from jaxspec.train.config import TrainConfig

CURVES, REPORT = "curves.png", "report.md"


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Means over some batches.

    Attributes:
      split: "train" (the batches since the measurement before) or "heldout".
      tokens: read by the run so far.
      loss, accuracy: of each draft step; accuracy is how often the head's likeliest token is the target's.
      accepted_length: estimated tokens a round of a greedy chain of as many drafts, the target's own included.
    """

    split: str
    step: int
    tokens: int
    tokens_per_second: float | None
    loss: list[float]
    accuracy: list[float]
    accepted_length: float

    def __str__(self) -> str:
        accuracy = ", ".join(f"{share:.1%}" for share in self.accuracy)
        return f"loss {sum(self.loss):.3f}, right {accuracy}, {self.accepted_length:.2f} tokens a round ({self.split})"


def read_measurements(path: Path) -> list[Measurement]:
    """Those of a file with one in each line; a last line that was cut off is left out."""
    if not path.is_file():
        return []
    lines = path.read_text().split("\n")[:-1]
    return [Measurement(**json.loads(line)) for line in lines]


def write_report(
    config: TrainConfig, measured: Sequence[Measurement], directory: Path, say: Callable[[str], None]
) -> None:
    """`report.md`, and `curves.png` where matplotlib is installed."""
    heldout = [each for each in measured if each.split == "heldout"]
    with whole_file(directory / REPORT) as partial:
        partial.write_text(_as_text(config, measured, heldout))
    if importlib.util.find_spec("matplotlib") is None:
        say(f"{CURVES} is missing, for matplotlib is: `uv sync --extra plot`, or `pip install matplotlib`")
    else:
        with whole_file(directory / CURVES) as partial:
            _draw(measured, heldout, partial)


def _as_text(config: TrainConfig, measured: Sequence[Measurement], heldout: Sequence[Measurement]) -> str:
    last = heldout[-1]
    speeds = [each.tokens_per_second for each in measured if each.tokens_per_second]
    lines = [
        f"# EAGLE-3 head for {config.target}",
        "",
        f"{last.step} steps, {last.tokens:,} tokens"
        + (f", {sorted(speeds)[len(speeds) // 2]:,.0f} tokens/s (median)" if speeds else "")
        + f". Estimated on held-out rows: {last.accepted_length:.2f} tokens a round, with greedy chains of "
        f"{len(last.accuracy)}.",
        "",
        "| draft step | loss | right |",
        "| --- | --- | --- |",
        *(
            f"| {number} | {loss:.3f} | {share:.1%} |"
            for number, (loss, share) in enumerate(zip(last.loss, last.accuracy, strict=True), 1)
        ),
        "",
        "| tokens | tokens a round |",
        "| --- | --- |",
        *(f"| {each.tokens:,} | {each.accepted_length:.2f} |" for each in heldout),
        "",
    ]
    return "\n".join(lines)


def _draw(measured: Sequence[Measurement], heldout: Sequence[Measurement], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 4), layout="constrained")
    losses, accuracies, lengths = figure.subplots(1, 3)
    trained = [each for each in measured if each.split == "train"]
    for split, points in (("train", trained), ("heldout", heldout)):
        tokens = [each.tokens for each in points]
        style = {"alpha": 0.6} if split == "train" else {"marker": "o", "markersize": 3}
        losses.plot(tokens, [sum(each.loss) for each in points], label=split, **style)
        lengths.plot(tokens, [each.accepted_length for each in points], label=split, **style)
    for step in range(len(heldout[-1].accuracy)):
        shares = [each.accuracy[step] for each in heldout]
        accuracies.plot([each.tokens for each in heldout], shares, label=f"draft step {step + 1}")
    losses.set(title="Loss, all draft steps", yscale="log")
    accuracies.set(title="Right on held-out rows")
    lengths.set(title="Tokens a round, estimated")
    for axes in (losses, accuracies, lengths):
        axes.set_xlabel("training tokens")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    figure.savefig(path, format="png", dpi=150)
