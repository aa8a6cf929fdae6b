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


# Both sides of what is read at once; two rows at once, that may belong to two tokens; a tile that is not full.
@pytest.mark.parametrize(
    ("parts", "tiles", "width", "group"),
    [(2, 1, 512, 4), (3, 2, 128, 5), (32, 1, 128, 3), (33, 1, 256, 3), (3, 2, 64, 5), (2, 1, 64, 3)],
)
def test_equals_the_plain_merge_where_parts_have_keys_and_where_none_has(parts, tiles, width, group, capfd):
    random = np.random.default_rng(parts)
    batch, heads, rows, tokens = 2, 2, 8, 2 if tiles == 1 else 3
    count = tokens * group
    lses = 3 * random.standard_normal((batch, heads, parts, tiles, rows))
    lses[0, :, :, 0, 0], lses[1, :, 1:], lses[0, 0, 0] = NO_KEYS, NO_KEYS, NO_KEYS
    outputs = np.where(lses[..., None] > NO_KEYS, random.standard_normal((*lses.shape, width)), 0)
    flat_outputs, flat_lses = (
        np.moveaxis(x, 2, 0).reshape(parts, batch, heads, tiles * rows, *x.shape[5:]) for x in (outputs, lses)
    )
    flat_outputs[:, :, :, count:], flat_lses[:, :, :, count:] = np.nan, np.nan
    outputs, lses = (
        np.moveaxis(x, 0, 2).reshape(like.shape) for x, like in ((flat_outputs, outputs), (flat_lses, lses))
    )
    lses = np.pad(lses, [(0, 0)] * 4 + [(0, 5)], constant_values=np.nan)
    interpret = INTERPRET if jax.default_backend() == "cpu" else False
    output, lse = merge_splits(jnp.float32(outputs), jnp.float32(lses), tokens, group, interpret=interpret)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())
    expected = merge(*(jnp.float32(x[:, :, :, :count]) for x in (flat_outputs, flat_lses)))
    by_token = [x.reshape(batch, heads, tokens, group, *x.shape[3:]).swapaxes(1, 2) for x in expected]
    np.testing.assert_allclose(output, by_token[0].reshape(output.shape), atol=1e-5)
    np.testing.assert_allclose(lse, by_token[1].reshape(lse.shape), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(
    ("rows", "width", "rule"),
    [(8, 96, "rows of 96 values must have a multiple or a part of 128"), (3, 64, "tiles of 3 rows of 64 values")],
)
def test_rows_that_do_not_fill_the_threads_are_refused_with_the_rule_and_the_remedy(rows, width, rule):
    with pytest.raises(ValueError, match=f"{rule}.*; use merge"):
        merge_splits(jnp.zeros((1, 1, 2, 1, rows, width)), jnp.zeros((1, 1, 2, 1, rows)), 1, rows)


@pytest.mark.parametrize(
    ("lse_rows", "tokens", "rule"),
    [
        (7, 1, "lses of 7 rows must be of at least the 8 that a tile of outputs has"),
        (8, 9, "9 tokens of 2 heads must be 1 to 16 rows, as outputs has"),
        (8, 0, "0 tokens of 2 heads must be 1 to 16 rows"),
    ],
)
def test_rows_that_are_not_there_are_refused(lse_rows, tokens, rule):
    with pytest.raises(ValueError, match=rule):
        merge_splits(jnp.zeros((1, 1, 3, 2, 8, 64)), jnp.zeros((1, 1, 3, 2, lse_rows)), tokens, 2)


@NEEDS_COMPILER
@pytest.mark.parametrize(("parts", "width"), [(8, 512), (132, 512), (15, 64)])
def test_compiles_for_an_h200_as_one_launch_without_spills(parts, width, monkeypatch, capfd):
    shape = 2, 1, parts, 1, 16
    arguments = tuple(jax.ShapeDtypeStruct(each, jnp.float32) for each in ((*shape, width), shape))
    run = jax.jit(lambda outputs, lses: merge_splits(outputs, lses, 2, 8, interpret=False))
    compiled, report = compile_for_h200(run, arguments, monkeypatch, capfd)
    assert_without_spills(report)
    text = compiled.as_text()
    assert text.count('custom_call_target="mosaic_gpu') == 1
    assert " fusion(" not in text
