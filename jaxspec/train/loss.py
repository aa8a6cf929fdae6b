"""What a head is trained for and measured by: how well its draft steps foresee the target."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.drafts.eagle3_head import Eagle3Head
from jaxspec.models.decoder import Decoder
from jaxspec.train.dataset import Batch

# Positions whose logits, of all steps, are held at once.
_POSITIONS = 2048
# Least probability of acceptance that its loss tells from less.
_LEAST_ACCEPTANCE = 1e-5


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sums:
    """Sums over drafted tokens, one entry a draft step; they add up over batches and devices.

    Attributes:
      loss, learned: of what is learned from: tokens of answers where the target's likeliest token is in the draft
        vocabulary.
      correct, drafted: how many of the head's likeliest tokens are the target's, of all tokens of answers.
      accepted, starts: drafted tokens that greedy decoding would accept, where it starts at any token of an answer.
    """

    loss: Float[Array, "steps"]
    learned: Int[Array, "steps"]
    correct: Int[Array, "steps"]
    drafted: Int[Array, "steps"]
    accepted: Int[Array, ""]
    starts: Int[Array, ""]


def step_sums(
    head: Eagle3Head,
    target: Decoder,
    outputs: Float[Array, "steps B S H"],
    hidden: Float[Array, "B S E"],
    batch: Batch,
    loss: str,
) -> Sums:
    """Measures the outputs of `unroll` against the target's states `hidden`.

    Args:
      loss: "kl": the divergence of the draft from the target over the draft vocabulary, where the target is
        renormalised. "acceptance": -log of the sum of min(p, q), the probability that a drafted token is accepted.
    """
    steps, b, s = outputs.shape[:3]
    # By the position u at which the target says the token: step s is row u - 1 - s there.
    aligned = jnp.stack([_later(rows, step + 1) for step, rows in enumerate(outputs)])
    drafted = jnp.stack([_is_drafted(batch, step) for step in range(steps)])
    size = math.gcd(b * s, _POSITIONS)

    def blocks(x: Array, before: int) -> Array:
        """Flattens B and S after `before` axes, and brings blocks of positions to the front."""
        shape = x.shape[:before]
        return jnp.moveaxis(x.reshape(*shape, b * s // size, size, *x.shape[before + 2 :]), before, 0)

    def of_block(
        total: Float[Array, "steps"], block: tuple[Array, Array, Array]
    ) -> tuple[Float[Array, "steps"], tuple[Bool[Array, "steps N"], Bool[Array, "N"]]]:
        rows, states, counted = block
        truth = lax.stop_gradient(target.logits(states))
        best = jnp.argmax(truth, axis=-1)
        logits, ids = head.logits(rows, target)
        is_known = jnp.ones(best.shape, bool)
        if head.config.has_head:
            is_known = jnp.zeros(truth.shape[-1], bool).at[ids].set(True)[best]
            truth = truth[:, ids]
        is_correct = ids[jnp.argmax(logits, axis=-1)] == best
        losses = jnp.where(counted & is_known, _row_losses(logits, truth, loss), 0.0)
        return total + losses.sum(-1), (is_correct, is_known)

    total, (correct, is_known) = lax.scan(
        jax.checkpoint(of_block), jnp.zeros(steps), (blocks(aligned, 1), blocks(hidden, 0), blocks(drafted, 1))
    )
    is_correct = jnp.moveaxis(correct, 0, 1).reshape(steps, b, s) & drafted
    learned = drafted & is_known.reshape(b, s)
    # Back to the rows from which they were drafted: a row's drafts hold up to its first wrong one.
    runs = jnp.cumprod(jnp.stack([_earlier(hits, step + 1) for step, hits in enumerate(is_correct)]), axis=0)
    return Sums(
        loss=total,
        learned=learned.sum((1, 2)),
        correct=is_correct.sum((1, 2)),
        drafted=drafted.sum((1, 2)),
        accepted=runs.sum(),
        starts=drafted[0].sum(),
    )


def _row_losses(
    logits: Float[Array, "steps N V_d"], truth: Float[Array, "N V_d"], loss: str
) -> Float[Array, "steps N"]:
    log_q, log_p = jax.nn.log_softmax(logits), jax.nn.log_softmax(truth)
    if loss == "kl":
        return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
    overlap = jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1)
    return -jnp.log(jnp.maximum(overlap, _LEAST_ACCEPTANCE))


def _is_drafted(batch: Batch, step: int) -> Bool[Array, "B S"]:
    """Where the target says a token of an answer, in the conversation of the row that drafts it in this step."""
    start, end = _later(batch.documents, step + 1), _earlier(batch.documents, 1)
    return (start == end) & (end > 0) & _earlier(batch.is_answer, 1)


def _later(x: Array, by: int) -> Array:
    """Shifts [B, S, …] towards the end of S; zeros come in."""
    return jnp.pad(x, ((0, 0), (by, 0), *[(0, 0)] * (x.ndim - 2)))[:, : x.shape[1]]


def _earlier(x: Array, by: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, by), *[(0, 0)] * (x.ndim - 2)))[:, by:]
