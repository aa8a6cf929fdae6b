"""The Mosaic kernel against the plain-JAX parts that it fuses: in interpret mode, races looked for.

On a Hopper GPU the same tests run the kernel itself:

    JAX_PLATFORMS=cuda python -m pytest -n 0 --full tests/kernels/test_chunk_prefill_kernel.py
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import NEEDS_COMPILER, assert_without_spills, compile_for_h200
from kernel_cases import INTERPRET, assert_same_attention, cases_of, steepness

from pallas_kernels.chunk_prefill import Prefix, causal_attention, chunk_prefill
from pallas_kernels.chunk_prefill.plan import TILE, Plan
from pallas_kernels.chunk_prefill.tiles import Tiles
from pallas_kernels.context_decode import context_decode
from pallas_kernels.lse_merge import merge

LAYERS, LAYER = 2, 1
# Empty, one token, and both sides of every boundary of a page of 16 and a tile of 128 that matters, up to full.
BOUNDARIES = (0, 1, 15, 16, 17, 127, 128, 129, 255, 256, 257, 383, 384)


@dataclasses.dataclass(frozen=True)
class Case:
    """One chunk after a prefix of each of the lengths; `plan` replaces parts of the default one."""

    tokens: int
    group: int
    kv_heads: int
    head_dim: int
    page_size: int = 16
    lengths: tuple[int, ...] = ()
    has_chunk: bool = True
    dtype: str = "bfloat16"
    plan: tuple[tuple[str, int], ...] = ()
    spare_pages: int = 0
    is_steep: bool = False

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def width(self) -> int:
        return -(-max(self.lengths, default=0) // self.page_size) + self.spare_pages

    def how(self) -> Plan:
        max_keys = self.width * self.page_size + self.has_chunk * self.tokens
        plan = Plan.of(self.tokens, self.group * self.kv_heads, self.kv_heads, self.head_dim, max_keys)
        return dataclasses.replace(plan, **dict(self.plan))

    def draw(self, length: int, poison: float = np.nan) -> dict[str, jax.Array]:
        """Random inputs, shuffled pages; `poison` wherever the sequence has no token, the trash page included."""
        random = np.random.default_rng(length)
        table = random.permutation(np.arange(1, 1 + self.width))
        shape = (LAYERS, 2, 1 + self.width, self.page_size, self.kv_heads, self.head_dim)
        pages = np.full(shape, poison, np.float32)
        for m in range(-(-length // self.page_size)):
            rows = min(self.page_size, length - m * self.page_size)
            pages[LAYER, :, table[m], :rows] = random.standard_normal((2, rows, *shape[4:]))
        q = random.standard_normal((self.tokens, self.group * self.kv_heads, self.head_dim))
        if self.is_steep:
            q *= steepness(random, q.shape[:-1])
        k, v = random.standard_normal((2, self.tokens, self.kv_heads, self.head_dim))
        arrays = {name: jnp.asarray(x, self.dtype) for name, x in dict(q=q, k=k, v=v, pages=pages).items()}
        is_granted = np.arange(self.width) * self.page_size < length
        return arrays | dict(page_row=jnp.asarray(np.where(is_granted, table, 0), jnp.int32), length=jnp.int32(length))

    def run(self, x: dict[str, jax.Array]) -> tuple[np.ndarray, np.ndarray]:
        output, lse = _kernel(self)(x)
        return np.asarray(output), np.asarray(lse)

    def reference(self, x: dict[str, jax.Array]) -> tuple[np.ndarray, np.ndarray]:
        output, lse = _reference(dataclasses.replace(self, plan=()), x)
        return np.asarray(output), np.asarray(lse)


@functools.partial(jax.jit, static_argnums=0)
@jax.default_matmul_precision("highest")
def _reference(case: Case, x: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Compiled whole: one by one its operations would take longer to compile."""
    q, k, v, pages = (x[name].astype(jnp.float32) for name in ("q", "k", "v", "pages"))
    parts = [causal_attention(q, k, v, scale=case.scale)] if case.has_chunk else []
    if case.lengths:
        prefix = (pages, LAYER, x["page_row"][None], x["length"][None])
        output, lse = context_decode(q[None], *prefix, scale=case.scale)
        parts.append((output[0], lse[0]))
    return merge(*(jnp.stack(each) for each in zip(*parts, strict=True)))


