"""Attention of decoding, of prefill and of latent (MLA) decoding, one row a case: the Mosaic kernel beside its peers.

    python tools/bench/attention.py
    python tools/bench/attention.py --cases 8x8192:t8 1x1024:t1 --plan splits=2,stages=4 --no-peers
    python tools/bench/attention.py --cases prefill:0+8192 latent:8x8192:h16:t1

Time is that of one call, prologue and merge included, in a chain of calls inside one program that goes round several
sets of inputs: neither dispatch nor what the L2 cache keeps is measured. An addition makes each call wait for the one
before; what a chain of these alone takes, `waiting`, is taken off. TB/s counts the keys and values read, once;
`of copy` is its share of the rate of a large copy measured in the same run. The reference reads the same pages; cuDNN
(`jax.nn.dot_product_attention`) reads a contiguous cache and knows no tree: it sees the prefix alone, as all do where a
case ends in `:no-tree`. jax's older Pallas kernel (Triton) reads pages of its own layout, for one query token.
FlashInfer is a script of its own, `peer_flashinfer.py`, for it lives in PyTorch. Of a prefill, whose chunk is causal,
TFLOP/s counts what its rows see; cuDNN attends to prefix and chunk in two calls and does not join them. Of latents,
TB/s counts each once, and TFLOP/s both products of the prefix. `tree:` joins a layer's tree with the parts of dcp
ranks, `merge:` the parts that splits leave; they are given no bytes, for they find them in the L2 cache. `commit:`
moves accepted rows into pages of all layers, in place as its reference does, and a call waits for the one before by the
pages themselves. Before it is timed, each case is compared with the reference: `error` is ‖kernel − reference‖ /
‖reference‖, for a prefill over rows spread over the chunk, for a commit of what changes.
"""

import argparse
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from commit import COMMITS
from decode_cases import CASES, Case
from generate import copy_rate
from jax import lax
from latent import LATENTS
from merge import MERGES
from prefill import PREFILLS
from timing import Attend, Programs, Work, binary_tree, or_reason, relative_error
from tree import TREES

from pallas_kernels.context_decode import context_decode
from pallas_kernels.context_decode.kernel import context_decode as prefix_decode
from pallas_kernels.context_decode.kernel import tree_decode
from pallas_kernels.context_decode.plan import Plan
from pallas_kernels.lse_merge import merge
from pallas_kernels.tree_attention import tree_attention

# May fail, where a plan breaks its rules.
type Make = Callable[[], Work]


def work_of(case: Case, plan: dict[str, int], has_peers: bool, rate: float) -> Work:
    """At a copy rate in bytes a second."""
    kernel, reference = by_kernel(case, plan), by_reference(case)

    def error(x: Inputs) -> jax.Array:
        return relative_error(*(attend(x.q, x, jnp.int32(0)) for attend in (kernel, reference)))

    def columns(µs: float) -> dict[str, object]:
        return {"TB/s": round(case.bytes / µs / 1e6, 2), "of copy": f"{case.bytes / µs * 1e6 / rate:.0%}"}

    return Work(
        name=case.name,
        draw=functools.partial(draw, case),
        sets=case.sets,
        kernel=kernel,
        peers={"cuDNN": by_cudnn(case), "old Pallas": by_old_pallas(case), "reference": reference} if has_peers else {},
        error=error,
        seconds=case.bytes / rate,
        columns=columns,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """`pages` are those of all sets; set i reads the pages of `tables[i]`."""

    q: jax.Array
    pages: jax.Array
    tables: jax.Array
    lengths: jax.Array
    tree: tuple[jax.Array, ...]


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
        tree=(tree_k, tree_v, jnp.tile(binary_tree(case.tokens), (case.batch, 1, 1))) if case.has_tree else (),
    )


def by_kernel(case: Case, plan: dict[str, int]) -> Attend:
    tiles = case.context // 64 + case.has_tree
    rows = case.tokens * case.heads // case.kv_heads
    decode: Callable[..., tuple[jax.Array, jax.Array]] = tree_decode if case.has_tree else prefix_decode
    how = dataclasses.replace(Plan.of(case.batch, rows, case.kv_heads, case.head_dim, tiles), **plan)

    def attend(q: jax.Array, x: Inputs, i: jax.Array) -> jax.Array:
        return decode(q, x.pages, 0, x.tables[i], x.lengths, *x.tree, scale=case.scale, plan=how)[0]

    return attend


