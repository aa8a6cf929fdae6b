"""The `jaxspec` command: `generate`, `convert`, `train-draft` and `bench`."""

import _thread
import argparse
import contextlib
import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import jax

from jaxspec import LLM, MeshShape, RequestOutput, SamplingParams, UserError
from jaxspec.checkpoint.convert import convert
from jaxspec.checkpoint.default_model import DEFAULT_MODEL, cache_directory, is_default_model, open_model
from jaxspec.evaluate import command as bench_acceptance
from jaxspec.llm import ATTENTION, EXCHANGE, TAIL_AXES, check_at_least, check_options
from jaxspec.mesh import make_mesh
from jaxspec.models.registry import read_config
from jaxspec.precision import DTYPES
from jaxspec.tokenizer import Tokenizer
from jaxspec.train.config import read_train_config
from jaxspec.train.run import make_data, train

_SECONDS_TO_RETURN = 0.1
_DRAFTED, _PLAIN = "\033[32m", "\033[0m"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        _fail(f"{message} (see {self.prog} --help)")


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the `jaxspec` command; returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        with _no_interrupt_is_lost():
            options.run(options)
    except UserError as error:
        _fail(str(error))
    except KeyboardInterrupt:
        print("\njaxspec: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # whoever read the text has had enough
        return 141
    return 0


@contextlib.contextmanager
def _no_interrupt_is_lost() -> Iterator[None]:
    """One that comes while C calls Python, as JAX lets the garbage collector do, is else only printed."""
    before = sys.unraisablehook

    def hook(unraisable: "sys.UnraisableHookArgs") -> None:
        if isinstance(unraisable.exc_value, KeyboardInterrupt):
            # Not at once: it would be raised in this very function, and be lost again.
            again = threading.Timer(_SECONDS_TO_RETURN, _thread.interrupt_main)
            again.daemon = True
            again.start()
        else:
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = before


def _fail(message: str) -> NoReturn:
    print(f"jaxspec: {message}", file=sys.stderr)
    raise SystemExit(2)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="jaxspec", description="Speculative decoding in JAX on (pp, tp, dcp) meshes.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=_Parser)

    generate = commands.add_parser("generate", help="answer a prompt")
    generate.set_defaults(run=_generate)
    add = generate.add_argument
    add("prompt", metavar="PROMPT")
    add("--model", default=DEFAULT_MODEL, help="a known name or a converted checkpoint (default: %(default)s)")
    add(
        "--draft",
        metavar="PATH",
        help="none, ngram, eagle3 (the head that comes with jaxspec, for the default model), or the directory of an "
        "EAGLE-3 head, published or converted (default: eagle3 for the default model, none for others)",
    )
    add(
        "--draft-taps",
        metavar="I,J,…",
        help="what a head reads of the model: its residual streams after so many layers, for instance 2,16,29; "
        "the default is what the head's files say",
    )
    add("--mesh", default="1,1,1", help="sizes pp,tp,dcp (default: %(default)s)")
    add(
        "--tree",
        help="none, chain:D, static:… or (with a head) dynamic:steps=S,topk=K,nodes=N; the default is the draft's own",
    )
    add("--dtype", default="auto", help=f"auto, {', '.join(DTYPES)} (default: %(default)s)")
    add("--tail-placement", help=f"{' or '.join(TAIL_AXES)}; the default measures both on GPUs")
    add(
        "--attention",
        choices=ATTENTION,
        default="auto",
        help="plain JAX (reference), the kernels for Hopper GPUs (pallas), or these where they can be had (auto) "
        "(default: %(default)s)",
    )
    add(
        "--exchange",
        choices=EXCHANGE,
        default="auto",
        help="how devices talk: by the collectives of XLA (xla), by stores into each other's memory (peers), or so "
        "where it can be had (auto) (default: %(default)s)",
    )
    add("--max-tokens", type=int, default=128, metavar="N", help="tokens generated at most (default: %(default)s)")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (default: %(default)s)")
    add("--top-p", type=float, default=1.0, metavar="P")
    add("--top-k", type=int, default=0, metavar="K")
    add("--min-p", type=float, default=0.0, metavar="P")
    add("--seed", type=int, help="the same seed gives the same text; drawn at random where it is not given")
    add("--chunk-size", type=int, default=64, metavar="N", help="prompt tokens a tick (default: %(default)s)")
    add("--no-chat", action="store_true", help="give the prompt to the model as it is, without a chat template")
    add("--json", action="store_true", help="print one JSON object instead of the text")

    to_orbax = commands.add_parser(
        "convert", help="make a checkpoint from a GGUF file, a Hugging Face directory or an EAGLE-3 head"
    )
    to_orbax.set_defaults(run=_convert)
    to_orbax.add_argument("src", metavar="SRC", type=Path, help="a .gguf file, or the directory of a model or a head")
    to_orbax.add_argument("dst", metavar="DST", type=Path, help="a new directory")

    train_draft = commands.add_parser("train-draft", help="train an EAGLE-3 head for a model")
    train_draft.set_defaults(run=_train_draft)
    train_draft.add_argument("config", metavar="CONFIG.yaml", type=Path, help="as those in configs/train")
    train_draft.add_argument("--data-only", action="store_true", help="make the data, and train nothing yet")

    bench = commands.add_parser("bench", help="measure drafts on a set of prompts")
    benchmarks = bench.add_subparsers(required=True, metavar="BENCHMARK")
    on_prompts = benchmarks.add_parser("acceptance", help="how much of what is drafted is accepted, and how fast it is")
    on_prompts.set_defaults(run=_bench_acceptance)
    bench_acceptance.add_options(on_prompts)
    return parser


def _convert(options: argparse.Namespace) -> None:
    jax.config.update("jax_platforms", "cpu")  # it only writes files: no GPU needs to be taken
    convert(options.src, options.dst)


def _train_draft(options: argparse.Namespace) -> None:
    config = read_train_config(options.config)
    _keep_compiled_programs()
    (make_data if options.data_only else train)(config, lambda line: print(f"jaxspec: {line}", file=sys.stderr))


def _bench_acceptance(options: argparse.Namespace) -> None:
    _keep_compiled_programs()
    bench_acceptance.run(options)


def _generate(options: argparse.Namespace) -> None:
    params = SamplingParams(
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        min_p=options.min_p,
        seed=options.seed,
        max_tokens=options.max_tokens,
    )
    mesh = MeshShape.parse(options.mesh)
    draft = options.draft
    if draft is None:
        draft = "eagle3" if is_default_model(options.model) and options.tree != "none" else "none"
    # Before the model is opened, which may convert it first.
    draft_taps = _parse_taps(options.draft_taps)
    check_options(draft, options.tree, options.dtype, options.tail_placement, draft_taps)
    check_at_least("chunk_size", options.chunk_size, 1)
    make_mesh(mesh)
    _keep_compiled_programs()
    llm = LLM(
        options.model,
        draft=draft,
        mesh=mesh,
        tree=options.tree,
        dtype=options.dtype,
        tail_placement=options.tail_placement,
        attention=options.attention,
        exchange=options.exchange,
        draft_taps=draft_taps,
        max_num_seqs=1,
        max_model_len=_context_for(options),
        chunk_size=options.chunk_size,
        chat=False if options.no_chat else None,
        report=lambda line: print(f"jaxspec: {line}", file=sys.stderr),
    )
    output = _follow(llm, options.prompt, params, is_silent=options.json)
    if options.json:
        print(json.dumps(_as_json(llm, output), ensure_ascii=False))
    else:
        print(_statistics(llm, output), file=sys.stderr)


def _parse_taps(text: str | None) -> list[int] | None:
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,4}(,[0-9]{1,4})*", text):
        raise UserError(
            f"--draft-taps {text!r} must be numbers of layers with commas between them, for instance 2,16,29"
        )
    return [int(tap) for tap in text.split(",")]


