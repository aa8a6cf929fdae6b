"""Latent (MLA) decoding, one row a case: the Mosaic kernel beside the reference.

    python tools/bench/latent.py
    python tools/bench/latent.py --cases 8x8192:h16:t1 --plan splits=8 --no-peers

Measured as by `attention.py`, whose chains of calls these are. TB/s counts the latents read, once; TFLOP/s both
products of the prefix; `of copy` is the share of the rate of a large copy measured in the same run. The reference reads
the same pages. Before it is timed, each case is compared with it: `error` is ‖kernel − reference‖ / ‖reference‖.
"""

import argparse
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
from attention import COLD_BYTES, TOLERANCE, Chain, binary_tree
from generate import copy_rate

from pallas_kernels.latent_decode import latent_decode, latent_tree_attention
from pallas_kernels.latent_decode.kernel import latent_tree_decode
from pallas_kernels.latent_decode.plan import Plan
from pallas_kernels.latent_decode.reference import KEY, LATENT
from pallas_kernels.lse_merge import merge

_SCALE = 192**-0.5  # of DeepSeek-V3: heads of 128 and 64 rotary dimensions before their projection is absorbed


@dataclasses.dataclass(frozen=True)
class Case:
    batch: int
    context: int
    heads: int
    tokens: int
    page_size: int = 64

    @property
    def name(self) -> str:
        page = f":page{self.page_size}" * (self.page_size != 64)
        return f"{self.batch}x{self.context}:h{self.heads}:t{self.tokens}{page}"

    @property
    def bytes(self) -> int:
        return 2 * self.batch * self.context * KEY

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.tokens * self.heads * self.context * (KEY + LATENT)

    @property
    def sets(self) -> int:
        return 1 + -(-COLD_BYTES // self.bytes)


CASES = [
    Case(8, 8192, heads=16, tokens=1),
    Case(8, 8192, heads=128, tokens=1),
    Case(64, 4096, heads=128, tokens=1),
    Case(8, 8192, heads=128, tokens=8),
    Case(8, 8192, heads=16, tokens=4),
    Case(8, 8192, heads=16, tokens=8),
    Case(8, 8192, heads=16, tokens=32),
    Case(8, 8192, heads=16, tokens=1, page_size=16),
    Case(1, 1024, heads=16, tokens=1),
    Case(1, 8192, heads=16, tokens=1),
    Case(32, 2048, heads=16, tokens=1),
    Case(1, 131072, heads=16, tokens=1),
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """`pages` are those of all sets; set i reads the pages of `tables[i]`."""

    q: jax.Array
    pages: jax.Array
    tables: jax.Array
    lengths: jax.Array
    tree: tuple[jax.Array, jax.Array]


def draw(case: Case, key: jax.Array) -> Inputs:
    q_key, pages_key, table_key, tree_key = jax.random.split(key, 4)
    width = case.context // case.page_size
    count = case.sets * case.batch * width
    return Inputs(
        q=jax.random.normal(q_key, (case.batch, case.tokens, case.heads, KEY), jnp.bfloat16),
        pages=jax.random.normal(pages_key, (1, count, case.page_size, KEY), jnp.bfloat16),
        tables=jax.random.permutation(table_key, count).astype(jnp.int32).reshape(case.sets, case.batch, width),
        lengths=jnp.full(case.batch, case.context, jnp.int32),
        tree=(
            jax.random.normal(tree_key, (case.batch, case.tokens, KEY), jnp.bfloat16),
            jnp.tile(binary_tree(case.tokens), (case.batch, 1, 1)),
        ),
    )


type Attend = Callable[[jax.Array, Inputs, jax.Array], jax.Array]


def by_kernel(case: Case, plan: dict[str, int]) -> Attend:
    how = dataclasses.replace(Plan.of(case.batch, case.tokens * case.heads, case.context // 64 + 1), **plan)

    @jax.jit  # traced once, however often it is called
    def attend(q, pages, table, lengths, tree):
        return _as_wide(latent_tree_decode(q, pages, 0, table, lengths, *tree, scale=_SCALE, plan=how)[0])

    return lambda q, x, i: attend(q, x.pages, x.tables[i], x.lengths, x.tree)


def by_reference(q: jax.Array, x: Inputs, i: jax.Array) -> jax.Array:
    prefix = latent_decode(q, x.pages, 0, x.tables[i], x.lengths, scale=_SCALE)
    among = latent_tree_attention(q, *x.tree, scale=_SCALE)
    return _as_wide(merge(*(jnp.stack(each) for each in zip(prefix, among, strict=True)))[0])


def _as_wide(output: jax.Array) -> jax.Array:
    """As wide as queries, which the chain adds it to."""
    return jnp.pad(output, ((0, 0), (0, 0), (0, 0), (0, KEY - LATENT)))


@dataclasses.dataclass(frozen=True)
class Programs:
    """All that a case runs."""

    draw: jax.stages.Compiled
    error: jax.stages.Compiled
    kernel: Chain
    reference: Chain | None

    @staticmethod
    def compile(case: Case, rate: float, plan: dict[str, int], has_peers: bool) -> "Programs":
        kernel = by_kernel(case, plan)
        shapes = jax.eval_shape(functools.partial(draw, case), jax.random.key(0))

        def error(x: Inputs) -> jax.Array:
            got, want = (f(x.q, x, jnp.int32(0)).astype(jnp.float32) for f in (kernel, by_reference))
            return jnp.linalg.norm(got - want) / jnp.linalg.norm(want)

        chain = functools.partial(Chain.compile, shapes, case.sets, case.bytes)
        return Programs(
            draw=jax.jit(functools.partial(draw, case)).lower(jax.random.key(0)).compile(),
            error=jax.jit(error).lower(shapes).compile(),
            kernel=chain(kernel, rate),
            reference=chain(by_reference, rate / 8) if has_peers else None,
        )

    def measure(self, case: Case, rate: float) -> dict[str, object]:
        x = self.draw(jax.random.key(0))
        error = float(self.error(x))
        row: dict[str, object] = {"case": case.name, "error": f"{error:.1e}"}
        if not error < TOLERANCE:
            return row | {"µs": "WRONG"}
        time_of_kernel = self.kernel.microseconds(x)
        row["µs"] = round(time_of_kernel, 1)
        row["TB/s"] = round(case.bytes / time_of_kernel / 1e6, 2)
        row["of copy"] = f"{case.bytes / time_of_kernel * 1e6 / rate:.0%}"
        row["TFLOP/s"] = round(case.flops / time_of_kernel / 1e6)
        if self.reference:
            row["reference µs"] = round(self.reference.microseconds(x), 1)
        return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="CASE", help=" ".join(names))
    parser.add_argument("--plan", default="", help="parts of the plan to replace, as splits=2")
    parser.add_argument("--no-peers", action="store_true", help="the kernel alone")
    parser.add_argument("--output", type=Path, help="the rows as JSON")
    options = parser.parse_args()

    plan = {name: int(value) for name, value in (part.split("=") for part in options.plan.split(",") if part)}
    rate = copy_rate()
    print(f"# {jax.devices()[0].device_kind}, jax {jax.__version__}, copies move {rate / 1e12:.2f} TB/s", flush=True)
    print("case | error | µs | TB/s | of copy | TFLOP/s | reference µs", flush=True)
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
