"""What a head is trained for and measured by: how well its draft steps foresee the target."""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

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
      emitted, rounds: how many tokens of answers follow their first one, and in how many rounds a chain of as many
        drafts as steps emits them: the engine's own, where the target has said them greedily.
    """

    loss: Float[Array, "steps"]
    learned: Int[Array, "steps"]
    correct: Int[Array, "steps"]
    drafted: Int[Array, "steps"]
    emitted: Int[Array, ""]
    rounds: Int[Array, ""]


def step_sums(
    head: Eagle3Head,
    target: Decoder,
    outputs: Float[Array, "steps B S H"],
    hidden: Float[Array, "B S E"],
    batch: Batch,
    loss: str,
    weights: Float[Array, "steps"],
) -> tuple[Float[Array, ""], Sums]:
    """Measures the outputs of `unroll` against the target's states `hidden`.

    Args:
      loss: "kl": the divergence of the draft from the target over the draft vocabulary, where the target is
        renormalised. "acceptance": -log of the sum of min(p, q), the probability that a drafted token is accepted.
      weights: of the steps.

    Returns:
      The weighted sum of the losses, through which alone gradients go.
    """
    steps, b, s = outputs.shape[:3]
    # By the position u at which the target says the token: step s is row u - 1 - s there.
    aligned = jnp.stack([_later(rows, step + 1) for step, rows in enumerate(outputs)])
    drafted = is_drafted(batch, steps)
    size = math.gcd(b * s, _POSITIONS)

    def blocks(x: Array, before: int) -> Array:
        """Flattens B and S after `before` axes, and brings blocks of positions to the front."""
        shape = x.shape[:before]
        return jnp.moveaxis(x.reshape(*shape, b * s // size, size, *x.shape[before + 2 :]), before, 0)

    matrix, ids = head.vocabulary(target)
    rows = blocks(head.normed(aligned), 1)
    truth = _Truth(blocks(hidden, 0), target.vocabulary, ids, blocks(drafted, 1))
    objective, total, (correct, is_known) = _over_vocabulary(loss, rows, matrix, truth, weights)
    is_correct = jnp.moveaxis(correct, 0, 1).reshape(steps, b, s) & drafted
    learned = drafted & is_known.reshape(b, s)
    # Back to the rows from which they were drafted: a row's drafts hold up to its first wrong one.
    runs = jnp.cumprod(jnp.stack([_earlier(hits, step + 1) for step, hits in enumerate(is_correct)]), axis=0)
    emits = _earlier(drafted[0] & batch.is_answer, 1)
    sums = Sums(
        loss=total,
        learned=learned.sum((1, 2)),
        correct=is_correct.sum((1, 2)),
        drafted=drafted.sum((1, 2)),
        emitted=emits.sum(),
        rounds=_rounds(emits, runs.sum(0)).sum(),
    )
    return objective, sums


def is_drafted(batch: Batch, steps: int) -> Bool[Array, "steps B S"]:
    """Where the target says a token of an answer, in the conversation of the row that drafts it in each step."""
    end = _earlier(batch.documents, 1)
    says = (end > 0) & _earlier(batch.is_answer, 1)
    return jnp.stack([says & (_later(batch.documents, step + 1) == end) for step in range(steps)])


def _rounds(emits: Bool[Array, "B S"], accepted: Int[Array, "B S"]) -> Bool[Array, "B S"]:
    """Of the rows from which a token can be emitted those at which a round begins.

    Args:
      accepted: drafts of each row that hold; the round after it begins one row further than these.
    """
    b, s = emits.shape
    row = jnp.arange(b)[:, None]
    # Twice as far in each iteration; row S is where rounds end.
    next_row = jnp.where(emits, jnp.minimum(jnp.arange(s) + 1 + accepted, s), s)
    next_row = jnp.pad(next_row, ((0, 0), (0, 1)), constant_values=s)
    begins = jnp.pad(emits & ~_later(emits, 1), ((0, 0), (0, 1)))
    for _ in range(s.bit_length()):
        begins = begins.at[row, next_row].max(begins)
        next_row = jnp.take_along_axis(next_row, next_row, axis=1)
    return begins[:, :s] & emits


class _Truth(NamedTuple):
    """What drafts are measured by.

    Attributes:
      states: of the target, in blocks of positions.
      matrix: the target's vocabulary.
      ids: in it, of the draft vocabulary, ascending.
      drafted: whether a draft counts.
    """

    states: Float[Array, "blocks N E"]
    matrix: Float[Array, "V E"]
    ids: Int[Array, "V_d"]
    drafted: Bool[Array, "blocks steps N"]


type _Hits = tuple[Bool[Array, "blocks steps N"], Bool[Array, "blocks N"]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _over_vocabulary(
    loss: str,
    rows: Float[Array, "blocks steps N H"],
    matrix: Float[Array, "V_d H"],
    truth: _Truth,
    weights: Float[Array, "steps"],
) -> tuple[Float[Array, ""], Float[Array, "steps"], _Hits]:
    """The weighted sum of the losses; and what no gradient goes through: the sums of each step, which drafts are
    right, and whether the target's token is in the draft vocabulary.

    Logits are large, and what follows from them is little: they are computed once, a block at a time, and where
    gradients are wanted these are made at once too, so that no logits are kept or computed again.
    """

    def of_block(total: Array, block: tuple[Array, Array, Array]) -> tuple[Array, Any]:
        rows, states, drafted = block
        losses, hits, _ = _block(loss, rows, matrix, truth, states, drafted)
        return total + losses, hits

    total, hits = lax.scan(of_block, jnp.zeros(rows.shape[1]), (rows, truth.states, truth.drafted))
    return jnp.sum(weights * total), total, hits


def _forward(loss, rows, matrix, truth, weights):
    def of_block(sums: tuple[Array, Array], block: tuple[Array, Array, Array]) -> tuple[tuple[Array, Array], Any]:
        rows, states, drafted = block
        losses, hits, pull = _block(loss, rows, matrix, truth, states, drafted)
        (d_logits,) = pull(weights)
        d_logits = d_logits.astype(rows.dtype)
        d_rows = jnp.einsum("snv,vh->snh", d_logits, matrix, preferred_element_type=jnp.float32)
        d_matrix = jnp.einsum("snv,snh->vh", d_logits, rows, preferred_element_type=jnp.float32)
        total, d_total = sums
        return (total + losses, d_total + d_matrix), (hits, d_rows.astype(rows.dtype))

    zeros = jnp.zeros(rows.shape[1]), jnp.zeros(matrix.shape, jnp.float32)
    (total, d_matrix), (hits, d_rows) = lax.scan(of_block, zeros, (rows, truth.states, truth.drafted))
    return (jnp.sum(weights * total), total, hits), (d_rows, d_matrix.astype(matrix.dtype))


def _backward(loss, gradients, wanted):
    d_rows, d_matrix = gradients
    factor = wanted[0]
    return (factor * d_rows).astype(d_rows.dtype), (factor * d_matrix).astype(d_matrix.dtype), None, None


_over_vocabulary.defvjp(_forward, _backward)


def _block(loss, rows, matrix, truth, states, drafted):
    """Sums of the losses of a block, its hits, and the gradient of these sums by the logits."""
    scores = jnp.einsum("ne,ve->nv", states, truth.matrix, preferred_element_type=jnp.float32)
    best = jnp.argmax(scores, axis=-1)
    is_known = jnp.ones(best.shape, bool)
    if len(truth.ids) < scores.shape[-1]:
        is_known = jnp.zeros(scores.shape[-1], bool).at[truth.ids].set(True)[best]
        scores = scores[:, truth.ids]
    log_p = jax.nn.log_softmax(scores)
    logits = jnp.einsum("snh,vh->snv", rows, matrix, preferred_element_type=jnp.float32)

    def losses(logits: Float[Array, "steps N V_d"]) -> Float[Array, "steps"]:
        return jnp.where(drafted & is_known, _row_losses(logits, log_p, loss), 0.0).sum(-1)

    is_correct = truth.ids[jnp.argmax(logits, axis=-1)] == best
    sums, pull = jax.vjp(losses, logits)
    return sums, (is_correct, is_known), pull


def _row_losses(
    logits: Float[Array, "steps N V_d"], log_p: Float[Array, "N V_d"], loss: str
) -> Float[Array, "steps N"]:
    log_q = jax.nn.log_softmax(logits)
    if loss == "kl":
        return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
    overlap = jnp.sum(jnp.exp(jnp.minimum(log_p, log_q)), axis=-1)
    return -jnp.log(jnp.maximum(overlap, _LEAST_ACCEPTANCE))


def _later(x: Array, by: int) -> Array:
    """Shifts [B, S, …] towards the end of S; zeros come in."""
    return jnp.pad(x, ((0, 0), (by, 0), *[(0, 0)] * (x.ndim - 2)))[:, : x.shape[1]]


def _earlier(x: Array, by: int) -> Array:
    return jnp.pad(x, ((0, 0), (0, by), *[(0, 0)] * (x.ndim - 2)))[:, by:]
