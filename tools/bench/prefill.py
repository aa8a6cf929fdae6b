"""Attention of a chunk of prompt tokens over its paged prefix and among themselves: the cases of `attention.py`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from decode_cases import cold_sets, variation
from jax import lax
from timing import Work, relative_error

from pallas_kernels.chunk_prefill import Prefix, chunk_prefill
from pallas_kernels.chunk_prefill.plan import Plan
from pallas_kernels.context_decode import context_decode

_CHECKED = 32  # rows, spread over the chunk: a reference of all of them would be larger than the card's memory


@dataclasses.dataclass(frozen=True)
class Prefill:
    context: int
    tokens: int
    page_size: int = 64
    head_dim: int = 128
    heads: int = 32
    kv_heads: int = 8

    @property
    def name(self) -> str:
        return f"prefill:{self.context}+{self.tokens}" + variation(self.page_size, self.head_dim)

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def flops(self) -> int:
        """Two products, over what each row sees; masked parts of tiles that are multiplied anyway do not count."""
        return 4 * self.heads * self.head_dim * (self.tokens * self.context + self.tokens * (self.tokens + 1) // 2)

    @property
    def sets(self) -> int:
        return cold_sets(4 * (self.context + self.tokens) * self.kv_heads * self.head_dim)

    def work(self, changes: dict[str, int], has_peers: bool) -> Work:
        plan = Plan.of(self.tokens, self.heads, self.kv_heads, self.head_dim, self.context + self.tokens)
        kernel = by_kernel(self, dataclasses.replace(plan, **changes))
        return Work(
            name=self.name,
            draw=functools.partial(draw, self),
            sets=self.sets,
            kernel=kernel,
            peers={"cuDNN": by_cudnn(self)} if has_peers else {},
            error=functools.partial(error, self, kernel),
            seconds=self.flops / 5e14 + 5e-6,
            columns=lambda µs: {"TFLOP/s": round(self.flops / µs / 1e6)},
        )


PREFILLS = [
    Prefill(0, 8192),
    Prefill(8192, 8192),
    Prefill(8192, 2048),
    Prefill(32768, 512),
    Prefill(8192, 64),
    Prefill(8192, 2048, page_size=16),
    Prefill(0, 8192, head_dim=64),
    Prefill(8192, 2048, head_dim=64),
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """`pages` are those of all sets; set i has `tables[i]` and `chunks[i]`."""

    q: jax.Array
    pages: jax.Array
    tables: jax.Array
    chunks: jax.Array


def draw(case: Prefill, key: jax.Array) -> Inputs:
    q_key, pages_key, table_key, chunk_key = jax.random.split(key, 4)
    width = case.context // case.page_size
    count, of_token = case.sets * width, (case.kv_heads, case.head_dim)
    return Inputs(
        q=jax.random.normal(q_key, (case.tokens, case.heads, case.head_dim), jnp.bfloat16),
        pages=jax.random.normal(pages_key, (1, 2, count, case.page_size, *of_token), jnp.bfloat16),
        tables=jax.random.permutation(table_key, count).astype(jnp.int32).reshape(case.sets, width),
        chunks=jax.random.normal(chunk_key, (case.sets, 2, case.tokens, *of_token), jnp.bfloat16),
    )


def by_kernel(case: Prefill, plan: Plan):
    def attend(q: jax.Array, x: Inputs, i: jax.Array) -> jax.Array:
        prefix = Prefix(x.pages, 0, x.tables[i], jnp.int32(case.context)) if case.context else None
        chunk = x.chunks[i]
        return chunk_prefill(q, chunk=(chunk[0], chunk[1]), prefix=prefix, scale=case.scale, plan=plan)[0]

    return attend


def by_cudnn(case: Prefill):
    """Prefix and chunk in two calls, contiguous, whose results are not joined."""

    def attend(q: jax.Array, x: Inputs, i: jax.Array) -> jax.Array:
        cudnn = functools.partial(jax.nn.dot_product_attention, scale=case.scale, implementation="cudnn")
        chunk_k, chunk_v = (x.chunks[i][kind][None] for kind in (0, 1))
        output = cudnn(q[None], chunk_k, chunk_v, is_causal=True)[0]
        if case.context:
            shape = (case.sets, 1, case.context, case.kv_heads, case.head_dim)
            k, v = (lax.dynamic_index_in_dim(x.pages[0, kind].reshape(shape), i, keepdims=False) for kind in (0, 1))
            output += cudnn(q[None], k, v)[0]
        return output

    return attend


def error(case: Prefill, kernel, x: Inputs) -> jax.Array:
    """Each checked row as a sequence of one token whose last pages are the chunk's."""
    rows = jnp.linspace(0, case.tokens - 1, min(_CHECKED, case.tokens)).astype(jnp.int32)
    chunk = x.chunks[0].reshape(2, -1, case.page_size, *x.chunks.shape[3:])
    pages = jnp.concatenate([x.pages[0], chunk], axis=1)
    table = jnp.concatenate([x.tables[0], x.pages.shape[2] + jnp.arange(chunk.shape[1])])
    tables = jnp.broadcast_to(table, (len(rows), len(table)))
    want, _ = context_decode(x.q[rows, None], pages[None], 0, tables, case.context + rows + 1, scale=case.scale)
    return relative_error(kernel(x.q, x, jnp.int32(0))[rows], want[:, 0])
