"""A layer's tree joined with the parts of dcp ranks: cases of `attention.py`."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from decode_cases import variation
from timing import Attend, Work, binary_tree, relative_error

from pallas_kernels.lse_merge import join, merge, pack, unpack
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.tree_attention.kernel import tree_join


@dataclasses.dataclass(frozen=True)
class Tree:
    batch: int
    tokens: int
    ranks: int
    head_dim: int = 128
    heads: int = 32
    kv_heads: int = 8

    @property
    def name(self) -> str:
        return f"tree:{self.batch}:t{self.tokens}:dcp{self.ranks}" + variation(head_dim=self.head_dim)

    @property
    def own_heads(self) -> int:
        return self.heads // self.ranks

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def work(self, has_peers: bool) -> Work:
        kernel, reference = (jax.jit(functools.partial(f, self)) for f in (by_kernel, by_reference))

        def one_head(attend: Callable[[jax.Array, Inputs], jax.Array]) -> Attend:
            """Own heads are fewer than the queries that the next call is to wait with."""
            return lambda q, x, i: attend(q, x)[:, :, :1]

        return Work(
            name=self.name,
            draw=functools.partial(draw, self),
            sets=1,  # a layer finds its inputs in the L2 cache too, where projection and exchange have just put them
            kernel=one_head(kernel),
            peers={"reference": one_head(reference)} if has_peers else {},
            error=lambda x: relative_error(kernel(x.q, x), reference(x.q, x)),
            seconds=5e-6,
            columns=lambda µs: {},
        )


TREES = [
    Tree(1, 1, 2),
    Tree(1, 8, 2),
    Tree(8, 1, 2),
    Tree(8, 8, 2),
    Tree(8, 8, 4),
    Tree(8, 8, 2, head_dim=64),
    Tree(8, 32, 2),
    Tree(8, 33, 2),
    Tree(8, 64, 4),
    Tree(32, 8, 2),
    Tree(32, 32, 4),
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    q: jax.Array
    k: jax.Array
    v: jax.Array
    ancestors: jax.Array
    parts: jax.Array


def draw(case: Tree, key: jax.Array) -> Inputs:
    q, k, v, output, lse = jax.random.split(key, 5)
    rows = (case.batch, case.tokens)
    parts = (case.ranks, *rows, case.own_heads)
    return Inputs(
        q=jax.random.normal(q, (*rows, case.heads, case.head_dim), jnp.bfloat16),
        k=jax.random.normal(k, (*rows, case.kv_heads, case.head_dim), jnp.bfloat16),
        v=jax.random.normal(v, (*rows, case.kv_heads, case.head_dim), jnp.bfloat16),
        ancestors=jnp.tile(binary_tree(case.tokens), (case.batch, 1, 1)),
        parts=pack(jax.random.normal(output, (*parts, case.head_dim)), jax.random.normal(lse, parts)),
    )


def by_kernel(case: Tree, q: jax.Array, x: Inputs) -> jax.Array:
    return tree_join(q, x.k, x.v, x.ancestors, 0, x.parts, scale=case.scale)


def by_reference(case: Tree, q: jax.Array, x: Inputs) -> jax.Array:
    own = np.arange(case.own_heads)
    k, v = (each[:, :, own // (case.heads // case.kv_heads)] for each in (x.k, x.v))
    among = tree_attention(q[:, :, own], k, v, x.ancestors, scale=case.scale)
    return join(merge(*unpack(x.parts)), among).astype(q.dtype)
