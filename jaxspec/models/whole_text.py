"""The target over whole texts at once, without a cache: for what is not served."""

import jax
import jax.numpy as jnp
from jax.extend.backend import get_backend
from jaxtyping import Array, Bool, Float, Int

from jaxspec.models.decoder import Decoder, Observe

_CUDNN_HEAD_DIMS = range(8, 129, 8)


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
    has_cudnn = q.dtype == jnp.bfloat16 and q.shape[-1] in _CUDNN_HEAD_DIMS and "cuda" in get_backend().platform_version
    return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="cudnn" if has_cudnn else None)
