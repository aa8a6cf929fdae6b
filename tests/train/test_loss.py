"""What is counted, position by position, against loops that say it in words."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.train.dataset import Batch
from jaxspec.train.loss import is_drafted, step_sums

VOCAB, STEPS = 12, 4
# Its outputs are its logits, over the even tokens where the vocabulary is reduced; so are the target's states.
TARGET = SimpleNamespace(vocabulary=jnp.eye(VOCAB))


def head_of(ids):
    return SimpleNamespace(
        normed=lambda outputs: outputs, vocabulary=lambda target: (jnp.eye(len(ids)), jnp.asarray(ids))
    )


def batch_and_scores(ids, rows=3, length=40, seed=0):
    random = np.random.default_rng(seed)
    documents = np.sort(random.integers(1, 4, (rows, length)), axis=1).astype(np.int32)
    documents[:, -5:] = 0  # padding
    is_answer = random.random((rows, length)) < 0.8
    states = random.normal(size=(rows, length, VOCAB)).astype(np.float32)
    outputs = random.normal(size=(STEPS, rows, length, len(ids))).astype(np.float32)
    for step in range(STEPS):  # most of them right, so that several in a row are
        right = np.roll(states, -1 - step, axis=1)[..., ids]
        outputs[step] = np.where(random.random((rows, length, 1)) < 0.7, right, outputs[step])
    return (
        Batch(jnp.zeros_like(documents), *(jnp.asarray(x) for x in (documents, documents, is_answer))),
        states,
        outputs,
    )


def rounds_of(emits, accepted):
    """One after the other over each stretch of rows that emit."""
    rounds, t = 0, 0
    while t < len(emits):
        rounds += emits[t]
        t += 1 + accepted[t] if emits[t] else 1
    return rounds


@pytest.mark.parametrize("ids", [np.arange(VOCAB), np.arange(0, VOCAB, 2)], ids=["whole", "reduced"])
def test_sums_equal_loops_over_rows_and_steps(ids):
    batch, states, outputs = batch_and_scores(ids)
    sums = step_sums(head_of(ids), TARGET, jnp.asarray(outputs), jnp.asarray(states), batch, "kl", jnp.ones(STEPS))[1]
    documents, is_answer = np.asarray(batch.documents), np.asarray(batch.is_answer)
    b, s = documents.shape
    correct, drafted, learned, loss, longest = *np.zeros((4, STEPS)), 0
    accepted, emits = np.zeros((b, s), int), np.zeros((b, s), bool)
    for row in range(b):
        for t in range(s):
            runs_on = True
            for step in range(STEPS):
                said = t + 1 + step  # where the target says the token that step `step` of row t drafts
                if said + 1 >= s or documents[row, t] == 0 or documents[row, t] != documents[row, said + 1]:
                    break
                if not is_answer[row, said + 1]:
                    runs_on = False
                    continue
                best, scores = states[row, said].argmax(), outputs[step, row, t].astype(np.float64)
                hit = ids[scores.argmax()] == best
                drafted[step] += 1
                correct[step] += hit
                emits[row, t] |= step == 0 and is_answer[row, said]
                runs_on &= bool(hit)
                accepted[row, t] += runs_on
                longest = max(longest, runs_on * (step + 1))
                if best in ids:
                    truth = states[row, said][ids].astype(np.float64)
                    log_p, log_q = (x - np.log(np.exp(x).sum()) for x in (truth, scores))
                    learned[step] += 1
                    loss[step] += (np.exp(log_p) * (log_p - log_q)).sum()
    assert (sums.correct.tolist(), sums.drafted.tolist()) == (correct.tolist(), drafted.tolist())
    assert (sums.learned.tolist(), int(sums.emitted)) == (learned.tolist(), emits.sum())
    assert int(sums.rounds) == sum(rounds_of(emits[row], accepted[row]) for row in range(b))
    np.testing.assert_allclose(sums.loss, loss, rtol=1e-4)
    assert longest == STEPS  # runs of all lengths are there


def test_the_loss_of_acceptance_is_that_of_a_certain_draft():
    ids = np.arange(VOCAB)
    batch, states, _ = batch_and_scores(ids)
    perfect = np.stack([np.roll(states, -1 - step, axis=1) for step in range(STEPS)])
    for loss in ("kl", "acceptance"):
        sums = step_sums(head_of(ids), TARGET, jnp.asarray(perfect), jnp.asarray(states), batch, loss, jnp.ones(STEPS))[
            1
        ]
        np.testing.assert_allclose(sums.loss, 0, atol=1e-4)
        assert sums.correct.tolist() == sums.drafted.tolist()


@pytest.mark.parametrize("loss", ["kl", "acceptance"])
@pytest.mark.parametrize("ids", [np.arange(VOCAB), np.arange(0, VOCAB, 2)], ids=["whole", "reduced"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_those_of_the_weighted_losses(loss, ids, dtype):
    batch, states, outputs = batch_and_scores(ids)
    weights = jnp.array([1.0, 0.5, 0.0, 2.0])
    matrix = jnp.asarray(np.random.default_rng(1).normal(size=(len(ids), len(ids))), dtype)

    def objective(outputs, matrix):
        head = SimpleNamespace(normed=lambda rows: rows, vocabulary=lambda target: (matrix, jnp.asarray(ids)))
        return step_sums(head, TARGET, outputs, jnp.asarray(states), batch, loss, weights)[0]

    def plain(outputs, matrix):
        """The same of whole arrays, as it is defined."""
        total = 0.0
        for step, weight in enumerate(weights):
            logits = jnp.einsum("bsh,vh->bsv", outputs[step], matrix, preferred_element_type=jnp.float32)
            log_q = jnp.roll(jax.nn.log_softmax(logits), step + 1, axis=1)
            log_p = jax.nn.log_softmax(jnp.asarray(states)[..., ids])
            if loss == "kl":
                losses = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
            else:
                losses = -jnp.log(jnp.minimum(jnp.exp(log_p), jnp.exp(log_q)).sum(-1))
            counts = is_drafted(batch, STEPS)[step] & np.isin(states.argmax(-1), ids)
            total += weight * jnp.sum(jnp.where(counts, losses, 0.0))
        return total

    rows = jnp.asarray(outputs, dtype)
    ours, theirs = (jax.value_and_grad(f, (0, 1))(rows, matrix) for f in (objective, plain))
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.linalg.norm(a - b) < (1e-5 if dtype == "float32" else 1e-2) * np.linalg.norm(b)
