"""The training-time test of EAGLE-3 (Li et al. 2025, arXiv 2503.01840): all draft steps of all rows at once.

Row t starts from the true taps at t. In step s, counted from 0, it takes the true token at t + 1 + s, stands at
position t + s, and sees what it would see if it drafted: the true rows up to t, and itself of the steps 1 to s. So the
target's prediction that step s is to meet is that at t + 1 + s.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from jaxspec.drafts.eagle3_head import Eagle3Head
from jaxspec.models.decoder import Decoder
from jaxspec.models.whole_text import read_whole
from jaxspec.speculate.taps import tap_observer
from jaxspec.train.chain_attention import Steps, chain_attention
from jaxspec.train.dataset import Batch

# Of each layer, keys and values of the steps so far.
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
