"""Milliseconds a round of the decode program, with random weights made on the devices: no checkpoint is needed.

    python tools/bench/step.py --shape llama-3.1-8b --meshes 1,1,1 2,1,1 --trees none chain:4 --batch 1 8
    python tools/bench/step.py --draft eagle3 --trees chain:4 dynamic:steps=4,topk=4,nodes=16

Slots hold `--context` tokens, and shapes are static, so an idle dispatch costs what a busy one does (but a chunk of the
lane is empty). The floor is what the target's weights take to be read, each stage's in turn, at the rate of a large
copy measured in the same run; what is above it belongs to the draft too. `big` lists the largest temporaries of the
program: none should have the size of a cache or of a weight matrix.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import re
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from generate import bytes_per_round, copy_rate
from jax.sharding import Mesh
from profiling import print_kernels

from jaxspec.cache.pages import PageGeometry
from jaxspec.cache.plan import check_memory, plan_memory
from jaxspec.checkpoint.restore import abstract_decoder
from jaxspec.drafts.eagle3 import Eagle3
from jaxspec.drafts.eagle3_config import Eagle3Config
from jaxspec.drafts.interface import Drafter
from jaxspec.drafts.registry import find_drafter
from jaxspec.engine.engine import Engine
from jaxspec.errors import UserError
from jaxspec.llm import ATTENTION, EXCHANGE, TAIL_AXES
from jaxspec.mesh import MeshShape, make_mesh
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import DecoderLayout
from jaxspec.models.registry import read_config
from jaxspec.peers import BY_PEERS, Peers, choose_exchange
from jaxspec.precision import DTYPES
from jaxspec.speculate.attention import AUTO, choose_attention
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
    parser.add_argument("--draft", choices=["ngram", "eagle3"], default="ngram", help="of trees other than none")
    parser.add_argument("--trees", nargs="+", default=["none", "chain:4"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1])
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--placements", nargs="+", choices=TAIL_AXES, default=["last"], help="where there are stages")
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--lane", action="store_true", help="the program in which a prompt chunk rides along")
    parser.add_argument("--sampled", action="store_true", help="the program for slots that may sample, without filters")
    parser.add_argument("--attention", choices=ATTENTION, default=AUTO)
    parser.add_argument(
        "--exchange", nargs="+", choices=EXCHANGE, default=[AUTO], help="how devices talk, where there are several"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--profile", action="store_true", help="the kernels of two dispatches by their time")
    parser.add_argument("--output", type=Path, help="the rows as JSON")
    options = parser.parse_args()

    rate = copy_rate()
    print(f"# {jax.devices()[0].device_kind}, jax {jax.__version__}, copies move {rate / 1e12:.2f} TB/s", flush=True)
    print(
        "mesh | tail | exchange | batch | tree | ms/round | floor ms | ratio | temp MiB | compile s | big", flush=True
    )
    rows = []
    for mesh in options.meshes:
        shape = MeshShape.parse(mesh)
        config = read_config({"model_type": "llama", "max_position_embeddings": 131072, **SHAPES[options.shape]})
        for placement in options.placements if shape.pp > 1 else options.placements[:1]:
            layout = DecoderLayout(config, shape, TAIL_AXES[placement], DTYPES[options.dtype])
            graph, state = abstract_decoder(layout)
            weights = random_weights(state, make_mesh(layout.mesh))
            exchanges = options.exchange if shape.size > 1 else options.exchange[:1]
            for exchange, tree, batch in itertools.product(exchanges, options.trees, options.batch):
                row = measure(options, layout, graph, weights, placement, exchange, tree, batch, rate)
                rows.append(row)
                print(" | ".join(str(value) for value in row.values()), flush=True)
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1))


def random_weights(state, mesh: Mesh):
    """Made in one program, sharded from birth; integers count up.

    All arrays are cut from one: to compile a draw for each takes longer than a whole step does.
    """
    shardings = nnx.get_named_sharding(state, mesh)

    def draw(key):
        floats = [x for x in jax.tree.leaves(state) if not jnp.issubdtype(x.dtype, jnp.integer)]
        noise = 0.02 * jax.random.normal(key, (max(x.size for x in floats),), floats[0].dtype)
        return jax.tree.map(
            lambda x: (
                jnp.arange(x.size, dtype=x.dtype) if jnp.issubdtype(x.dtype, jnp.integer) else noise[: x.size]
            ).reshape(x.shape),
            state,
        )

    return jax.jit(draw, out_shardings=shardings)(jax.random.key(0, impl="rbg"))


def random_head(target: ModelConfig) -> Drafter:
    """An EAGLE-3 head as they are published for such a target: one layer, and 32,000 tokens of its own."""
    config = Eagle3Config(
        layer=dataclasses.replace(target, num_layers=1, tie_embeddings=False),
        target_hidden_size=target.hidden_size,
        draft_vocab_size=32_000,
        taps=None,
        num_taps=3,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        has_fc=True,
        fc_bias=False,
        has_embedding=False,
        has_head=True,
    )
    return Eagle3(config, files=None).fit(target)


def measure(options, layout, graph, weights, placement, exchange, tree, batch, rate) -> dict[str, object]:
    mesh, page_size = layout.mesh, 64 * layout.mesh.dcp
    name = "none" if tree == "none" else options.draft
    drafter = random_head(layout.config) if name == "eagle3" else find_drafter(name)
    draft_weights = random_weights(state, make_mesh(layout.mesh)) if (state := drafter.abstract_weights(layout)) else ()
    pages = -(-options.context // page_size)
    shape, geometry, device_mesh = TreeSpec.parse(tree), PageGeometry(page_size, mesh.dcp), make_mesh(mesh)
    attention, _ = choose_attention(options.attention, device_mesh.devices.flat[0], layout, shape.num_nodes, geometry)
    chosen, _ = choose_exchange(exchange, device_mesh)
    peers = Peers.connect(device_mesh, mesh) if chosen == BY_PEERS else None
    spec = StepSpec(
        layout=layout,
        drafter=drafter,
        tree=shape,
        geometry=geometry,
        num_pages=1 + batch * mesh.pp * pages,
        pages_per_slot=pages,
        slots_per_group=batch,
        chunk=options.chunk,
        rounds=options.rounds,
        attention=attention,
    )
    row = {"mesh": str(mesh), "tail": placement, "exchange": chosen, "batch": batch, "tree": tree}
    try:
        check_memory(plan_memory(spec, device_mesh), device_mesh)
    except UserError:
        return row | dict.fromkeys(("ms/round", "floor ms", "ratio"), "does not fit")
    engine = Engine(spec, device_mesh, graph, weights, draft_weights, peers)
    started = time.perf_counter()
    program = engine.program(Variant(not options.lane or mesh.pp == 1, options.lane, not options.sampled, batch))
    compiled = time.perf_counter() - started
    fill(engine, options.context - spec.tree.num_nodes - 1)
    dispatch = functools.partial(
        engine.seconds_per_dispatch, batch, has_lane=options.lane, is_greedy=not options.sampled
    )
    for _ in range(3):  # the first runs record graphs
        dispatch(1)
    seconds = float(np.median([dispatch(5) for _ in range(5)]))
    if options.profile:
        print_kernels(lambda: dispatch(1))
    milliseconds = 1e3 * seconds / (1 if options.lane else options.rounds)  # a lane's dispatch has one round
    floor = 1e3 * bytes_per_round(engine) / rate
    return row | {
        "ms/round": round(milliseconds, 3),
        "floor ms": round(floor, 3),
        "ratio": round(milliseconds / floor, 2),
        "temp MiB": round(program.memory_analysis().temp_size_in_bytes / 2**20, 1),
        "compile s": round(compiled, 1),
        "big": largest_results(program.as_text()),
    }


def fill(engine: Engine, length: int) -> None:
    """Slots that hold so many tokens, in pages of their own: kernels read no more than there are."""
    slots = engine._state.slots
    count, width = slots.page_table.shape
    held = {
        "length": np.full(count, length, np.int32),
        "page_table": 1 + np.arange(count * width, dtype=np.int32).reshape(count, width),
    }
    placed = {name: jax.device_put(array, getattr(slots, name).sharding) for name, array in held.items()}
    engine._state = dataclasses.replace(engine._state, slots=dataclasses.replace(slots, **placed))


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
