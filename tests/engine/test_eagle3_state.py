"""What an EAGLE-3 head keeps between rounds, and that a head which is fed wrongly is noticed.

Acceptance could decay silently over a long output if the draft's pages held anything but what a prefill of the accepted
text would put there.
"""

import dataclasses
import functools

import numpy as np
import pytest
from models_on_mesh import ONE, PAIR_TARGET, FileReader, engine
from test_eagle3_meshes import head, independent, lengths, mean
from toy import run

from jaxspec.drafts.eagle3 import Eagle3
from jaxspec.drafts.eagle3_config import eagle3_tensor_shapes
from jaxspec.engine.sequence import Sequence, Status
from jaxspec.mesh import MeshShape
from jaxspec.sampling_params import SamplingParams

DYNAMIC = "dynamic:steps=4,topk=4,nodes=16"


@functools.cache
def head_with(**changes) -> Eagle3:
    """The trained head with other sizes or switches; `layers` and `d2t` change its tensors too."""
    right = head()
    tensors = dict(right.files.read(list(eagle3_tensor_shapes(right.config))))
    if changes.pop("d2t", None) == "missing":
        tensors["d2t"] = np.zeros_like(tensors["d2t"])
    if base := changes.pop("rope_theta", None):
        changes["layer"] = dataclasses.replace(right.config.layer, rope_theta=base)
    if count := changes.pop("layers", None):
        changes["layer"] = dataclasses.replace(right.config.layer, num_layers=count)
    config = dataclasses.replace(right.config, **changes)
    random = np.random.default_rng(0)
    for name, shape in eagle3_tensor_shapes(config).items():
        if name not in tensors:  # a later layer that changes little, so that the head still drafts well
            is_norm = name.endswith("norm.weight")
            tensors[name] = np.ones(shape) if is_norm else random.normal(0, 0.05, shape).astype(np.float32)
    return dataclasses.replace(right, config=config, files=FileReader(tensors))


def true_rows(built, sequence: Sequence, count: int) -> np.ndarray:
    """The draft's K/V at the first `count` positions of a sequence, [layers, 2, count, heads, size].

    On the last stage: where the tail is not spread, the others compute on what means nothing.
    """
    pages, last = built._state.draft, set(built.mesh.devices[-1].flat)
    whole = np.full(pages.shape, np.nan, np.float32)
    for shard in pages.addressable_shards:
        if shard.device in last:
            whole[shard.index] = shard.data
    return whole[:, :, sequence.pages].reshape(*whole.shape[:2], -1, *whole.shape[4:])[:, :, :count]


def run_until(built, sequence: Sequence, tokens: int) -> None:
    """Stops while the sequence still has its pages."""
    built.add(sequence)
    while len(sequence.token_ids) < tokens:
        for _ in built.step():
            pass
    assert sequence.status is Status.RUNNING


def finish(built, sequence: Sequence) -> None:
    built.finish(sequence, "cancelled")
    while built.has_work:
        for _ in built.step():
            pass


CASES = [
    (ONE, "last", "chain:4", {}),
    (ONE, "last", "static:fan12", {"taps": (), "num_taps": 1, "has_fc": False}),
    (MeshShape(2, 1, 2), "last", DYNAMIC, {}),
    (MeshShape(2, 2, 1), "spread", DYNAMIC, {"layers": 2}),
]


@pytest.mark.parametrize(("mesh", "placement", "tree", "changes"), CASES, ids=str)
def test_the_draft_cache_after_many_rounds_is_that_of_a_prefill_of_the_accepted_text(mesh, placement, tree, changes):
    built = engine(PAIR_TARGET, mesh, draft=head_with(**changes), tree=tree, placement=placement, num_slots=2)
    for prompt in independent()["prompts"][5:7]:  # the second one reuses slot and pages of the first
        grown = Sequence(0, prompt, SamplingParams(max_tokens=90), 0, [])
        run_until(built, grown, 70)
        text = grown.prompt + grown.token_ids
        # The newest token has no row yet, and the row before it pairs with it.
        after_rounds = true_rows(built, grown, len(text) - 1)
        finish(built, grown)
        fresh = Sequence(1, text, SamplingParams(max_tokens=8), 0, [])
        run_until(built, fresh, 1)
        np.testing.assert_allclose(after_rounds, true_rows(built, fresh, len(text) - 1), atol=2e-5, rtol=0)
        finish(built, fresh)
        assert not changes.get("layers") or mean([grown]) > 1.5
    assert not built._state.draft[:, :, 0].any(), "page 0 belongs to nobody"


def test_acceptance_does_not_depend_on_who_had_the_slot_and_the_pages_before():
    built = engine(PAIR_TARGET, MeshShape(2, 1, 2), draft=head(), tree="chain:4", num_slots=2, num_pages=33)
    prompts, expected = independent()["prompts"], independent()["accepted_lengths"]
    for start in (0, 8, 4):
        requests = [Sequence(i, prompts[start + i], SamplingParams(max_tokens=48), 0, []) for i in range(4)]
        run(built, requests)
        assert lengths(requests) == expected[start : start + 4]


@functools.cache
def accepted(tree: str, **changes) -> float:
    drafter = head_with(**changes) if changes else head()
    requests = [Sequence(i, p, SamplingParams(max_tokens=48), 0, []) for i, p in enumerate(independent()["prompts"])]
    run(engine(PAIR_TARGET, draft=drafter, tree=tree), requests)
    assert [request.token_ids for request in requests] == independent()["greedy"]
    return mean(requests)


@pytest.mark.parametrize(
    ("wrong", "least"),
    [
        ({"taps": (1, 2, 3)}, 0.4),  # outputs of layers taken for what enters them
        ({"rope_theta": 1e5}, 0.03),  # the target's base
        ({"rope_theta": 1e1}, 0.1),
        ({"d2t": "missing"}, 1.0),
        ({"norm_output": True}, 0.4),
        ({"norm_before_residual": True}, 0.4),
    ],
    ids=str,
)
def test_a_head_that_is_read_wrongly_accepts_less(wrong, least):
    assert accepted("chain:4", **wrong) < accepted("chain:4") - least