def by_reference(case: Case) -> Attend:
    def attend(q: jax.Array, x: Inputs, i: jax.Array) -> jax.Array:
        prefix = context_decode(q, x.pages, 0, x.tables[i], x.lengths, scale=case.scale)
        if not case.has_tree:
            return prefix[0]
        among = tree_attention(q, *x.tree, scale=case.scale)
        return merge(*(jnp.stack(each) for each in zip(prefix, among, strict=True)))[0]

    return attend


def by_cudnn(case: Case) -> Attend:
    def attend(q: jax.Array, x: Inputs, i: jax.Array) -> jax.Array:
        shape = (case.sets, case.batch, case.context, case.kv_heads, case.head_dim)
        k, v = (lax.dynamic_index_in_dim(x.pages[0, kind].reshape(shape), i, keepdims=False) for kind in (0, 1))
        return jax.nn.dot_product_attention(q, k, v, scale=case.scale, implementation="cudnn")

    return attend


def by_old_pallas(case: Case) -> Attend:
    """One query token over pages of each KV head; what the pages hold is random, so they may be read as such."""

    def attend(q: jax.Array, x: Inputs, i: jax.Array) -> jax.Array:
        if case.tokens > 1:
            raise NotImplementedError("one query token")
        # Deprecated: it may be gone one day.
        from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

        k, v = (x.pages[0, kind].reshape(case.kv_heads, -1, case.page_size, case.head_dim) for kind in (0, 1))
        return paged_attention(q[:, 0] * case.scale, k, v, x.tables[i], x.lengths)[:, None]

    return attend


def parse_part(part: str) -> tuple[str, int]:
    name, value = part.split("=")
    return name, int(value)


def compile_named(name: str, make: Make) -> Programs:
    return Programs.compile(dataclasses.replace(make(), name=name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in (*CASES, *PREFILLS, *LATENTS, *TREES, *MERGES, *COMMITS)]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="CASE", help=" ".join(names))
    parser.add_argument(
        "--plan",
        nargs="+",
        default=[""],
        help='parts of the plan to replace, as splits=4,is_cluster=0; several, if wanted, and "" for the kernel\'s own',
    )
    parser.add_argument("--no-peers", action="store_true", help="the kernel alone")
    parser.add_argument("--output", type=Path, help="the rows as JSON")
    options = parser.parse_args()

    plans = {text: dict(parse_part(part) for part in text.split(",") if part) for text in options.plan}
    has_peers = not options.no_peers
    rate = copy_rate()
    print(f"# {jax.devices()[0].device_kind}, jax {jax.__version__}, copies move {rate / 1e12:.2f} TB/s", flush=True)

    def planned(cases: Sequence[Any], work: Callable[[Any, dict[str, int]], Work]) -> list[tuple[str, Make]]:
        return [
            (f"{case.name} {text}".strip(), functools.partial(work, case, plan))
            for name in options.cases
            for case in cases
            if case.name == name
            for text, plan in plans.items()
        ]

    works = {
        "case | error | µs | waiting µs | TB/s | of copy | cuDNN µs | old Pallas µs | reference µs": planned(
            CASES, lambda case, plan: work_of(case, plan, has_peers, rate)
        ),
        "case | error | µs | waiting µs | TFLOP/s | cuDNN µs": planned(
            PREFILLS, lambda case, plan: case.work(plan, has_peers)
        ),
        "case | error | µs | waiting µs | TB/s | of copy | TFLOP/s | reference µs": planned(
            LATENTS, lambda case, plan: case.work(plan, has_peers, rate)
        ),
        "case | error | µs | waiting µs | reference µs": [
            (name, functools.partial(case.work, has_peers))
            for name in options.cases
            for case in (*TREES, *MERGES, *COMMITS)
            if case.name == name
        ],
    }
    rows = []
    with ThreadPoolExecutor() as pool:
        for header, group in works.items():
            if group:
                print(header, flush=True)
            for several in itertools.batched(group, 6):
                # Compiled together, since that takes most of the time; timed alone.
                compiled = list(pool.map(lambda named: or_reason(lambda: compile_named(*named)), several))
                for (name, _), programs in zip(several, compiled, strict=True):
                    if isinstance(programs, str):
                        print(f"{name} | {programs}", flush=True)
                        continue
                    rows.append(programs.measure())
                    print(" | ".join(str(value) for value in rows[-1].values()), flush=True)
    if options.output:
        options.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
