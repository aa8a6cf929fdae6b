"""Engines whose devices talk by peer stores: here with kernels that do by XLA what those of a GPU do."""

import re
from collections import Counter
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from h200 import NEEDS_COMPILER, compile_for_h200, h200_mesh
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from models_on_mesh import PAIR_TARGET, engine
from test_eagle3_meshes import head, serve
from toy import Requests, run, toy_engine

from jaxspec import LLM
from jaxspec.engine.engine import Engine
from jaxspec.errors import UserError
from jaxspec.mesh import AXES, MODEL_AXES, PP, XLA, Collectives, MeshShape, make_mesh, rank
from jaxspec.peers import PeerCollectives, Peers, axis_sets, choose_exchange
from jaxspec.speculate.program import Variant, build_step
from jaxspec.speculate.state import StepState
from pallas_kernels.peer_exchange.layout import MAX_BYTES, Workspace


def with_peers(built: Engine) -> Engine:
    """The same engine, talking by (simulated) peer stores."""
    shape = built.spec.layout.mesh
    table = jnp.zeros((*built.mesh.devices.shape, 2), jnp.int32)
    peers = Peers(shape, {axes: SimpleNamespace(table=table) for axes in axis_sets(shape)})
    return Engine(built.spec, built.mesh, built.graph, built.weights, built._draft_weights, peers)


@pytest.fixture
def calls(monkeypatch) -> Counter:
    """Counts of kernels called, which run by XLA; nothing else may cross devices, and all write the failure."""
    counts, find = Counter(), PeerCollectives._group

    def simulate(name, collective):
        def kernel(x, axes, failure, ranks):
            assert ranks == lax.axis_size(axes) > 1
            counts[name] += 1
            failure[...] = failure[...]
            return collective(x, axes)

        monkeypatch.setattr(f"jaxspec.peers.peer_exchange.{name}", kernel)

    def alone(collective):
        def allowed(x, axes):
            assert lax.axis_size(axes) == 1, f"a collective over {axes} went by XLA"
            return collective(x, axes)

        return allowed

    def group(self, axes, dtype, size):
        found = find(self, axes, dtype, size)
        return found and (axes, *found[1:])

    simulate("all_reduce", lax.psum)
    simulate("all_gather", lax.all_gather)
    simulate("all_to_all", lambda x, axes: lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True))
    monkeypatch.setattr(PeerCollectives, "_group", group)
    for name, collective in [("all_reduce", lax.psum), ("all_max", lax.pmax), ("gather", lax.all_gather)]:
        monkeypatch.setattr(f"jaxspec.mesh.{name}", alone(collective))
        monkeypatch.setattr(Collectives, name, staticmethod(alone(collective)))
    return counts


@pytest.mark.parametrize(
    "mesh, placement",
    [((2, 1, 2), "spread"), pytest.param((1, 2, 2), "last", marks=pytest.mark.slow)],
    ids=str,
)
def test_tokens_are_those_of_xla_and_every_collective_goes_by_peers(mesh, placement, request):
    built = engine(
        PAIR_TARGET, MeshShape(*mesh), draft=head(), tree="dynamic:steps=4,topk=4,nodes=16", placement=placement
    )
    expected = serve(built, count=4, max_tokens=12, seeds=(3, 4))
    calls = request.getfixturevalue("calls")
    actual = serve(with_peers(built), count=4, max_tokens=12, seeds=(3, 4))
    for a, b in zip(actual, expected, strict=True):
        assert a.token_ids == b.token_ids
        assert a.accepted_lengths == b.accepted_lengths
    assert set(calls) == {"all_reduce", "all_gather", "all_to_all"}


def test_a_device_that_does_not_answer_is_an_error_that_names_it(calls, monkeypatch):
    built = with_peers(toy_engine(MeshShape(2, 1, 2)))

    def silent(x, axes, failure, ranks):
        failure[...] = jnp.where(rank(AXES) == 1, 3, failure[...])
        return lax.psum(x, axes)

    monkeypatch.setattr("jaxspec.peers.peer_exchange.all_reduce", silent)
    request = Requests(np.random.default_rng(0)).make(5, 10)
    rule = r"device 1 \(pp 0, tp 0, dcp 1\) waited in vain for device 2 \(pp 1, tp 0, dcp 0\): .* exchange 'xla'"
    with pytest.raises(UserError, match=rule):
        run(built, [request])
    assert request.finish_reason == "cancelled" and not built.has_work