def _keep_compiled_programs() -> None:
    """A second start finds the programs of the first on disk."""
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "xla"))


def _context_for(options: argparse.Namespace) -> int:
    """The least power of two, from 512 on, that holds the prompt and its answer, within what the model can.

    Attention reads a table as long as the context, so it should be no longer than needed; and few sizes are few
    programs.
    """
    checkpoint = open_model(options.model)
    tokenizer, limit = Tokenizer.load(checkpoint.path), read_config(checkpoint.config).max_positions
    is_chat = tokenizer.has_chat_template and not options.no_chat
    prompt = tokenizer.encode_chat(options.prompt) if is_chat else tokenizer.encode(options.prompt)
    needed = len(prompt) + options.max_tokens
    if needed > limit:
        raise UserError(
            f"a prompt of {len(prompt)} tokens and max_tokens={options.max_tokens} need a context of {needed} tokens, "
            f"but the model's is {limit}: shorten the prompt or lower --max-tokens"
        )
    return min(max(512, 1 << (needed - 1).bit_length()), limit)


def _follow(llm: LLM, prompt: str, params: SamplingParams, is_silent: bool) -> RequestOutput:
    """Prints text as it is accepted; on a terminal, tokens that were drafted are coloured."""
    is_coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    chunks = llm.stream(prompt, params)
    while True:
        try:
            chunk = next(chunks)
        except StopIteration as end:
            if not is_silent:
                print(flush=True)
            return end.value
        if is_silent:
            continue
        if is_coloured:
            pieces = [f"{_DRAFTED}{token.text}{_PLAIN}" if token.is_drafted else token.text for token in chunk.tokens]
            print("".join(pieces) + chunk.text[sum(len(token.text) for token in chunk.tokens) :], end="", flush=True)
        else:
            print(chunk.text, end="", flush=True)


def _as_json(llm: LLM, output: RequestOutput) -> dict[str, object]:
    return {
        "text": output.text,
        "token_ids": output.token_ids,
        "prompt_tokens": len(output.prompt_token_ids),
        "finish_reason": output.finish_reason,
        "accepted_lengths": output.accepted_lengths,
        "mean_accepted_length": output.mean_accepted_length,
        "tokens_per_second": output.tokens_per_second,
        "time_to_first_token_s": output.time_to_first_token_s,
        "mesh": str(llm.mesh_shape),
        "draft": llm.draft,
        "tree": llm.tree,
    }


def _statistics(llm: LLM, output: RequestOutput) -> str:
    parts = [f"{len(output.token_ids)} tokens ({output.finish_reason})"]
    if output.tokens_per_second is not None and output.mean_accepted_length is not None:
        parts.append(f"{output.tokens_per_second:.1f} tokens/s")
        parts.append(f"{output.mean_accepted_length:.2f} tokens a round")
        milliseconds = 1e3 * output.mean_accepted_length / output.tokens_per_second
        parts.append(f"{milliseconds:.1f} ms a round")
    parts.append(f"first token after {output.time_to_first_token_s:.2f} s")
    parts.append(f"mesh {llm.mesh_shape}, draft {llm.draft}, tree {llm.tree}, {llm.dtype}")
    return "jaxspec: " + ", ".join(parts)


if __name__ == "__main__":
    sys.exit(main())
