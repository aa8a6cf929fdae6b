"""Drafts are coupled to the target: the same noise at the same position and token (Daliri et al. 2024)."""

import dataclasses
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from models_on_mesh import ONE

from jaxspec.drafts.eagle3 import propose
from jaxspec.mesh import MODEL_AXES, XLA, make_mesh
from jaxspec.speculate.sampling import SamplingRows, target_tokens

VOCAB = 40
DRAFTED = np.array([1, 2, 5, 7, 11, 12, 20, 29, 33, 39])  # the target's tokens that the draft knows
LENGTHS = np.array([3, 9, 30, 31])
ROWS = 5


@dataclasses.dataclass(frozen=True)
class KnownLogits:
    """A head whose outputs are its logits."""

    def logits(self, outputs, target):
        return outputs, jnp.array(DRAFTED)


def sampling() -> SamplingRows:
    rows = SamplingRows.empty(len(LENGTHS))
    return dataclasses.replace(
        rows,
        temperature=jnp.array([0.0, 0.5, 1.0, 2.0]),
        seed=jnp.arange(8, dtype=jnp.uint32).reshape(4, 2),
    )


@pytest.mark.parametrize("depth", [0, 1, 4])
def test_where_draft_and_target_agree_the_first_child_is_the_token_that_the_target_will_take(depth):
    """A node of depth d stands at `length + d`, and its children are chosen for the position after it."""
    logits = np.random.default_rng(depth).normal(0, 2, (len(LENGTHS), ROWS, VOCAB)).astype(np.float32)
    # The target wants nothing that the draft does not know.
    known = np.isin(np.arange(VOCAB), DRAFTED)
    logits = np.where(known, logits, -1e9).astype(np.float32)

    def both(logits):
        context = types.SimpleNamespace(
            target=None,
            is_greedy=False,
            sampling=sampling(),
            length=jnp.array(LENGTHS),
            tail_axes=MODEL_AXES,
            collectives=XLA,
        )
        drafted = propose(KnownLogits(), context, logits[..., DRAFTED], depth, 3)
        positions = jnp.broadcast_to((context.length + depth)[:, None] + 1, logits.shape[:2])
        options = dict(vocab_size=VOCAB, axes=MODEL_AXES, is_greedy=False)
        return drafted.tokens, target_tokens(logits, positions, context.sampling, **options)

    run = jax.shard_map(both, mesh=make_mesh(ONE), in_specs=P(), out_specs=P(), check_vma=False)
    drafted, taken = jax.jit(run)(logits)
    np.testing.assert_array_equal(drafted[..., 0], taken)
    assert np.isin(drafted, DRAFTED).all()
    # At other positions it would be another token.
    assert not np.array_equal(np.argmax(logits, axis=-1)[1:], taken[1:])
