"""Attention of decoding, one row a case: the Mosaic kernel beside the reference and cuDNN.

    python tools/bench/attention.py
    python tools/bench/attention.py --cases 8x8192:t8 1x1024:t1 --plan splits=2,stages=3 --no-peers

Time is that of one call, prologue and merge included, in a chain of calls inside one program that goes round several
sets of inputs: neither dispatch nor what the L2 cache keeps is measured. TB/s counts the keys and values read, once;
`of copy` is its share of the rate of a large copy measured in the same run. The reference reads the same pages; cuDNN
(`jax.nn.dot_product_attention`) reads a contiguous cache and knows no tree: it sees the prefix alone. Before it is
timed, each case is compared with the reference: `error` is ‖kernel − reference‖ / ‖reference‖.
"""

import argparse
import dataclasses
import functools
import itertools
import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from generate import copy_rate
from jax import lax

from pallas_kernels.context_decode import context_decode
from pallas_kernels.context_decode.kernel import tree_decode
from pallas_kernels.context_decode.plan import Plan
from pallas_kernels.lse_merge import merge
from pallas_kernels.tree_attention import tree_attention

_CHAINED = 8  # calls in one iteration: few enough to compile, enough for the host to stay ahead of the device
_COLD_BYTES = 2**28  # between two reads of one set of inputs; the L2 cache has 50 MiB
_SECONDS = 0.02  # of one measurement
_TOLERANCE = 5e-3  # bfloat16 rounds the weights of kernel and reference


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    context: int
    tokens: int
    page_size: int = 64
    head_dim: int = 128
    heads: int = 32
    kv_heads: int = 8

    @property
    def name(self) -> str:
        sizes = f"{self.batch}x{self.context}:t{self.tokens}"
        return (
            sizes + f":page{self.page_size}" * (self.page_size != 64) + f":head{self.head_dim}" * (self.head_dim != 128)
        )

    @property
    def bytes(self) -> int:
        return 2 * 2 * self.batch * self.context * self.kv_heads * self.head_dim

    @property
    def sets(self) -> int:
        return 1 + -(-_COLD_BYTES // self.bytes)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


CASES = [
    Case(8, 8192, 8),
    Case(8, 8192, 1),
    Case(8, 8192, 32),
    Case(1, 1024, 1),
    Case(1, 8192, 1),
    Case(32, 2048, 1),
    Case(1, 131072, 1),
    Case(8, 8192, 1, page_size=16),
    Case(8, 8192, 8, head_dim=64),
    Case(1, 1024, 8),
    Case(1, 8192, 8),
    Case(32, 2048, 8),
    Case(1, 131072, 8),
    Case(1, 1024, 32),
    Case(1, 8192, 32),
    Case(32, 2048, 32),
    Case(1, 131072, 32),
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """`pages` are those of all sets; set i reads the pages of `tables[i]`."""

    q: jax.Array
    pages: jax.Array
    tables: jax.Array
    lengths: jax.Array
    tree: tuple[jax.Array, jax.Array, jax.Array]


def draw(case: Case, key: jax.Array) -> Inputs:
    q_key, pages_key, table_key, tree_key = jax.random.split(key, 4)
    width = case.context // case.page_size
    count = case.sets * case.batch * width
    tree_k, tree_v = jax.random.normal(
        tree_key, (2, case.batch, case.tokens, case.kv_heads, case.head_dim), jnp.bfloat16
    )
    return Inputs(
        q=jax.random.normal(q_key, (case.batch, case.tokens, case.heads, case.head_dim), jnp.bfloat16),
        pages=jax.random.normal(pages_key, (1, 2, count, case.page_size, case.kv_heads, case.head_dim), jnp.bfloat16),
        tables=jax.random.permutation(table_key, count).astype(jnp.int32).reshape(case.sets, case.batch, width),
        lengths=jnp.full(case.batch, case.context, jnp.int32),
        tree=(tree_k, tree_v, jnp.tile(binary_tree(case.tokens), (case.batch, 1, 1))),
    )


def shapes(case: Case) -> Inputs:
    return jax.eval_shape(functools.partial(draw, case), jax.random.key(0))


def binary_tree(nodes: int) -> np.ndarray:
    """Ancestor bits: node n > 0 is a child of (n - 1) // 2."""
    words = np.zeros((nodes, 2), np.uint32)
    for node in range(nodes):
        if node:
            words[node] = words[(node - 1) // 2]
        words[node, node // 32] |= np.uint32(1 << node % 32)
    return words


type Attend = Callable[[jax.Array, Inputs, jax.Array], jax.Array]


def by_kernel(case: Case, plan: dict[str, int]) -> Attend:
    tiles = case.context // 64 + 1
    rows = case.tokens * case.heads // case.kv_heads
    how = dataclasses.replace(Plan.of(case.batch, rows, case.kv_heads, case.head_dim, tiles), **plan)

    @jax.jit  # traced once, however often it is called
    def attend(q, pages, table, lengths, tree):
        return tree_decode(q, pages, 0, table, lengths, *tree, scale=case.scale, plan=how)[0]

    return lambda q, x, i: attend(q, x.pages, x.tables[i], x.lengths, x.tree)


def by_reference(case: Case) -> Attend:
    def attend(q: jax.Array, x: Inputs, i: jax.Array) -> jax.Array:
        prefix = context_decode(q, x.pages, 0, x.tables[i], x.lengths, scale=case.scale)
        among = tree_attention(q, *x.tree, scale=case.scale)
        return merge(*(jnp.stack(each) for each in zip(prefix, among, strict=True)))[0]

    return attend


def by_cudnn(case: Case) -> Attend:
    def attend(q: jax.Array, x: Inputs, i: jax.Array) -> jax.Array:
        shape = (case.sets, case.batch, case.context, case.kv_heads, case.head_dim)
        k, v = (lax.dynamic_index_in_dim(x.pages[0, kind].reshape(shape), i, keepdims=False) for kind in (0, 1))
        return jax.nn.dot_product_attention(q, k, v, scale=case.scale, implementation="cudnn")

    return attend


@dataclasses.dataclass(frozen=True)
class Chain:
    """Calls that wait for each other, in one program."""

    program: Callable[[Inputs], jax.Array]
    calls: int

    @staticmethod
    def compile(case: Case, attend: Attend, rate: float) -> "Chain":
        """As many calls as take a while at `rate` bytes a second."""
        iterations = max(2, int(_SECONDS * rate / case.bytes / _CHAINED))

        def chain(x: Inputs) -> jax.Array:
            def body(n, q):
                for call in range(_CHAINED):
                    output = attend(q, x, lax.rem(n * _CHAINED + call, case.sets))
                    q = q + (0 * output).astype(q.dtype)  # each call waits for the one before
                return q

            return lax.fori_loop(0, iterations, body, x.q)

        return Chain(jax.jit(chain).lower(shapes(case)).compile(), iterations * _CHAINED)

    def microseconds(self, x: Inputs) -> float:
        """Of one call: the median of five runs after three that warm up (the first ones record graphs)."""
        times = []
        for _ in range(8):
            started = time.perf_counter()
            self.program(x).block_until_ready()
            times.append(time.perf_counter() - started)
        return 1e6 * float(np.median(times[3:])) / self.calls


@dataclasses.dataclass(frozen=True)
class Programs:
    """All that a case runs. A peer that can't be compiled leaves the reason."""

    draw: Callable[[jax.Array], Inputs]
    error: Callable[[Inputs], jax.Array]
    kernel: Chain
    peers: dict[str, Chain | str]

    @staticmethod
    def compile(case: Case, rate: float, plan: dict[str, int], has_peers: bool) -> "Programs":
        kernel, reference = by_kernel(case, plan), by_reference(case)

        def error(x: Inputs) -> jax.Array:
            got, want = (f(x.q, x, jnp.int32(0)).astype(jnp.float32) for f in (kernel, reference))
            return jnp.linalg.norm(got - want) / jnp.linalg.norm(want)

        peers: dict[str, Chain | str] = {}
        for name, attend, guess in [("cuDNN", by_cudnn(case), rate), ("reference", reference, rate / 8)] * has_peers:
            try:
                peers[name] = Chain.compile(case, attend, guess)
            except (ValueError, RuntimeError, NotImplementedError) as reason:
                peers[name] = f"{type(reason).__name__}: {str(reason)[:60]}"
        return Programs(
            draw=jax.jit(functools.partial(draw, case)).lower(jax.random.key(0)).compile(),
            error=jax.jit(error).lower(shapes(case)).compile(),
            kernel=Chain.compile(case, kernel, rate),
            peers=peers,
        )

    def measure(self, case: Case, rate: float) -> dict[str, object]:
        x = self.draw(jax.random.key(0))
        error = float(self.error(x))
        row: dict[str, object] = {"case": case.name, "error": f"{error:.1e}"}
        if not error < _TOLERANCE:
            return row | {"µs": "WRONG"}
        time_of_kernel = self.kernel.microseconds(x)
        row["µs"] = round(time_of_kernel, 1)
        row["TB/s"] = round(case.bytes / time_of_kernel / 1e6, 2)
        row["of copy"] = f"{case.bytes / time_of_kernel * 1e6 / rate:.0%}"
        for name, peer in self.peers.items():
            row[f"{name} µs"] = peer if isinstance(peer, str) else round(peer.microseconds(x), 1)
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="CASE", help=" ".join(names))
    parser.add_argument("--plan", default="", help="parts of the plan to replace, as splits=4,may_cluster=0")
    parser.add_argument("--no-peers", action="store_true", help="the kernel alone")
    parser.add_argument("--output", type=Path, help="the rows as JSON")
    options = parser.parse_args()

    plan = {name: int(value) for name, value in (part.split("=") for part in options.plan.split(",") if part)}
    rate = copy_rate()
    print(f"# {jax.devices()[0].device_kind}, jax {jax.__version__}, copies move {rate / 1e12:.2f} TB/s", flush=True)
    print("case | error | µs | TB/s | of copy | cuDNN µs | reference µs", flush=True)
    rows = []
    with ThreadPoolExecutor() as pool:
        for cases in itertools.batched((case for name in options.cases for case in CASES if case.name == name), 6):
            # Compiled together, since that takes most of the time; timed alone.
            programs = pool.map(lambda case: Programs.compile(case, rate, plan, not options.no_peers), cases)
            for case, compiled in zip(cases, list(programs), strict=True):
                rows.append(compiled.measure(case, rate))
                print(" | ".join(str(value) for value in rows[-1].values()), flush=True)
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