def test_messages_go_by_peers_where_a_kernel_takes_them():
    shape = MeshShape(2, 1, 4)
    assert axis_sets(shape) == [("pp",), ("dcp",), ("pp", "dcp")]
    tables = {axes: object() for axes in axis_sets(shape)}
    collectives = PeerCollectives(shape, tables, failure := object())
    for axes, long, ranks in [(MODEL_AXES, ("dcp",), 4), (AXES, ("pp", "dcp"), 8), ((PP,), ("pp",), 2)]:
        assert collectives._group(axes, jnp.bfloat16, 8) == (tables[long], failure, ranks)
    for axes, dtype, size in [
        (("tp",), jnp.bfloat16, 8),  # one device
        (("dcp", "pp"), jnp.bfloat16, 8),  # another order of ranks
        (MODEL_AXES, jnp.uint32, 8),
        (MODEL_AXES, jnp.float32, MAX_BYTES // 4 + 1),
        (MODEL_AXES, jnp.float32, 0),
    ]:
        assert collectives._group(axes, dtype, size) is None


def test_what_no_kernel_takes_goes_by_xla():
    """On a mesh of CPUs: were a kernel called, it could not be compiled."""
    shape = MeshShape(2, 1, 2)
    mesh = make_mesh(shape)

    def program(collectives):
        x = jnp.arange(24.0).astype(jnp.float16).reshape(2, 12).astype(jnp.int16) + rank(AXES).astype(jnp.int16)
        return (
            collectives.all_reduce(x, MODEL_AXES),
            collectives.all_max(x, AXES),
            collectives.gather(x, AXES),
            collectives.exchange(x, "dcp"),
            collectives.to_next_stage(x, 2),
            collectives.broadcast_from_last_stage(x, 2),
            collectives.publish(x, 2),
        )

    def both():
        tables = {axes: jnp.zeros(2, jnp.int32) for axes in axis_sets(shape)}
        peers = PeerCollectives(shape, tables, jax.new_ref(jnp.zeros(1, jnp.int32)))
        return program(peers), program(XLA)

    actual, expected = jax.jit(jax.shard_map(both, mesh=mesh, in_specs=(), out_specs=P(AXES), check_vma=False))()
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_peer_stores_are_refused_where_they_cannot_be_had():
    mesh = make_mesh(MeshShape(1, 2, 1))
    assert choose_exchange("xla", mesh)[0] == choose_exchange("auto", mesh)[0] == "xla"
    assert choose_exchange("peers", make_mesh(MeshShape(1, 1, 1)))[0] == "xla"
    with pytest.raises(UserError, match="must be Hopper GPUs, not cpu; use exchange 'xla' or 'auto'"):
        choose_exchange("peers", mesh)
    with pytest.raises(UserError, match="exchange='nccl' must be one of auto, xla, peers"):
        LLM(exchange="nccl")


@NEEDS_COMPILER
def test_a_program_compiles_for_h200s_without_spills_and_without_collectives_of_xla(monkeypatch, capfd):
    mesh = (2, 1, 2)
    shape = MeshShape(*mesh)
    built = engine(PAIR_TARGET, shape, draft=head(), tree="chain:4", placement="spread")
    gpus = h200_mesh(mesh, AXES)

    def placed(arrays, specs):
        def each(spec, part):
            sharding = NamedSharding(gpus, spec)
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), part)

        return jax.tree.map(each, specs, arrays, is_leaf=lambda x: isinstance(x, P))

    variant = Variant(is_solo=False, has_lane=True, is_greedy=False, batch=1)
    weights = [built.weights, built._draft_weights]
    specs = [nnx.get_partition_spec(part) for part in weights]
    tables = {
        axes: jax.ShapeDtypeStruct((*mesh, 2 * Workspace(shape.axis_size(axes)).table_size), jnp.int32)
        for axes in axis_sets(shape)
    }
    compiled, report = compile_for_h200(
        build_step(built.spec, variant, gpus, built.graph, *specs),
        [
            *map(placed, weights, specs),
            placed(built._state, StepState.specs(built.spec)),
            placed(variant.blank_commands(built.spec).pack(), P()),
            placed(tables, {axes: P(*AXES) for axes in tables}),
        ],
        monkeypatch,
        capfd,
    )
    assert re.findall(r"(\d+) bytes spill stores", report).count("0") == report.count("bytes spill stores")
    text = compiled.as_text()
    assert "mosaic_gpu" in text
    assert not re.search(r"(all-reduce|all-gather|all-to-all|collective-permute)(-start)?\(", text)
