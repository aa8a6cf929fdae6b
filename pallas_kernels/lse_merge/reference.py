"""Log-sum-exp merge of partial attention, in plain JAX."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def join(
    a: tuple[Float[Array, "*R D"], Float[Array, "*R"]], b: tuple[Float[Array, "*R D"], Float[Array, "*R"]]
) -> Float[Array, "*R D"]:
    """Output of attention over two disjoint sets of keys, each given by its output and log-sum-exp."""
    return merge(jnp.stack([a[0], b[0]]), jnp.stack([a[1], b[1]]))[0]


def merge(
    outputs: Float[Array, "parts *R D"], lses: Float[Array, "parts *R"]
) -> tuple[Float[Array, "*R D"], Float[Array, "*R"]]:
    """Attention over the union of disjoint sets of keys.

    Args:
      outputs: each part's output, normalised by its own softmax.
      lses: each part's log-sum-exp of the scores, natural logarithm; -1e30 (finite) for a part without keys.

    Returns:
      Output and log-sum-exp over all parts; without any keys an output of 0 and -1e30.
    """
    top = jnp.max(lses, axis=0)
    weights = jnp.exp(lses - top)
    total = jnp.sum(weights, axis=0)
    merged = jnp.sum(outputs * weights[..., None], axis=0) / total[..., None]
    return merged, top + jnp.log(total)
