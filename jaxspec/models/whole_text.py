"""The target over whole texts at once, without a cache: for what is not served."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models.decoder import Decoder, Observe


def read_whole[Observed](
    target: Decoder,
    tokens: Int[Array, "B S"],
    positions: Int[Array, "B S"],
    mask: Bool[Array, "B S S"],
    observe: Observe[Observed],
    observed: Observed,
) -> tuple[Float[Array, "B S E"], Observed]:
    """States after the final norm, and what `observe` has gathered of the rows B * S. The target is on one stage.

    Args:
      mask: which tokens each one attends to.
    """
    b, s = tokens.shape

    def attend(cache: None, layer: int, q: Array, k: Array, v: Array) -> tuple[Array, None]:
        q, k, v = (x.reshape(b, s, *x.shape[1:]) for x in (q, k, v))
        return _attend(q, k, v, mask[:, None]).reshape(b * s, -1), None

    rows, _, observed = target.stage(
        target.embed(tokens.reshape(-1)), positions.reshape(-1), attend, None, observe, observed
    )
    return target.final_hidden(rows).reshape(b, s, -1), observed


def _attend(
    q: Float[Array, "B S H D"], k: Float[Array, "B S K D"], v: Float[Array, "B S K D"], mask: Bool[Array, "B 1 S S"]
) -> Float[Array, "B S H D"]:
    """XLA would write the scores of all heads to memory, more than once a layer; cuDNN never does."""
    attention = functools.partial(jax.nn.dot_product_attention, mask=mask)
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return attention(q, k, v)
    return lax.platform_dependent(q, k, v, cuda=functools.partial(attention, implementation="cudnn"), default=attention)
