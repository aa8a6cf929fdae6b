import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache.slots import SlotTable
from jaxspec.speculate.commands import Commands, SlotCommands, SlotOp
from jaxspec.speculate.lane import NO_SLOT
from jaxspec.speculate.sampling import SamplingRows
from jaxspec.speculate.trees import TreeSpec

SLOTS, STOP_IDS, PAGES = 4, 2, 3
KEEP, RELEASE, ADMIT, GRANT = range(4)  # one slot gets each


def blank(lane_entries: int = 0) -> Commands:
    return Commands.blank(SLOTS, STOP_IDS, PAGES, lane_entries, chunk=5)


def draw(like, seed: int = 0):
    """Arrays of the same shapes with any int32 in them."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda x: random.integers(-(2**31), 2**31, x.shape, np.int32), like)


@pytest.mark.parametrize("lane_entries", [0, 3], ids=["without_lane", "with_lane"])
def test_commands_are_unpacked_as_they_were_packed(lane_entries):
    commands = draw(blank(lane_entries))
    packed = commands.pack()
    assert packed.dtype == np.int32
    assert packed.ndim == 1
    unpacked = jax.jit(blank(lane_entries).unpack)(packed)
    assert jax.tree.structure(unpacked) == jax.tree.structure(commands)
    jax.tree.map(np.testing.assert_array_equal, unpacked, commands)


def test_floats_and_seeds_survive_packing_as_their_bits():
    commands = blank()
    commands.slots.op[:] = SlotOp.ADMIT
    temperature = np.array([0.0, 1e-3, 0.7, 100.0], np.float32)
    seed = np.array([[0, 0], [2**32 - 1, 1], [2**31, 2**31 - 1], [5, 2**32 - 1]], np.uint32)
    commands.slots.temperature[:] = temperature.view(np.int32)
    commands.slots.seed[:] = seed.view(np.int32)
    table = jax.jit(lambda packed: blank().unpack(packed).slots.apply(filled_table()))(commands.pack())
    np.testing.assert_array_equal(table.sampling.temperature, temperature)
    np.testing.assert_array_equal(table.sampling.seed, seed)


def test_blank_commands_ask_for_nothing():
    commands = blank(lane_entries=2)
    assert np.all(commands.slots.op == SlotOp.KEEP)
    assert np.all(commands.lane.length == 0)
    assert np.all(commands.lane.slot == NO_SLOT)
    table = filled_table()
    jax.tree.map(np.testing.assert_array_equal, commands.slots.apply(table), table)


def test_rows_of_a_group_are_its_slots():
    slots = draw(blank().slots)
    rows = slots.rows(jnp.int32(1), 2)
    jax.tree.map(lambda part, whole: np.testing.assert_array_equal(part, whole[1:3]), rows, slots)


def filled_table() -> SlotTable:
    """A busy table: every row decodes and has something pending."""
    table = SlotTable.empty(SLOTS, PAGES, STOP_IDS, TreeSpec.parse("static:0,0,1"))
    count = jnp.arange(SLOTS, dtype=jnp.int32)
    return dataclasses.replace(
        table,
        is_active=jnp.ones(SLOTS, bool),
        length=10 + count,
        pending_count=jnp.full(SLOTS, 2, jnp.int32),
        path=jnp.tile(jnp.array([0, 1, 3], jnp.int32), (SLOTS, 1)),
        remaining=100 + count,
        page_table=jnp.tile(jnp.array([4, 5, 0], jnp.int32), (SLOTS, 1)),
        tokens=7 + jnp.zeros_like(table.tokens),
        stop_ids=jnp.full((SLOTS, STOP_IDS), 3, jnp.int32),
        sampling=SamplingRows(
            temperature=jnp.full(SLOTS, 0.5),
            top_p=jnp.full(SLOTS, 0.9),
            min_p=jnp.full(SLOTS, 0.1),
            top_k=jnp.full(SLOTS, 20, jnp.int32),
            seed=jnp.full((SLOTS, 2), 11, jnp.uint32),
        ),
    )


@pytest.fixture(scope="module")
def commands() -> SlotCommands:
    """Each op on one slot; all other fields are filled on every slot, also where they must not be read."""
    random = np.random.default_rng(1)
    slots = blank().slots
    slots.op[:] = [SlotOp.KEEP, SlotOp.RELEASE, SlotOp.ADMIT, SlotOp.GRANT]
    slots.length[:] = 33
    slots.remaining[:] = 44
    slots.temperature[:] = np.float32(1.5).view(np.int32)
    slots.top_p[:] = np.float32(0.25).view(np.int32)
    slots.min_p[:] = np.float32(0.125).view(np.int32)
    slots.top_k[:] = 6
    slots.seed[:] = np.array([2**32 - 2, 9], np.uint32).view(np.int32)
    slots.stop_ids[:] = [8, -1]
    slots.page_table[:] = random.integers(10, 20, (SLOTS, PAGES))
    return slots


@pytest.fixture(scope="module")
def applied(commands) -> SlotTable:
    return commands.apply(filled_table())


def assert_row_kept(applied: SlotTable, row: int, *but: str) -> None:
    before, after = filled_table(), applied
    for field in dataclasses.fields(SlotTable):
        if field.name not in but:
            jax.tree.map(
                lambda x, y: np.testing.assert_array_equal(x[row], y[row]),
                getattr(after, field.name),
                getattr(before, field.name),
            )


def test_keep_changes_nothing(applied):
    assert_row_kept(applied, KEEP)


def test_release_stops_decoding_and_drops_what_is_pending(applied, commands):
    assert not applied.is_active[RELEASE]
    assert applied.pending_count[RELEASE] == 0
    np.testing.assert_array_equal(applied.page_table[RELEASE], commands.page_table[RELEASE])
    assert_row_kept(applied, RELEASE, "is_active", "pending_count", "page_table")


def test_grant_replaces_the_page_table_only(applied, commands):
    np.testing.assert_array_equal(applied.page_table[GRANT], commands.page_table[GRANT])
    assert_row_kept(applied, GRANT, "page_table")


def test_admit_waits_for_the_tail_with_nothing_pending_and_an_empty_tree(applied):
    assert not applied.is_active[ADMIT]
    assert applied.pending_count[ADMIT] == 0
    assert np.all(applied.tokens[ADMIT] == -1)


def test_admit_takes_the_request_from_the_host(applied, commands):
    assert applied.length[ADMIT] == 33
    assert applied.remaining[ADMIT] == 44
    assert applied.stop_ids[ADMIT].tolist() == [8, -1]
    np.testing.assert_array_equal(applied.page_table[ADMIT], commands.page_table[ADMIT])
    sampling = jax.tree.map(lambda x: x[ADMIT], applied.sampling)
    assert (sampling.temperature, sampling.top_p, sampling.min_p, sampling.top_k) == (1.5, 0.25, 0.125, 6)
    assert sampling.seed.tolist() == [2**32 - 2, 9]


def test_admit_keeps_the_shape_of_the_tree(applied):
    assert_row_kept(
        applied,
        ADMIT,
        *("is_active", "length", "pending_count", "path", "remaining"),
        *("page_table", "tokens", "stop_ids", "sampling"),
    )


def test_blank_commands_are_made_without_the_device(monkeypatch):
    """It is busy with the dispatch before, and whatever asks it for something waits that long."""

    def on_device(primitive, *arguments, **parameters):
        raise AssertionError(f"{primitive} ran on the device")

    monkeypatch.setattr("jax._src.core.Primitive.bind", on_device)
    packed = blank(lane_entries=2).pack()
    assert packed.dtype == np.int32
    with pytest.raises(AssertionError, match="ran on the device"):  # so that the check would notice
        jnp.zeros(2)
