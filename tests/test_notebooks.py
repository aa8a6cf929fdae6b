"""Notebooks run from top to bottom, and say what they say about tokens and rounds."""

import json
from pathlib import Path

import pytest
from test_cli import needs_model

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def code_of(name: str) -> list[str]:
    cells = json.loads((NOTEBOOKS / name).read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


@needs_model
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
def test_quickstart_runs_and_its_answers_are_those_of_plain_decoding():
    matplotlib = pytest.importorskip("matplotlib", reason="needs the plot extra")
    matplotlib.use("Agg")
    names: dict = {}
    for cell in code_of("quickstart.ipynb"):
        exec(compile(cell, "quickstart.ipynb", "exec"), names)
    answers, sampled = names["answers"], names["sampled"]
    assert answers["chain"].token_ids == answers["tree"].token_ids == answers["plain"].token_ids
    assert names["sharded"].accepted_lengths == answers["chain"].accepted_lengths
    assert max(answers["chain"].accepted_lengths) > 1
    assert sampled["chain"].token_ids == sampled["plain"].token_ids
