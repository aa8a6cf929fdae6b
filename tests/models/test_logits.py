"""Every target family against transformers on the same weights (tools/make_model_fixtures.py made the fixtures)."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from models_on_mesh import MODELS, ONE, engine, full_logits, layout_of, load, restored
from toy import run

from jaxspec.engine.sequence import Sequence
from jaxspec.mesh import MODEL_AXES, PP, MeshShape, make_mesh
from jaxspec.models.registry import read_config
from jaxspec.sampling_params import SamplingParams
from jaxspec.speculate.commands import Commands
from jaxspec.speculate.lane import LaneRows
from jaxspec.speculate.program import initial_state
from jaxspec.speculate.state import StepState
from jaxspec.speculate.taps import tap_observer
from jaxspec.speculate.tick import Entry, advance
from pallas_kernels.chunk_prefill import causal_attention

FAMILIES = sorted(path.name for path in MODELS.iterdir())
# Largest difference of a logit; their standard deviation is above 1.
TOLERANCE = 2e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_a_whole_text_equal_those_of_transformers(name):
    _, _, reference = load(name)
    for tokens, logits in zip(reference["tokens"], reference["logits"], strict=True):
        np.testing.assert_allclose(full_logits(name, tokens), logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_text_through_prefill_pages_and_ticks_equals_that_of_transformers(name):
    _, _, reference = load(name)
    requests = [
        Sequence(i, reference["tokens"][i, :16].tolist(), SamplingParams(max_tokens=24), 0, []) for i in range(2)
    ]
    plain = engine(name)
    run(plain, requests)
    assert [request.token_ids for request in requests] == reference["greedy"].tolist()


@pytest.mark.parametrize("mesh", [ONE, MeshShape(1, 2, 2)], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_prefill_and_of_cached_decode_equal_those_of_transformers(name, mesh):
    """Three chunks of a prompt, then the rest of the text as one chain to verify over the cached prefix."""
    _, _, reference = load(name)
    tokens, expected = reference["tokens"][0], reference["logits"][0]
    built = engine(name, mesh, draft="ngram", tree="chain:26", chunk=8)
    logits = _teacher_forced(built, name, mesh, tokens, prefix=21)
    np.testing.assert_allclose(logits, expected, atol=TOLERANCE, rtol=0)


def _teacher_forced(built, name, mesh, tokens, prefix):
    """Logits of all of `tokens` [48] through the ticks of an engine: `prefix` of them by chunks, 27 as a tree."""
    spec = built.spec
    graph, weights = restored(name, mesh)
    state = initial_state(spec, 1, built.mesh)
    page_row = np.zeros(spec.pages_per_slot, np.int32)
    page_row[:8] = [5, 3, 9, 1, 7, 2, 8, 4]

    def tick(weights, state, lane):
        model = nnx.merge(graph, weights)
        commands = Commands.blank(spec.num_slots, spec.stop_ids, spec.pages_per_slot, 0, spec.chunk).slots
        entry = Entry(jnp.int32(0), jax.tree.map(jnp.asarray, commands), jnp.bool_(False), lane)
        with jax.default_matmul_precision("highest"):
            state, leaving = advance(spec, model, state, jnp.int32(0), entry)
            hidden = leaving.trees.hidden[0] if lane is None else leaving.chunk.hidden
            return state, model.logits(model.final_hidden(hidden))

    specs = (nnx.get_partition_spec(weights), StepState.specs(spec), P())
    run = jax.jit(
        jax.shard_map(
            tick,
            mesh=built.mesh,
            in_specs=specs,
            out_specs=(StepState.specs(spec), P(None, MODEL_AXES)),
            check_vma=False,
        )
    )
    logits = []
    for start in range(0, prefix, spec.chunk):
        count = min(spec.chunk, prefix - start)
        chunk = np.zeros(spec.chunk, np.int32)
        chunk[:count] = tokens[start : start + count]
        state, part = run(weights, state, LaneRows(chunk, *np.array([start, count, 0, -1], np.int32), page_row))
        logits.append(part[:count])
    slots = dataclasses.replace(
        state.slots,
        is_active=state.slots.is_active.at[0].set(True),
        length=state.slots.length.at[0].set(prefix),
        tokens=state.slots.tokens.at[0].set(tokens[prefix:]),
        page_table=state.slots.page_table.at[0].set(page_row),
    )
    _, part = run(weights, dataclasses.replace(state, slots=slots), None)
    return np.concatenate([*logits, part])[:, : spec.layout.config.vocab_size]


@pytest.mark.parametrize("name", FAMILIES)
def test_taps_that_pass_through_a_pipeline_are_the_residual_streams_of_a_whole_text(name):
    """Of every family, without a word of it in its file: all taps, and the last rows, over two stages."""
    tokens = jnp.asarray(load(name)[2]["tokens"][0])

    def read(mesh):
        layout, (graph, weights) = layout_of(name, mesh), restored(name, mesh)
        taps = range(layout.config.num_layers + 1)

        def body(weights, tokens):
            model = nnx.merge(graph, weights)

            def attend(new, layer, q, k, v):
                return causal_attention(q, k, v, scale=q.shape[-1] ** -0.5)[0].reshape(len(q), -1), new

            x = model.embed(tokens)
            seen = jnp.zeros((len(tokens), len(taps), x.shape[1]))
            for stage in range(mesh.pp):
                if stage:
                    x, seen = (lax.ppermute(each, PP, [(stage - 1, stage)]) for each in (x, seen))
                observe = tap_observer(taps, layout)
                x, _, seen = model.stage(x, jnp.arange(len(tokens)), attend, None, observe, seen)
            return x[None], seen[None]

        specs = nnx.get_partition_spec(weights), P()
        run = jax.shard_map(body, mesh=make_mesh(mesh), in_specs=specs, out_specs=P(PP), check_vma=False)
        with jax.default_matmul_precision("highest"):
            x, seen = jax.jit(run)(weights, tokens)
        return np.asarray(x[-1]), np.asarray(seen[-1])

    (x, seen), (expected_x, expected) = read(MeshShape(2, 1, 1)), read(ONE)
    np.testing.assert_allclose(seen, expected, atol=1e-5, rtol=1e-5)
    np.testing.assert_array_equal(expected[:, -1], expected_x)
    np.testing.assert_allclose(x, expected_x, atol=1e-5, rtol=1e-5)
    assert all(np.abs(np.diff(expected, axis=1)).max((0, 2)) > 1e-3)  # no two are alike


def test_both_ways_of_writing_rope_scaling_mean_the_same():
    import json

    new, old = (json.loads((MODELS / "llama3" / name).read_text()) for name in ("config.json", "config.old.json"))
    assert read_config(new) == read_config(old)
    assert read_config(new).rope_scaling is not None
