"""Causal attention inside a chunk, in plain JAX and float32. (Its paged prefix is `context_decode` with B = 1.)"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.context_decode.reference import softmax_attend


def causal_attention(
    q: Float[Array, "C H D"], k: Float[Array, "C K D"], v: Float[Array, "C K D"], *, scale: float
) -> tuple[Float[Array, "C H D"], Float[Array, "C H"]]:
    """Row i attends to rows 0..i.

    Args:
      q, k, v: of the C rows; query head h reads KV head `h*K//H`.
      scale: factor on the scores.

    Returns:
      Float32 output normalised by its own softmax, and the log-sum-exp of the scores.
    """
    c, h, d = q.shape
    kv_heads = k.shape[1]
    is_visible = jnp.arange(c)[None, :] <= jnp.arange(c)[:, None]
    grouped = q.reshape(c, kv_heads, h // kv_heads, d)
    scores = scale * jnp.einsum("ckgd,nkd->ckgn", grouped, k, preferred_element_type=jnp.float32)
    output, lse = softmax_attend(scores, is_visible[:, None, None, :], v, "ckgn,nkd->ckgd")
    return output.reshape(c, h, d), lse.reshape(c, h)
