"""Speed of generation: one row a mesh, draft and tail placement, beside the floor and beside transformers.

    python tools/bench/generate.py --model DIR --meshes 1,1,1 2,1,1 --drafts none ngram --peer

The floor of a round is what its weights take to be read, at the rate of a large copy measured in the same run; each
device reads its own part, so a tp or dcp mesh has a lower one. Tokens a second count those after the first,
greedy, one sequence at a time. The peer decodes the same prompts with the same weights (transformers, torch).
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxspec
from jaxspec.checkpoint.store import Checkpoint
from jaxspec.engine.engine import Engine

PROMPTS = [
    "Explain what gravity is in two sentences.",
    "Write a Python function that adds two numbers.",
    "Write a short poem about the sea.",
    "List the planets of the solar system, each with one fact.",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--meshes", nargs="+", default=["1,1,1"])
    parser.add_argument("--drafts", nargs="+", default=["none", "ngram"])
    parser.add_argument("--placements", nargs="+", default=["last", "spread"], help="where the mesh has stages")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--exchange", default="auto")
    parser.add_argument("--tree", help="of every draft (default: each one's own)")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--peer", action="store_true", help="transformers on the same device and weights")
    parser.add_argument("--output", type=Path, help="the rows as JSON")
    options = parser.parse_args()

    device = jax.devices()[0]
    rate = copy_rate()
    print(f"# {device.device_kind}, jax {jax.__version__}, copies move {rate / 1e12:.2f} TB/s", flush=True)
    header = (
        "mesh",
        "draft",
        "tail",
        "exchange",
        "tokens/s",
        "ms/round",
        "floor ms",
        "tokens/round",
        "TTFT ms",
        "temp MiB",
        "compile s",
    )
    print(" | ".join(header), flush=True)
    rows = []
    for mesh in options.meshes:
        for draft in options.drafts:
            for placement in options.placements if not mesh.startswith("1,") else ["last"]:
                row = measure(options, mesh, draft, placement, rate)
                rows.append(row)
                print(" | ".join(str(value) for value in row.values()), flush=True)
    if options.peer:
        rows.append({"peer": "transformers", "tokens/s": peer_tokens_per_second(options)})
        print(f"transformers: {rows[-1]['tokens/s']:.1f} tokens/s", flush=True)
    if options.output:
        options.output.write_text(json.dumps({"device": device.device_kind, "rows": rows}, indent=1))


def copy_rate() -> float:
    """Bytes read and written a second by a large device-to-device copy."""
    size = 2**30 if jax.devices()[0].platform != "cpu" else 2**27
    x = jnp.arange(size // 4, dtype=jnp.float32)
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = step(step(x)).block_until_ready()
    started = time.perf_counter()
    for _ in range(20):
        x = step(x)
    x.block_until_ready()
    return 2 * size * 20 / (time.perf_counter() - started)


def bytes_per_round(engine: Engine) -> int:
    """Weights that the devices of one (tp, dcp) place read in a round: every stage's layers in turn, and the head."""
    layout = engine.spec.layout

    def local(weights: Any) -> int:
        return sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(weights))

    weights = nnx.to_pure_dict(engine.weights)
    return layout.mesh.pp * local(weights["layers"]) + local(weights["embedding" if layout.shares_head else "head"])


def measure(options: argparse.Namespace, mesh: str, draft: str, placement: str, rate: float) -> dict[str, object]:
    started = time.perf_counter()
    llm = jaxspec.LLM(
        options.model,
        draft=draft,
        mesh=jaxspec.MeshShape.parse(mesh),
        dtype=options.dtype,
        tail_placement=placement,
        attention=options.attention,
        exchange=options.exchange,
        tree=None if draft == "none" else options.tree,
        max_num_seqs=1,
        max_model_len=1024,
        report=lambda line: print(f"#   {line}", file=sys.stderr, flush=True),
    )
    llm.warm_up()
    compiled = time.perf_counter() - started
    params = jaxspec.SamplingParams(max_tokens=options.max_tokens)
    for prompt in PROMPTS:  # the first runs of a program record its graphs
        llm.generate(prompt, params)
    outputs = [llm.generate(prompt, params)[0] for prompt in PROMPTS]
    tokens = sum(len(o.token_ids) - 1 for o in outputs)
    seconds = sum((len(o.token_ids) - 1) / o.tokens_per_second for o in outputs if o.tokens_per_second)
    rounds = sum(len(o.accepted_lengths) for o in outputs)
    temporaries = max(p.memory_analysis().temp_size_in_bytes for p in llm.engine.programs.values())
    return {
        "mesh": mesh,
        "draft": f"{llm.draft} {llm.tree}",
        "tail": placement,
        "exchange": llm.exchange,
        "tokens/s": round(tokens / seconds, 1),
        "ms/round": round(1e3 * seconds / rounds, 3),
        "floor ms": round(1e3 * bytes_per_round(llm.engine) / rate, 3),
        "tokens/round": round(tokens / rounds, 2),
        "TTFT ms": round(1e3 * statistics.median(o.time_to_first_token_s for o in outputs), 1),
        "temp MiB": round(temporaries / 2**20, 1),
        "compile s": round(compiled, 1),
    }


def peer_tokens_per_second(options: argparse.Namespace) -> float:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = Checkpoint.open(options.model)
    tokenizer = jaxspec.LLM(options.model, max_num_seqs=1, max_model_len=256).tokenizer
    config = LlamaConfig(**{k: v for k, v in checkpoint.config.items() if k not in ("architectures", "model_type")})
    on_gpu = torch.cuda.is_available()
    model = LlamaForCausalLM(config).to(torch.bfloat16 if on_gpu else torch.float32)
    state = {name: torch.tensor(array) for name, array in checkpoint.read(list(checkpoint.shapes)).items()}
    model.load_state_dict(state, strict=False)
    model = model.to("cuda" if on_gpu else "cpu").eval()
    for _ in range(2):  # the second time is warm
        tokens, seconds = 0, 0.0
        for prompt in PROMPTS:
            ids = torch.tensor([tokenizer.encode_chat(prompt)], device=model.device)
            started = time.perf_counter()
            out = model.generate(ids, max_new_tokens=options.max_tokens, do_sample=False)
            tokens += out.shape[1] - ids.shape[1]
            seconds += time.perf_counter() - started
    return tokens / seconds


if __name__ == "__main__":
    main()
