"""A trained EAGLE-3 head on every mesh: tokens are those of plain decoding, and acceptance is that of one device.

The target and the head (tools/make_eagle3_pair.py) are tiny but trained, so that drafts are accepted and refused in
turn: a head that is fed a wrong row anywhere shows in the accepted lengths, never in the tokens.
"""

import functools
import json

import covers
import jax
import numpy as np
import pytest
from margins import smallest_margin
from models_on_mesh import PAIR, PAIR_TARGET, engine
from toy import run

from jaxspec.drafts.eagle3 import Eagle3
from jaxspec.engine.sequence import Sequence
from jaxspec.mesh import MeshShape
from jaxspec.sampling_params import SamplingParams

TREES = ["chain:4", "static:fan12", "dynamic:steps=4,topk=4,nodes=16"]
FACTORS = {
    "mesh": [(4, 1, 1), (2, 1, 2), (1, 2, 2), (2, 2, 2)],
    "tree": TREES,
    "placement": ["last", "spread"],
    "chunk": [3, 64],
    "rounds": [1, 2],
    "model": [PAIR_TARGET],
}
LEAST_MARGIN = 5e-4  # rounding moves these scores by less than 5e-5
SAMPLED = dict(temperature=0.4, top_p=0.95, top_k=40, min_p=0.01)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    covers.parametrize(metafunc, FACTORS)


@functools.cache
def independent() -> dict:
    """Prompts, greedy tokens and accepted lengths of chain:4, as a loop without a cache in torch found them."""
    return json.loads((PAIR / "prompts.json").read_text())


@functools.cache
def head() -> Eagle3:
    return Eagle3.open(PAIR / "head")


def serve(built, count=7, max_tokens=48, seeds=(3, 4, 5)) -> list[Sequence]:
    """The first prompts greedily, and as many of the next as there are seeds sampled."""
    prompts = independent()["prompts"]
    requests = [
        Sequence(order, prompts[order], SamplingParams(max_tokens=max_tokens), 0, [])
        for order in range(count - len(seeds))
    ]
    for seed in seeds:
        order = len(requests)
        requests.append(Sequence(order, prompts[order], SamplingParams(max_tokens=max_tokens, **SAMPLED), seed, []))
    return run(built, requests)


def lengths(requests: list[Sequence]) -> list[list[int]]:
    return [request.accepted_lengths for request in requests]


def mean(requests: list[Sequence]) -> float:
    return float(np.mean([length for request in requests for length in request.accepted_lengths]))


@pytest.fixture(scope="module")
def plain():
    return serve(engine(PAIR_TARGET))


@pytest.fixture(scope="module")
def one_device():
    """Speculation on one device, by tree."""

    @functools.cache
    def speculate(tree):
        return serve(engine(PAIR_TARGET, draft=head(), tree=tree))

    return speculate


def test_chains_are_accepted_as_an_independent_loop_without_caches_accepts_them():
    prompts = independent()["prompts"]
    requests = [Sequence(i, prompt, SamplingParams(max_tokens=48), 0, []) for i, prompt in enumerate(prompts)]
    run(engine(PAIR_TARGET, draft=head(), tree="chain:4"), requests)
    assert [request.token_ids for request in requests] == independent()["greedy"]
    assert lengths(requests) == independent()["accepted_lengths"]


@pytest.mark.parametrize("tree", TREES)
def test_the_reference_runs_are_decisive_and_accept_drafts(plain, one_device, tree):
    margins = {request.order: smallest_margin(PAIR_TARGET, request) for request in plain}
    assert min(margins.values()) > LEAST_MARGIN, margins
    greedy, sampled = one_device(tree)[:4], one_device(tree)[4:]
    assert mean(greedy) > 3
    assert mean(sampled) > 2
    # Drafts have no margin of their own: no choice of theirs may hang on rounding.
    built = engine(PAIR_TARGET, draft=head(), tree=tree)
    random, weights = np.random.default_rng(0), built._draft_weights

    def nudge(x):
        return x * (1 + 1e-5 * random.standard_normal(x.shape).astype(x.dtype)) if x.dtype == np.float32 else x

    try:
        built._draft_weights = jax.tree.map(nudge, weights)
        assert lengths(serve(built)) == lengths(one_device(tree))
    finally:
        built._draft_weights = weights


def test_every_mesh_gives_the_tokens_of_plain_decoding_and_the_acceptance_of_one_device(plain, one_device, case):
    built = engine(
        PAIR_TARGET,
        MeshShape(*case["mesh"]),
        draft=head(),
        tree=case["tree"],
        placement=case["placement"],
        chunk=case["chunk"],
        rounds=case["rounds"],
    )
    requests = serve(built)
    assert [request.token_ids for request in requests] == [request.token_ids for request in plain]
    assert lengths(requests) == lengths(one_device(case["tree"]))


def test_trees_accept_more_than_chains(one_device):
    chain, static, dynamic = (mean(one_device(tree)) for tree in TREES)
    assert static > chain + 0.2
    assert dynamic > chain + 0.2
