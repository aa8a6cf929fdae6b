import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.models.whole_text import _attend


@pytest.mark.parametrize("head_dim", [8, 12])
def test_attention_in_bfloat16_runs_where_there_is_no_cudnn(head_dim):
    random = np.random.default_rng(0)
    q, k, v = (jnp.asarray(random.normal(size=(2, 5, heads, head_dim)), jnp.float32) for heads in (4, 2, 2))
    mask = jnp.tri(5, dtype=bool)[None, None]
    exact = _attend(q, k, v, mask)
    rounded = _attend(*(x.astype(jnp.bfloat16) for x in (q, k, v)), mask)
    np.testing.assert_allclose(rounded.astype(jnp.float32), exact, atol=0.05)
    np.testing.assert_allclose(exact[:, 0], np.repeat(v[:, 0], 2, axis=1), atol=1e-5)  # the first sees itself alone
