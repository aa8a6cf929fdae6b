"""Runs as tables, as a JSON object and as a picture."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec.evaluate.acceptance import Acceptance, Answer, Run, acceptance, by_category


def as_tables(plain: Run, drafted: Sequence[Run]) -> str:
    """What a user reads: speed and acceptance of each run, then acceptance by position and by category."""
    runs = [plain, *drafted]
    totals = [acceptance(run.answers, run.depth) for run in runs]
    rows = [
        [
            run.draft,
            run.tree,
            _number(total.mean_accepted_length),
            f"{run.tokens_per_second:.1f}",
            f"{run.tokens_per_second / plain.tokens_per_second:.2f}",
            f"{total.identical:.1%}",
        ]
        for run, total in zip(runs, totals, strict=True)
    ]
    speeds = _table(["draft", "tree", "tokens a round", "tokens/s", "speed-up", "identical"], rows, num_names=2)
    tables = [speeds, _positions(drafted, totals[1:]), _categories(plain, drafted)]
    return "\n\n".join([*tables, *filter(None, [_differences(drafted)])])


def as_json(plain: Run, drafted: Sequence[Run]) -> list[dict[str, Any]]:
    """Everything about each run, plain decoding first."""
    return [
        {
            "draft": run.draft,
            "tree": run.tree,
            "dtype": run.dtype,
            "attention": run.attention,
            "exchange": run.exchange,
            "seconds": run.seconds,
            "tokens_per_second": run.tokens_per_second,
            "speed_up": run.tokens_per_second / plain.tokens_per_second,
            **dataclasses.asdict(acceptance(run.answers, run.depth)),
            "by_category": {category: dataclasses.asdict(each) for category, each in by_category(run).items()},
            "answers": [_answer_as_json(answer) for answer in run.answers],
        }
        for run in (plain, *drafted)
    ]


def draw(drafted: Sequence[Run], path: Path) -> None:
    """Writes a PNG: acceptance by position, and tokens a round by category, of each run.

    Raises:
      ImportError: matplotlib is not installed.
    """
    from matplotlib.figure import Figure  # an optional dependency

    categories = list(by_category(drafted[0]))
    num_bars = len(categories) * len(drafted)
    figure = Figure(figsize=(12, max(4.5, 1.5 + 0.16 * num_bars + 0.12 * len(categories))), layout="constrained")
    left, right = figure.subplots(1, 2)
    height = 0.8 / len(drafted)
    for index, run in enumerate(drafted):
        positions = acceptance(run.answers, run.depth).by_position
        left.plot(range(1, len(positions) + 1), positions, marker="o", label=_label(run))
        means = [each.mean_accepted_length or 0.0 for each in by_category(run).values()]
        centres = [row + (index - (len(drafted) - 1) / 2) * height for row in range(len(categories))]
        right.barh(centres, means, height)
    left.set(
        title="Acceptance by position", xlabel="drafted tokens", ylabel="share of rounds that accept at least as many"
    )
    left.set_xticks(range(1, max(run.depth for run in drafted) + 1))
    left.set_ylim(0, 1)
    left.grid(alpha=0.3)
    right.set(title="Acceptance by category", xlabel="tokens a round, bonus included")
    right.set_yticks(range(len(categories)), categories)
    right.invert_yaxis()
    right.axvline(1, color="grey", linewidth=0.8)
    right.grid(axis="x", alpha=0.3)
    figure.legend(loc="outside lower center")
    figure.savefig(path, format="png", dpi=150)


def _answer_as_json(answer: Answer) -> dict[str, Any]:
    output = answer.output
    return {
        "id": answer.question.id,
        "category": answer.question.category,
        "turn": answer.turn,
        "prompt_tokens": len(output.prompt_token_ids),
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "accepted_lengths": output.accepted_lengths,
        "first_difference": answer.first_difference,
        "lead": answer.lead,
    }


def _positions(drafted: Sequence[Run], totals: Sequence[Acceptance]) -> str:
    depth = max(run.depth for run in drafted)
    header = ["rounds that accept at least", *(str(position) for position in range(1, depth + 1))]
    rows = [
        [_label(run), *(f"{share:.1%}" for share in total.by_position), *[""] * (depth - len(total.by_position))]
        for run, total in zip(drafted, totals, strict=True)
    ]
    return _table(header, rows)


def _categories(plain: Run, drafted: Sequence[Run]) -> str:
    runs = [by_category(run) for run in drafted]
    rows = [
        [category, str(each.requests), *(_number(run[category].mean_accepted_length) for run in runs)]
        for category, each in by_category(plain).items()
    ]
    return _table(["tokens a round by category", "answers", *(_label(run) for run in drafted)], rows)


def _differences(drafted: Sequence[Run]) -> str:
    """A line for each run whose answers differ from plain decoding's where that has been measured."""
    lines = []
    for run in drafted:
        leads = [answer.lead for answer in run.answers if answer.lead is not None]
        if leads:
            lines.append(
                f"{_label(run)}: {len(leads)} of {len(run.answers)} answers differ from plain decoding's; where they "
                f"first do, the likeliest token led by {max(leads):.2g} at most, in logits"
            )
    return "\n".join(lines)


def _label(run: Run) -> str:
    return f"{run.draft} {run.tree}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _table(header: list[str], rows: list[list[str]], num_names: int = 1) -> str:
    """Aligned columns: the first `num_names` to the left, numbers to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join(
            cell.ljust(width) if column < num_names else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in (header, *rows)
    ]
    return "\n".join(lines)
