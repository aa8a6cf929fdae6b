"""What the tests of several kernels share: simulation and trees."""

import numpy as np
import watched_products  # noqa: F401  (as it is imported, products are watched)
from jax.experimental.pallas import mosaic_gpu as plgpu

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)


def random_ancestors(random: np.random.Generator, batch: int, nodes: int) -> np.ndarray:
    """Ancestor bits of random trees."""
    words = np.zeros((batch, nodes, 2), np.uint32)
    for b in range(batch):
        for node in range(nodes):
            if node:
                words[b, node] = words[b, random.integers(node)]
            words[b, node, node // 32] |= np.uint32(1 << node % 32)
    return words
