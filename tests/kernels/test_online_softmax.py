"""When what weights are relative to rises; the kernels that use it are tested with scores that make it rise late."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mosaic import LOG2_E
from pallas_kernels.online_softmax import raise_top


@pytest.mark.parametrize("scale", [1e-3, 0.125, 30.0])
def test_top_rises_to_the_largest_score_where_that_is_more_than_eight_powers_of_two_above_it(scale):
    to_log2 = scale * LOG2_E
    power = 1 / to_log2  # that a score has to grow by for twice the weight
    top = np.array([0, 0, 0, 0, -1e30, -1e30], np.float32)
    largest = np.array([-9 * power, 7.9 * power, 8.1 * power, 300 * power, -np.inf, -3 * power], np.float32)
    scores = np.full((6, 64), -np.inf, np.float32)
    scores[np.arange(6), [0, 7, 8, 31, 40, 63]] = largest
    expected = np.array([0, 0, largest[2], largest[3], -1e30, largest[5]], np.float32)
    np.testing.assert_array_equal(raise_top(jnp.asarray(top), jnp.asarray(scores), to_log2, True), expected)
