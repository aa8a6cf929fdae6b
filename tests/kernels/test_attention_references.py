"""The plain-JAX kernels against softmax written out one row at a time in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.chunk_prefill import causal_attention
from pallas_kernels.context_decode import context_decode
from pallas_kernels.kv_commit import commit_rows
from pallas_kernels.lse_merge import merge
from pallas_kernels.tree_attention import tree_attention

LAYERS, LAYER = 2, 1
PAGE_SIZE, PAGES_PER_SEQUENCE = 4, 3
NODES, KV_HEADS, HEAD_DIM = 3, 2, 8
SCALE = 0.4
NO_KEYS = -1e30
# Empty, one token, and both sides of every page boundary up to full.
LENGTHS = np.array([0, 1, 3, 4, 5, 7, 8, 9, 11, 12])
TOLERANCE = 1e-5  # float32 against float64, values of order 1

pytestmark = pytest.mark.usefixtures("exact_products")

decode = jax.jit(context_decode, static_argnames=("layer", "scale"))
commit = jax.jit(commit_rows)
attend_tree = jax.jit(tree_attention, static_argnames="scale")


@pytest.fixture
def exact_products():
    with jax.default_matmul_precision("highest"):
        yield


def naive_attend(q, keys, values):
    """One query [D] over keys and values [N, D]: output and log-sum-exp."""
    if len(keys) == 0:
        return np.zeros(len(q)), NO_KEYS
    scores = SCALE * (keys.astype(np.float64) @ q.astype(np.float64))
    lse = np.max(scores) + np.log(np.sum(np.exp(scores - np.max(scores))))
    return np.exp(scores - lse) @ values.astype(np.float64), lse


def naive_rows(q, keys, values, visible):
    """Rows q [T, H, D] over keys [N, K, D]; row t sees the indices `visible[t]`."""
    rows, heads, _ = q.shape
    output, lse = np.zeros(q.shape), np.zeros((rows, heads))
    for row in range(rows):
        for head in range(heads):
            kv = head * keys.shape[1] // heads
            output[row, head], lse[row, head] = naive_attend(
                q[row, head], keys[visible[row], kv], values[visible[row], kv]
            )
    return output, lse


def naive_decode(q, pages, page_table, lengths):
    output, lse = np.zeros(q.shape), np.zeros(q.shape[:3])
    for b, length in enumerate(lengths):
        tokens = [pages[LAYER, :, page_table[b, p // PAGE_SIZE], p % PAGE_SIZE] for p in range(length)]
        keys, values = (
            np.stack([token[i] for token in tokens]) if tokens else np.zeros((0, *pages.shape[4:])) for i in (0, 1)
        )
        output[b], lse[b] = naive_rows(q[b], keys, values, [np.arange(length)] * q.shape[1])
    return output, lse


def draw_decode(seed, group=2):
    """Queries, a cache of random numbers, and a table of shuffled pages with the trash page past each length."""
    random = np.random.default_rng(seed)
    batch = len(LENGTHS)
    count = batch * PAGES_PER_SEQUENCE + 1
    q = random.standard_normal((batch, NODES, group * KV_HEADS, HEAD_DIM)).astype(np.float32)
    pages = random.standard_normal((LAYERS, 2, count, PAGE_SIZE, KV_HEADS, HEAD_DIM)).astype(np.float32)
    page_table = random.permutation(np.arange(1, count)).reshape(batch, PAGES_PER_SEQUENCE).astype(np.int32)
    is_granted = np.arange(PAGES_PER_SEQUENCE) * PAGE_SIZE < LENGTHS[:, None]
    return q, pages, np.where(is_granted, page_table, 0)


def poison_unread(pages, page_table, value):
    """`value` in every row that no length covers, the trash page and the other layer included."""
    poisoned = np.full_like(pages, value)
    for b, length in enumerate(LENGTHS):
        for p in range(length):
            at = (LAYER, slice(None), page_table[b, p // PAGE_SIZE], p % PAGE_SIZE)
            poisoned[at] = pages[at]
    return poisoned


@pytest.mark.parametrize("group", [1, 2, 3, 4])
def test_context_decode_equals_softmax_over_the_tokens_of_the_table(group):
    q, pages, page_table = draw_decode(group, group)
    output, lse = decode(q, pages, LAYER, page_table, LENGTHS, scale=SCALE)
    expected, expected_lse = naive_decode(q, pages, page_table, LENGTHS)
    np.testing.assert_allclose(output, expected, atol=TOLERANCE)
    np.testing.assert_allclose(lse, expected_lse, atol=TOLERANCE, rtol=1e-6)


def test_context_decode_without_keys_is_zero_with_a_finite_log_sum_exp():
    q, pages, page_table = draw_decode(0)
    output, lse = decode(q, pages, LAYER, page_table, LENGTHS, scale=SCALE)
    assert LENGTHS[0] == 0
    assert np.all(output[0] == 0)
    assert np.all(np.asarray(lse[0]) == np.float32(NO_KEYS))
    assert np.all(np.isfinite(lse))


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf, 1e30, -1e30], ids=str)
def test_rows_that_no_length_covers_do_not_reach_context_decode(poison):
    q, pages, page_table = draw_decode(1)
    clean = decode(q, pages, LAYER, page_table, LENGTHS, scale=SCALE)
    dirty = decode(q, poison_unread(pages, page_table, poison), LAYER, page_table, LENGTHS, scale=SCALE)
    for expected, actual in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_context_decode_in_bfloat16_errs_by_the_rounding_of_its_weights():
    q, pages, page_table = draw_decode(2)
    q, pages = jnp.asarray(q, jnp.bfloat16), jnp.asarray(pages, jnp.bfloat16)
    output, lse = decode(q, pages, LAYER, page_table, LENGTHS, scale=SCALE)
    wide_q, wide_pages = np.asarray(q, np.float32), np.asarray(pages, np.float32)
    expected, expected_lse = naive_decode(wide_q, wide_pages, page_table, LENGTHS)
    assert output.dtype == lse.dtype == jnp.float32
    # Products of bfloat16 are exact in float32; a weight is rounded to 8 bits.
    np.testing.assert_allclose(output, expected, atol=2**-9 * np.max(np.abs(wide_pages)) + TOLERANCE)
    np.testing.assert_allclose(lse, expected_lse, atol=TOLERANCE, rtol=1e-6)


def test_merging_attention_over_parts_of_the_keys_equals_attention_over_all():
    q, pages, page_table = draw_decode(3)
    # One part a page; most lengths leave some parts empty.
    parts = [
        decode(q, pages, LAYER, page_table[:, [m]], np.clip(LENGTHS - m * PAGE_SIZE, 0, PAGE_SIZE), scale=SCALE)
        for m in range(PAGES_PER_SEQUENCE)
    ]
    output, lse = merge(jnp.stack([part[0] for part in parts]), jnp.stack([part[1] for part in parts]))
    expected, expected_lse = naive_decode(q, pages, page_table, LENGTHS)
    np.testing.assert_allclose(output, expected, atol=TOLERANCE)
    np.testing.assert_allclose(lse, expected_lse, atol=TOLERANCE, rtol=1e-6)


def test_merge_weighs_parts_by_their_share_of_the_softmax():
    random = np.random.default_rng(4)
    outputs = random.standard_normal((4, 5, 3, HEAD_DIM)).astype(np.float32)
    lses = (30 * random.standard_normal((4, 5, 3))).astype(np.float32)
    lses[1, ::2] = NO_KEYS
    output, lse = merge(outputs, lses)
    shares = np.exp(lses.astype(np.float64) - np.max(lses, axis=0))
    total = np.sum(shares, axis=0)
    np.testing.assert_allclose(output, np.sum(outputs * (shares / total)[..., None], axis=0), atol=TOLERANCE)
    np.testing.assert_allclose(lse, np.max(lses, axis=0) + np.log(total), rtol=1e-6, atol=TOLERANCE)


def test_merge_of_a_part_with_an_empty_one_changes_nothing():
    random = np.random.default_rng(5)
    part = random.standard_normal((5, HEAD_DIM)).astype(np.float32)
    lse = (50 * random.standard_normal(5)).astype(np.float32)
    merged = merge(jnp.stack([jnp.zeros_like(part), part]), jnp.stack([jnp.full(5, NO_KEYS), lse]))
    np.testing.assert_array_equal(merged[0], part)
    np.testing.assert_array_equal(merged[1], lse)


def test_merge_of_empty_parts_is_an_empty_part():
    output, lse = merge(jnp.zeros((4, 2, HEAD_DIM)), jnp.full((4, 2), NO_KEYS))
    assert np.all(output == 0)
    assert np.all(np.asarray(lse) == np.float32(NO_KEYS))


def draw_parents(random, nodes):
    return [-1, *(int(random.integers(0, node)) for node in range(1, nodes))]


def visible_nodes(parents):
    """Of each node: itself and its ancestors, in order."""
    visible = []
    for node in range(len(parents)):
        above = [node]
        while parents[above[-1]] >= 0:
            above.append(parents[above[-1]])
        visible.append(sorted(above))
    return visible


def pack_bits(visible):
    words = np.zeros((len(visible), 2), np.uint32)
    for node, others in enumerate(visible):
        for other in others:
            words[node, other // 32] |= np.uint32(1 << (other % 32))
    return words


def draw_tree(seed, nodes, group, batch=2):
    random = np.random.default_rng(seed)
    visible = [visible_nodes(draw_parents(random, nodes)) for _ in range(batch)]
    q = random.standard_normal((batch, nodes, group * KV_HEADS, HEAD_DIM)).astype(np.float32)
    k, v = random.standard_normal((2, batch, nodes, KV_HEADS, HEAD_DIM)).astype(np.float32)
    return q, k, v, visible, np.stack([pack_bits(each) for each in visible])


@pytest.mark.parametrize(("nodes", "group"), [(1, 2), (7, 1), (7, 3), (64, 4)])
def test_tree_nodes_attend_to_themselves_and_their_ancestors(nodes, group):
    q, k, v, visible, ancestors = draw_tree(nodes, nodes, group)
    output, lse = attend_tree(q, k, v, ancestors, scale=SCALE)
    for b in range(len(q)):
        expected, expected_lse = naive_rows(q[b], k[b], v[b], visible[b])
        np.testing.assert_allclose(output[b], expected, atol=TOLERANCE)
        np.testing.assert_allclose(lse[b], expected_lse, atol=TOLERANCE)


def test_a_node_of_the_upper_word_is_seen_by_its_descendants_only():
    # Node 40 is a child of node 5, and 63 is a child of 40; all others are children of the root.
    parents = [-1] + [0] * 63
    parents[40], parents[63] = 5, 40
    q, k, v, _, _ = draw_tree(8, 64, 1, batch=1)
    ancestors = pack_bits(visible_nodes(parents))[None]
    before, _ = attend_tree(q, k, v, ancestors, scale=SCALE)
    v[0, 40] += 1
    after, _ = attend_tree(q, k, v, ancestors, scale=SCALE)
    changed = np.any(np.asarray(before != after), axis=(0, 2, 3))
    assert list(np.flatnonzero(changed)) == [40, 63]


def test_siblings_do_not_see_each_other():
    #     0
    #    / \
    #   1   2     and 3 below 1, 4 below 2
    q, k, v, _, _ = draw_tree(9, 5, 2, batch=1)
    ancestors = pack_bits(visible_nodes([-1, 0, 0, 1, 2]))[None]
    before, _ = attend_tree(q, k, v, ancestors, scale=SCALE)
    k[0, 2], v[0, 2] = 1e4, 1e4
    after, _ = attend_tree(q, k, v, ancestors, scale=SCALE)
    np.testing.assert_array_equal(before[0, [0, 1, 3]], after[0, [0, 1, 3]])
    assert np.all(np.asarray(before[0, [2, 4]] != after[0, [2, 4]]))


def test_tree_attention_in_bfloat16_errs_by_the_rounding_of_its_weights():
    q, k, v, visible, ancestors = draw_tree(10, 7, 3)
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))
    output, lse = attend_tree(q, k, v, ancestors, scale=SCALE)
    q, k, v = (np.asarray(x, np.float32) for x in (q, k, v))
    for b in range(len(q)):
        expected, expected_lse = naive_rows(q[b], k[b], v[b], visible[b])
        np.testing.assert_allclose(output[b], expected, atol=2**-9 * np.max(np.abs(v)) + TOLERANCE)
        np.testing.assert_allclose(lse[b], expected_lse, atol=TOLERANCE)


@pytest.mark.parametrize("group", [1, 3])
def test_chunk_rows_attend_to_themselves_and_earlier_rows(group):
    random = np.random.default_rng(group)
    q = random.standard_normal((7, group * KV_HEADS, HEAD_DIM)).astype(np.float32)
    k, v = random.standard_normal((2, 7, KV_HEADS, HEAD_DIM)).astype(np.float32)
    output, lse = causal_attention(q, k, v, scale=SCALE)
    expected, expected_lse = naive_rows(q, k, v, [np.arange(row + 1) for row in range(7)])
    np.testing.assert_allclose(output, expected, atol=TOLERANCE)
    np.testing.assert_allclose(lse, expected_lse, atol=TOLERANCE)


def test_a_chunk_is_a_chain():
    random = np.random.default_rng(11)
    q, k, v = random.standard_normal((3, 7, KV_HEADS, HEAD_DIM)).astype(np.float32)
    chain = pack_bits(visible_nodes(list(range(-1, 6))))
    by_bits = attend_tree(q[None], k[None], v[None], chain[None], scale=SCALE)
    causal = causal_attention(q, k, v, scale=SCALE)
    np.testing.assert_allclose(by_bits[0][0], causal[0], atol=TOLERANCE)
    np.testing.assert_allclose(by_bits[1][0], causal[1], atol=TOLERANCE)


def draw_commit():
    """Three sequences with two rows each, all to different places."""
    random = np.random.default_rng(12)
    pages = random.standard_normal((LAYERS, 2, 7, PAGE_SIZE, KV_HEADS, HEAD_DIM)).astype(np.float32)
    pages[:, :, 0] = 0
    pending = random.standard_normal((LAYERS, 2, 3, NODES, KV_HEADS, HEAD_DIM)).astype(np.float32)
    nodes = np.array([[0, 2], [1, 1], [2, 0]])
    page, offset = np.array([[1, 1], [3, 5], [6, 2]]), np.array([[2, 3], [3, 0], [0, 1]])
    return pages, pending, nodes, page, offset


def test_commit_moves_the_named_nodes_in_every_layer_and_nothing_else():
    pages, pending, nodes, page, offset = draw_commit()
    is_written = np.array([[True, True], [True, False], [False, True]])
    expected = pages.copy()
    for b, a in np.argwhere(is_written):
        expected[:, :, page[b, a], offset[b, a]] = pending[:, :, b, nodes[b, a]]
    np.testing.assert_array_equal(commit(pages, pending, 0, nodes, page, offset, is_written), expected)


def test_rows_that_commit_drops_leave_zeros_in_the_trash_page_whatever_they_hold():
    pages, pending, nodes, page, offset = draw_commit()
    pages[:, :, 0] = 5
    committed = commit(pages, np.full_like(pending, np.nan), 0, nodes, page, offset, np.zeros((3, 2), bool))
    np.testing.assert_array_equal(committed[:, :, 1:], pages[:, :, 1:])
    assert np.all(np.isin(committed[:, :, 0], (0, 5)))
    assert np.all(np.asarray(committed[:, :, 0])[:, :, np.unique(offset)] == 0)
