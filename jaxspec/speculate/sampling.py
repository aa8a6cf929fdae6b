"""The target's token at a position: a pure function of logits, sampling parameters, seed and position.

Greedy decoding takes the argmax; sampling takes argmax(log p + Gumbel noise) over what the filters keep. The noise is
a hash of (seed, position, token id), so the text that comes out depends on no drafter, tree, mesh or batch (coupled
sampling, Daliri et al. 2024). The vocabulary is split over devices and never gathered: filters are thresholds, found
by counting, and an argmax is a comparison of (value, id) pairs.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float, Int, Shaped, UInt32

from jaxspec.mesh import XLA, AxisNames, Collectives, rank

_DIGIT_BITS = 4  # of the threshold search: eight rounds of fifteen counts
_SHORT = 1024  # scores that are ordered as they are


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
    collectives: Collectives = XLA,
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
        return split_argmax(logits, ids, axes, collectives)
    rows = jax.tree.map(lambda x: jnp.broadcast_to(x[:, None], (*positions.shape, *x.shape[1:])), sampling)
    scores = perturbed_scores(logits, ids, positions, rows, axes, collectives)
    return split_argmax(scores, ids, axes, collectives)


def perturbed_scores(
    logits: Float[Array, "B T local_V"],
    ids: Int[Array, "local_V"],
    positions: Int[Array, "B T"],
    rows: SamplingRows,
    axes: AxisNames,
    collectives: Collectives = XLA,
) -> Float[Array, "B T local_V"]:
    """log p + Gumbel noise up to a constant a row, -inf where the filters drop a token; plain logits if greedy."""
    top = collectives.all_max(jnp.max(logits, axis=-1, keepdims=True), axes)
    scaled = _at_temperature(logits - top, rows)
    kept = (scaled >= filter_threshold(scaled, rows, axes, collectives)) | (rows.temperature[..., None] == 0)
    return jnp.where(kept, _with_noise(scaled, ids, positions, rows), -jnp.inf)


def draft_scores(
    logits: Float[Array, "*R local_V"], ids: Int[Array, "local_V"], positions: Int[Array, "*#R"], rows: SamplingRows
) -> Float[Array, "*R local_V"]:
    """What `perturbed_scores` gives without filters, up to a constant a row, and without its collectives.

    A draft that ranks its tokens by these scores is coupled to the target: where both have the same logits and no
    filter drops the token, the best one is the token that the target takes.

    Args:
      logits: of a draft; -inf for padding.
      ids: the target's id of each, of which the noise is a function.
      positions: absolute position of the token to be chosen; where it is one for several rows, so is the noise.
      rows: parameters of each row.
    """
    return _with_noise(_at_temperature(logits, rows), ids, positions, rows)


def _at_temperature(logits: Float[Array, "*R local_V"], rows: SamplingRows) -> Float[Array, "*R local_V"]:
    """Greedy rows stay as they are."""
    return logits / jnp.where(rows.temperature > 0, rows.temperature, 1.0)[..., None]


def _with_noise(
    scaled: Float[Array, "*R local_V"], ids: Int[Array, "local_V"], positions: Int[Array, "*R"], rows: SamplingRows
) -> Float[Array, "*R local_V"]:
    """Greedy rows stay as they are."""
    return jnp.where(rows.temperature[..., None] > 0, scaled + gumbel_noise(rows.seed, positions, ids), scaled)


def filter_threshold(
    scaled: Float[Array, "B T local_V"], rows: SamplingRows, axes: AxisNames, collectives: Collectives = XLA
) -> Float[Array, "B T 1"]:
    """The least score that top-k, then top-p over what top-k left, then min-p keep; ties at it stay.

    Args:
      scaled: logits over the temperature, shifted so that the largest is 0.
    """

    def search() -> UInt32[Array, "B T"]:
        keys = _ordered_bits(scaled)
        top_k = jnp.where(rows.top_k > 0, rows.top_k, jnp.iinfo(jnp.int32).max).astype(jnp.float32)
        k_key = largest_threshold(keys, jnp.ones_like(scaled), top_k, axes, collectives)
        mass = jnp.where(keys >= k_key[..., None], jnp.exp(scaled), 0.0)
        total = collectives.all_reduce(jnp.sum(mass, axis=-1), axes)
        p_mass = jnp.maximum(rows.top_p * total, jnp.finfo(jnp.float32).tiny)
        p_key = largest_threshold(keys, mass, jnp.where(rows.top_p < 1, p_mass, jnp.inf), axes, collectives)
        return jnp.maximum(k_key, p_key)

    # The search is hundreds of launches; that no row needs it is the same on all devices, which have the same rows.
    has_filter = jnp.any(((rows.top_k > 0) | (rows.top_p < 1)) & (rows.temperature > 0))
    key = lax.cond(has_filter, search, lambda: jnp.zeros(scaled.shape[:-1], jnp.uint32))
    threshold = _from_ordered_bits(key)
    return jnp.maximum(threshold, jnp.log(rows.min_p))[..., None]


def largest_threshold(
    keys: UInt32[Array, "B T local_V"],
    weights: Float[Array, "B T local_V"],
    need: Float[Array, "B T"],
    axes: AxisNames,
    collectives: Collectives = XLA,
) -> UInt32[Array, "B T"]:
    """The largest key such that the weights at it and above add up to at least `need`; 0 where no key does."""

    def next_digit(step: Int[Array, ""], prefix: UInt32[Array, "B T"]) -> UInt32[Array, "B T"]:
        shift = jnp.uint32(32 - _DIGIT_BITS) - jnp.uint32(_DIGIT_BITS) * step.astype(jnp.uint32)
        candidates = [prefix | (jnp.uint32(digit) << shift) for digit in range(1, 1 << _DIGIT_BITS)]
        sums = [jnp.sum(jnp.where(keys >= c[..., None], weights, 0.0), axis=-1) for c in candidates]
        is_enough = collectives.all_reduce(jnp.stack(sums, axis=-1), axes) >= need[..., None]
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


def split_argmax(
    scores: Float[Array, "*R local_V"], ids: Int[Array, "local_V"], axes: AxisNames, collectives: Collectives = XLA
) -> Int[Array, "*R"]:
    """Global id of the largest score; of equal ones the lowest id."""
    best = jnp.argmax(scores, axis=-1, keepdims=True)
    values, winners = _gather_together((jnp.max(scores, axis=-1, keepdims=True), ids[best]), axes, collectives)
    owner = jnp.argmax(values, axis=-2, keepdims=True)
    return jnp.take_along_axis(winners, owner, axis=-2)[..., 0, 0]


def split_top_k(
    scores: Float[Array, "*R local_V"],
    ids: Int[Array, "local_V"],
    k: int,
    axes: AxisNames,
    collectives: Collectives = XLA,
) -> tuple[Int[Array, "*R k"], Float[Array, "*R k"]]:
    """The k best ids of the whole vocabulary and their log-probabilities under softmax(scores), with one collective.

    Args:
      scores: this device's part; -inf for padding and for tokens that may not be chosen.
      ids: ascending along the split.
      k: may be larger than a device's part.

    Returns:
      Ids, best first and of equal scores the lowest first; -1 where no more scores are finite. Log-probabilities,
      never above 0 whatever the rounding; -inf where the id is -1.
    """
    mass = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    padding = [(0, 0)] * (scores.ndim - 1) + [(0, max(0, k - scores.shape[-1]))]
    local_values, best = _local_top_k(jnp.pad(scores, padding, constant_values=-jnp.inf), k)
    values, winners, masses = _gather_together((local_values, ids[best], mass), axes, collectives)
    values, place = lax.top_k(values.reshape(*scores.shape[:-1], -1), k)
    winners = jnp.take_along_axis(winners.reshape(*scores.shape[:-1], -1), place, axis=-1)
    log_probs = jnp.minimum(values - jax.nn.logsumexp(masses, axis=-2), 0.0)
    is_token = log_probs > -jnp.inf  # false for NaN too: what it came from ranks nothing
    return jnp.where(is_token, winners, -1), jnp.where(is_token, log_probs, -jnp.inf)


def _local_top_k(scores: Float[Array, "*R V"], k: int) -> tuple[Float[Array, "*R k"], Int[Array, "*R k"]]:
    """What `lax.top_k` gives, in the same order, without ordering the whole axis.

    The k best lie in the k groups of neighbours with the best maxima: each group before another, by maximum and then by
    place, holds a score that is before all of the other's.
    """
    size = scores.shape[-1]
    if k == 1 or size <= _SHORT:
        return lax.top_k(scores, k)
    width = 1 << round(math.log2(size / k) / 2)  # as many groups as scores in the groups that are chosen
    padding = [(0, 0)] * (scores.ndim - 1) + [(0, -size % width)]
    groups = jnp.pad(scores, padding, constant_values=-jnp.inf).reshape(*scores.shape[:-1], -1, width)
    _, chosen = lax.top_k(jnp.max(groups, axis=-1), min(k, groups.shape[-2]))
    chosen = jnp.sort(chosen, axis=-1)  # so that of equal scores the first still comes first
    members = jnp.take_along_axis(groups, chosen[..., None], axis=-2).reshape(*scores.shape[:-1], -1)
    values, place = lax.top_k(members, k)
    return values, jnp.take_along_axis(chosen, place // width, axis=-1) * width + place % width


def _gather_together(
    parts: tuple[Shaped[Array, "*R _"], ...], axes: AxisNames, collectives: Collectives
) -> list[Shaped[Array, "*R ranks _"]]:
    """Gathers arrays of 32-bit numbers with one collective; a small one costs a GPU as much as reading megabytes."""
    packed = jnp.concatenate([lax.bitcast_convert_type(part, jnp.int32) for part in parts], axis=-1)
    gathered = jnp.moveaxis(collectives.gather(packed, axes), 0, -2)
    ends = np.cumsum([part.shape[-1] for part in parts])[:-1]
    pieces = jnp.split(gathered, ends, axis=-1)
    return [lax.bitcast_convert_type(piece, part.dtype) for piece, part in zip(pieces, parts, strict=True)]


def _ordered_bits(x: Float[Array, "*S"]) -> UInt32[Array, "*S"]:
    """Unsigned integers in the order of the floats."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))


def _from_ordered_bits(bits: UInt32[Array, "*S"]) -> Float[Array, "*S"]:
    """Inverse of `_ordered_bits`; 0, which no finite float maps to, becomes -inf."""
    restored = jnp.where(bits >> 31 == 1, bits ^ jnp.uint32(1 << 31), ~bits)
    return jnp.where(bits == 0, -jnp.inf, lax.bitcast_convert_type(restored, jnp.float32))