@functools.cache
def _kernel(case: Case):
    """Compiled once for all lengths, which it does not know."""
    interpret = INTERPRET if jax.default_backend() == "cpu" else False

    def run(x):
        chunk = (x["k"], x["v"]) if case.has_chunk else None
        prefix = Prefix(x["pages"], LAYER, x["page_row"], x["length"]) if case.lengths else None
        how = dict(scale=case.scale, plan=case.how(), interpret=interpret)
        return chunk_prefill(x["q"], chunk=chunk, prefix=prefix, **how)

    return jax.jit(run)


def assert_equals_reference(case: Case, length: int = 0) -> None:
    clean = case.draw(length, poison=0.0)
    got, expected = case.run(case.draw(length)), case.reference(clean)
    assert_same_attention(got, expected, (clean["pages"], clean["v"]), case.dtype)


CASES = {
    # Fewer tiles of memory than tiles of keys: slots are used again.
    "packed_group_of_4": Case(16, 4, 1, 64, lengths=BOUNDARIES, plan=(("splits", 1), ("stages", 2))),
    "splits_of_which_some_are_empty": Case(16, 4, 1, 64, lengths=(0, 1, 129, 384), plan=(("splits", 3),)),
    "heads_where_they_are": Case(130, 3, 1, 128, 64, (0, 200), dtype="float16", plan=(("packed", 1), ("splits", 1))),
    "packed_group_of_3": Case(50, 3, 1, 64, 128, (1, 257), plan=(("splits", 2),), spare_pages=2),
    "packed_group_of_16": Case(13, 16, 1, 64, 32, (127,), plan=(("splits", 1),)),
    "two_kv_heads_and_large_pages": Case(40, 1, 2, 128, 256, (300,), plan=(("splits", 1),)),
    "odd_pages": Case(16, 1, 1, 64, 24, (100,)),
    "steep": Case(130, 2, 1, 64, 64, (600,), plan=(("splits", 1),), is_steep=True),
    "prefix_alone": Case(70, 2, 1, 64, 64, (0, 64, 150), has_chunk=False),
}


@pytest.mark.parametrize("case", cases_of(CASES, slow={"packed_group_of_16", "odd_pages"}))
def test_equals_the_reference_over_prefix_and_chunk_whatever_unused_pages_hold(case, capfd):
    for length in case.lengths:
        assert_equals_reference(case, length)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("tokens", [1, 64, 65, 128, 129, 257])
def test_a_chunk_alone_equals_the_reference_at_every_boundary_of_its_tiles(tokens, capfd):
    assert_equals_reference(Case(tokens, 1, 1, 64, plan=(("splits", 1), ("stages", 2))))
    assert "RACE DETECTED" not in "".join(capfd.readouterr())


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("group", [1, 4])
def test_long_chunks_equal_the_reference(head_dim, group):
    assert_equals_reference(Case(500, group, 1, head_dim, 64, (600,)), 600)


def test_without_keys_the_output_is_zero_with_a_finite_log_sum_exp():
    case = CASES["prefix_alone"]
    output, lse = case.run(case.draw(0))
    assert np.all(output == 0)
    assert np.all(lse == np.float32(-1e30))


