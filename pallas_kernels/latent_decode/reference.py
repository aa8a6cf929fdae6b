"""Decode attention over pages of latents, in plain JAX and float32.

In multi-head latent attention (MLA) a token leaves one row for all heads: 512 values of the compressed keys and values,
and 64 of a key with rotary position. With the up-projections absorbed into the queries and the output, the first 512
are what every head has for values, and all 576 what it has for keys.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.context_decode.reference import softmax_attend
from pallas_kernels.tree_attention import is_ancestor

LATENT, ROPE = 512, 64
KEY = LATENT + ROPE


def latent_decode(
    q: Float[Array, "B T H 576"],
    pages: Float[Array, "L P S 576"],
    layer: int,
    page_table: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T H 512"], Float[Array, "B T H"]]:
    """Every query attends to the first `lengths[b]` tokens of its sequence that are on this device.

    Args:
      q: query heads, the key's up-projection absorbed; then their rotary part.
      pages: latents of every layer, then the rotary part of the key.
      layer: which layer.
      page_table: pages of each sequence, in order; entries beyond its length must be valid pages too.
      lengths: tokens of each sequence on this device; 0 gives an output of 0 and a log-sum-exp of -1e30.
      scale: factor on the scores.

    Returns:
      Float32 output, a mean of latents normalised by its own softmax, and the log-sum-exp of the scores.
    """
    # Pages are read when the queries are there: all layers' at once, which a scheduler is else free to do, would be a
    # copy of the cache.
    q, page_table = lax.optimization_barrier((q, page_table))
    rows = pages[layer, page_table].reshape(len(page_table), -1, KEY)
    is_visible = jnp.arange(rows.shape[1]) < lengths[:, None]
    return _attend(q, rows, is_visible[:, None, None, :], scale)


def latent_tree_attention(
    q: Float[Array, "B T H 576"],
    tree: Float[Array, "B T 576"],
    ancestors: UInt32[Array, "B T 2"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T H 512"], Float[Array, "B T H"]]:
    """Every node attends to the nodes whose bit is set in its row of `ancestors`.

    Args:
      q: as of `latent_decode`.
      tree: rows of the T nodes, as those of a page.
      ancestors: bit n % 32 of word n // 32 of row t is set where node t sees node n, itself included; T <= 64.
      scale: factor on the scores.

    Returns:
      Float32 output normalised by its own softmax, and the log-sum-exp of the scores.
    """
    return _attend(q, tree, is_ancestor(ancestors)[:, :, None, :], scale)


def _attend(q, rows, is_visible, scale):
    # Zeroed rather than only masked: a NaN that an earlier owner left in a page would survive a weight of 0.
    is_used = jnp.any(is_visible, axis=(1, 2))[..., None]
    values = jnp.where(is_used, rows[..., :LATENT], 0)
    scores = scale * jnp.einsum("bthd,bnd->bthn", q, rows, preferred_element_type=jnp.float32)
    return softmax_attend(scores, is_visible, values, "bthn,bnd->bthd")
