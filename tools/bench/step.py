"""Milliseconds a round of the decode program, with random weights made on the devices: no checkpoint is needed.

    python tools/bench/step.py --shape llama-3.1-8b --meshes 1,1,1 2,1,1 --trees none chain:4 --batch 1 8

Shapes are static, so an empty dispatch costs what a busy one does. The floor is what the weights take to be read, each
stage's in turn, at the rate of a large copy measured in the same run. `big` lists the largest
temporaries of the program: none should have the size of a cache or of a weight matrix.
"""

import argparse
import json
import re
import time
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from generate import bytes_per_round, copy_rate

from jaxspec.cache.pages import PageGeometry
from jaxspec.checkpoint.restore import abstract_decoder
from jaxspec.drafts.registry import find_drafter
from jaxspec.engine.engine import Engine
from jaxspec.llm import DTYPES, TAIL_AXES
from jaxspec.mesh import MeshShape, make_mesh
from jaxspec.models.decoder import DecoderLayout
from jaxspec.models.registry import read_config
from jaxspec.speculate.program import Variant
from jaxspec.speculate.state import StepSpec
from jaxspec.speculate.trees import TreeSpec

SHAPES = {
    "smollm2-135m": dict(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    ),
    "llama-3.1-8b": dict(
        vocab_size=128256,
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-3.1-8b")
    parser.add_argument("--meshes", nargs="+", default=["1,1,1"])
    parser.add_argument("--trees", nargs="+", default=["none", "chain:4"], help="drafted by n-grams")
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--placement", choices=TAIL_AXES, default="last")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--output", type=Path, help="the rows as JSON")
    options = parser.parse_args()

    rate = copy_rate()
    print(f"# {jax.devices()[0].device_kind}, jax {jax.__version__}, copies move {rate / 1e12:.2f} TB/s", flush=True)
    print("mesh | batch | tree | ms/round | floor ms | ratio | temp MiB | compile s | big", flush=True)
    rows = []
    for mesh in options.meshes:
        shape = MeshShape.parse(mesh)
        config = read_config({"model_type": "llama", "max_position_embeddings": 131072, **SHAPES[options.shape]})
        layout = DecoderLayout(config, shape, TAIL_AXES[options.placement], DTYPES[options.dtype])
        graph, weights = random_weights(layout)
        for tree in options.trees:
            for batch in options.batch:
                row = measure(options, layout, graph, weights, tree, batch, rate)
                rows.append(row)
                print(" | ".join(str(value) for value in row.values()), flush=True)
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1))


def random_weights(layout: DecoderLayout):
    """Made in one program, sharded from birth."""
    graph, state = abstract_decoder(layout)
    shardings = nnx.get_named_sharding(state, make_mesh(layout.mesh))

    def draw(key):
        leaves, structure = jax.tree.flatten(state)
        keys = jax.random.split(key, len(leaves))
        drawn = [0.02 * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(structure, drawn)

    return graph, jax.jit(draw, out_shardings=shardings)(jax.random.key(0))


def measure(options, layout, graph, weights, tree, batch, rate) -> dict[str, object]:
    mesh, page_size = layout.mesh, 64 * layout.mesh.dcp
    pages = -(-options.context // page_size)
    spec = StepSpec(
        layout=layout,
        drafter=find_drafter("none" if tree == "none" else "ngram"),
        tree=TreeSpec.parse(tree),
        geometry=PageGeometry(page_size, mesh.dcp),
        num_pages=1 + batch * mesh.pp * pages,
        pages_per_slot=pages,
        slots_per_group=batch,
        chunk=64,
        rounds=options.rounds,
    )
    device_mesh = make_mesh(mesh)
    engine = Engine(spec, device_mesh, graph, weights)
    started = time.perf_counter()
    program = engine.program(Variant(is_solo=True, has_lane=False, is_greedy=True, batch=batch))
    compiled = time.perf_counter() - started
    for _ in range(3):  # the first runs record graphs
        engine.seconds_per_dispatch(batch, 1)
    milliseconds = 1e3 * float(np.median([engine.seconds_per_dispatch(batch, 5) for _ in range(5)])) / options.rounds
    floor = 1e3 * bytes_per_round(engine) / rate
    return {
        "mesh": str(mesh),
        "batch": batch,
        "tree": tree,
        "ms/round": round(milliseconds, 3),
        "floor ms": round(floor, 3),
        "ratio": round(milliseconds / floor, 2),
        "temp MiB": round(program.memory_analysis().temp_size_in_bytes / 2**20, 1),
        "compile s": round(compiled, 1),
        "big": largest_results(program.as_text()),
    }


def largest_results(text: str, least: int = 2**20, count: int = 4) -> list[str]:
    """The largest arrays that instructions other than parameters, tuples and views produce outside fusions."""
    found: dict[str, int] = {}
    pattern = re.compile(
        r"= (bf16|f32|s32|u32)\[([\d,]+)\]\S* (?!parameter|get-tuple-element|bitcast|tuple|while)([\w-]+)\("
    )
    for kind, sizes, operation in pattern.findall(text):
        size = int(np.prod([int(n) for n in sizes.split(",")])) * (2 if kind == "bf16" else 4)
        if size >= least:
            found[f"{operation} {kind}[{sizes}]"] = size
    return sorted(found, key=lambda name: -found[name])[:count]


if __name__ == "__main__":
    main()
