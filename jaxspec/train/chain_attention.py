"""Attention of all rows of a draft step at once, with a backward pass of its own."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

# Rows whose scores over all keys are held at once.
_QUERY_BLOCK = 256

# Keys or values of step 0, 1, …
type Steps = tuple[Float[Array, "B S K D"], ...]


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
