"""Attention by ancestor bits, in plain JAX and float32."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, UInt32

from pallas_kernels.context_decode.reference import softmax_attend


def is_ancestor(ancestors: UInt32[Array, "B T 2"]) -> Bool[Array, "B T T"]:
    """[b, t, n]: node n is t or an ancestor of t."""
    node = jnp.arange(ancestors.shape[1])
    return (ancestors[:, :, node // 32] >> (node % 32).astype(jnp.uint32)) & 1 == 1


def tree_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    ancestors: UInt32[Array, "B T 2"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Every node attends to the nodes whose bit is set in its row of `ancestors`.

    Args:
      q, k, v: of the T nodes; query head h reads KV head `h*K//H`.
      ancestors: bit n % 32 of word n // 32 of row t is set where node t sees node n, itself included; T <= 64.
      scale: factor on the scores.

    Returns:
      Float32 output normalised by its own softmax, and the log-sum-exp of the scores.
    """
    return masked_attention(q, k, v, is_ancestor(ancestors), scale=scale)


def masked_attention(
    q: Float[Array, "B T H D"],
    k: Float[Array, "B N K D"],
    v: Float[Array, "B N K D"],
    is_visible: Bool[Array, "B T N"],
    *,
    scale: float,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T H"]]:
    """Every query attends to the keys that it sees: a level of a tree that grows over all levels so far.

    Args:
      q, k, v: query head h reads KV head `h*K//H`.
      scale: factor on the scores.

    Returns:
      Float32 output normalised by its own softmax, and the log-sum-exp of the scores; 0 and -1e30 where none is seen.
    """
    b, t, h, d = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(b, t, kv_heads, h // kv_heads, d)
    scores = scale * jnp.einsum("btkgd,bnkd->btkgn", grouped, k, preferred_element_type=jnp.float32)
    output, lse = softmax_attend(scores, is_visible[:, :, None, None, :], v, "btkgn,bnkd->btkgd")
    return output.reshape(b, t, h, d), lse.reshape(b, t, h)
