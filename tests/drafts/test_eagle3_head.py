"""The head against speculators on the same weights (tools/make_eagle3_fixtures.py made the fixtures), on any mesh.

Row p starts from the true taps at p and is then fed its own output, as in drafting: in step s it takes the token after
p + s at position p + s, and sees the true rows up to p and itself of steps 1 to s.
"""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P
from models_on_mesh import ONE, FileReader
from safetensors.numpy import load_file

from jaxspec.checkpoint.eagle3_files import open_head
from jaxspec.drafts.eagle3 import Eagle3
from jaxspec.drafts.eagle3_config import EMBEDDING, eagle3_tensor_shapes
from jaxspec.drafts.eagle3_head import head_axes
from jaxspec.llm import TAIL_AXES
from jaxspec.mesh import PP, MeshShape, gather, make_mesh
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import DecoderLayout, pad_axis
from jaxspec.models.tensors import HEAD
from jaxspec.speculate.state import Streams
from jaxspec.speculate.taps import tap_observer, tap_places
from pallas_kernels.tree_attention import masked_attention

FIXTURES = Path(__file__).parents[1] / "fixtures" / "eagle3"
SAME_AS_PLAIN = ("reference_layout", "specforge_layout")  # the same weights, without an embedding
TARGET_LAYERS = 8
STEPS = 3
# Largest difference of an output, which reach 17, or of a logit.
TOLERANCE = 3e-5


@dataclasses.dataclass(frozen=True)
class Ends:
    """What a head may borrow of its target, this device's part."""

    embedding: Any
    head: Any

    def embed(self, tokens):
        return self.embedding[tokens]

    @property
    def vocabulary(self):
        return self.head


@functools.cache
def fitted(case: str, taps: tuple[int, ...] | None = None) -> Eagle3:
    opened = Eagle3.open(FIXTURES / case)
    return opened.fit(target_of(opened), taps)


def target_of(drafter: Eagle3) -> ModelConfig:
    """Only its sizes matter: a head reads none of its weights but the ends."""
    return ModelConfig(
        family="llama",
        vocab_size=drafter.config.layer.vocab_size,
        hidden_size=drafter.config.target_hidden_size,
        intermediate_size=8,
        num_layers=TARGET_LAYERS,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        norm_eps=1e-5,
        rope_theta=1e4,
        max_positions=64,
    )


def ends_of(drafter: Eagle3, like: str) -> Ends:
    """The ends of a target that `drafter` lacks, from the head `like`; those that it must not touch are NaN."""
    files, config = open_head(FIXTURES / like), drafter.config
    shape = (config.layer.vocab_size, config.layer.hidden_size)
    return Ends(
        *(
            np.full(shape, np.nan, np.float32) if has_own else files.read([name])[name].astype(np.float32)
            for name, has_own in ((EMBEDDING, config.has_embedding), (HEAD, config.has_head))
        )
    )


def residual_streams(drafter: Eagle3, layout: DecoderLayout, taps: np.ndarray) -> np.ndarray:
    """f32[pp, slots, N, E]: what each layer slot of each stage gives, with what enters the first one before them.

    Only the taps are those of a target. The rest is noise that must not be read.
    """
    size = (layout.mesh.pp, 1 + layout.layer_slots, *taps[:, 0].shape)
    streams = np.random.default_rng(0).normal(0, 3, size).astype(np.float32)
    assert drafter.config.taps is not None
    for number, (stage, after) in enumerate(tap_places(drafter.config.taps, layout.stage_sizes)):
        streams[stage, 1 + after] = taps[:, number]
    return streams


def gathered_on_the_way(drafter: Eagle3, layout: DecoderLayout, streams: jax.Array) -> jax.Array:
    """The taps of rows that have passed all stages, where the tail runs; `streams` are this stage's."""
    stages, (n, width) = layout.mesh.pp, streams.shape[1:]
    observe = tap_observer(drafter.taps, layout)
    arriving = Streams(streams[-1], jnp.full((n, len(drafter.taps), width), 9.0))
    for _ in range(stages):
        taps = arriving.taps
        for slot, x in enumerate(streams, start=-1):
            taps = observe(taps, slot, x)
        leaving = Streams(streams[-1], taps)
        arriving = leaving.to_next_stage(stages)
    return (leaving.from_last_stage(stages) if PP in layout.tail_axes else leaving).taps


def sees_true_rows_and_its_own(cache, layer, residual, q, k, v):
    """`cache` holds, of each layer, the keys and values of the steps so far."""
    keys, values = cache.get(layer, ((), ()))
    keys, values, n = (*keys, k), (*values, v), len(q)
    is_visible = jnp.concatenate([jnp.tri(n, dtype=bool), *[jnp.eye(n, dtype=bool)] * (len(keys) - 1)], axis=1)
    output, _ = masked_attention(
        q[None], jnp.concatenate(keys)[None], jnp.concatenate(values)[None], is_visible[None], scale=q.shape[-1] ** -0.5
    )
    return residual, output.reshape(n, -1), cache | {layer: (keys, values)}