def test_huge_values_in_unused_rows_do_not_change_a_bit():
    case = CASES["packed_group_of_4"]
    for got, expected in zip(case.run(case.draw(17, poison=1e4)), case.run(case.draw(17)), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_rows_do_not_see_later_rows():
    case, seen = CASES["heads_where_they_are"], 70
    x = case.draw(0)
    changed = x | {name: x[name].at[seen:].set(50) for name in ("k", "v")}
    (before, _), (after, _) = case.run(x), case.run(changed)
    np.testing.assert_array_equal(before[:seen], after[:seen])
    assert np.all(np.any(before[seen:] != after[seen:], axis=-1))


def test_the_tiles_of_a_block_are_all_that_its_rows_see_and_no_others():
    for length, tokens, rows, splits in [
        (0, 300, 128, 1),
        (1, 300, 128, 2),
        (128, 129, 32, 1),
        (300, 700, 43, 3),
        (257, 16, 16, 8),
    ]:
        for first in range(0, tokens, rows):
            last = min(first + rows, tokens) - 1
            covered: list[range] = []
            for split in range(splits):
                tiles = jax.tree.map(int, Tiles.of(jnp.int32(length), first, last, split, splits))
                for n in range(tiles.start, tiles.end):
                    begin = int(tiles.first_of_prefix(n))
                    keys = range(begin, min(begin + TILE, length))
                    if tiles.is_of_chunk(n):
                        begin = tiles.first_of_chunk(n)
                        keys = range(length + begin, length + min(begin + TILE, last + 1))
                        assert not tiles.is_partial(n)
                    if n < tiles.whole:
                        assert len(keys) == TILE and keys[-1] <= length + first
                    covered.append(keys)
            # Each key once, and each tile with a key that the last row sees.
            assert sorted(key for keys in covered for key in keys) == list(range(length + last + 1))
            assert all(covered)


@pytest.mark.parametrize(("tokens", "packed"), [(16, 4), (200, 4), (256, 1), (1000, 1), (8192, 1)])
def test_groups_are_packed_where_tiles_would_stay_empty_else(tokens, packed):
    assert Plan.of(tokens, 32, 8, 128, tokens).packed == packed


@pytest.mark.parametrize(("tokens", "splits"), [(16, 16), (256, 2), (512, 1), (8192, 1)])
def test_splits_fill_the_multiprocessors_in_one_wave(tokens, splits):
    assert Plan.of(tokens, 32, 8, 128, 32768).splits == splits


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (dict(head_dim=32), "head_dim=32 must be one of"),
        (dict(dtype="float32"), "dtype=float32 must be bfloat16 or float16"),
        (dict(heads=17), "17 query heads must be 1 to 16 times the 1 KV heads"),
        (dict(page_size=4), "pages of 4 tokens on a device must have a multiple of 8"),
        (dict(cache_dtype="float16"), "q is bfloat16 and the cache float16: both must be the same"),
        (dict(scale=0.0), "scale=0.0 must be positive"),
        (dict(scale=float("inf")), "scale=inf must be positive and finite"),
        (dict(has_keys=False), "neither a chunk nor a prefix is given"),
    ],
    ids=str,
)
def test_what_the_kernel_does_not_take_is_refused_with_the_rule_and_the_remedy(change, rule):
    sizes = dict(heads=1, head_dim=64, page_size=16, dtype="bfloat16", scale=1.0, has_keys=True) | change
    q = jnp.zeros((2, sizes["heads"], sizes["head_dim"]), sizes["dtype"])
    k = jnp.zeros((2, 1, sizes["head_dim"]), sizes["dtype"])
    pages = jnp.zeros((1, 2, 2, sizes["page_size"], 1, sizes["head_dim"]), sizes.get("cache_dtype", sizes["dtype"]))
    prefix = Prefix(pages, 0, jnp.ones(1, jnp.int32), jnp.int32(1))
    chunk, prefix = ((k, k), prefix) if sizes["has_keys"] else (None, None)
    with pytest.raises(ValueError, match=rule) as raised:
        chunk_prefill(q, chunk=chunk, prefix=prefix, scale=sizes["scale"])
    assert "use the reference" in str(raised.value)


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("tokens", "page_size", "has_chunk"),
    [(8192, 64, True), (8192, 16, True), (8192, None, True), (8192, 64, False), (200, 16, True), (16, 64, True)],
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_compiles_for_an_h200_without_spills_and_reads_the_cache_in_place(
    tokens, page_size, has_chunk, head_dim, monkeypatch, capfd
):
    kv_heads, group, max_length = 8, 4, 32768
    arguments = [jax.ShapeDtypeStruct((tokens, kv_heads * group, head_dim), jnp.bfloat16)]
    if has_chunk:
        arguments += [jax.ShapeDtypeStruct((tokens, kv_heads, head_dim), jnp.bfloat16)] * 2
    cache_bytes = 0
    if page_size:
        width = max_length // page_size
        pages = jax.ShapeDtypeStruct((LAYERS, 2, 1 + width, page_size, kv_heads, head_dim), jnp.bfloat16)
        arguments += [pages, jax.ShapeDtypeStruct((width,), jnp.int32), jax.ShapeDtypeStruct((), jnp.int32)]
        cache_bytes = 2 * pages.size

    def prefill(q, *others):
        chunk, others = (others[:2], others[2:]) if has_chunk else (None, others)
        prefix = Prefix(others[0], LAYER, *others[1:]) if page_size else None
        return chunk_prefill(q, chunk=chunk, prefix=prefix, scale=head_dim**-0.5, interpret=False)

    compiled, report = compile_for_h200(jax.jit(prefill), arguments, monkeypatch, capfd)
    assert_without_spills(report)
    # The tensor cores work while scores are turned into weights: the assembler has not put a wait after each product.
    assert "serialized" not in report
    if page_size:
        assert compiled.memory_analysis().temp_size_in_bytes < cache_bytes // 8
