import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxspec.cache.paged import local_address
from jaxspec.cache.pages import TRASH_PAGE, PageGeometry, PagePool
from jaxspec.errors import UserError
from jaxspec.mesh import DCP, MeshShape, make_mesh


def owner(position: int, geometry: PageGeometry) -> int:
    """Ranks take turns of local_size tokens."""
    return position // geometry.local_size % geometry.dcp


def local_lengths(length: int, geometry: PageGeometry) -> list[int]:
    return [int(geometry.local_length(length, rank)) for rank in range(geometry.dcp)]


@pytest.mark.parametrize(
    ("interleave", "length", "expected"), [(1, 10, [3, 3, 2, 2]), (2, 10, [4, 2, 2, 2]), (1, 3, [1, 1, 1, 0])]
)
def test_local_lengths_of_the_worked_examples_on_four_ranks(interleave, length, expected):
    assert local_lengths(length, PageGeometry(4 * interleave, 4)) == expected


def test_local_lengths_seen_by_three_nodes_after_ten_tokens_on_four_ranks():
    geometry = PageGeometry(4, 4)
    seen = [[int(geometry.local_length(position + 1, rank)) for position in (10, 11, 12)] for rank in range(4)]
    assert seen[0] == [3, 3, 4]
    assert seen[2] == [3, 3, 3]
    assert seen[3] == [2, 3, 3]


GEOMETRIES = [PageGeometry(*sizes) for sizes in ((16, 1), (16, 2), (16, 4), (4, 4), (6, 3), (8, 8), (1, 1))]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_local_length_counts_the_tokens_that_a_rank_owns(geometry):
    lengths = np.arange(3 * geometry.page_size + 2)
    for rank in range(geometry.dcp):
        counted = [sum(owner(position, geometry) == rank for position in range(length)) for length in lengths]
        np.testing.assert_array_equal(geometry.local_length(lengths, rank), counted)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_local_lengths_of_all_ranks_add_up_to_the_length(geometry):
    lengths = np.arange(3 * geometry.page_size + 2)
    total = sum(geometry.local_length(lengths, rank) for rank in range(geometry.dcp))
    np.testing.assert_array_equal(total, lengths)


def test_pages_for_rounds_up_to_whole_pages():
    geometry = PageGeometry(16, 2)
    assert [geometry.pages_for(tokens) for tokens in (0, 1, 15, 16, 17, 32, 33)] == [0, 1, 1, 1, 2, 2, 3]


@pytest.mark.parametrize(("page_size", "dcp"), [(10, 4), (2, 4)])
def test_a_page_size_that_dcp_does_not_divide_is_refused(page_size, dcp):
    with pytest.raises(UserError, match=f"page_size={page_size}"):
        PageGeometry(page_size, dcp)


TABLE = np.array([[5, 2, 9], [4, 0, 0]], np.int32)


def addresses(geometry: PageGeometry, positions: np.ndarray) -> tuple[np.ndarray, ...]:
    """Page, offset and ownership as each rank computes them, ranks first."""
    mesh = make_mesh(MeshShape(1, 1, geometry.dcp))
    stacked = jax.shard_map(
        lambda p: jax.tree.map(lambda x: x[None], local_address(p, TABLE, geometry)),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(DCP),
        check_vma=False,
    )(positions)
    return tuple(np.asarray(x) for x in stacked)


@pytest.mark.parametrize("geometry", [PageGeometry(8, 4), PageGeometry(4, 4), PageGeometry(8, 2), PageGeometry(4, 1)])
def test_a_position_is_at_its_page_and_offset_on_the_one_rank_that_owns_it(geometry):
    positions = np.tile(np.arange(3 * geometry.page_size), (2, 1))
    page, offset, is_mine = addresses(geometry, positions)
    np.testing.assert_array_equal(np.sum(is_mine, axis=0), 1)
    for rank, b, position in np.ndindex(is_mine.shape):
        assert is_mine[rank, b, position] == (owner(position, geometry) == rank)
        assert page[rank, b, position] == TABLE[b, position // geometry.page_size]
        assert offset[rank, b, position] == position % geometry.page_size % geometry.local_size


@pytest.mark.parametrize(("interleave", "rank", "local"), [(1, 1, 2), (2, 0, 3)])
def test_position_nine_on_four_ranks_is_where_the_worked_examples_say(interleave, rank, local):
    geometry = PageGeometry(4 * interleave, 4)
    page, offset, is_mine = addresses(geometry, np.array([[9], [9]]))
    assert list(np.flatnonzero(is_mine[:, 0, 0])) == [rank]
    index = list(TABLE[0]).index(page[rank, 0, 0])
    assert index * geometry.local_size + offset[rank, 0, 0] == local


def test_a_position_past_the_table_is_nobodys():
    geometry = PageGeometry(4, 2)
    _, _, is_mine = addresses(geometry, np.array([[11, 12, 400], [11, 12, 400]]))
    np.testing.assert_array_equal(np.sum(is_mine, axis=0), [[1, 0, 0], [1, 0, 0]])


def test_a_pool_grants_every_page_once_and_never_the_trash_page():
    pool = PagePool(6)
    assert pool.num_free == 5
    granted = [*pool.grant(2), *pool.grant(3)]
    assert sorted(granted) == [1, 2, 3, 4, 5]
    assert TRASH_PAGE not in granted
    assert pool.num_free == 0


def test_a_grant_that_is_too_large_changes_nothing():
    pool = PagePool(4)
    assert pool.grant(4) is None
    assert pool.num_free == 3
    assert len(pool.grant(3)) == 3


def test_a_grant_of_no_pages_is_empty_even_when_none_are_free():
    pool = PagePool(1)
    assert pool.grant(0) == []


def test_pages_given_back_are_granted_again():
    pool = PagePool(5)
    first = pool.grant(2)
    second = pool.grant(2)
    pool.give_back(first)
    assert pool.num_free == 2
    assert sorted(pool.grant(2)) == sorted(first)
    assert pool.grant(1) is None
    pool.give_back(second)
    assert sorted(pool.grant(2)) == sorted(second)
