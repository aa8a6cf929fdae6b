"""The target's token at a position: a pure function of logits, sampling parameters, seed and position.

Greedy decoding takes the argmax; sampling takes argmax(log p + Gumbel noise) over what the filters keep. The noise is
a hash of (seed, position, token id), so the text that comes out depends on no drafter, tree, mesh or batch (coupled
sampling, Daliri et al. 2024). The vocabulary is split over devices and never gathered: filters are thresholds, found
by counting, and an argmax is a comparison of (value, id) pairs.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float, Int, UInt32

from jaxspec.mesh import AxisNames, all_max, all_reduce, gather, rank

_DIGIT_BITS = 4  # of the threshold search: eight rounds of fifteen counts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingRows:
    """Sampling parameters, one row a slot. A temperature of 0 is greedy; top_k 0, top_p 1 and min_p 0 keep all."""

    temperature: Float[Array, "B"]
    top_p: Float[Array, "B"]
    min_p: Float[Array, "B"]
    top_k: Int[Array, "B"]
    seed: UInt32[Array, "B 2"]

    @staticmethod
    def empty(slots: int) -> "SamplingRows":
        return SamplingRows(
            temperature=jnp.zeros(slots, jnp.float32),
            top_p=jnp.ones(slots, jnp.float32),
            min_p=jnp.zeros(slots, jnp.float32),
            top_k=jnp.zeros(slots, jnp.int32),
            seed=jnp.zeros((slots, 2), jnp.uint32),
        )


def target_tokens(
    logits: Float[Array, "B T local_V"],
    positions: Int[Array, "B T"],
    sampling: SamplingRows,
    *,
    vocab_size: int,
    axes: AxisNames,
    is_greedy: bool,
) -> Int[Array, "B T"]:
    """The token that follows each node.

    Args:
      logits: this device's part of the vocabulary, split in order over `axes`; ids from `vocab_size` on are padding.
      positions: absolute position of the token to be chosen.
      sampling: parameters of each sequence.
      is_greedy: static; all sequences are greedy, so that nothing else is computed.
    """
    ids = rank(axes) * logits.shape[-1] + jnp.arange(logits.shape[-1])
    logits = jnp.where(ids < vocab_size, logits.astype(jnp.float32), -jnp.inf)
    if is_greedy:
        return split_argmax(logits, ids, axes)
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x[:, None], (*positions.shape, *x.shape[1:])), sampling)
    return split_argmax(perturbed_scores(logits, ids, positions, rows, axes), ids, axes)


def perturbed_scores(
    logits: Float[Array, "B T local_V"],
    ids: Int[Array, "local_V"],
    positions: Int[Array, "B T"],
    rows: SamplingRows,
    axes: AxisNames,
) -> Float[Array, "B T local_V"]:
    """log p + Gumbel noise up to a constant a row, -inf where the filters drop a token; plain logits if greedy."""
    is_sampled = rows.temperature[..., None] > 0
    top = all_max(jnp.max(logits, axis=-1, keepdims=True), axes)
    scaled = (logits - top) / jnp.where(is_sampled, rows.temperature[..., None], 1.0)
    kept = scaled >= filter_threshold(scaled, rows, axes)
    noisy = scaled + gumbel_noise(rows.seed, positions, ids)
    return jnp.where(is_sampled, jnp.where(kept, noisy, -jnp.inf), scaled)


def filter_threshold(scaled: Float[Array, "B T local_V"], rows: SamplingRows, axes: AxisNames) -> Float[Array, "B T 1"]:
    """The least score that top-k, then top-p over what top-k left, then min-p keep; ties at it stay.

    Args:
      scaled: logits over the temperature, shifted so that the largest is 0.
    """
    keys = _ordered_bits(scaled)
    top_k = jnp.where(rows.top_k > 0, rows.top_k, jnp.iinfo(jnp.int32).max).astype(jnp.float32)
    k_key = largest_threshold(keys, jnp.ones_like(scaled), top_k, axes)
    mass = jnp.where(keys >= k_key[..., None], jnp.exp(scaled), 0.0)
    total = all_reduce(jnp.sum(mass, axis=-1), axes)
    p_mass = jnp.maximum(rows.top_p * total, jnp.finfo(jnp.float32).tiny)
    p_key = largest_threshold(keys, mass, jnp.where(rows.top_p < 1, p_mass, jnp.inf), axes)
    threshold = _from_ordered_bits(jnp.maximum(k_key, p_key))
    return jnp.maximum(threshold, jnp.log(rows.min_p))[..., None]


def largest_threshold(
    keys: UInt32[Array, "B T local_V"], weights: Float[Array, "B T local_V"], need: Float[Array, "B T"], axes: AxisNames
) -> UInt32[Array, "B T"]:
    """The largest key such that the weights at it and above add up to at least `need`; 0 where no key does."""

    def next_digit(step: Int[Array, ""], prefix: UInt32[Array, "B T"]) -> UInt32[Array, "B T"]:
        shift = jnp.uint32(32 - _DIGIT_BITS) - jnp.uint32(_DIGIT_BITS) * step.astype(jnp.uint32)
        candidates = [prefix | (jnp.uint32(digit) << shift) for digit in range(1, 1 << _DIGIT_BITS)]
        sums = [jnp.sum(jnp.where(keys >= c[..., None], weights, 0.0), axis=-1) for c in candidates]
        is_enough = all_reduce(jnp.stack(sums, axis=-1), axes) >= need[..., None]
        return prefix | (jnp.sum(is_enough, axis=-1).astype(jnp.uint32) << shift)

    return lax.fori_loop(0, 32 // _DIGIT_BITS, next_digit, jnp.zeros(need.shape, jnp.uint32))


def gumbel_noise(
    seed: UInt32[Array, "*R 2"], positions: Int[Array, "*R"], ids: Int[Array, "local_V"]
) -> Float[Array, "*R local_V"]:
    """Standard Gumbel noise, a function of (seed, position, token id) alone: Threefry-2x32 of each triple.

    A device evaluates it at the ids it holds, so the noise is the same however the vocabulary is split.
    """
    shape = (*positions.shape, len(ids))
    key, position, token = (
        jnp.broadcast_to(x, shape).astype(jnp.uint32) for x in (seed[..., 0, None], positions[..., None], ids)
    )
    bits, _ = threefry2x32_p.bind(key, jnp.broadcast_to(seed[..., 1, None], shape), position, token)
    # (0, 1), finest near 0, which is where -log1p(-u) makes the largest noise.
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    return -jnp.log(-jnp.log1p(-uniform))


def split_argmax(scores: Float[Array, "*R local_V"], ids: Int[Array, "local_V"], axes: AxisNames) -> Int[Array, "*R"]:
    """Global id of the largest score; of equal ones the lowest id."""
    best = jnp.argmax(scores, axis=-1)
    values = gather(jnp.max(scores, axis=-1), axes)
    owner = jnp.argmax(values, axis=0)
    return jnp.take_along_axis(gather(ids[best], axes), owner[None], axis=0)[0]


def _ordered_bits(x: Float[Array, "*S"]) -> UInt32[Array, "*S"]:
    """Unsigned integers in the order of the floats."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _from_ordered_bits(bits: UInt32[Array, "*S"]) -> Float[Array, "*S"]:
    """Inverse of `_ordered_bits`; 0, which no finite float maps to, becomes -inf."""
    restored = jnp.where(bits >> 31 == 1, bits ^ jnp.uint32(1 << 31), ~bits)
    return jnp.where(bits == 0, -jnp.inf, lax.bitcast_convert_type(restored, jnp.float32))
