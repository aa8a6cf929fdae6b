import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import draft
from jaxspec.cache.pages import TRASH_PAGE

PAGE_SIZE = 4
TABLE = np.array([[3, 1, 6], [2, 5, 0]], np.int32)
LAYER = 1
SHAPE = (3, 2, 7, PAGE_SIZE, 2, 3)  # layers, keys and values, pages, offsets, heads, channels


@pytest.fixture
def pages() -> np.ndarray:
    return np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)


def rows(*shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values of `shape` rows."""
    k, v = np.random.default_rng(1).normal(size=(2, *shape, *SHAPE[-2:])).astype(np.float32)
    return k, v


def write(pages, positions, k, v, is_written) -> np.ndarray:
    return np.asarray(draft.write(jnp.asarray(pages), LAYER, TABLE[: len(k)], positions, k, v, is_written))


def test_rows_land_at_their_page_and_offset_and_nothing_else_changes(pages):
    positions, (k, v) = np.array([[0, 3, 4, 11], [1, 2, 6, 7]]), rows(2, 4)
    expected = pages.copy()
    for b, j in np.ndindex(positions.shape):
        page, offset = TABLE[b, positions[b, j] // PAGE_SIZE], positions[b, j] % PAGE_SIZE
        expected[LAYER, 0, page, offset], expected[LAYER, 1, page, offset] = k[b, j], v[b, j]
    np.testing.assert_array_equal(write(pages, positions, k, v, np.ones((2, 4), bool)), expected)


def test_rows_that_are_not_written_leave_zeros_at_their_offset_of_the_trash_page_only(pages):
    positions, (k, v) = np.array([[0, 1, 6], [0, 1, 3]]), rows(2, 3)
    is_written = np.array([[True, False, True], [False, False, False]])
    expected = pages.copy()
    expected[LAYER, 0, 3, 0], expected[LAYER, 0, 1, 2] = k[0, 0], k[0, 2]
    expected[LAYER, 1, 3, 0], expected[LAYER, 1, 1, 2] = v[0, 0], v[0, 2]
    expected[LAYER, :, TRASH_PAGE, [0, 1, 3]] = 0
    np.testing.assert_array_equal(write(pages, positions, k, v, is_written), expected)


def test_positions_past_the_table_are_dropped(pages):
    positions, (k, v) = np.array([[12, 13, 4002], [5, 14, 15]]), rows(2, 3)
    expected = pages.copy()
    expected[LAYER, 0, 5, 1], expected[LAYER, 1, 5, 1] = k[1, 0], v[1, 0]
    expected[LAYER, :, TRASH_PAGE] = 0  # at every offset: those of 12, 13, 14 and 15
    np.testing.assert_array_equal(write(pages, positions, k, v, np.ones((2, 3), bool)), expected)


def test_rows_are_stored_in_the_type_of_the_pages(pages):
    k, v = rows(1, 1)
    written = draft.write(
        jnp.asarray(pages, jnp.bfloat16), LAYER, TABLE[:1], np.array([[2]]), k, v, np.ones((1, 1), bool)
    )
    assert written.dtype == jnp.bfloat16
    np.testing.assert_array_equal(written[LAYER, 0, 3, 2], k[0, 0].astype(jnp.bfloat16))
