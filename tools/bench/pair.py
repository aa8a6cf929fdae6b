"""The trained pair of the tests on the devices that there are: is it right, and what does a round take?

    python tools/bench/pair.py --meshes 1,1,1 2,1,1 1,2,1 1,1,2

Greedy tokens must be those of an independent loop, and accepted lengths those of it (a chain of 4) or of the first mesh
(other trees), all in float32.
"""

import argparse
import json
from pathlib import Path

import jax
import numpy as np
from safetensors.numpy import load_file

from jaxspec.cache.pages import PageGeometry
from jaxspec.checkpoint.restore import restore_decoder
from jaxspec.drafts.eagle3 import Eagle3
from jaxspec.engine.engine import Engine
from jaxspec.engine.sequence import Sequence
from jaxspec.llm import TAIL_AXES
from jaxspec.mesh import MeshShape, make_mesh
from jaxspec.models.decoder import DecoderLayout
from jaxspec.models.registry import read_config
from jaxspec.sampling_params import SamplingParams
from jaxspec.speculate.state import StepSpec
from jaxspec.speculate.trees import TreeSpec

PAIR = Path(__file__).parents[2] / "tests" / "fixtures" / "eagle3_pair"


class File:
    """All tensors of one file."""

    def __init__(self, path: Path):
        self._tensors = load_file(path)

    def read(self, names):
        return {name: self._tensors[name] for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--meshes", nargs="+", default=["1,1,1"])
    parser.add_argument("--trees", nargs="+", default=["chain:4", "dynamic:steps=4,topk=4,nodes=16"])
    parser.add_argument("--placements", nargs="+", choices=TAIL_AXES, default=["last", "spread"])
    options = parser.parse_args()
    expected = json.loads((PAIR / "prompts.json").read_text())
    lengths = {"chain:4": expected["accepted_lengths"]}
    print(f"# {jax.devices()[0].device_kind}, jax {jax.__version__}, float32")
    print("mesh | tail | tree | tokens | accepted lengths | mean | ms/round", flush=True)
    for mesh in map(MeshShape.parse, options.meshes):
        for placement in options.placements if mesh.pp > 1 else options.placements[:1]:
            for tree in options.trees:
                engine = make_engine(mesh, placement, tree)
                requests = serve(engine, expected["prompts"])
                found = [request.accepted_lengths for request in requests]
                are_tokens = [r.token_ids for r in requests] == expected["greedy"]
                are_lengths = found == lengths.setdefault(tree, found)
                mean = np.mean([length for each in found for length in each])
                seconds = np.median([engine.seconds_per_dispatch(1, 5) for _ in range(5)]) / engine.spec.rounds
                verdicts = ["same" if is_same else "DIFFER" for is_same in (are_tokens, are_lengths)]
                print(mesh, placement, tree, *verdicts, f"{mean:.3f}", f"{1e3 * seconds:.3f}", sep=" | ", flush=True)


def make_engine(mesh: MeshShape, placement: str, tree: str) -> Engine:
    config = read_config(json.loads((PAIR / "target" / "config.json").read_text()))
    layout, devices = DecoderLayout(config, mesh, TAIL_AXES[placement], np.dtype("float32")), make_mesh(mesh)
    head = Eagle3.open(PAIR / "head").fit(config)
    spec = StepSpec(
        layout=layout,
        drafter=head,
        tree=TreeSpec.parse(tree),
        geometry=PageGeometry(64 * mesh.dcp, mesh.dcp),
        num_pages=1 + 8 * 2,
        pages_per_slot=2,
        slots_per_group=8 // mesh.pp,
        chunk=32,
        rounds=4,
    )
    graph, weights = restore_decoder(File(PAIR / "target" / "model.safetensors"), layout, devices)
    return Engine(spec, devices, graph, weights, head.restore(layout, devices))


def serve(engine: Engine, prompts: list[list[int]]) -> list[Sequence]:
    requests = [Sequence(i, prompt, SamplingParams(max_tokens=48), 0, []) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    while engine.has_work:
        for _ in engine.step():
            pass
    return requests


if __name__ == "__main__":
    main()
