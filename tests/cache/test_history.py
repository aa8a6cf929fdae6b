import jax.numpy as jnp
import numpy as np

from jaxspec.cache import history
from jaxspec.cache.pages import TRASH_PAGE

PAGE_SIZE = 4
TABLE = np.array([[3, 1, 6], [2, 5, 0]], np.int32)


def empty() -> jnp.ndarray:
    pages = np.full((7, PAGE_SIZE), 99, np.int32)
    pages[TRASH_PAGE] = 0
    return jnp.asarray(pages)


def test_what_is_written_is_read_at_its_position():
    positions = np.array([[0, 3, 4, 11], [1, 2, 6, 7]])
    tokens = np.array([[10, 11, 12, 13], [20, 21, 22, 23]])
    written = history.write(empty(), TABLE, positions, tokens, np.ones((2, 4), bool))
    read = np.asarray(history.read(written, TABLE))
    assert read.shape == (2, 12)
    for b in range(2):
        np.testing.assert_array_equal(read[b, positions[b]], tokens[b])
        untouched = np.setdiff1d(np.arange(8), positions[b])
        np.testing.assert_array_equal(read[b, untouched], 99)


def test_sequences_that_share_a_page_read_the_same_tokens():
    positions, tokens = np.array([[0, 1, 2, 3]]), np.array([[7, 8, 9, 10]])
    written = history.write(empty(), TABLE[:1], positions, tokens, np.ones((1, 4), bool))
    shared = np.array([[3, 4, 0], [3, 5, 0]])
    read = np.asarray(history.read(written, shared))
    np.testing.assert_array_equal(read[0, :4], tokens[0])
    np.testing.assert_array_equal(read[1, :4], tokens[0])


def test_masked_tokens_are_not_written():
    positions, tokens = np.array([[0, 1, 2], [0, 1, 2]]), np.array([[10, 11, 12], [20, 21, 22]])
    is_written = np.array([[True, False, True], [False, False, False]])
    written = np.asarray(history.write(empty(), TABLE, positions, tokens, is_written))
    expected = np.array(empty())
    expected[3, 0], expected[3, 2] = 10, 12
    np.testing.assert_array_equal(written, expected)


def test_masked_tokens_leave_zeros_in_the_trash_page():
    positions, tokens = np.array([[1], [2]]), np.array([[5], [6]])
    written = history.write(jnp.full((7, PAGE_SIZE), 99), TABLE, positions, tokens, np.zeros((2, 1), bool))
    np.testing.assert_array_equal(written[TRASH_PAGE], [99, 0, 0, 99])


def test_positions_past_the_table_are_written_nowhere():
    positions, tokens = np.array([[12, 13, 4000], [12, 15, 16]]), np.full((2, 3), 5)
    written = history.write(empty(), TABLE, positions, tokens, np.ones((2, 3), bool))
    np.testing.assert_array_equal(written, empty())
