"""Tokens and acceptance on every mesh: float32, several sequences of unequal length at once, greedy and sampled.

Correct tokens alone prove little: a drafter fed wrong metadata still gives them, only slower. So every round's
accepted length must be that of the speculative run on one device, too.
"""

import covers
import numpy as np
import pytest
from margins import smallest_margin
from models_on_mesh import ONE, engine
from toy import run

from jaxspec.engine.sequence import Sequence
from jaxspec.mesh import MeshShape
from jaxspec.sampling_params import SamplingParams

MESHES = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 4), (2, 2, 1)]  # test_eagle3_meshes.py has others
FACTORS = {
    "mesh": MESHES,
    "draft": [("none", "none"), ("ngram", "static:fork3x3")],
    "placement": ["last", "spread"],
    "chunk": [3, 64],
    "rounds": [1, 2],
    "model": ["llama_bias", "qwen3"],
}
# Random prompts whose answers repeat themselves, so that n-grams are accepted: seeds of greedy and of sampled ones.
PROMPTS = {"llama_bias": ([93, 78, 27, 65], [42, 29, 57]), "qwen3": ([77, 65, 17, 73], [48, 14, 7])}
LEAST_MARGIN = 5e-4  # rounding moves these scores by less than 5e-5


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    covers.parametrize(metafunc, FACTORS)


def serve(case_engine, model: str) -> list[Sequence]:
    greedy, sampled = PROMPTS[model]
    requests = []
    for order, seed in enumerate([*greedy, *sampled]):
        rng = np.random.default_rng(seed)
        prompt = rng.integers(0, 256, int(rng.integers(3, 41))).tolist()
        options = {"temperature": 0.2, "top_p": 0.9, "top_k": 20, "min_p": 0.01} if seed in sampled else {}
        params = SamplingParams(max_tokens=40 - 3 * order, **options)
        requests.append(Sequence(order, prompt, params, seed, []))
    return run(case_engine, requests)


@pytest.fixture(scope="module")
def one_device():
    """Runs on one device, by (model, draft): plain decoding and speculation."""
    runs = {}

    def run(model, draft):
        if (model, draft) not in runs:
            runs[model, draft] = serve(engine(model, ONE, draft=draft[0], tree=draft[1]), model)
        return runs[model, draft]

    return run


@pytest.mark.parametrize("model", PROMPTS)
def test_the_reference_runs_are_decisive_and_accept_drafts(one_device, model):
    plain = one_device(model, ("none", "none"))
    margins = {request.seed: smallest_margin(model, request) for request in plain}
    assert min(margins.values()) > LEAST_MARGIN, margins
    for draft in FACTORS["draft"][1:]:
        accepted = [length for request in one_device(model, draft) for length in request.accepted_lengths]
        assert np.mean(accepted) > 1.5


def test_every_mesh_gives_the_tokens_of_plain_decoding_and_the_acceptance_of_one_device(one_device, case):
    plain, speculative = one_device(case["model"], ("none", "none")), one_device(case["model"], case["draft"])
    draft, tree = case["draft"]
    requests = serve(
        engine(
            case["model"],
            MeshShape(*case["mesh"]),
            draft=draft,
            tree=tree,
            placement=case["placement"],
            chunk=case["chunk"],
            rounds=case["rounds"],
        ),
        case["model"],
    )
    assert [r.token_ids for r in requests] == [r.token_ids for r in plain]
    assert [r.accepted_lengths for r in requests] == [r.accepted_lengths for r in speculative]
