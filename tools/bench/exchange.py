"""Exchanges between GPUs by peer stores, beside the collectives of XLA: right or wrong, and how long one takes.

    python tools/bench/exchange.py
    python tools/bench/exchange.py --ranks 4 --kib 16 64 --packets 2 4 --layers 16

Wants two Hopper GPUs or more in one host; exits with 1 if any bit is wrong. `bits` compares with XLA (sums of more than
two ranks with their sum in order of rank, since XLA may take another). Times are microseconds a call, of the fastest
of several measurements:

- `chain`: calls that depend on each other, in one loop inside one program; `none` is the same without them.
- `stack`: two reductions a layer in a decoder of so many layers (hidden size 4096, feed-forward 14336, split over the
  ranks), its weights too many for the cache. A call costs what the stack takes longer than without any reduction.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import peer_exchange
from pallas_kernels.peer_exchange import PeerGroup

AXIS = "rank"
HIDDEN, FEED_FORWARD = 4096, 14336
CHAINED, ROUNDS = 32, 4  # calls in the body of the loop, and times around it
STACKS = 4  # times that a program runs the stack, as a dispatch of the engine has several rounds

# A reduction: (x, table, failure) -> x.
type Reduce = Callable[[jax.Array, jax.Array, jax.Ref], jax.Array]


def reductions(ranks: int, packets: list[int]) -> dict[str, Reduce]:
    kinds: dict[str, Reduce] = {
        "none": lambda x, table, failure: x,
        "psum": lambda x, table, failure: lax.psum(x, AXIS),
        "peers": lambda x, table, failure: peer_exchange.all_reduce(x, table, failure, ranks),
    }
    for count in packets:
        kinds[f"peers:{count}"] = functools.partial(_with_packets, ranks, count)
    return kinds


def _with_packets(ranks: int, packets: int, x: jax.Array, table: jax.Array, failure: jax.Ref) -> jax.Array:
    return peer_exchange.all_reduce(x, table, failure, ranks, least_packets=packets)


def on_all(mesh: Mesh, body: Callable[..., Any], *specs: P) -> Callable[..., Any]:
    """`body(table, failure, *arguments)` on every rank -> (its results stacked, failures)."""

    def program(table: jax.Array, *arguments: Any) -> Any:
        failure = jax.new_ref(jnp.zeros(1, jnp.int32))
        results = body(table.reshape(-1), failure, *arguments)
        return jax.tree.map(lambda x: x[None], results), jax.freeze(failure)

    return jax.jit(jax.shard_map(program, mesh=mesh, in_specs=(P(AXIS), *specs), out_specs=P(AXIS), check_vma=False))


def comparison(mesh: Mesh) -> Callable[..., Any]:
    """How many elements of each exchange differ from what XLA gives, on each rank."""
    ranks = mesh.size

    def body(table: jax.Array, failure: jax.Ref, x: jax.Array) -> dict[str, jax.Array]:
        x = x[0]
        gathered = lax.all_gather(x, AXIS)
        total = lax.psum(x, AXIS)
        if ranks > 2:
            total = functools.reduce(jnp.add, list(gathered.astype(jnp.float32))).astype(x.dtype)
        rows = jnp.stack([x + i for i in range(ranks)])
        exchanged = lax.all_to_all(rows, AXIS, split_axis=0, concat_axis=0, tiled=True)
        return {
            "all_reduce": jnp.sum(peer_exchange.all_reduce(x, table, failure, ranks) != total),
            "all_gather": jnp.sum(peer_exchange.all_gather(x, table, failure, ranks) != gathered),
            "all_to_all": jnp.sum(peer_exchange.all_to_all(rows, table, failure, ranks) != exchanged),
        }

    return on_all(mesh, body, P(AXIS))


def chain(mesh: Mesh, call: Reduce) -> Callable[..., Any]:
    def body(table: jax.Array, failure: jax.Ref, x: jax.Array) -> jax.Array:
        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            for _ in range(CHAINED):
                x = call(x, table, failure)
            return x, None

        return lax.scan(step, x[0], length=ROUNDS)[0]

    return on_all(mesh, body, P(AXIS))


def exchanges(ranks: int) -> dict[str, Reduce]:
    """All-to-all and all-gather, in a form that chains. Each has a small kernel of XLA after it."""

    def all_to_all(x: jax.Array, _: jax.Array, __: jax.Ref) -> jax.Array:
        return lax.all_to_all(x.reshape(ranks, -1), AXIS, split_axis=0, concat_axis=0, tiled=True).reshape(x.shape) * 2

    def by_peers(x: jax.Array, table: jax.Array, failure: jax.Ref) -> jax.Array:
        return peer_exchange.all_to_all(x.reshape(ranks, -1), table, failure, ranks).reshape(x.shape) * 2

    return {
        "all_to_all": all_to_all,
        "all_to_all:peers": by_peers,
        "all_gather": lambda x, table, failure: lax.all_gather(x, AXIS).sum(axis=0).astype(x.dtype),
        "all_gather:peers": lambda x, table, failure: (
            peer_exchange.all_gather(x, table, failure, ranks).sum(axis=0).astype(x.dtype)
        ),
    }


def stack(mesh: Mesh, call: Reduce) -> Callable[..., Any]:
    def body(table: jax.Array, failure: jax.Ref, x: jax.Array, layers: list[tuple[jax.Array, ...]]) -> jax.Array:
        def normed(x: jax.Array) -> jax.Array:
            wide = x.astype(jnp.float32)
            return (wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)

        def step(x: jax.Array, _: None) -> tuple[jax.Array, None]:
            for into, out, up, down in layers:
                x = x + call(normed(x) @ into[0] @ out[0], table, failure)
                x = x + call(jax.nn.silu(normed(x) @ up[0]) @ down[0], table, failure)
            return normed(x), None

        return lax.scan(step, x, length=STACKS)[0]

    return on_all(mesh, body, P(), P(AXIS))


def stack_shapes(mesh: Mesh, layers: int) -> list[tuple[jax.ShapeDtypeStruct, ...]]:
    own, own_ffn = HIDDEN // mesh.size, FEED_FORWARD // mesh.size
    shapes = [(HIDDEN, own), (own, HIDDEN), (HIDDEN, own_ffn), (own_ffn, HIDDEN)]
    sharding = NamedSharding(mesh, P(AXIS))
    return [
        tuple(jax.ShapeDtypeStruct((mesh.size, *shape), jnp.bfloat16, sharding=sharding) for shape in shapes)
        for _ in range(layers)
    ]


def draw_weights(mesh: Mesh, layers: int) -> Any:
    @functools.cache
    def draw(shape: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
        return jax.jit(
            lambda key: (jax.random.normal(key, shape) * shape[1] ** -0.5).astype(jnp.bfloat16),
            out_shardings=NamedSharding(mesh, P(AXIS)),
        )

    leaves, tree = jax.tree.flatten(stack_shapes(mesh, layers))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    return tree.unflatten([draw(leaf.shape)(key) for key, leaf in zip(keys, leaves, strict=True)])


def microseconds(program: Callable[..., Any], *arguments: Any, calls: int) -> tuple[float, Any]:
    """Of one of so many calls in a program; and what it returns."""
    for _ in range(3):  # the first run is plain, the second records graphs
        results = jax.block_until_ready(program(*arguments))
    best = float("inf")
    for _ in range(7):
        started = time.perf_counter()
        for _ in range(5):
            results = program(*arguments)
        jax.block_until_ready(results)
        best = min(best, (time.perf_counter() - started) / 5)
    (values, failures) = results
    if np.asarray(failures).any():
        sys.exit(f"FAIL: a rank did not answer: {np.asarray(failures)}")
    return 1e6 * best / calls, values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=min(8, len(jax.devices())))
    parser.add_argument("--kib", type=int, nargs="+", default=[16, 64, 256], help="sizes of a message")
    parser.add_argument("--packets", type=int, nargs="*", default=[2, 4], choices=[2, 4], help="of a thread, at least")
    parser.add_argument("--layers", type=int, default=16)
    options = parser.parse_args()
    mesh = jax.make_mesh((options.ranks,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[: options.ranks])
    if broken := peer_exchange.unreachable(mesh, (AXIS,)):
        sys.exit(broken)
    group = PeerGroup.connect(mesh, (AXIS,))
    kinds = reductions(options.ranks, options.packets)
    by_rank, everywhere = NamedSharding(mesh, P(AXIS)), NamedSharding(mesh, P())
    is_right = True

    def report(*columns: object) -> None:
        print("  ".join(f"{column:>16}" for column in columns), flush=True)

    def number(kib: int, dtype: Any, sharding: NamedSharding, *rows: int) -> jax.Array:
        size = kib * 1024 // np.dtype(dtype).itemsize
        values = np.random.default_rng(kib).standard_normal((*rows, size)).astype(dtype)
        return jax.device_put(values, sharding)

    print(f"{options.ranks} x {jax.devices()[0].device_kind}, jax {jax.__version__}")
    report("bits", "KiB", "all_gather", "all_reduce", "all_to_all")
    for dtype in (jnp.bfloat16, jnp.float32):
        for kib in (1, 9, *options.kib, 512):
            differing, failures = comparison(mesh)(group.table, number(kib, dtype, by_rank, options.ranks))
            answered = not np.asarray(failures).any()
            is_fine = [answered and not np.asarray(wrong).any() for _, wrong in sorted(differing.items())]
            is_right &= all(is_fine)
            report(np.dtype(dtype).name, kib, *("pass" if each else "FAIL" for each in is_fine))

    others = {"none": kinds["none"], **exchanges(options.ranks)}
    for title, named in (("chain, us", kinds), ("chain, us", others)):
        report(title, *named)
        for kib in options.kib:
            x = number(kib, jnp.bfloat16, by_rank, options.ranks)
            programs = {name: chain(mesh, call) for name, call in named.items()}
            times = [microseconds(program, group.table, x, calls=CHAINED * ROUNDS)[0] for program in programs.values()]
            report(kib, *(f"{each:.2f}" for each in times))

    weights = draw_weights(mesh, options.layers)
    calls = 2 * options.layers * STACKS
    report("stack, us", "stack, no calls", *list(kinds)[1:], "bits")
    for kib in options.kib:
        rows = kib * 512 // HIDDEN
        x = jax.device_put(np.random.default_rng(kib).standard_normal((rows, HIDDEN)).astype(jnp.bfloat16), everywhere)
        took, results = {}, {}
        for name, call in kinds.items():
            took[name], results[name] = microseconds(stack(mesh, call), group.table, x, weights, calls=calls)
        is_same = {name: (np.asarray(results[name]) == np.asarray(results["psum"])).all() for name in list(kinds)[2:]}
        if options.ranks == 2:
            is_right &= all(is_same.values())
        floor = took["none"]
        report(
            kib,
            f"{floor * 2 * options.layers:.0f}",
            *(f"{took[name] - floor:.2f}" for name in list(kinds)[1:]),
            "pass" if all(is_same.values()) else "FAIL" if options.ranks == 2 else "differs",
        )
    print("PASS" if is_right else "FAIL")
    sys.exit(not is_right)


if __name__ == "__main__":
    main()
