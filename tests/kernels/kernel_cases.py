"""What the tests of several kernels share: simulation and trees."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import pytest
import watched_products  # noqa: F401  (as it is imported, products are watched)
from jax.experimental.pallas import mosaic_gpu as plgpu

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


def rounding(dtype: str) -> float:
    """By how much of itself a weight is rounded at most, to 8 bits in bfloat16 and 11 in float16."""
    return {"bfloat16": 2**-8, "float16": 2**-11}[dtype]
