"""What the tests of several kernels share: simulation and trees."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import watched_products  # noqa: F401  (as it is imported, products are watched)
from jax import Array
from jax.experimental.pallas import mosaic_gpu as plgpu

Outcome = tuple[np.ndarray, np.ndarray]  # output and log-sum-exp
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def cases_of(cases: Mapping[str, Any], slow: Collection[str]) -> list[Any]:
    """Parameters of a test by their names; slow ones run with `--full` only."""
    return [
        pytest.param(case, id=name, marks=[pytest.mark.slow] if name in slow else []) for name, case in cases.items()
    ]


def random_ancestors(random: np.random.Generator, batch: int, nodes: int) -> np.ndarray:
    """Ancestor bits of random trees."""
    words = np.zeros((batch, nodes, 2), np.uint32)
    for b in range(batch):
        for node in range(nodes):
            if node:
                words[b, node] = words[b, random.integers(node)]
            words[b, node, node // 32] |= np.uint32(1 << node % 32)
    return words


def steepness(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Factors on queries, of which some see scores that grow far beyond the first, and some weights that are equal."""
    return random.choice([0.0, 1.0, 8.0, 24.0], shape)[..., None]


def assert_same_attention(got: Outcome, expected: Outcome, values: Iterable[Array], dtype: str) -> None:
    """Outputs, each of the first axis for itself too, and log-sum-exps, up to the rounding of weights."""
    (output, lse), (expected_output, expected_lse) = got, expected
    rounding = {"bfloat16": 2**-8, "float16": 2**-11}[dtype]  # of a weight by so much of itself at most
    largest = max(float(jnp.max(jnp.abs(each))) for each in values)
    # Half of it on average, and less where several weights share a row.
    np.testing.assert_allclose(output, expected_output, atol=rounding / 2 * largest)
    np.testing.assert_allclose(lse, expected_lse, atol=1e-4, rtol=1e-6)
    # Many weights are rounded up and down: over a long context one value too few is less than the bound above.
    for i, (rows, expected_rows) in enumerate(zip(output, expected_output, strict=True)):
        error = np.linalg.norm(rows - expected_rows)
        assert error <= rounding * np.linalg.norm(expected_rows), f"rows {i}: {error}"
