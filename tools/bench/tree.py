"""A layer's tree joined with the parts of dcp ranks, one row a case: the Mosaic kernel beside plain JAX.

    python tools/bench/tree.py
    python tools/bench/tree.py --cases 8:t8:dcp2 8:t64:dcp4

Time is that of one call in a chain of calls inside one program, each with the product and sum that make the next one
wait for it. A layer finds its inputs in the L2 cache, where projection and exchange have just put them, and so do these
calls. Before it is timed, each case is compared with plain JAX: `error` is ‖kernel − reference‖ / ‖reference‖.
"""

import argparse
import dataclasses
import functools
import json
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from attention import binary_tree
from jax import lax

from pallas_kernels.lse_merge import join, merge, pack, unpack
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.tree_attention.kernel import tree_join

_CHAINED, _ITERATIONS = 8, 250
_TOLERANCE = 5e-3  # bfloat16 rounds the weights and the output of the kernel


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    tokens: int
    ranks: int
    head_dim: int = 128
    heads: int = 32
    kv_heads: int = 8

    @property
    def name(self) -> str:
        return f"{self.batch}:t{self.tokens}:dcp{self.ranks}" + f":head{self.head_dim}" * (self.head_dim != 128)

    @property
    def own_heads(self) -> int:
        return self.heads // self.ranks

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5


CASES = [
    Case(1, 1, 2),
    Case(1, 8, 2),
    Case(8, 1, 2),
    Case(8, 8, 2),
    Case(8, 8, 4),
    Case(8, 8, 2, head_dim=64),
    Case(8, 32, 2),
    Case(8, 33, 2),
    Case(8, 64, 4),
    Case(32, 8, 2),
    Case(32, 32, 4),
]

type Inputs = dict[str, jax.Array]


def draw(case: Case, key: jax.Array) -> Inputs:
    q, k, v, output, lse = jax.random.split(key, 5)
    rows = (case.batch, case.tokens)
    parts = (case.ranks, *rows, case.own_heads)
    return dict(
        q=jax.random.normal(q, (*rows, case.heads, case.head_dim), jnp.bfloat16),
        k=jax.random.normal(k, (*rows, case.kv_heads, case.head_dim), jnp.bfloat16),
        v=jax.random.normal(v, (*rows, case.kv_heads, case.head_dim), jnp.bfloat16),
        ancestors=jnp.tile(binary_tree(case.tokens), (case.batch, 1, 1)),
        parts=pack(jax.random.normal(output, (*parts, case.head_dim)), jax.random.normal(lse, parts)),
    )


def by_kernel(case: Case, q: jax.Array, x: Inputs) -> jax.Array:
    return tree_join(q, x["k"], x["v"], x["ancestors"], 0, x["parts"], scale=case.scale)


def by_reference(case: Case, q: jax.Array, x: Inputs) -> jax.Array:
    own = np.arange(case.own_heads)
    k, v = (x[name][:, :, own // (case.heads // case.kv_heads)] for name in ("k", "v"))
    among = tree_attention(q[:, :, own], k, v, x["ancestors"], scale=case.scale)
    return join(merge(*unpack(x["parts"])), among).astype(q.dtype)


def microseconds(attend: Callable[[jax.Array, Inputs], jax.Array], x: Inputs) -> float:
    """Of one call: the median of five runs after three that warm up (the first ones record graphs)."""
    attend = jax.jit(attend)  # traced once, however often it is called

    def chain(x: Inputs) -> jax.Array:
        def body(_, q):
            for _ in range(_CHAINED):
                q = q + 0 * attend(q, x)[:, :, :1]
            return q

        return lax.fori_loop(0, _ITERATIONS, body, x["q"])

    program = jax.jit(chain).lower(x).compile()
    times = []
    for _ in range(8):
        started = time.perf_counter()
        program(x).block_until_ready()
        times.append(time.perf_counter() - started)
    return 1e6 * float(np.median(times[3:])) / (_ITERATIONS * _CHAINED)


def measure(case: Case) -> dict[str, object]:
    x = jax.jit(functools.partial(draw, case))(jax.random.key(0))
    kernel, reference = functools.partial(by_kernel, case), functools.partial(by_reference, case)
    got, want = (jax.jit(f)(x["q"], x).astype(jnp.float32) for f in (kernel, reference))
    error = float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))
    row: dict[str, object] = {"case": case.name, "error": f"{error:.1e}"}
    if not error < _TOLERANCE:
        return row | {"µs": "WRONG"}
    return row | {"µs": round(microseconds(kernel, x), 1), "reference µs": round(microseconds(reference, x), 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="CASE", help=" ".join(names))
    parser.add_argument("--output", type=Path, help="the rows as JSON")
    options = parser.parse_args()

    print(f"# {jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    print("case | error | µs | reference µs", flush=True)
    rows = []
    for case in (case for name in options.cases for case in CASES if case.name == name):
        rows.append(measure(case))
        print(" | ".join(str(value) for value in rows[-1].values()), flush=True)
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
