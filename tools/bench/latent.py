"""Latent (MLA) decoding: cases of `attention.py`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from decode_cases import cold_sets, variation
from timing import Attend, Work, binary_tree, relative_error

from pallas_kernels.latent_decode import latent_decode, latent_tree_attention
from pallas_kernels.latent_decode.kernel import latent_tree_decode
from pallas_kernels.latent_decode.plan import Plan
from pallas_kernels.latent_decode.reference import KEY, LATENT
from pallas_kernels.lse_merge import merge

_SCALE = 192**-0.5  # of DeepSeek-V3: heads of 128 and 64 rotary dimensions before their projection is absorbed


@dataclasses.dataclass(frozen=True)
class Latent:
    batch: int
    context: int
    heads: int
    tokens: int
    page_size: int = 64

    @property
    def name(self) -> str:
        return f"latent:{self.batch}x{self.context}:h{self.heads}:t{self.tokens}" + variation(self.page_size)

    @property
    def bytes(self) -> int:
        return 2 * self.batch * self.context * KEY

    @property
    def flops(self) -> int:
        return 2 * self.batch * self.tokens * self.heads * self.context * (KEY + LATENT)

    @property
    def sets(self) -> int:
        return cold_sets(self.bytes)

    def work(self, plan: dict[str, int], has_peers: bool, rate: float) -> Work:
        """At a copy rate in bytes a second."""
        kernel = by_kernel(self, plan)

        def error(x: Inputs) -> jax.Array:
            return relative_error(*(attend(x.q, x, jnp.int32(0)) for attend in (kernel, by_reference)))

        def columns(µs: float) -> dict[str, object]:
            return {
                "TB/s": round(self.bytes / µs / 1e6, 2),
                "of copy": f"{self.bytes / µs * 1e6 / rate:.0%}",
                "TFLOP/s": round(self.flops / µs / 1e6),
            }

        return Work(
            name=self.name,
            draw=functools.partial(draw, self),
            sets=self.sets,
            kernel=kernel,
            peers={"reference": by_reference} if has_peers else {},
            error=error,
            seconds=max(self.bytes / rate, self.flops / 5e14),
            columns=columns,
        )


LATENTS = [
    Latent(8, 8192, heads=16, tokens=1),
    Latent(8, 8192, heads=128, tokens=1),
    Latent(64, 4096, heads=128, tokens=1),
    Latent(8, 8192, heads=128, tokens=8),
    Latent(8, 8192, heads=16, tokens=4),
    Latent(8, 8192, heads=16, tokens=8),
    Latent(8, 8192, heads=16, tokens=32),
    Latent(8, 8192, heads=16, tokens=1, page_size=16),
    Latent(1, 1024, heads=16, tokens=1),
    Latent(1, 8192, heads=16, tokens=1),
    Latent(32, 2048, heads=16, tokens=1),
    Latent(1, 131072, heads=16, tokens=1),
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


def draw(case: Latent, key: jax.Array) -> Inputs:
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


def by_kernel(case: Latent, plan: dict[str, int]) -> Attend:
    how = dataclasses.replace(Plan.of(case.batch, case.tokens * case.heads, case.context // 64 + 1), **plan)

    def attend(q: jax.Array, x: Inputs, i: jax.Array) -> jax.Array:
        return _as_wide(latent_tree_decode(q, x.pages, 0, x.tables[i], x.lengths, *x.tree, scale=_SCALE, plan=how)[0])

    return attend


def by_reference(q: jax.Array, x: Inputs, i: jax.Array) -> jax.Array:
    prefix = latent_decode(q, x.pages, 0, x.tables[i], x.lengths, scale=_SCALE)
    among = latent_tree_attention(q, *x.tree, scale=_SCALE)
    return _as_wide(merge(*(jnp.stack(each) for each in zip(prefix, among, strict=True)))[0])


def _as_wide(output: jax.Array) -> jax.Array:
    """As wide as queries, which the chain adds it to."""
    return jnp.pad(output, ((0, 0), (0, 0), (0, 0), (0, KEY - LATENT)))
