"""`jaxspec bench acceptance`: its options, and what it prints and writes."""

import argparse
import functools
import gc
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxspec.checkpoint.default_model import DEFAULT_MODEL, open_model
from jaxspec.checkpoint.staging import whole_file
from jaxspec.errors import UserError
from jaxspec.evaluate.acceptance import Run, context_for, measure, with_leads
from jaxspec.evaluate.margins import leads
from jaxspec.evaluate.questions import Question, read_questions
from jaxspec.evaluate.report import as_json, as_tables, draw
from jaxspec.llm import ATTENTION, EXCHANGE, LLM, check_at_least, check_options
from jaxspec.mesh import MeshShape, make_mesh
from jaxspec.models.registry import read_config
from jaxspec.precision import DTYPES
from jaxspec.sampling_params import SamplingParams
from jaxspec.speculate.trees import TreeSpec
from jaxspec.tokenizer import Tokenizer

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of `jaxspec bench acceptance`."""
    add = parser.add_argument
    add(
        "prompts",
        nargs="+",
        type=Path,
        metavar="PROMPTS.jsonl",
        help="Spec-Bench, MT-bench, GSM8K, HumanEval, or any file with a field prompt or turns in each line",
    )
    add("--model", default=DEFAULT_MODEL, help="a known name or a converted checkpoint (default: %(default)s)")
    add(
        "--draft",
        action="append",
        required=True,
        metavar="PATH",
        help="as of generate, several times if wanted; plain decoding is always measured",
    )
    add(
        "--tree",
        action="append",
        help="as of generate, several times if wanted: each draft is measured with each tree that goes with it; the "
        "default is the draft's own",
    )
    add("--mesh", default="1,1,1", help="sizes pp,tp,dcp (default: %(default)s)")
    add("--dtype", default="auto", help=f"auto, {', '.join(DTYPES)} (default: %(default)s)")
    add("--attention", choices=ATTENTION, default="auto", help="as of generate (default: %(default)s)")
    add("--exchange", choices=EXCHANGE, default="auto", help="as of generate (default: %(default)s)")
    add("--max-tokens", type=int, default=256, metavar="N", help="tokens of an answer at most (default: %(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: %(default)s)")
    add("--top-p", type=float, default=1.0, metavar="P")
    add("--top-k", type=int, default=0, metavar="K")
    add("--min-p", type=float, default=0.0, metavar="P")
    add("--seed", type=int, default=0, help="of the first question, one more for each next (default: %(default)s)")
    add("--max-num-seqs", type=int, default=8, metavar="N", help="questions answered at once (default: %(default)s)")
    add("--chunk-size", type=int, default=64, metavar="N", help="as of generate (default: %(default)s)")
    add("--limit", type=int, metavar="N", help="only the first N questions of each file")
    add("--output", type=Path, metavar="DIR", help="where acceptance.json and acceptance.png are written")


def run(options: argparse.Namespace) -> None:
    """Measures plain decoding and every draft with its trees, one after the other; prints tables, writes files.

    Raises:
      UserError: an option or a file is wrong; found before any model is opened, where no model is needed for it.
    """
    params = SamplingParams(**{name: getattr(options, name) for name in _SAMPLING})
    check_at_least("max_num_seqs", options.max_num_seqs, 1)
    check_at_least("chunk_size", options.chunk_size, 1)
    if options.limit is not None:
        check_at_least("limit", options.limit, 1)
    mesh = MeshShape.parse(options.mesh)
    pairs = _pairs(options.draft, options.tree, options.dtype)
    questions = [question for path in options.prompts for question in read_questions(path, options.limit)]
    device = make_mesh(mesh).devices.flat[0]
    checkpoint = open_model(options.model)
    config = read_config(checkpoint.config)
    context = context_for(questions, options.max_tokens, Tokenizer.load(checkpoint.path), config.max_positions)
    if options.output is not None:
        _make_directory(options.output)
    start = functools.partial(
        LLM,
        options.model,
        mesh=mesh,
        dtype=options.dtype,
        attention=options.attention,
        exchange=options.exchange,
        max_num_seqs=options.max_num_seqs,
        max_model_len=context,
        chunk_size=options.chunk_size,
        report=_say,
    )
    num_runs = 1 + len(pairs)
    _say(f"run 1 of {num_runs}: plain decoding, {len(questions)} questions")
    plain = _measure(start, questions, params, options.max_num_seqs)
    drafted = []
    for number, (draft, tree) in enumerate(pairs, 2):
        _say(f"run {number} of {num_runs}: draft {draft}, tree {tree}")
        drafted.append(_measure(start, questions, params, options.max_num_seqs, draft, tree, plain))
    if params.is_greedy:
        gc.collect()
        drafted = with_leads(drafted, functools.partial(leads, checkpoint, config, DTYPES[plain.dtype]))
    print(as_tables(plain, drafted))
    if options.output is not None:
        settings = {
            "model": options.model,
            "mesh": str(mesh),
            "dtype": plain.dtype,
            "device": device.device_kind,
            "jax": jax.__version__,
            "max_num_seqs": options.max_num_seqs,
            "chunk_size": options.chunk_size,
            "context": context,
            "sampling": {name: getattr(options, name) for name in _SAMPLING},
            "files": [str(path) for path in options.prompts],
        }
        _write(options.output, settings | {"runs": as_json(plain, drafted)}, drafted)


def _pairs(drafts: Sequence[str], trees: Sequence[str] | None, dtype: str) -> list[tuple[str, str]]:
    """Every draft with every tree that goes with it.

    Raises:
      UserError: a draft or a tree is unknown, or goes with none of the others.
    """
    for tree in trees or ():
        TreeSpec.parse(tree)
    pairs: dict[tuple[str, str], None] = {}  # without the pairs that are asked for twice
    refusals: dict[str, UserError] = {}
    for draft in drafts:
        if draft == "none":
            raise UserError("--draft none: plain decoding is always measured; leave it out")
        drafter, default = check_options(draft, None, dtype, None, None)
        for tree in trees or [default.name]:
            try:
                drafter.check_tree(TreeSpec.parse(tree))
                pairs[draft, tree] = None
            except UserError as error:
                refusals |= {draft: error, tree: error}
    matched = {name for pair in pairs for name in pair}
    for name, refusal in refusals.items():
        if name not in matched:
            raise refusal
    return list(pairs)


def _measure(
    start: Callable[..., LLM],
    questions: Sequence[Question],
    params: SamplingParams,
    num_seqs: int,
    draft: str = "none",
    tree: str = "none",
    plain: Run | None = None,
) -> Run:
    gc.collect()  # an LLM and its engine refer to each other: the one before still holds its memory
    return measure(start(draft=draft, tree=tree), questions, params, num_seqs, plain)


def _make_directory(path: Path) -> None:
    """Before the work, so that hours of it don't end with a directory that can't be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output {path} cannot be made ({error.strerror}): give a directory, new or not") from error
    if not os.access(path, os.W_OK):
        raise UserError(f"--output {path} cannot be written to: give a directory that can")
    if not _has_matplotlib():
        _say("acceptance.png will be missing, for matplotlib is: `uv sync --extra plot`, or `pip install matplotlib`")


def _has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _write(directory: Path, result: dict[str, Any], drafted: Sequence[Run]) -> None:
    with whole_file(directory / "acceptance.json") as path:
        path.write_text(json.dumps(result) + "\n")
    if _has_matplotlib():
        with whole_file(directory / "acceptance.png") as path:
            draw(drafted, path)


def _say(line: str) -> None:
    print(f"jaxspec: {line}", file=sys.stderr)
