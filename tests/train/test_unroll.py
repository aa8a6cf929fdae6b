"""The training-time test against speculators (tools/make_eagle3_fixtures.py), and its attention against a plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models_on_mesh import ONE
from safetensors.numpy import load_file
from test_eagle3_head import FIXTURES, Ends, ends_of, fitted, target_of

from jaxspec.mesh import make_mesh
from jaxspec.models.decoder import DecoderLayout
from jaxspec.train.chain_attention import chain_attention
from jaxspec.train.dataset import Batch
from jaxspec.train.loss import step_sums
from jaxspec.train.unroll import sees, unroll
from pallas_kernels.tree_attention import masked_attention

STEPS = 3


def batch_of(tokens, documents, positions, is_answer) -> Batch:
    arrays = (np.asarray(x)[None] for x in (tokens, documents, positions, is_answer))
    return Batch(*(jnp.asarray(x) for x in arrays))


def on_one_device(case: str, function):
    """Calls `function(head)` where a head's weights lie whole on one device, as in training."""
    drafter = fitted(case)
    layout = DecoderLayout(target_of(drafter), ONE, (), np.dtype("float32"))
    mesh = make_mesh(ONE)
    weights = drafter.restore(layout, mesh)
    sharded = jax.shard_map(
        lambda weights: function(drafter._head(weights, layout)),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    with jax.default_matmul_precision("highest"):
        return jax.tree.map(np.asarray, jax.jit(sharded)(weights))


@pytest.mark.parametrize("case", ["plain", "full_vocab", "everything"])
def test_all_rows_of_all_steps_equal_those_of_speculators(case):
    reference = load_file(FIXTURES / case / "reference.safetensors")
    taps, following = reference["taps"][None], reference["tokens"]
    # `following` begins with the second token; the first is never read. Beyond the last one, speculators reads 0.
    tokens = np.concatenate([[0], following, np.zeros(STEPS, np.int32)]).astype(np.int32)
    padding = len(tokens) - taps.shape[1]
    taps = np.pad(taps, ((0, 0), (0, padding), (0, 0), (0, 0)))
    batch = batch_of(tokens, np.ones_like(tokens), np.arange(len(tokens)), np.ones(len(tokens), bool))
    ends = ends_of(fitted(case), case)

    def run(head):
        outputs = unroll(head, ends, taps, batch, STEPS)[:, 0]
        return [(head.logits(rows, ends)[0], head.recycled(rows)) for rows in outputs]

    for step, (logits, recycled) in enumerate(on_one_device(case, run)):
        suffix = f"_{step}" if step else ""
        n = len(following)
        np.testing.assert_allclose(logits[:n], reference[f"logits{suffix}"], atol=3e-5, rtol=0)
        np.testing.assert_allclose(recycled[:n], reference[f"recycle{suffix}"], atol=3e-5, rtol=0)


@pytest.mark.parametrize("case", ["plain", "before_fc", "full_vocab"])
@pytest.mark.parametrize("loss", ["kl", "acceptance"])
def test_losses_of_two_texts_in_a_row_equal_those_of_speculators(case, loss):
    reference, drafter = load_file(FIXTURES / case / "loss.safetensors"), fitted(case)
    # The target's word at a position counts where the token after it is of an answer.
    is_answer = np.roll(reference["counted"], 1).astype(bool)
    batch = batch_of(reference["tokens"], reference["documents"], reference["positions"], is_answer)
    ends = Ends(ends_of(drafter, case).embedding, reference["target_head"])

    def run(head):
        outputs = unroll(head, ends, reference["taps"][None], batch, STEPS)
        return step_sums(head, ends, outputs, reference["states"][None], batch, loss, jnp.ones(STEPS))[1]

    sums = on_one_device(case, run)
    np.testing.assert_allclose(sums.loss / sums.learned, reference[loss], rtol=2e-5)
    # Of the rows that speculators counts (here all that stand at STEPS or later in the second text) it sees as many.
    assert sums.learned.tolist() == [np.count_nonzero(reference["counted"][step + 1 :]) for step in range(STEPS)]


def naive(q, keys, values, mask, scale):
    """All scores at once: of step 0 as `mask` says, of the later steps of a row its own."""
    own = jnp.eye(q.shape[1], dtype=bool)[None]
    visible = jnp.concatenate([mask, *[jnp.broadcast_to(own, mask.shape)] * (len(keys) - 1)], axis=-1)
    k, v = jnp.concatenate(keys, axis=1), jnp.concatenate(values, axis=1)
    return masked_attention(q, k, v, visible, scale=scale)[0]


@pytest.mark.parametrize(
    ("steps", "length", "dtype"), [(1, 24, "float32"), (4, 24, "float32"), (3, 512, "float32"), (3, 24, "bfloat16")]
)
def test_attention_and_its_gradients_equal_a_plain_one(steps, length, dtype):
    b, heads, kv_heads, d = 2, 4, 2, 8
    random = np.random.default_rng(0)

    def draw(count):
        return jnp.asarray(random.normal(size=(b, length, count, d)), dtype)

    q, weight = draw(heads), draw(heads)
    keys, values = (tuple(draw(kv_heads) for _ in range(steps)) for _ in range(2))
    documents = jnp.asarray(np.sort(random.integers(0, 4, (b, length)), axis=1))  # 0 is padding here, at the front
    mask = sees(Batch(documents, documents, documents, documents > 0))

    def value_and_gradients(attention):
        def total(q, keys, values):
            return jnp.sum(weight * attention(q, keys, values, mask, scale=d**-0.5))

        return jax.jit(jax.value_and_grad(total, (0, 1, 2)))(q, keys, values)

    with jax.default_matmul_precision("highest"):
        ours, theirs = value_and_gradients(chain_attention), value_and_gradients(naive)
    tolerance = dict(atol=2e-4, rtol=1e-4) if dtype == "float32" else dict(atol=0.1, rtol=0.05)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(a.astype(np.float32), b.astype(np.float32), **tolerance)


def test_tokens_of_other_conversations_and_of_the_future_change_nothing():
    reference = load_file(FIXTURES / "plain" / "loss.safetensors")
    ends = ends_of(fitted("plain"), "plain")
    taps = reference["taps"][None]

    def run(head, tokens, taps):
        batch = batch_of(tokens, reference["documents"], reference["positions"], np.ones(len(tokens), bool))
        return unroll(head, ends, taps, batch, STEPS)[:, 0]

    tokens, other = reference["tokens"], reference["tokens"].copy()
    other[:14], other[20] = (other[:14] + 1) % 256, (other[20] + 1) % 256
    other_taps = taps.copy()
    other_taps[:, :14], other_taps[:, 20:] = 7, 7
    before = on_one_device("plain", lambda head: run(head, tokens, taps))
    after = on_one_device("plain", lambda head: run(head, other, other_taps))
    for step in range(STEPS):
        # Row 19 - step is the first that has read token 20; rows from 14 on are the second text.
        rows = slice(14, 19 - step)
        np.testing.assert_array_equal(before[step, rows], after[step, rows])
        assert not np.array_equal(before[step, 19 - step], after[step, 19 - step])
