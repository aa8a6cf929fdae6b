"""The exchange by peer stores: its protocol simulated, its kernels compiled, and on two Hopper GPUs or more, run.

JAX_PLATFORMS=cuda python -m pytest -n 0 tests/kernels/test_peer_exchange.py
"""

import dataclasses
import functools
import itertools
import random
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import NEEDS_COMPILER, assert_without_spills, compile_for_h200, h200_mesh
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.mesh import AXES, MeshShape, make_mesh
from pallas_kernels import peer_exchange
from pallas_kernels.peer_exchange import PeerGroup, layout, unsupported
from pallas_kernels.peer_exchange.group import peer_tables
from pallas_kernels.peer_exchange.layout import (
    INCOMING,
    MAX_BLOCKS,
    MAX_BYTES,
    MAX_PACKETS,
    NAME,
    OUTGOING,
    PACKET,
    PAYLOAD,
    STRIDE,
    THREADS,
    Cut,
    Workspace,
)

MESH = (2, 2, 2)
RANKS = (2, 4, 8)


def tables_of(ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Addresses of workspaces, far from each other and in no order, and the tables that go with them."""
    bases = np.random.default_rng(ranks).permutation(ranks).astype(np.int64) * (1 << 32) + (1 << 40)
    return bases, peer_tables(bases, [0])


# The tables


@pytest.mark.parametrize(
    "axes", [axes for size in (1, 2, 3) for axes in itertools.combinations(range(3), size)], ids=str
)
def test_every_rank_sends_to_where_its_peer_listens(axes):
    bases = np.random.default_rng(0).permutation(8).astype(np.int64).reshape(MESH) * (1 << 32) + (1 << 40)
    tables = peer_tables(bases, list(axes))
    sizes = [MESH[axis] for axis in axes]
    ranks, end = int(np.prod(sizes)), Workspace(int(np.prod(sizes))).words * 4
    for place in np.ndindex(MESH):
        me = np.ravel_multi_index([place[axis] for axis in axes], sizes)
        *rows, epochs = tables[place]
        rows = np.reshape(rows, (ranks + 1, 3))
        for peer, where in enumerate(np.ndindex(*sizes)):
            there = list(place)
            for axis, index in zip(axes, where, strict=True):
                there[axis] = index
            of_peer = np.reshape(tables[tuple(there)][:-1], (ranks + 1, 3))
            assert rows[peer][OUTGOING] == of_peer[me][INCOMING]
            assert rows[peer][NAME] == 1 + np.ravel_multi_index(there, MESH)
            offset = rows[peer][OUTGOING] - bases[tuple(there)]
            assert 0 <= offset < Workspace(ranks).slot_bytes
        assert (rows[ranks] == rows[(me + 1) % ranks]).all()
        assert 0 < epochs - bases[place] == end - MAX_BLOCKS * THREADS * 4


@pytest.mark.parametrize("ranks", RANKS)
def test_packets_of_a_workspace_lie_apart_aligned_and_before_the_epochs(ranks):
    workspace = Workspace(ranks)
    block, slot, thread, sender, packet = np.ix_(
        range(MAX_BLOCKS), range(layout.SLOTS), range(THREADS), range(ranks), range(MAX_PACKETS)
    )
    starts = workspace.packet(block, slot, thread) + sender * workspace.sender_bytes + packet * STRIDE
    assert len(np.unique(starts)) == starts.size
    assert (starts % PACKET == 0).all()
    assert starts.max() + PACKET == workspace.epochs


@pytest.mark.parametrize("nbytes", [1, 1024, 1025, 9216, 131072, 131073, 262144, 300000, MAX_BYTES])
def test_a_cut_holds_the_message_in_one_wave_of_blocks(nbytes):
    for least, itemsize in itertools.product((1, 2, MAX_PACKETS), (2, 4)):
        cut = Cut.of(nbytes, least)
        assert cut.blocks <= MAX_BLOCKS and least <= cut.packets <= MAX_PACKETS
        assert nbytes <= cut.padded_size(itemsize) * itemsize < nbytes + cut.packets * THREADS * PAYLOAD
        assert cut.block_size(itemsize) * itemsize == cut.packets * THREADS * PAYLOAD


def test_a_cut_that_would_not_lie_within_the_workspace_is_refused():
    for nbytes, least in [(0, 1), (MAX_BYTES + 1, 1), (1024, MAX_PACKETS + 1)]:
        with pytest.raises(AssertionError, match="within the workspace"):
            Cut.of(nbytes, least)


# The protocol


@dataclasses.dataclass
class Simulation:
    """Threads of several ranks that exchange messages through simulated memory, in any order that hardware may take.

    What is atomic is half a packet: one word of data and one epoch. Halves that are stored arrive whenever they like
    and in any order; each load sees what has arrived. A half that would replace one that is still wanted is an error.
    """

    ranks: int
    sizes: list[int]  # bytes of the messages, one call after the other
    seed: int
    is_other_only: bool = False
    memory: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    on_their_way: list[tuple[int, tuple[int, int]]] = dataclasses.field(default_factory=list)
    wanted: dict[int, int] = dataclasses.field(default_factory=dict)  # address -> epoch that nobody has read yet

    def run(self) -> None:
        rng = random.Random(self.seed)
        _, tables = tables_of(self.ranks)
        places = [(block, thread) for block in (0, 1, MAX_BLOCKS - 1) for thread in (0, THREADS - 1)]
        threads = [self._thread(tables[me], me, *place) for me in range(self.ranks) for place in places]
        # Some ranks are much slower than others, and so is the way between them.
        weights = [rng.choice((1, 1, 30)) for _ in threads]
        arrival = rng.choice((0.2, 0.5, 0.9))
        while threads:
            if self.on_their_way and rng.random() < arrival:
                self._arrive(*self.on_their_way.pop(rng.randrange(len(self.on_their_way))))
                continue
            index = rng.choices(range(len(threads)), weights)[0]
            if next(threads[index], "ended") == "ended":
                del threads[index], weights[index]
        for address, half in self.on_their_way:
            self._arrive(address, half)
        assert not self.wanted, "a packet that nobody has read"

    def _thread(self, table, me: int, block: int, thread: int):
        """What a thread of the kernel does, a step for every access to memory that others can see."""
        workspace = Workspace(self.ranks)
        rows, epochs = table[:-1].reshape(-1, 3), int(table[-1])
        rows = rows[-1:] if self.is_other_only else rows[:-1]
        counter = epochs + block * 4 * THREADS + thread * 4
        for call, size in enumerate(self.sizes):
            cut = Cut.of(size)
            if block >= cut.blocks:
                continue
            epoch = self.memory.get(counter, (0, 0))[0] + 1
            packet = workspace.packet(block, epoch, thread)
            for row, i, half in itertools.product(rows, range(cut.packets), (0, 8)):
                address = int(row[OUTGOING]) + packet + i * STRIDE + half
                self.on_their_way.append(
                    (address, (self._data(me, row[NAME] - 1, call, block, thread, i, half), epoch))
                )
                yield
            for row in rows:
                addresses = [
                    int(row[INCOMING]) + packet + i * STRIDE + half for i in range(cut.packets) for half in (0, 8)
                ]
                while True:
                    seen = []
                    for address in addresses:
                        seen.append(self.memory.get(address, (0, 0)))
                        yield
                    if all(tag == epoch for _, tag in seen):
                        break
                for address, (i, half), (data, _) in zip(
                    addresses, itertools.product(range(cut.packets), (0, 8)), seen, strict=True
                ):
                    assert data == self._data(row[NAME] - 1, me, call, block, thread, i, half)
                    assert self.wanted.pop(address) == epoch
            self.memory[counter] = (epoch, 0)

    def _arrive(self, address: int, half: tuple[int, int]) -> None:
        assert address not in self.wanted, "a packet that was not read yet is overwritten"
        self.wanted[address] = half[1]
        self.memory[address] = half

    @staticmethod
    def _data(*what: int) -> int:
        return hash(tuple(int(part) for part in what))


SIZES = [1, 1024, 2048, 131072, 1, 262144, 3000, MAX_BYTES, MAX_BYTES, 140000, 1, 131072, MAX_BYTES]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("ranks", RANKS)
def test_messages_of_mixed_sizes_arrive_whole_in_any_order_of_events(ranks, seed):
    sizes = random.Random(seed).sample(SIZES, 10 if ranks < 8 else 5)
    Simulation(ranks, sizes, seed).run()
    if ranks == 2:
        Simulation(ranks, sizes, seed, is_other_only=True).run()


@pytest.mark.parametrize("ranks", RANKS)
def test_the_simulation_notices_that_one_slot_is_not_enough(ranks, monkeypatch):
    monkeypatch.setattr(layout, "SLOTS", 1)
    with pytest.raises(AssertionError, match="overwritten"):
        for seed in range(12):
            Simulation(ranks, SIZES[:6], seed).run()


# What is refused


def test_messages_that_no_kernel_takes_are_refused_with_the_rule_and_the_remedy():
    assert unsupported(dtype=jnp.bfloat16, size=MAX_BYTES // 2, ranks=8) is None
    assert unsupported(dtype=jnp.float32, size=1, ranks=2) is None
    table, failure = jnp.zeros(20, jnp.int32), jax.new_ref(jnp.zeros(1, jnp.int32))
    for x, ranks, rule in [
        (jnp.zeros(MAX_BYTES // 4 + 1), 2, f"{MAX_BYTES + 4} bytes must have 1 to {MAX_BYTES}"),
        (jnp.zeros((2, 0)), 2, "0 bytes must have 1 to"),
        (jnp.zeros(4, jnp.int8), 2, "dtype=int8 must be one of bfloat16, float16, float32, int32"),
        (jnp.zeros(4), 16, "16 ranks must be 2 to 8"),
        (jnp.zeros(4), 1, "1 ranks must be 2 to 8"),
    ]:
        for kernel in (peer_exchange.all_reduce, peer_exchange.all_gather):
            with pytest.raises(ValueError, match=rule) as raised:
                kernel(x, table, failure, ranks)
            assert "use the collective of XLA" in str(raised.value)
    with pytest.raises(ValueError, match="3 rows must be 2, one for each rank"):
        peer_exchange.all_to_all(jnp.zeros((3, 4)), table, failure, 2)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="wants eight devices that are no GPUs")
def test_devices_that_do_not_reach_each_other_are_refused():
    mesh = make_mesh(MeshShape(2, 2, 2))
    for axes, rule in [
        (AXES, "must be Hopper GPUs, not cpu"),
        (("tp", "pp"), "must be in the order of the mesh"),
        ((), "must be 2 to 8"),
    ]:
        with pytest.raises(ValueError, match=rule):
            PeerGroup.connect(mesh, axes)


def test_memory_that_peers_may_not_see_is_refused(monkeypatch):
    gpu = SimpleNamespace(compute_capability="9.0", process_index=0)
    mesh = SimpleNamespace(devices=np.array([gpu, gpu]), shape={"tp": 2}, axis_names=("tp",))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    assert "the allocator 'platform' must be JAX's default" in peer_exchange.unreachable(mesh, ("tp",))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "BFC")
    assert peer_exchange.unreachable(mesh, ("tp",)) is None  # the same device needs no access to itself
    for told in ("visible_devices:0;allocator:cuda_async", {"allocator": "cuda_async"}):
        with jax._src.config.jax_pjrt_client_create_options(told):
            assert "the allocator 'cuda_async' must be" in peer_exchange.unreachable(mesh, ("tp",))


# Compiled

KERNELS = {
    "all_reduce": (peer_exchange.all_reduce, lax.psum),
    "all_gather": (peer_exchange.all_gather, lax.all_gather),
    "all_to_all": (
        peer_exchange.all_to_all,
        functools.partial(lax.all_to_all, split_axis=0, concat_axis=0, tiled=True),
    ),
}


@NEEDS_COMPILER
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("packets", [1, MAX_PACKETS])
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("ranks", RANKS)
def test_compiles_for_h200s_without_spills_and_in_one_order(ranks, name, packets, dtype, monkeypatch, capfd):
    mesh, size = h200_mesh((ranks,), ("x",)), 3000

    def program(x, table):
        failure = jax.new_ref(jnp.zeros(1, jnp.int32))

        def step(x, _):
            for _ in range(2):
                y = KERNELS[name][0](x, table.reshape(-1), failure, ranks, least_packets=packets)
                x = y if y.shape == x.shape else y.sum(axis=0).astype(x.dtype)
            return x, None

        x, _ = lax.scan(step, x, length=2)
        return x, jax.freeze(failure)

    def argument(dtype, spec, *shape):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    sharded = jax.shard_map(program, mesh=mesh, in_specs=(P(), P("x")), out_specs=(P(), P("x")), check_vma=False)
    compiled, report = compile_for_h200(
        jax.jit(sharded),
        [
            argument(jnp.dtype(dtype), P(), *([ranks] if name == "all_to_all" else []), size),
            argument(jnp.int32, P("x"), ranks, 2 * Workspace(ranks).table_size),
        ],
        monkeypatch,
        capfd,
    )
    assert_without_spills(report)
    # Each call writes the ref in place that the one before has written: nothing else orders them.
    calls = re.findall(r"%(\S+) = .*mosaic_gpu.*output_to_operand_aliasing=\{\{1\}: \(2, \{\}\)\}", compiled.as_text())
    assert len(calls) == 2


# On GPUs

ON_GPUS = pytest.mark.skipif(
    jax.default_backend() == "cpu" or len(jax.devices()) < 2, reason="needs two Hopper GPUs of one host"
)
# (elements, dtype): whole blocks and not, a packet a thread and more, and the largest.
MESSAGES = [
    (1, "float32"),
    (4608, "bfloat16"),
    (5000, "bfloat16"),
    (65536, "bfloat16"),
    (65537, "float32"),
    (200000, "bfloat16"),
    (131072, "float32"),
    (262144, "bfloat16"),
    (777, "int32"),
]


@functools.cache
def group() -> PeerGroup:
    """Over the GPUs there are."""
    mesh = jax.make_mesh((min(8, len(jax.devices())),), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return PeerGroup.connect(mesh, ("x",))


def on_gpus(body, x, *more):
    """Runs `body(x, call, *more)` on all of them; `call(kernel, x)` exchanges. The failures come after its results."""
    peers = group()

    def program(x, table, *more):
        failure = jax.new_ref(jnp.zeros(1, jnp.int32))
        result = body(x[0], lambda kernel, x: kernel(x, table.reshape(-1), failure, peers.ranks), *more)
        return jax.tree.map(lambda y: y[None], result), jax.freeze(failure)

    mesh = peers.table.sharding.mesh
    specs = (P("x"), P("x"), *(P() for _ in more))
    return jax.jit(jax.shard_map(program, mesh=mesh, in_specs=specs, out_specs=P("x"), check_vma=False))(
        x, peers.table, *more
    )


def draw(size: int, dtype: str, *rows: int) -> np.ndarray:
    random = np.random.default_rng(size)
    shape = (group().ranks, *rows, size)
    if dtype == "int32":
        return random.integers(-1000, 1000, shape).astype(np.int32)
    return random.standard_normal(shape).astype(jnp.dtype(dtype))


@ON_GPUS
@pytest.mark.parametrize("message", MESSAGES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_on_gpus_each_message_arrives_as_by_xla(name, message):
    kernel, oracle = KERNELS[name]
    size, dtype = message
    x = draw(size, dtype, *([group().ranks] if name == "all_to_all" else []))
    (actual, expected), failures = on_gpus(lambda x, call: (call(kernel, x), oracle(x, "x")), x)
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert not np.asarray(failures).any()
    if name == "all_reduce":
        assert all((row == actual[0]).all() for row in actual), "ranks differ"
        if group().ranks > 2 and dtype != "int32":  # XLA may add more than two in another order, or round between
            wide = functools.reduce(np.add, x.astype(np.float32))
            np.testing.assert_array_equal(actual[0], wide.astype(x.dtype))
            return
    np.testing.assert_array_equal(actual, expected)


@ON_GPUS
def test_on_gpus_a_long_chain_stays_right_while_one_rank_is_late():
    """Thousands of exchanges of changing size; one rank computes for longer before some of them."""
    small, large = draw(4608, "float32")[:, None] + 0, draw(100000, "float32")[:, None] + 0
    both = np.concatenate([small, large], axis=-1)

    def body(x, call):
        def step(carry, i):
            error, x = carry
            is_late = (lax.axis_index("x") == i % lax.axis_size("x")) & (i % 7 == 0)
            work = lax.fori_loop(0, jnp.where(is_late, 2000, 0), lambda _, y: jnp.sin(y), x[0, :128])
            x = x.at[0, :128].add(0 * work)
            for part in (x[0, :4608], x[0, 4608:]):
                gathered = lax.all_gather(part, "x")
                in_order = functools.reduce(jnp.add, list(gathered))
                error += jnp.sum(call(peer_exchange.all_reduce, part) != in_order)
                error += jnp.sum(call(peer_exchange.all_gather, part) != gathered)
            return (error, x * 0.999), None

        return lax.scan(step, (jnp.int32(0), x), jnp.arange(500))[0][0]

    for _ in range(3):
        errors, failures = on_gpus(body, both)
        assert not np.asarray(errors).any()
        assert not np.asarray(failures).any()


@ON_GPUS
def test_on_gpus_a_peer_that_does_not_answer_is_named_in_bounded_time():
    """Rank 0 alone exchanges; afterwards all do the same number of calls again, and it is right again."""
    x = draw(4608, "float32")

    def body(x, call, silent):
        return lax.cond(
            lax.axis_index("x") == silent,
            lambda: jnp.zeros_like(x),
            lambda: call(peer_exchange.all_reduce, x),
        )

    _, failures = on_gpus(body, x, jnp.int32(1))
    failures = np.asarray(failures)
    assert failures[0] == 1 + 1 and failures[1] == 0
    # The silent rank makes up for the call that it has missed, the others sit it out.
    on_gpus(lambda x, call: lax.cond(lax.axis_index("x") == 1, lambda: call(peer_exchange.all_reduce, x), lambda: x), x)
    (actual, expected), failures = on_gpus(lambda x, call: (call(peer_exchange.all_reduce, x), lax.psum(x, "x")), x)
    assert not np.asarray(failures).any()
    np.testing.assert_array_equal(actual, expected)
