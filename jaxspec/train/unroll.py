"""The training-time test of EAGLE-3 (Li et al. 2025, arXiv 2503.01840): all draft steps of all rows at once.

Row t starts from the true taps at t. In step s, counted from 0, it takes the true token at t + 1 + s, stands at
position t + s, and sees what it would see if it drafted: the true rows up to t, and itself of the steps 1 to s. So the
target's prediction that step s is to meet is that at t + 1 + s.
"""

import math

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


def chain_attention(
    q: Float[Array, "B S H D"], keys: Steps, values: Steps, mask: Bool[Array, "B S S"], scale: float
) -> Float[Array, "B S H D"]:
    """Attention of each row to the rows of step 0 that `mask` shows it, and to itself in all later steps.

    Only a block of rows has its scores in memory at a time; the backward pass computes them again.

    Args:
      keys, values: of step 0, 1, … up to that of `q`, each `[B, S, K, D]`.
    """
    b, s, heads, d = q.shape
    context_k, context_v = keys[0], values[0]
    kv_heads, size = context_k.shape[2], math.gcd(s, _QUERY_BLOCK)

    def blocks(x: Array) -> Array:
        """[B, S, …] -> [blocks, B, size, …]"""
        return jnp.moveaxis(x.reshape(b, s // size, size, *x.shape[2:]), 1, 0)

    def of_block(block: tuple[Array, Array, list[Array], list[Array]]) -> Array:
        rows, visible, own_keys, own_values = block
        among = jnp.einsum("bqkgd,bskd->bkgqs", rows, context_k, preferred_element_type=jnp.float32) * scale
        among = jnp.where(visible[:, None, None], among, -jnp.inf)
        own = [
            jnp.einsum("bqkgd,bqkd->bkgq", rows, key, preferred_element_type=jnp.float32)[..., None] * scale
            for key in own_keys
        ]
        largest = lax.stop_gradient(
            jnp.max(jnp.concatenate([among.max(-1, keepdims=True), *own], -1), -1, keepdims=True)
        )
        among, own = jnp.exp(among - largest), [jnp.exp(score - largest) for score in own]
        output = jnp.einsum("bkgqs,bskd->bqkgd", among.astype(q.dtype), context_v, preferred_element_type=jnp.float32)
        total = among.sum(-1, keepdims=True)
        for share, value in zip(own, own_values, strict=True):
            output += jnp.moveaxis(share, 3, 1) * value[:, :, :, None]
            total += share
        return (output / jnp.moveaxis(total, 3, 1)).astype(q.dtype)

    grouped = q.reshape(b, s, kv_heads, heads // kv_heads, d)
    split = (blocks(grouped), blocks(mask), [blocks(k) for k in keys[1:]], [blocks(v) for v in values[1:]])
    return jnp.moveaxis(lax.map(jax.checkpoint(of_block), split), 0, 1).reshape(q.shape)
