"""The partial results of splits joined: cases of `attention.py`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from decode_cases import variation
from jax import lax
from timing import Attend, Work, relative_error

from pallas_kernels.lse_merge import merge
from pallas_kernels.lse_merge.kernel import merge_splits


@dataclasses.dataclass(frozen=True)
class Merge:
    """`batch` counts sequences times KV heads where these have splits of their own."""

    batch: int
    parts: int
    rows: int
    head_dim: int = 128

    @property
    def name(self) -> str:
        return f"merge:{self.batch}:{self.parts}x{self.rows}" + variation(head_dim=self.head_dim)

    def work(self, has_peers: bool) -> Work:
        def waiting(join) -> Attend:
            """A call waits by the fewest values, its log-sum-exps. Barriers keep XLA from fusing that addition with the
            reference, and from computing only what the next call sees of the output."""

            def attend(lses: jax.Array, x: Inputs, i: int | jax.Array) -> jax.Array:
                output, lse = lax.optimization_barrier(join(*lax.optimization_barrier((x.outputs, lses))))
                return (output[..., 0] + lse)[:, None]

            return attend

        return Work(
            name=self.name,
            draw=functools.partial(draw, self),
            sets=1,  # the splits have just put their results into the L2 cache
            kernel=waiting(by_kernel),
            peers={"reference": waiting(by_reference)} if has_peers else {},
            error=lambda x: relative_error(*(join(x.outputs, x.q)[0] for join in (by_kernel, by_reference))),
            seconds=5e-6,
            columns=lambda µs: {},
        )


MERGES = [
    # Of more than 32 parts XLA would transpose the reference's once, outside of the chain.
    Merge(64, 4, 32),
    Merge(8, 15, 4),  # 1x8192:t1
    Merge(8, 15, 32),  # 1x8192:t8
    Merge(8, 16, 16, head_dim=512),  # latent:8x8192:h16:t1
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """`q` are the log-sum-exps."""

    q: jax.Array
    outputs: jax.Array


def draw(case: Merge, key: jax.Array) -> Inputs:
    lse_key, output_key = jax.random.split(key)
    shape = (case.batch, case.parts, case.rows)
    return Inputs(q=jax.random.normal(lse_key, shape), outputs=jax.random.normal(output_key, (*shape, case.head_dim)))


def by_kernel(outputs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    output, lse = merge_splits(outputs[:, None, :, None], lses[:, None, :, None], lses.shape[2], 1)
    return output[:, :, 0], lse[:, :, 0]


def by_reference(outputs: jax.Array, lses: jax.Array) -> tuple[jax.Array, jax.Array]:
    return merge(jnp.moveaxis(outputs, 1, 0), jnp.moveaxis(lses, 1, 0))
