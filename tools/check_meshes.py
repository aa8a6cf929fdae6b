"""Every mesh that fits the devices there are: the same texts as on one device, the memory that was planned, the speed.

    python tools/check_meshes.py
    python tools/check_meshes.py --meshes 2,2,1 4,1,1 --drafts runs/smollm2-eagle3/head --exchange peers
    python tools/check_meshes.py --drafts eagle3 --greedy --jobs 4 --contexts --dtype bfloat16 --against reference

Each mesh and placement of the tail is run by a process of its own, `--jobs` of them at once, which is killed when it
takes too long: what it had found by then, and what it was at, is in the table. Most of the time is the compiler's, for
every draft, tree and kind of sampling has programs of its own. Texts are SmolLM2's, with every draft and tree.
Where a greedy token differs from that of one device, `lead` says by how much the likeliest token led the second there:
rounding explains small leads only. Speeds are those of `bench/step.py`, for random weights of Llama-3.1-8B's shape.
"""

import argparse
import gc
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from jaxspec.checkpoint.staging import whole_file
from jaxspec.evaluate.acceptance import first_difference

ONE = "1,1,1"
MESHES = ["2,1,1", "1,2,1", "1,1,2", "2,2,1", "2,1,2", "1,2,2", "4,1,1", "2,2,2"]
STEP = Path(__file__).parent / "bench" / "step.py"
PROMPTS = [
    "Explain what gravity is in two sentences.",
    "Write a Python function that reverses a list.",
    "List three animals that live in the sea, and say one thing about each of them.",
    "Repeat the word yes ten times.",
    "What is 17 times 23? Show how you work it out, step by step.",
]
GREEDY, SAMPLED = dict(temperature=0.0), dict(temperature=0.8, top_p=0.95, seed=7)
TREES = {"none": ["none"], "ngram": ["chain:4"]}
HEAD_TREES = ["chain:4", "dynamic:steps=4,topk=4,nodes=16"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meshes", nargs="+", default=MESHES, help="those that don't fit are left out")
    parser.add_argument("--drafts", nargs="+", default=["none", "ngram", "eagle3"], help="names, or heads of SmolLM2")
    parser.add_argument("--greedy", action="store_true", help="no sampled texts")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--against", help="attention of the one device that all are compared with (default: the same)")
    parser.add_argument("--exchange", default="auto")
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--prompts", type=int, default=len(PROMPTS), metavar="N", help="only the first N")
    parser.add_argument("--contexts", nargs="*", type=int, default=[1024, 32768], help="none measures no speeds")
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--limit", type=float, default=300, help="seconds for a process")
    parser.add_argument("--jobs", type=int, default=1, help="processes at once, where texts are made")
    parser.add_argument("--output", type=Path, help="everything as JSON")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(options, *options.child)
        return

    counted = run_process(options, "count", ONE)
    if counted["end"] != "done":
        sys.exit(f"check_meshes: the process that counts devices {counted['end']}: {counted['error']}")
    count = counted["result"]
    meshes = [mesh for mesh in options.meshes if math.prod(map(int, mesh.split(","))) <= count]
    print(f"# {count} devices: meshes {' '.join(meshes) or 'none of those asked for'}", flush=True)
    tasks = [(mesh, placement) for mesh in [ONE, *meshes] for placement in placements(mesh)]
    against = argparse.Namespace(**vars(options) | {"attention": options.against or options.attention})
    print(
        "mesh | tail | draft | tree | sampling | tokens | lead | accepted lengths | MiB planned | MiB in use",
        flush=True,
    )
    with ThreadPoolExecutor(options.jobs) as pool:
        waited_for = pool.submit(run_process, against, "texts", ONE, tail="last")
        others = [task for task in tasks if task != (ONE, "last") or options.against]
        ends = [pool.submit(run_process, options, "texts", mesh, tail=tail) for mesh, tail in others]
        expected = waited_for.result()
        if not options.against or expected["end"] != "done":
            show_texts(options, expected, expected)
        for ended in as_completed(ends):
            show_texts(options, ended.result(), expected)
    results = [expected, *(ended.result() for ended in ends)]
    speeds = list(measure_speeds(options, [ONE, *meshes]))
    if options.output:
        options.output.write_text(json.dumps({"texts": results, "speeds": speeds}, indent=1))


def placements(mesh: str) -> list[str]:
    return ["last", "spread"] if int(mesh.split(",")[0]) > 1 else ["last"]


def show_texts(options: argparse.Namespace, found: dict[str, Any], expected: dict[str, Any]) -> None:
    """A row for each run of a mesh, and one that says where it ended."""
    mesh, tail = found["mesh"], found["tail"]
    by_name = {(run["draft"], run["tree"], run["sampling"]): run for run in expected["result"]}
    for run in found["result"]:
        reference = by_name.get((run["draft"], run["tree"], run["sampling"]))
        verdicts = ["-", "-", "-"] if reference is None else compare(options, run, reference)
        row = [mesh, tail, run["draft"], run["tree"], run["sampling"], *verdicts, run["planned"], run["in_use"]]
        print(*row, sep=" | ", flush=True)
    if found["end"] != "done":
        print(mesh, tail, found["end"], f"while it was at: {found['at']}", sep=" | ", flush=True)


def compare(options: argparse.Namespace, run: dict[str, Any], reference: dict[str, Any]) -> list[str]:
    """Whether tokens and accepted lengths are those of one device; the largest lead where greedy tokens differ."""
    answers = list(zip(run["answers"], reference["answers"], strict=True))
    parted = [(found, wanted) for found, wanted in answers if found["token_ids"] != wanted["token_ids"]]
    lead = "-"
    if parted and run["sampling"] == "greedy":
        texts = [
            wanted["prompt"] + wanted["token_ids"][: first_difference(found["token_ids"], wanted["token_ids"])]
            for found, wanted in parted
        ]
        measured = run_process(options, "leads", ONE, texts)
        lead = f"{max(measured['result']):.2g}" if measured["end"] == "done" else measured["end"]
    lengths = sum(found["accepted_lengths"] != wanted["accepted_lengths"] for found, wanted in answers)
    return [verdict(len(parted), len(answers)), lead, verdict(lengths, len(answers))]


def verdict(differ: int, count: int) -> str:
    return f"{differ} of {count} DIFFER" if differ else "same"


def measure_speeds(options: argparse.Namespace, meshes: list[str]) -> Iterator[dict[str, Any]]:
    for context in options.contexts:
        print(
            f"# {options.shape}, context {context}: mesh | tail | exchange | batch | tree | ms/round | floor ms | ratio"
        )
        for mesh in meshes:
            with tempfile.TemporaryDirectory() as directory:
                rows = Path(directory) / "rows.json"
                sizes = ["--context", str(context), "--batch", *map(str, options.batch), "--shape", options.shape]
                sizes += ["--attention", options.attention, "--exchange", options.exchange]
                command = [sys.executable, str(STEP), "--meshes", mesh, *sizes, "--output", str(rows)]
                end, _ = wait(command, options.limit)
                measured = json.loads(rows.read_text()) if rows.is_file() else []
            if end != "done":
                print(mesh, end, sep=" | ", flush=True)
            for row in measured:
                names = ("mesh", "tail", "exchange", "batch", "tree", "ms/round", "floor ms", "ratio")
                print(*(row[name] for name in names), sep=" | ", flush=True)
                yield row | {"context": context}


def run_process(
    options: argparse.Namespace, task: str, mesh: str, texts: Any = None, tail: str = "last"
) -> dict[str, Any]:
    """A task in a process of its own: how it ended, what it was at, and its result."""
    with tempfile.TemporaryDirectory() as directory:
        given, at, result = (Path(directory) / name for name in ("given", "at", "result"))
        given.write_text(json.dumps(texts))
        command = [sys.executable, __file__, "--child", f"{task}:{mesh}:{tail}", directory, *arguments_of(options)]
        end, error = wait(command, options.limit)
        return {
            "mesh": mesh,
            "tail": tail,
            "end": end,
            "at": at.read_text() if at.is_file() else "start",
            "error": error,
            "result": json.loads(result.read_text()) if result.is_file() else [],
        }


def arguments_of(options: argparse.Namespace) -> list[str]:
    names = ("dtype", "attention", "exchange", "max_tokens", "prompts")
    named = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    return [*named, *["--greedy"] * options.greedy, "--drafts", *options.drafts]


def wait(command: list[str], limit: float) -> tuple[str, str]:
    """How a process ended: done, failed or HANGS; and the end of what it said on standard error."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True)
        try:
            code = process.wait(limit)
            end = "done" if code == 0 else f"failed with {code}"
        except subprocess.TimeoutExpired:
            end = f"HANGS for {limit:.0f} s"
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        errors.seek(0)
        said = errors.read()[-2000:]
    if end != "done":
        print(said, file=sys.stderr)
    return end, said


# In a process of its own


def run_child(options: argparse.Namespace, what: str, directory: str) -> None:
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # other processes may want the devices too
    task, mesh, tail = what.split(":")
    folder = Path(directory)

    def say(what: str) -> None:
        (folder / "at").write_text(f"{what}, {time.strftime('%H:%M:%S')}")

    def keep(result: Any) -> None:
        with whole_file(folder / "result") as partial:
            partial.write_text(json.dumps(result))

    given = json.loads((folder / "given").read_text())
    say("start of JAX")
    if task == "count":
        keep(count_devices(options))
    elif task == "leads":
        keep(measure_leads(options, given))
    else:
        made: list[dict[str, Any]] = []
        for texts in make_texts(options, mesh, tail, say):
            made.append(texts)
            keep(made)


def count_devices(options: argparse.Namespace) -> int:
    import jax

    if jax.devices()[0].platform != "cpu":
        return len(jax.devices())
    return max(math.prod(map(int, mesh.split(","))) for mesh in options.meshes)  # simulated


def measure_leads(options: argparse.Namespace, texts: list[list[int]]) -> list[float]:
    from jaxspec.checkpoint.default_model import DEFAULT_MODEL, open_model
    from jaxspec.evaluate.margins import leads
    from jaxspec.models.registry import read_config
    from jaxspec.precision import DTYPES

    checkpoint = open_model(DEFAULT_MODEL)
    return leads(checkpoint, read_config(checkpoint.config), DTYPES[options.dtype], texts)


def make_texts(options: argparse.Namespace, mesh: str, tail: str, say: Any) -> Iterator[dict[str, Any]]:
    import jax

    from jaxspec import LLM, SamplingParams

    samplings = {"greedy": GREEDY} | ({} if options.greedy else {"sampled": SAMPLED})
    pairs = [(draft, tree) for draft in options.drafts for tree in TREES.get(draft, HEAD_TREES)]
    for draft, tree in pairs:
        name = f"draft {draft}, tree {tree}"
        say(f"{name}: making it")
        llm = LLM(
            draft=draft,
            tree=tree,
            mesh=mesh,
            dtype=options.dtype,
            tail_placement=tail,
            attention=options.attention,
            exchange=options.exchange,
            max_num_seqs=4,
            max_model_len=256,
            report=lambda line, name=name: say(f"{name}: {line}"),
        )
        stats = jax.devices()[0].memory_stats()
        for sampling, settings in samplings.items():
            say(f"{name}: {sampling}")
            params = SamplingParams(max_tokens=options.max_tokens, **settings)
            outputs = llm.generate(PROMPTS[: options.prompts], params, show_progress=False)
            yield {
                "draft": draft,
                "tree": tree,
                "sampling": sampling,
                "planned": round(llm.memory.total / 2**20),
                "in_use": round(stats["bytes_in_use"] / 2**20) if stats else "-",
                "answers": [
                    {
                        "prompt": output.prompt_token_ids,
                        "token_ids": output.token_ids,
                        "accepted_lengths": output.accepted_lengths,
                    }
                    for output in outputs
                ],
            }
        del llm
        gc.collect()  # it and its engine refer to each other, and the next one's memory is measured


if __name__ == "__main__":
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # no multicast between GPUs
    main()
