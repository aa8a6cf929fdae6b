"""Decode attention over pages, in plain JAX and float32."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

NO_KEYS = -1e30  # finite: -inf minus -inf is NaN where no part has keys


def context_decode(
    q: Float[Array, "B T H D"],
    pages: Float[Array, "L 2 P S K D"],
    layer: int,
    page_table: Int[Array, "B M"],
    lengths: Int[Array, "B"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Every query attends to the first `lengths[b]` tokens of its sequence that are on this device.

    Args:
      q: query heads; head h reads KV head `h*K//H` (grouped-query attention).
      pages: keys (index 0) and values (1) of every layer.
      layer: which layer.
      page_table: pages of each sequence, in order; entries beyond its length must be valid pages too.
      lengths: tokens of each sequence on this device; 0 gives an output of 0 and a log-sum-exp of -1e30.
      scale: factor on the scores.

    Returns:
      Float32 output normalised by its own softmax, and the log-sum-exp of the scores.
    """
    b, t, h, d = q.shape
    kv_heads = pages.shape[4]
    # Pages are read when the queries are there: all layers' at once, which a scheduler is else free to do, would be a
    # copy of the cache.
    q, page_table = lax.optimization_barrier((q, page_table))
    keys = pages[layer, 0, page_table].reshape(b, -1, kv_heads, d)
    values = pages[layer, 1, page_table].reshape(b, -1, kv_heads, d)
    is_visible = jnp.arange(keys.shape[1]) < lengths[:, None]
    # Zeroed rather than only masked: a NaN that an earlier owner left in a page would survive a weight of 0.
    values = jnp.where(is_visible[:, :, None, None], values, 0)
    grouped = q.reshape(b, t, kv_heads, h // kv_heads, d)
    scores = scale * jnp.einsum("btkgd,bnkd->btkgn", grouped, keys, preferred_element_type=jnp.float32)
    output, lse = softmax_attend(scores, is_visible[:, None, None, None, :], values, "btkgn,bnkd->btkgd")
    return output.reshape(b, t, h, d), lse.reshape(b, t, h)


def softmax_attend(scores, is_visible, values, equation):
    """Softmax over the last axis of `scores` where `is_visible`, times `values`; with its log-sum-exp."""
    scores = jnp.where(is_visible, scores, NO_KEYS)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.where(is_visible, jnp.exp(scores - top), 0.0)
    total = jnp.sum(weights, axis=-1)
    output = jnp.einsum(equation, weights.astype(values.dtype), values, preferred_element_type=jnp.float32)
    has_keys = total > 0
    output = jnp.where(has_keys[..., None], output / jnp.where(has_keys, total, 1.0)[..., None], 0.0)
    return output, jnp.where(has_keys, top[..., 0] + jnp.log(jnp.where(has_keys, total, 1.0)), NO_KEYS)
