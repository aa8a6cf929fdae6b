"""Rotary position embedding (Su et al. 2021) in the half-split form of Hugging Face checkpoints."""

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxspec.models.config import ModelConfig, RopeScaling


def frequencies(config: ModelConfig) -> np.ndarray:
    """f32[D/2]: radians per position of each pair of channels."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    base = config.rope_theta**-exponents
    return (base if config.rope_scaling is None else _scaled(base, config.rope_scaling)).astype(np.float32)


def _scaled(base: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    if scaling.kind == "linear":
        return base / scaling.factor
    # Llama 3: long wavelengths are stretched by `factor`, short ones kept, and those between interpolated.
    wavelengths = 2 * math.pi / base
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    kept = np.clip((scaling.original_positions / wavelengths - low) / (high - low), 0.0, 1.0)
    return kept * base + (1 - kept) * base / scaling.factor


def rotate(
    x: Float[Array, "N H D"], positions: Int[Array, "N"], frequency: Float[np.ndarray, "D/2"]
) -> Float[Array, "N H D"]:
    """Turns channel pairs (i, i + D/2) of every head by position * frequency, in float32."""
    angles = positions[:, None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
