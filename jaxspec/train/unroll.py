"""The training-time test of EAGLE-3 (Li et al. 2025, arXiv 2503.01840): all draft steps of all rows at once.

Row t starts from the true taps at t. In step s, counted from 0, it takes the true token at t + 1 + s, stands at
position t + s, and sees what it would see if it drafted: the true rows up to t, and itself of the steps 1 to s. So the
target's prediction that step s is to meet is that at t + 1 + s.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxspec.drafts.eagle3_head import Eagle3Head
from jaxspec.models.decoder import Decoder
from jaxspec.models.whole_text import read_whole
from jaxspec.speculate.taps import tap_observer
from jaxspec.train.dataset import Batch

# Rows whose scores over all keys are held at once.
_QUERY_BLOCK = 256

# Of each layer, keys and values of the steps so far.
type Steps = tuple[Float[Array, "B S K D"], ...]
type LayerSteps = tuple[tuple[Steps, Steps], ...]


def sees(batch: Batch) -> Bool[Array, "B S S"]:
    """Which tokens a token may attend to: those before it in its conversation, and itself."""
    same = batch.documents[:, :, None] == batch.documents[:, None, :]
    return same & jnp.tri(batch.tokens.shape[1], dtype=bool)


def read_target(
    target: Decoder, batch: Batch, taps: tuple[int, ...]
) -> tuple[Float[Array, "B S taps E"], Float[Array, "B S E"]]:
    """What the head learns from: the taps, and the states after the final norm. The target is on one stage."""
    (b, s), layout = batch.tokens.shape, target.layout
    gathered: Array | None = jnp.zeros((b * s, len(taps), layout.config.hidden_size), layout.dtype)
    observe = tap_observer(taps, layout)
    hidden, gathered = read_whole(target, batch.tokens, batch.positions, sees(batch), observe, gathered)
    assert gathered is not None
    return gathered.reshape(b, s, len(taps), -1), hidden


def unroll(
    head: Eagle3Head, target: Decoder, taps: Float[Array, "B S taps E"], batch: Batch, steps: int
) -> Float[Array, "steps B S H"]:
    """Outputs of every row in every step, before the final norm. `target` lends its embedding."""
    b, s = batch.tokens.shape
    mask = sees(batch)

    def attend(
        seen: LayerSteps, layer: int, residual: Array, q: Array, k: Array, v: Array
    ) -> tuple[Array, Array, LayerSteps]:
        q, k, v = (x.reshape(b, s, *x.shape[1:]) for x in (q, k, v))
        old_k, old_v = seen[layer]
        keys, values = (*old_k, k), (*old_v, v)
        attended = chain_attention(q, keys, values, mask, scale=q.shape[-1] ** -0.5)
        return residual, attended.reshape(b * s, -1), (*seen[:layer], (keys, values), *seen[layer + 1 :])

    features = head.features(lax.collapse(taps, 0, 2))
    seen: LayerSteps = (((), ()),) * len(head.layers)
    outputs = []
    for step in range(steps):
        # Tokens from beyond the end of a conversation reach only rows that no loss counts.
        tokens = jnp.roll(batch.tokens, -1 - step, axis=1).reshape(-1)
        positions = (batch.positions + step).reshape(-1)
        rows, seen = head.rows(features, head.embed(tokens, target), positions, attend, seen)
        features = head.recycled(rows)
        outputs.append(rows.reshape(b, s, -1))
    return jnp.stack(outputs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def chain_attention(
    q: Float[Array, "B S H D"], keys: Steps, values: Steps, mask: Bool[Array, "B S S"], scale: float
) -> Float[Array, "B S H D"]:
    """Attention of each row to the rows of step 0 that `mask` shows it, and to itself in all later steps.

    Only a block of rows has its scores in memory at a time. The backward pass computes them again from the
    log-sum-exp, as flash attention does (Dao et al. 2022, arXiv 2205.14135): what JAX derives by itself goes through
    memory more than twice as often.

    Args:
      keys, values: of step 0, 1, … up to that of `q`, each `[B, S, K, D]`.
    """
    return _attend(q, keys, values, mask, scale)[0]


def _attend(q, keys, values, mask, scale):
    """Output and what the backward pass needs of it: output and log-sum-exp by blocks of rows."""
    context, own_keys, own_values, visible, rows = _by_blocks(q, keys, values, mask)

    def of_block(block: tuple[Array, Array, Steps, Steps]) -> tuple[Array, Array]:
        q, visible, keys, values = block
        among, own = _scores(q, context[0], keys, visible, scale)
        top = functools.reduce(jnp.maximum, own, among.max(-1))
        weights, shares = jnp.exp(among - top[..., None]), [jnp.exp(score - top) for score in own]
        total = functools.reduce(jnp.add, shares, weights.sum(-1))
        output = _product("bkns,bksd->bknd", weights.astype(q.dtype), context[1])
        for share, value in zip(shares, values, strict=True):
            output += _each_head(share, value)
        return (output / total[..., None]).astype(q.dtype), top + jnp.log(total)

    output, lse = lax.map(of_block, (rows, visible, own_keys, own_values))
    return _unblocked(output, q.shape), (q, keys, values, mask, output, lse)


def _attend_backward(scale, seen, d_output):
    q, keys, values, mask, output, lse = seen
    context, own_keys, own_values, visible, rows = _by_blocks(q, keys, values, mask)
    d_output = _row_blocks(d_output, keys[0].shape[2])

    def of_block(sums: tuple[Array, Array], block: tuple[Any, ...]) -> tuple[tuple[Array, Array], tuple[Any, ...]]:
        q, visible, keys, values, output, lse, d_output = block
        among, own = _scores(q, context[0], keys, visible, scale)
        weights = jnp.exp(among - lse[..., None])
        mean = jnp.sum(output.astype(jnp.float32) * d_output, axis=-1)  # of what each key's value adds to the loss
        d_weights = _product("bknd,bksd->bkns", d_output, context[1])
        d_scores = (weights * (d_weights - mean[..., None]) * scale).astype(q.dtype)
        d_q = _product("bkns,bksd->bknd", d_scores, context[0])
        d_keys, d_values = [], []
        for score, key, value in zip(own, keys, values, strict=True):
            share = jnp.exp(score - lse)
            d_score = share * (_dots(d_output, value) - mean) * scale
            d_q += _each_head(d_score, key)
            d_keys.append(_over_heads(d_score, q, key))
            d_values.append(_over_heads(share, d_output, value))
        d_k, d_v = sums
        d_k += _product("bkns,bknd->bksd", d_scores, q)
        d_v += _product("bkns,bknd->bksd", weights.astype(q.dtype), d_output)
        return (d_k, d_v), (d_q.astype(q.dtype), tuple(d_keys), tuple(d_values))

    zeros = jnp.zeros(context[0].shape, jnp.float32)
    sums, (d_q, d_keys, d_values) = lax.scan(
        of_block, (zeros, zeros), (rows, visible, own_keys, own_values, output, lse, d_output)
    )
    d_k, d_v = (jnp.moveaxis(x, 1, 2).astype(q.dtype) for x in sums)

    def unblocked(parts: Steps) -> Steps:
        return tuple(_unblocked(part, keys[0].shape) for part in parts)

    return _unblocked(d_q, q.shape), (d_k, *unblocked(d_keys)), (d_v, *unblocked(d_values)), None


chain_attention.defvjp(_attend, _attend_backward)


def _by_blocks(q, keys, values, mask):
    """Keys and values of step 0, [B, K, S, D], and the rest in blocks of rows: of the later steps, mask, queries."""
    b, s, kv_heads, _ = keys[0].shape
    size = math.gcd(s, _QUERY_BLOCK)
    context = tuple(jnp.moveaxis(x[0], 1, 2) for x in (keys, values))
    own_keys, own_values = (tuple(_row_blocks(x, kv_heads) for x in steps[1:]) for steps in (keys, values))
    visible = jnp.moveaxis(mask.reshape(b, s // size, size, s), 1, 0)
    return context, own_keys, own_values, visible, _row_blocks(q, kv_heads)


def _row_blocks(x: Float[Array, "B S H D"], kv_heads: int) -> Float[Array, "blocks B K N D"]:
    """A block's N rows of a KV head are the query heads of its group at one position, at the next one, …"""
    b, s, heads, d = x.shape
    size = math.gcd(s, _QUERY_BLOCK)
    split = x.reshape(b, s // size, size, kv_heads, heads // kv_heads, d)
    return split.transpose(1, 0, 3, 2, 4, 5).reshape(s // size, b, kv_heads, -1, d)


def _unblocked(x: Float[Array, "blocks B K N D"], shape: tuple[int, ...]) -> Float[Array, "B S H D"]:
    b, s, heads, d = shape
    blocks, _, kv_heads, *_ = x.shape
    split = x.reshape(blocks, b, kv_heads, s // blocks, heads // kv_heads, d)
    return split.transpose(1, 0, 3, 2, 4, 5).reshape(shape)


def _scores(
    q: Float[Array, "B K N D"],
    context: Float[Array, "B K S D"],
    own: Steps,
    visible: Bool[Array, "B Q S"],
    scale: float,
) -> tuple[Float[Array, "B K N S"], list[Float[Array, "B K N"]]]:
    among = _product("bknd,bksd->bkns", q, context) * scale
    group = q.shape[2] // visible.shape[1]
    among = jnp.where(jnp.repeat(visible, group, axis=1)[:, None], among, -jnp.inf)
    return among, [_dots(q, key) * scale for key in own]


def _product(how: str, x: Array, y: Array) -> Array:
    return jnp.einsum(how, x, y, preferred_element_type=jnp.float32)


# Between the rows of a block and a key or value of each of its positions, [B, K, Q, D].


def _dots(rows: Float[Array, "B K N D"], each: Float[Array, "B K Q D"]) -> Float[Array, "B K N"]:
    return _product("bkqgd,bkqd->bkqg", _of_positions(rows, each), each).reshape(rows.shape[:3])


def _each_head(factor: Float[Array, "B K N"], each: Float[Array, "B K Q D"]) -> Float[Array, "B K N D"]:
    b, kv_heads, size, d = each.shape
    return (factor.reshape(b, kv_heads, size, -1, 1) * each[:, :, :, None]).reshape(b, kv_heads, -1, d)


def _over_heads(
    factor: Float[Array, "B K N"], rows: Float[Array, "B K N D"], each: Float[Array, "B K Q D"]
) -> Float[Array, "B K Q D"]:
    return (_of_positions(factor[..., None], each) * _of_positions(rows, each)).sum(3).astype(each.dtype)


def _of_positions(rows: Float[Array, "B K N D"], each: Float[Array, "B K Q D"]) -> Float[Array, "B K Q G D"]:
    return rows.reshape(*each.shape[:3], -1, rows.shape[-1])
