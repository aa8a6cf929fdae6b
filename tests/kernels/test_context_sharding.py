"""Attention with the cache split along the sequence equals attention on one device."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxspec.cache.paged import TargetCache
from jaxspec.cache.pages import PageGeometry
from jaxspec.mesh import MODEL_AXES, TP, MeshShape, make_mesh
from jaxspec.speculate.attention import VisitAttention
from jaxspec.speculate.lane import LaneRows

LAYERS, LAYER = 2, 1
OF_LAYER = (2.0, 1.0)  # what a layer leaves behind, as multiples of the rows: no two leave the same
PAGE_SIZE, PAGES_PER_SEQUENCE = 8, 3
# Every length that three pages can hold: both sides of every page and every shard boundary.
LENGTHS = np.arange(PAGE_SIZE * PAGES_PER_SEQUENCE + 1)
BATCH, NODES, CHUNK, PADDING = len(LENGTHS), 3, 6, 2
FIRST_SLOT, SLOTS = 2, BATCH + 4
PARENTS = (-1, 0, 0)
SEES = ((0,), (0, 1), (0, 2))
ANCESTORS = np.array([[sum(1 << node for node in row), 0] for row in SEES], np.uint32)
HEAD_DIM = 8
TOLERANCE = 1e-5


@dataclasses.dataclass(frozen=True)
class Layout:
    mesh: MeshShape
    heads: int
    kv_heads: int


LAYOUTS = {
    "one_device": Layout(MeshShape(1, 1, 1), 12, 3),
    # Six heads a rank: the second rank begins inside the second group of four.
    "dcp2": Layout(MeshShape(1, 1, 2), 12, 3),
    # Three heads a rank: a rank's heads span two groups.
    "dcp4": Layout(MeshShape(1, 1, 4), 12, 3),
    # Six heads and one KV head on each tp rank, three of them a rank.
    "tp2_dcp2": Layout(MeshShape(1, 2, 2), 12, 2),
}


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def layout(request):
    if request.param.mesh.size > jax.device_count():
        pytest.skip(f"mesh {request.param.mesh} needs {request.param.mesh.size} devices")
    with jax.default_matmul_precision("highest"):
        yield request.param


@functools.cache
def visit(layout: Layout, has_lane: bool):
    """The jitted attention of a stage, on global arrays."""

    def body(cache, q, k, v, lengths, page_table, is_occupied, lane):
        attention = VisitAttention(
            cache=cache,
            geometry=PageGeometry(PAGE_SIZE, layout.mesh.dcp),
            first_slot=FIRST_SLOT,
            is_occupied=is_occupied,
            lengths=lengths,
            page_table=page_table,
            ancestors=jax.numpy.tile(ANCESTORS, (BATCH, 1, 1)),
            lane=lane if has_lane else None,
        )
        rows, _ = attention((), LAYER, q, k, v)
        return rows, attention.written(tuple((scale * k, scale * v) for scale in OF_LAYER), rows)[0]

    by_head = P(None, TP)
    return jax.jit(
        jax.shard_map(
            body,
            mesh=make_mesh(layout.mesh),
            in_specs=(TargetCache.specs(), by_head, by_head, by_head, P(), P(), P(), P()),
            out_specs=(P(None, MODEL_AXES), TargetCache.specs()),
            check_vma=False,
        )
    )


@dataclasses.dataclass(frozen=True)
class Inputs:
    cache: TargetCache
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    page_table: np.ndarray
    lane_pages: np.ndarray

    def run(self, layout: Layout, lane: LaneRows | None = None, is_occupied: bool = True):
        rows, cache = visit(layout, lane is not None)(
            self.cache, self.q, self.k, self.v, LENGTHS, self.page_table, is_occupied, lane
        )
        return np.asarray(rows).reshape(len(self.q), layout.heads, HEAD_DIM), cache

    def prefix(self, pages: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of the first tokens in `pages`."""
        rows = np.asarray(self.cache.pages)[0, LAYER, :, pages].swapaxes(0, 1)
        keys, values = rows.reshape(2, -1, *rows.shape[3:])[:, :length]
        return keys, values


