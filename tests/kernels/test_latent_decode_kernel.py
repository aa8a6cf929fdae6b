"""Latent decode: its reference against grouped-query attention, and the Mosaic kernel against its reference.

The kernel is simulated, races looked for. On a Hopper GPU the same tests run the kernel itself:

    JAX_PLATFORMS=cuda python -m pytest -n 0 tests/kernels/test_latent_decode_kernel.py
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import NEEDS_COMPILER, assert_without_spills, compile_for_h200
from kernel_cases import (
    INTERPRET,
    assert_same_attention,
    cases_of,
    random_ancestors,
    steepness,
)

from pallas_kernels.context_decode import context_decode
from pallas_kernels.latent_decode import latent_decode as decode_reference
from pallas_kernels.latent_decode import latent_tree_attention
from pallas_kernels.latent_decode.kernel import latent_decode, latent_tree_decode
from pallas_kernels.latent_decode.plan import Plan
from pallas_kernels.lse_merge import merge
from pallas_kernels.tree_attention import tree_attention

LAYERS, LAYER = 2, 1
KEY, LATENT = 576, 512
SCALE = KEY**-0.5
# Empty, one token, both sides of the boundary of a tile, and a last page and tile that are almost full.
BOUNDARIES = (0, 1, 63, 64, 65, 128, 319)


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of one sequence for each length."""

    tokens: int
    heads: int
    page_size: int
    lengths: tuple[int, ...]
    splits: int
    dtype: str = "bfloat16"
    pages_per_sequence: int = 0
    has_tree: bool = True
    is_steep: bool = False

    def how(self) -> Plan:
        tiles = -(-self.table_width * self.page_size // 64) + self.has_tree
        return dataclasses.replace(Plan.of(len(self.lengths), self.tokens * self.heads, tiles), splits=self.splits)

    @property
    def table_width(self) -> int:
        return self.pages_per_sequence or max(1, -(-max(self.lengths) // self.page_size))

    def draw(self, poison: float = np.nan) -> dict[str, jax.Array]:
        """Random inputs, shuffled pages; `poison` wherever no sequence has a token, the trash page included."""
        random = np.random.default_rng(self.tokens)
        batch, width = len(self.lengths), self.table_width
        table = random.permutation(np.arange(1, 1 + batch * width)).reshape(batch, width)
        pages = np.full((LAYERS, 1 + batch * width, self.page_size, KEY), poison, np.float32)
        for owned, length in zip(table, self.lengths, strict=True):
            for m in range(-(-length // self.page_size)):
                rows = min(self.page_size, length - m * self.page_size)
                pages[LAYER, owned[m], :rows] = random.standard_normal((rows, KEY))
        is_granted = np.arange(width) * self.page_size < np.array(self.lengths)[:, None]
        q = random.standard_normal((batch, self.tokens, self.heads, KEY))
        if self.is_steep:
            q *= steepness(random, q.shape[:-1])
        tree = random.standard_normal((batch, self.tokens, KEY))
        return {name: jnp.asarray(x, self.dtype) for name, x in dict(q=q, pages=pages, tree=tree).items()} | dict(
            page_table=jnp.asarray(np.where(is_granted, table, 0), jnp.int32),
            lengths=jnp.asarray(self.lengths, jnp.int32),
            ancestors=jnp.asarray(random_ancestors(random, batch, self.tokens)),
        )

    def run(self, x: dict[str, jax.Array]) -> tuple[np.ndarray, np.ndarray]:
        prefix = (x["q"], x["pages"], LAYER, x["page_table"], x["lengths"])
        interpret = INTERPRET if jax.default_backend() == "cpu" else False
        options = dict(scale=SCALE, plan=self.how(), interpret=interpret)
        if self.has_tree:
            output, lse = latent_tree_decode(*prefix, x["tree"], x["ancestors"], **options)
        else:
            output, lse = latent_decode(*prefix, **options)
        return np.asarray(output), np.asarray(lse)

    @jax.default_matmul_precision("highest")
    def reference(self, x: dict[str, jax.Array]) -> tuple[np.ndarray, np.ndarray]:
        x = x | {name: x[name].astype(jnp.float32) for name in ("q", "pages", "tree")}
        parts = [decode_reference(x["q"], x["pages"], LAYER, x["page_table"], x["lengths"], scale=SCALE)]
        if self.has_tree:
            parts.append(latent_tree_attention(x["q"], x["tree"], x["ancestors"], scale=SCALE))
        output, lse = merge(*(jnp.stack(each) for each in zip(*parts, strict=True)))
        return np.asarray(output), np.asarray(lse)


CASES = {
    # Up to six tiles, and room for two: slots are used again.
    "tree_of_4": Case(4, 3, 16, BOUNDARIES, splits=1),
    "tree_of_4_in_splits": Case(4, 3, 16, (0, 17, 192), splits=3),
    "prefix_only": Case(3, 2, 32, (0, 1, 64, 95, 160), splits=2, has_tree=False),
    "one_token": Case(1, 16, 64, (0, 200), splits=1),
    "smallest_pages": Case(2, 4, 8, (9, 70), splits=1, dtype="float16"),
    "two_words_of_bits": Case(64, 1, 128, (0, 70), splits=1, pages_per_sequence=3),
    "several_row_blocks": Case(5, 16, 64, (65, 130), splits=2),
    # More rows than the flipped loop takes.
    "many_rows": Case(4, 6, 16, (0, 64, 256, 319), splits=1),
    "many_rows_steep": Case(4, 6, 16, (319, 450), splits=1, is_steep=True),
    "many_rows_in_splits": Case(4, 6, 16, (0, 1, 17, 129, 192), splits=3),
    "many_rows_prefix_only": Case(3, 8, 32, (0, 1, 64, 95, 160), splits=2, has_tree=False),
    "many_rows_smallest_pages": Case(2, 12, 8, (9, 70), splits=1, dtype="float16"),
    "many_rows_one_token": Case(1, 24, 64, (0, 200), splits=1),
}
SLOW = {
    *(f"many_rows_{name}" for name in ("in_splits", "prefix_only", "smallest_pages", "one_token")),
}


@functools.cache
def poisoned_run(case: Case) -> tuple[np.ndarray, np.ndarray]:
    return case.run(case.draw(poison=np.nan))


def assert_equals_reference(case: Case, got: tuple[np.ndarray, np.ndarray]) -> None:
    clean = case.draw(poison=0.0)
    assert_same_attention(got, case.reference(clean), (clean["pages"], clean["tree"]), case.dtype)


@pytest.mark.parametrize("case", cases_of(CASES, slow=SLOW))
def test_equals_the_reference_over_prefix_and_tree_whatever_unused_pages_hold(case, capfd):
    got = poisoned_run(case)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())
    assert_equals_reference(case, got)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case(64, 16, 64, (0, 1, 200), splits=1),
        Case(64, 16, 64, (0, 1, 200), splits=4),
        Case(1, 128, 64, (130,), splits=1, dtype="float16"),
    ],
    ids=["largest_tree", "largest_tree_in_splits", "most_heads"],
)
def test_the_largest_sizes(case, capfd):
    got = case.run(case.draw())
    assert "RACE DETECTED" not in "".join(capfd.readouterr())
    assert_equals_reference(case, got)


def test_without_keys_the_output_is_zero_with_a_finite_log_sum_exp():
    output, lse = poisoned_run(CASES["prefix_only"])
    assert CASES["prefix_only"].lengths[0] == 0
    assert np.all(output[0] == 0)
    assert np.all(lse[0] == np.float32(-1e30))


def test_huge_values_in_unused_rows_do_not_change_a_bit():
    case = CASES["one_token"]
    for got, expected in zip(case.run(case.draw(poison=1e4)), poisoned_run(case), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_siblings_do_not_see_each_other():
    #     0
    #    / \
    #   1   2     and 3 below 1, 4 below 2
    case = Case(5, 2, 64, (3, 3), splits=1)
    x = case.draw()
    x = {name: value if name in ("pages", "page_table") else value.at[1].set(value[0]) for name, value in x.items()}
    x["page_table"] = x["page_table"].at[1].set(x["page_table"][0])
    sees = jnp.array([[0b1, 0], [0b11, 0], [0b101, 0], [0b1011, 0], [0b10101, 0]], jnp.uint32)
    x["ancestors"] = jnp.stack([sees, sees])
    x["tree"] = x["tree"].at[1, 2].set(1e3)
    (before, after), _ = case.run(x)
    np.testing.assert_array_equal(before[[0, 1, 3]], after[[0, 1, 3]])
    assert np.all(np.any(before[[2, 4]] != after[[2, 4]], axis=-1))


def test_the_reference_is_attention_with_one_kv_head_whose_values_are_part_of_its_keys():
    case = Case(4, 3, 16, (0, 1, 33), splits=1, dtype="float32")
    x = case.draw()
    pages = jnp.stack([x["pages"]] * 2, axis=1)[:, :, :, :, None]
    expected = context_decode(x["q"], pages, LAYER, x["page_table"], x["lengths"], scale=SCALE)
    actual = decode_reference(x["q"], x["pages"], LAYER, x["page_table"], x["lengths"], scale=SCALE)
    tree = x["tree"][:, :, None]
    expected_tree = tree_attention(x["q"], tree, tree, x["ancestors"], scale=SCALE)
    actual_tree = latent_tree_attention(x["q"], x["tree"], x["ancestors"], scale=SCALE)
    for (output, lse), (wide, wide_lse) in ((actual, expected), (actual_tree, expected_tree)):
        np.testing.assert_allclose(output, wide[..., :LATENT], atol=1e-5)
        np.testing.assert_allclose(lse, wide_lse, rtol=1e-6)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (dict(width=320), "rows of 320 values must have 512 of the latent and 64 of the rotary key"),
        (dict(dtype="float32"), "dtype=float32 must be bfloat16 or float16"),
        (dict(tokens=65), "65 query tokens must be 1 to 64"),
        (dict(heads=129), "129 query heads must be 1 to 128"),
        (dict(page_size=24), "pages of 24 tokens"),
        (dict(page_size=4), "pages of 4 tokens"),
        (dict(scale=0.0), "scale=0.0 must be positive"),
        (dict(scale=float("inf")), "scale=inf must be positive and finite"),
        (dict(q_dtype="float16"), "q is float16 and the cache bfloat16: both must be the same"),
    ],
    ids=str,
)
def test_what_the_kernel_does_not_take_is_refused_with_the_rule_and_the_remedy(change, rule):
    sizes = dict(tokens=1, heads=1, width=KEY, page_size=16, dtype="bfloat16", scale=SCALE) | change
    q = jnp.zeros((1, sizes["tokens"], sizes["heads"], sizes["width"]), sizes.get("q_dtype", sizes["dtype"]))
    pages = jnp.zeros((1, 2, sizes["page_size"], sizes["width"]), sizes["dtype"])
    with pytest.raises(ValueError, match=rule) as raised:
        latent_decode(q, pages, 0, jnp.ones((1, 1), jnp.int32), jnp.ones(1, jnp.int32), scale=sizes["scale"])
    assert "use the reference" in str(raised.value)


@pytest.mark.parametrize(
    ("batch", "rows", "context", "splits"),
    [(8, 16, 8192, 16), (8, 128, 8192, 8), (1, 16, 1024, 16), (1, 16, 131072, 132), (128, 16, 8192, 1)],
)
def test_splits_fill_the_multiprocessors_in_as_few_waves_as_they_can(batch, rows, context, splits):
    assert Plan.of(batch, rows, tiles=context // 64).splits == splits


@NEEDS_COMPILER
@pytest.mark.parametrize(
    ("tokens", "heads", "page_size"),
    [(1, 8, 16), (1, 16, 64), (4, 4, 8), (1, 128, 64), (8, 16, 16), (64, 128, 8)],
)
def test_compiles_for_an_h200_without_spills_and_reads_the_cache_in_place(tokens, heads, page_size, monkeypatch, capfd):
    batch, context = 8, 8192
    width = context // page_size

    def argument(dtype, *shape):
        return jax.ShapeDtypeStruct(shape, dtype)

    pages = argument(jnp.bfloat16, LAYERS, 1 + batch * width, page_size, KEY)

    def decode(q, pages, page_table, lengths, tree, ancestors):
        return latent_tree_decode(q, pages, LAYER, page_table, lengths, tree, ancestors, scale=SCALE, interpret=False)

    arguments = (
        argument(jnp.bfloat16, batch, tokens, heads, KEY),
        pages,
        argument(jnp.int32, batch, width),
        argument(jnp.int32, batch),
        argument(jnp.bfloat16, batch, tokens, KEY),
        argument(jnp.uint32, batch, tokens, 2),
    )
    compiled, report = compile_for_h200(jax.jit(decode), arguments, monkeypatch, capfd)
    assert_without_spills(report)
    assert compiled.memory_analysis().temp_size_in_bytes < pages.size // 4
