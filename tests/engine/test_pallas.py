"""Engines whose attention and commits are the kernels, simulated: tokens and acceptance are those of plain JAX.

The trained pair has heads of 16, which no kernel takes. The same function with heads of 64 is made of it: RoPE turns
dimension i of a head together with i + head_dim / 2, by a frequency that depends on i / head_dim alone, so that every
fourth dimension of a wide head does what one of a narrow head does, and the others are 0.
"""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from models_on_mesh import PAIR, PAIR_TARGET, engine
from safetensors.numpy import load_file, save_file
from toy import run

from jaxspec.drafts.eagle3 import Eagle3
from jaxspec.engine.sequence import Sequence
from jaxspec.sampling_params import SamplingParams
from jaxspec.speculate.attention import PALLAS

NARROW, WIDE = 16, 64
# Of 16: the second notices within five tokens when nodes see a sibling, or target or draft miss a token of the prefix.
PROMPTS, MAX_TOKENS = (3, 15), 8
TREES = ["dynamic:steps=3,topk=2,nodes=8", pytest.param("chain:4", marks=pytest.mark.slow)]


@pytest.fixture(scope="module")
def wide_pair(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("wide_pair")
    for part in ("target", "head"):
        widen(PAIR / part, directory / part)
    return directory


def widen(source: Path, destination: Path) -> None:
    """Writes a model of one function with that at `source`, with heads of 64 for 16."""
    tensors = load_file(source / "model.safetensors")
    for name, x in tensors.items():
        if "q_proj" in name:  # scores are divided by the root of the head size
            tensors[name] = spread(x) * x.dtype.type((WIDE / NARROW) ** 0.5)
        elif "k_proj" in name or "v_proj" in name:
            tensors[name] = spread(x)
        elif "o_proj" in name:
            tensors[name] = np.ascontiguousarray(spread(x.T).T)
    config = json.loads((source / "config.json").read_text())
    config.get("transformer_layer_config", config)["head_dim"] = WIDE
    destination.mkdir()
    save_file(tensors, destination / "model.safetensors")
    (destination / "config.json").write_text(json.dumps(config))


def spread(x: np.ndarray) -> np.ndarray:
    """Rows of narrow heads as those of wide ones."""
    of_half = np.arange(NARROW // 2) * WIDE // NARROW
    heads = x.reshape(-1, NARROW, *x.shape[1:])
    wide = np.zeros((len(heads), WIDE, *x.shape[1:]), x.dtype)
    wide[:, np.concatenate([of_half, WIDE // 2 + of_half])] = heads
    return wide.reshape(-1, *x.shape[1:])


@functools.cache
def independent() -> dict:
    """Prompts and greedy tokens, as a loop without a cache in torch found them; choices are far from ties."""
    return json.loads((PAIR / "prompts.json").read_text())


def serve(built) -> list[Sequence]:
    """Two requests at once, the second with a prompt of three chunks."""
    params = SamplingParams(max_tokens=MAX_TOKENS)
    return run(built, [Sequence(i, independent()["prompts"][n], params, 0, []) for i, n in enumerate(PROMPTS)])


@pytest.mark.parametrize("tree", TREES)
def test_tokens_are_those_of_plain_decoding_and_acceptance_is_that_of_plain_jax(tree, wide_pair):
    sizes = dict(tree=tree, chunk=16, num_slots=2, page_size=8, num_pages=16)
    expected = serve(engine(PAIR_TARGET, draft=Eagle3.open(PAIR / "head"), **sizes))
    wide = dict(draft=Eagle3.open(wide_pair / "head"), dtype="bfloat16", attention=PALLAS)
    got = serve(engine(str(wide_pair / "target"), **wide, **sizes))
    assert [each.token_ids for each in got] == [independent()["greedy"][n][:MAX_TOKENS] for n in PROMPTS]
    assert [each.accepted_lengths for each in got] == [each.accepted_lengths for each in expected]
    assert all(max(each.accepted_lengths) > 2 for each in got)
