"""The Mosaic kernel that merges splits against the plain-JAX merge: in interpret mode, races looked for.

On a Hopper GPU the same tests run the kernel itself:

    JAX_PLATFORMS=cuda python -m pytest -n 0 tests/kernels/test_lse_merge_kernel.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import NEEDS_COMPILER, assert_without_spills, compile_for_h200
from kernel_cases import INTERPRET

from pallas_kernels.lse_merge import merge
from pallas_kernels.lse_merge.kernel import merge_splits

NO_KEYS = -1e30


# Both sides of what is read at once.
@pytest.mark.parametrize(("parts", "width"), [(2, 512), (3, 128), (32, 128), (33, 256)])
def test_equals_the_plain_merge_where_parts_have_keys_and_where_none_has(parts, width, capfd):
    random = np.random.default_rng(parts)
    batch, padded, rows = 3, 8, 3
    lses = 3 * random.standard_normal((batch, parts, padded))
    lses[1, :, 0], lses[2, 1:], lses[0, 0] = NO_KEYS, NO_KEYS, NO_KEYS
    outputs = np.where(lses[..., None] > NO_KEYS, random.standard_normal((batch, parts, padded, width)), 0)
    outputs[:, :, rows:], lses[:, :, rows:] = np.nan, np.nan
    outputs, lses = jnp.asarray(outputs, jnp.float32), jnp.asarray(lses, jnp.float32)
    interpret = INTERPRET if jax.default_backend() == "cpu" else False
    output, lse = merge_splits(outputs, lses, rows, interpret=interpret)
    expected, expected_lse = merge(*(jnp.moveaxis(x[:, :, :rows], 1, 0) for x in (outputs, lses)))
    assert "RACE DETECTED" not in "".join(capfd.readouterr())
    np.testing.assert_allclose(output, expected, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-6, atol=1e-5)


def test_rows_that_do_not_fill_the_threads_are_refused_with_the_rule_and_the_remedy():
    with pytest.raises(ValueError, match="rows of 64 values must be a multiple of 128, one a thread; use merge"):
        merge_splits(jnp.zeros((1, 2, 8, 64)), jnp.zeros((1, 2, 8)), 8)


@NEEDS_COMPILER
@pytest.mark.parametrize("parts", [8, 132])
def test_compiles_for_an_h200_as_one_launch_without_spills(parts, monkeypatch, capfd):
    arguments = tuple(jax.ShapeDtypeStruct((2, parts, 16, *width), jnp.float32) for width in ((512,), ()))
    run = jax.jit(lambda outputs, lses: merge_splits(outputs, lses, 16, interpret=False))
    compiled, report = compile_for_h200(run, arguments, monkeypatch, capfd)
    assert_without_spills(report)
    text = compiled.as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 1
    assert " fusion(" not in text
