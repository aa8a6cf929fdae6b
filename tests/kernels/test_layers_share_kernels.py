"""All layers of a model are traced and compiled as one kernel: one each would take minutes."""

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.chunk_prefill.kernel import Prefix, chunk_prefill
from pallas_kernels.context_decode.kernel import tree_decode
from pallas_kernels.latent_decode.kernel import latent_decode
from pallas_kernels.latent_decode.reference import KEY
from pallas_kernels.lse_merge import LSE_COLUMNS
from pallas_kernels.tree_attention.kernel import tree_join

LAYERS = 3
TABLE, LENGTHS = jnp.zeros((1, 2), jnp.int32), jnp.ones(1, jnp.int32)


def decode_all(layers):
    q, new = jnp.zeros((1, 2, 3, 64), jnp.bfloat16), jnp.zeros((1, 2, 1, 64), jnp.bfloat16)
    pages, ancestors = jnp.zeros((LAYERS, 2, 4, 16, 1, 64), jnp.bfloat16), jnp.zeros((1, 2, 2), jnp.uint32)
    return [tree_decode(q, pages, layer, TABLE, LENGTHS, new, new, ancestors, scale=0.125) for layer in layers]


def prefill_all(layers):
    q, new = jnp.zeros((16, 3, 64), jnp.bfloat16), jnp.zeros((16, 1, 64), jnp.bfloat16)
    pages = jnp.zeros((LAYERS, 2, 4, 16, 1, 64), jnp.bfloat16)
    prefixes = (Prefix(pages, layer, TABLE[0], LENGTHS[0]) for layer in layers)
    return [chunk_prefill(q, chunk=(new, new), prefix=prefix, scale=0.125) for prefix in prefixes]


def decode_latents_of_all(layers):
    q, pages = jnp.zeros((1, 2, 3, KEY), jnp.bfloat16), jnp.zeros((LAYERS, 4, 16, KEY), jnp.bfloat16)
    return [latent_decode(q, pages, layer, TABLE, LENGTHS, scale=0.125) for layer in layers]


def join_trees_of_all(layers):
    q, new = jnp.zeros((1, 8, 2, 64), jnp.bfloat16), jnp.zeros((1, 8, 1, 64), jnp.bfloat16)
    parts, ancestors = jnp.zeros((2, 1, 8, 1, 64 + LSE_COLUMNS)), jnp.zeros((1, 8, 2), jnp.uint32)
    return [tree_join(q, new, new, ancestors, 0, parts, scale=0.125) for _ in layers]


@pytest.mark.parametrize("attend", [decode_all, prefill_all, decode_latents_of_all, join_trees_of_all])
def test_all_layers_are_one_kernel(attend):
    program = jax.make_jaxpr(lambda: attend(range(LAYERS)))().jaxpr
    kernels = [eqn.params["jaxpr"] for eqn in program.eqns if eqn.params.get("name") in ("_planned", "_call")]
    assert len(kernels) == LAYERS
    assert len({id(kernel) for kernel in kernels}) == 1