def run_steps(drafter: Eagle3, layout: DecoderLayout, ends: Ends, taps: np.ndarray, tokens: list[np.ndarray]):
    """Of every step: logits over the padded draft vocabulary, the target's ids of them, and what is fed to the next."""
    mesh = make_mesh(layout.mesh)
    weights = drafter.restore(layout, mesh)

    def steps(weights, embedding, output_head, streams):
        head, target = drafter._head(weights, layout), Ends(embedding, output_head)
        x, cache, results = head.features(gathered_on_the_way(drafter, layout, streams[0])), {}, []
        for step in range(STEPS):
            embedded, positions = head.embed(tokens[step], target), jnp.arange(len(x)) + step
            outputs, cache = head.rows(x, embedded, positions, sees_true_rows_and_its_own, cache)
            logits, ids = (gather(part, layout.tail_axes) for part in head.logits(outputs, target))
            x = head.recycled(outputs)
            results.append((jnp.moveaxis(logits, 0, 1).reshape(len(x), -1), ids.reshape(-1), x))
        return jax.tree.map(lambda result: result[None], results)

    sharded = jax.shard_map(
        steps,
        mesh=mesh,
        in_specs=(nnx.get_partition_spec(weights), P(), P(layout.tail_axes), P(PP)),
        out_specs=P(PP),
        check_vma=False,
    )
    output_head = pad_axis(ends.head, 0, layout.padded_vocab)
    with jax.default_matmul_precision("highest"):
        results = jax.jit(sharded)(weights, ends.embedding, output_head, residual_streams(drafter, layout, taps))
    # Where the tail is not spread, only the last stage has gathered all features.
    return jax.tree.map(lambda result: np.asarray(result)[-1], results)


def check(drafter: Eagle3, like: str, mesh: MeshShape, placement: str) -> None:
    """All rows of all steps equal those of the fixture `like`."""
    reference, size = load_file(FIXTURES / like / "reference.safetensors"), drafter.config.draft_vocab_size
    layout = DecoderLayout(target_of(drafter), mesh, TAIL_AXES[placement], np.dtype("float32"))
    suffixes = ("", *(f"_{step}" for step in range(1, STEPS)))
    tokens = [reference[f"tokens{suffix}"] for suffix in suffixes]
    results = run_steps(drafter, layout, ends_of(drafter, like), reference["taps"], tokens)
    offsets = drafter.files.read(["d2t"])["d2t"] if size < drafter.config.layer.vocab_size else 0
    for suffix, (logits, ids, recycled) in zip(suffixes, results, strict=True):
        np.testing.assert_allclose(recycled, reference[f"recycle{suffix}"], atol=TOLERANCE, rtol=0)
        np.testing.assert_allclose(logits[:, :size], reference[f"logits{suffix}"], atol=TOLERANCE, rtol=0)
        assert np.all(logits[:, size:] == -np.inf)
        np.testing.assert_array_equal(ids[:size], np.arange(size) + offsets)


@pytest.mark.parametrize("case", sorted(path.name for path in FIXTURES.iterdir()))
def test_three_steps_of_a_head_equal_those_of_speculators(case):
    check(fitted(case), "plain" if case in SAME_AS_PLAIN else case, ONE, "last")


@pytest.mark.parametrize(
    ("case", "mesh", "placement"),
    [
        ("plain", MeshShape(1, 2, 1), "last"),
        ("qwen3", MeshShape(1, 3, 1), "spread"),  # divides neither heads nor widths nor the vocabulary
        ("before_fc", MeshShape(2, 1, 2), "last"),
        ("everything", MeshShape(2, 1, 2), "spread"),
        ("fc_norm", MeshShape(3, 1, 1), "spread"),  # one stage has a slot without a layer
    ],
    ids=str,
)
def test_a_head_is_the_same_on_every_mesh(case, mesh, placement):
    check(fitted(case), case, mesh, placement)


def test_the_embedding_and_the_output_of_both_stages_can_be_taps():
    check(fitted("before_fc", (0, 4, 8)), "before_fc", MeshShape(2, 1, 2), "last")


@pytest.mark.parametrize("mesh", [MeshShape(1, 1, 1), MeshShape(3, 1, 1)], ids=str)
def test_a_head_may_borrow_both_ends_of_its_target(mesh):
    whole = fitted("full_vocab")
    config = dataclasses.replace(whole.config, has_embedding=False, has_head=False)
    tensors = whole.files.read(list(eagle3_tensor_shapes(config)))
    assert not {EMBEDDING, HEAD} & set(tensors)
    check(dataclasses.replace(whole, config=config, files=FileReader(tensors)), "full_vocab", mesh, "spread")


@pytest.mark.parametrize(
    ("mesh", "placement", "devices"),
    [
        (ONE, "spread", 1),
        (MeshShape(2, 2, 1), "last", 2),
        (MeshShape(2, 1, 2), "spread", 2),  # four would be more than there are heads
        (MeshShape(1, 3, 1), "last", 1),
        (MeshShape(2, 3, 1), "spread", 2),
    ],
    ids=str,
)
def test_its_two_key_heads_are_split_over_as_many_devices_as_divide_them(mesh, placement, devices):
    drafter = fitted("plain")
    layout = DecoderLayout(target_of(drafter), mesh, TAIL_AXES[placement], np.dtype("float32"))
    assert mesh.axis_size(head_axes(drafter.config, layout)) == devices
