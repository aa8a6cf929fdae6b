"""Accepted rows moved from the pending buffer into the pages of all layers of a stage: cases of `attention.py`."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from decode_cases import cold_sets
from timing import Attend, Work, relative_error

from pallas_kernels.kv_commit import commit_rows as by_reference
from pallas_kernels.kv_commit.kernel import commit_rows as by_kernel

_PAGE_SIZE = 64


@dataclasses.dataclass(frozen=True)
class Commit:
    batch: int
    accepted: int = 5
    tokens: int = 8
    layers: int = 32
    head_dim: int = 128
    kv_heads: int = 8

    @property
    def name(self) -> str:
        return f"commit:{self.batch}:{self.accepted}of{self.tokens}"

    @property
    def bytes(self) -> int:
        """Read and written, in bfloat16."""
        return 2 * 2 * 2 * self.layers * self.batch * self.accepted * self.kv_heads * self.head_dim

    @property
    def sets(self) -> int:
        return cold_sets(self.bytes)

    def work(self, has_peers: bool) -> Work:
        def attend(commit) -> Attend:
            is_written = np.tile(np.arange(self.tokens) < self.accepted, (self.batch, 1))
            return lambda pages, x, i: commit(pages, x.pending, 0, x.nodes[i], x.page[i], x.offset[i], is_written)

        kernel, reference = attend(by_kernel), attend(by_reference)

        def error(x: Inputs) -> jax.Array:
            """Of what changes. Page 0 belongs to no sequence: only the reference writes it."""
            got, want = ((commit(x.pages, x, 0) - x.pages)[:, :, 1:] for commit in (kernel, reference))
            return relative_error(got, want)

        return Work(
            name=self.name,
            draw=functools.partial(draw, self),
            sets=self.sets,
            kernel=kernel,
            peers={"reference": reference} if has_peers else {},
            error=error,
            seconds=self.bytes / 4e12 + 5e-6,
            columns=lambda µs: {},
            after=None,  # in place: each call waits for the one before by the pages
        )


COMMITS = [Commit(1), Commit(8), Commit(32)]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """Pages and pending nodes are those of all sets; set i moves `nodes[i]` to `page[i]` and `offset[i]`."""

    pages: jax.Array
    pending: jax.Array
    nodes: jax.Array
    page: jax.Array
    offset: jax.Array

    @property
    def q(self) -> jax.Array:
        """What goes from call to call."""
        return self.pages


def draw(case: Commit, key: jax.Array) -> Inputs:
    """A set of a sequence has as many successive tokens of some page as its tree has nodes."""
    pages_key, pending_key, node_key, place_key = jax.random.split(key, 4)
    count, shape = case.sets * case.batch, (case.sets, case.batch, case.tokens)
    places = _PAGE_SIZE + case.tokens * jax.random.permutation(place_key, count)[:, None] + jnp.arange(case.tokens)
    nodes = jax.random.permutation(node_key, jnp.broadcast_to(jnp.arange(case.tokens), shape), axis=2, independent=True)
    layers, of_token = (case.layers, 2), (case.kv_heads, case.head_dim)
    return Inputs(
        pages=jax.random.normal(
            pages_key, (*layers, 1 - (-count * case.tokens // _PAGE_SIZE), _PAGE_SIZE, *of_token), jnp.bfloat16
        ),
        pending=jax.random.normal(pending_key, (*layers, case.batch, case.sets * case.tokens, *of_token), jnp.bfloat16),
        nodes=nodes + case.tokens * jnp.arange(case.sets)[:, None, None],
        page=(places // _PAGE_SIZE).reshape(shape),
        offset=(places % _PAGE_SIZE).reshape(shape),
    )