def draw(layout: Layout, poison: float) -> Inputs:
    """Random rows, and pages that hold `poison` wherever no sequence has a token."""
    random = np.random.default_rng(0)
    count = 1 + (BATCH + 1) * PAGES_PER_SEQUENCE
    table = random.permutation(np.arange(1, count)).reshape(-1, PAGES_PER_SEQUENCE).astype(np.int32)
    page_table, lane_pages = table[:-1], table[-1]
    is_granted = np.arange(PAGES_PER_SEQUENCE) * PAGE_SIZE < LENGTHS[:, None]
    page_table = np.where(is_granted, page_table, 0)
    pages = np.full((1, LAYERS, 2, count, PAGE_SIZE, layout.kv_heads, HEAD_DIM), poison, np.float32)
    for owned, length in zip(page_table, LENGTHS, strict=True):
        for position in range(length):
            pages[0, LAYER, :, owned[position // PAGE_SIZE], position % PAGE_SIZE] = random.standard_normal(
                (2, layout.kv_heads, HEAD_DIM)
            )
    rows = BATCH * NODES + CHUNK + PADDING
    return Inputs(
        cache=TargetCache(pages, np.zeros((1, LAYERS, 2, SLOTS, NODES, layout.kv_heads, HEAD_DIM), np.float32)),
        q=random.standard_normal((rows, layout.heads, HEAD_DIM)).astype(np.float32),
        k=random.standard_normal((rows, layout.kv_heads, HEAD_DIM)).astype(np.float32),
        v=random.standard_normal((rows, layout.kv_heads, HEAD_DIM)).astype(np.float32),
        page_table=page_table,
        lane_pages=lane_pages,
    )


def naive_attend(q: np.ndarray, keys: np.ndarray, values: np.ndarray) -> np.ndarray:
    """One row of heads [H, D] over keys [N, K, D]."""
    heads, kv_heads = len(q), keys.shape[1]
    output = np.zeros(q.shape)
    for head in range(heads):
        kv = head // (heads // kv_heads)
        scores = keys[:, kv].astype(np.float64) @ q[head].astype(np.float64) / np.sqrt(HEAD_DIM)
        weights = np.exp(scores - np.max(scores))
        output[head] = weights @ values[:, kv] / np.sum(weights)
    return output


def naive_trees(inputs: Inputs) -> np.ndarray:
    output = []
    for b, length in enumerate(LENGTHS):
        keys, values = inputs.prefix(inputs.page_table[b], length)
        for node in range(NODES):
            new = b * NODES + np.array(SEES[node])
            output.append(
                naive_attend(
                    inputs.q[b * NODES + node],
                    np.concatenate([keys, inputs.k[new]]),
                    np.concatenate([values, inputs.v[new]]),
                )
            )
    return np.stack(output)


@pytest.mark.parametrize("poison", [np.nan, 1e30], ids=str)
def test_trees_see_their_prefix_and_ancestors_at_every_length(layout, poison):
    inputs = draw(layout, poison)
    rows, _ = inputs.run(layout)
    np.testing.assert_allclose(rows[: BATCH * NODES], naive_trees(inputs), atol=TOLERANCE)


def test_padding_rows_come_out_as_zeros(layout):
    rows, _ = draw(layout, np.nan).run(layout)
    assert np.all(rows[BATCH * NODES :] == 0)


def test_tree_rows_wait_in_the_pending_buffer_of_their_slots(layout):
    inputs = draw(layout, 0.0)
    _, cache = inputs.run(layout)
    expected = np.zeros(cache.pending.shape, np.float32)
    for i, new in enumerate((inputs.k, inputs.v)):
        rows = new[: BATCH * NODES].reshape(BATCH, NODES, -1, HEAD_DIM)
        for layer, scale in enumerate(OF_LAYER):
            expected[0, layer, i, FIRST_SLOT : FIRST_SLOT + BATCH] = scale * rows
    np.testing.assert_array_equal(cache.pending, expected)
    np.testing.assert_array_equal(cache.pages, inputs.cache.pages)


def test_nothing_is_kept_of_a_group_that_is_not_there(layout):
    inputs = draw(layout, 0.0)
    _, cache = inputs.run(layout, is_occupied=False)
    assert not np.any(cache.pending)


def chunk(inputs: Inputs, start: int, length: int) -> LaneRows:
    return LaneRows(
        tokens=np.zeros(CHUNK, np.int32),
        start=np.int32(start),
        length=np.int32(length),
        next_token=np.int32(0),
        slot=np.int32(-1),
        page_row=inputs.lane_pages,
    )


def with_prompt(inputs: Inputs, start: int) -> Inputs:
    """The lane's first `start` tokens have K/V; what follows is still poisoned."""
    random = np.random.default_rng(start)
    pages = np.array(inputs.cache.pages)
    for position in range(start):
        where = pages[0, LAYER, :, inputs.lane_pages[position // PAGE_SIZE], position % PAGE_SIZE]
        where[...] = random.standard_normal(where.shape)
    return dataclasses.replace(inputs, cache=dataclasses.replace(inputs.cache, pages=pages))


# Starts on both sides of shard boundaries (every 2 or 4 tokens) and page boundaries (every 8), full and partial chunks.
CHUNKS = [(0, 1), (0, 6), (1, 6), (4, 6), (6, 6), (7, 3), (8, 6), (9, 5), (15, 6), (18, 6)]


@pytest.mark.parametrize(("start", "length"), CHUNKS)
def test_chunk_rows_see_the_prompt_before_them_and_trees_stay_as_they_were(layout, start, length):
    inputs = with_prompt(draw(layout, np.nan), start)
    rows, _ = inputs.run(layout, chunk(inputs, start, length))
    keys, values = inputs.prefix(inputs.lane_pages, start)
    first = BATCH * NODES
    for row in range(length):
        expected = naive_attend(
            inputs.q[first + row],
            np.concatenate([keys, inputs.k[first : first + row + 1]]),
            np.concatenate([values, inputs.v[first : first + row + 1]]),
        )
        np.testing.assert_allclose(rows[first + row], expected, atol=TOLERANCE)
    alone, _ = inputs.run(layout)
    np.testing.assert_allclose(rows[:first], alone[:first], atol=TOLERANCE)


@pytest.mark.parametrize(("start", "length"), CHUNKS)
def test_chunk_rows_are_written_to_the_pages_of_their_positions(layout, start, length):
    inputs = draw(layout, 7.0)
    _, cache = inputs.run(layout, chunk(inputs, start, length))
    expected = np.array(inputs.cache.pages)
    for row in range(length):
        page, offset = divmod(start + row, PAGE_SIZE)
        for i, new in enumerate((inputs.k, inputs.v)):
            for layer, scale in enumerate(OF_LAYER):
                expected[0, layer, i, inputs.lane_pages[page], offset] = scale * new[BATCH * NODES + row]
    np.testing.assert_array_equal(np.asarray(cache.pages)[:, :, :, 1:], expected[:, :, :, 1:])
    assert np.all(np.isin(np.asarray(cache.pages)[:, :, :, 0], (0, 7)))
