"""A part's output and log-sum-exp in one array, so that one exchange carries both."""

import jax.numpy as jnp
from jaxtyping import Array, Float

# As many as the tensor cores' layout of a matrix in registers is wide: a kernel then reads both in one.
LSE_COLUMNS = 8


def pack(output: Float[Array, "*R D"], lse: Float[Array, "*R"]) -> Float[Array, "*R D+8"]:
    """The log-sum-exp fills the last columns."""
    columns = jnp.broadcast_to(lse[..., None], (*lse.shape, LSE_COLUMNS))
    return jnp.concatenate([output, columns], axis=-1)


def unpack(packed: Float[Array, "*R D+8"]) -> tuple[Float[Array, "*R D"], Float[Array, "*R"]]:
    return packed[..., :-LSE_COLUMNS], packed[..., -1]
