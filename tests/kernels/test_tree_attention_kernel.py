"""The Mosaic kernel that joins a tree with parts of dcp ranks, against plain JAX: in interpret mode, races looked for.

On a Hopper GPU the same tests run the kernel itself:

    JAX_PLATFORMS=cuda python -m pytest -n 0 tests/kernels/test_tree_attention_kernel.py
"""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import NEEDS_COMPILER, assert_without_spills, compile_for_h200
from kernel_cases import INTERPRET, random_ancestors

from jaxspec.cache import paged
from jaxspec.cache.paged import TargetCache
from jaxspec.cache.pages import PageGeometry
from jaxspec.speculate import attention
from jaxspec.speculate.attention import VisitAttention
from jaxspec.speculate.lane import LaneRows
from pallas_kernels.lse_merge import join, merge, pack, unpack
from pallas_kernels.tree_attention import tree_attention
from pallas_kernels.tree_attention.kernel import tree_join

HOW = INTERPRET if jax.default_backend() == "cpu" else False
NO_KEYS = -1e30


@dataclasses.dataclass(frozen=True)
class Case:
    """One sequence, of the heads from `first_head` on; ranks in `empty` have no keys."""

    tokens: int
    heads: int
    kv_heads: int
    ranks: int
    first_head: int = 0
    head_dim: int = 64
    own_heads: int = 1
    empty: tuple[int, ...] = ()
    dtype: str = "bfloat16"

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def draw(self) -> dict[str, jax.Array]:
        random = np.random.default_rng(self.tokens)
        q = random.standard_normal((1, self.tokens, self.heads, self.head_dim))
        k, v = random.standard_normal((2, 1, self.tokens, self.kv_heads, self.head_dim))
        shape = (self.ranks, 1, self.tokens, self.own_heads)
        output, lse = random.standard_normal((*shape, self.head_dim)), 3 * random.standard_normal(shape)
        for rank in self.empty:
            output[rank], lse[rank] = 0, NO_KEYS
        return {name: jnp.asarray(x, self.dtype) for name, x in dict(q=q, k=k, v=v).items()} | dict(
            ancestors=jnp.asarray(random_ancestors(random, 1, self.tokens)),
            parts=pack(jnp.asarray(output, jnp.float32), jnp.asarray(lse, jnp.float32)),
        )

    def run(self, x: dict[str, jax.Array]) -> np.ndarray:
        first = jnp.int32(self.first_head)
        output = tree_join(x["q"], x["k"], x["v"], x["ancestors"], first, x["parts"], scale=self.scale, interpret=HOW)
        assert output.dtype == self.dtype
        return np.asarray(output.astype(jnp.float32))

    @jax.default_matmul_precision("highest")
    def reference(self, x: dict[str, jax.Array]) -> np.ndarray:
        own = self.first_head + np.arange(self.own_heads)
        kv_of_own = own // (self.heads // self.kv_heads)
        q, k, v = (x[name][:, :, i].astype(jnp.float32) for name, i in (("q", own), ("k", kv_of_own), ("v", kv_of_own)))
        return np.asarray(join(merge(*unpack(x["parts"])), tree_attention(q, k, v, x["ancestors"], scale=self.scale)))


CASES = {
    # Heads 1 to 3 of groups of two: the first begins inside a group, and the last ends inside another.
    "heads_from_inside_a_group": Case(3, 6, 3, ranks=2, first_head=1, own_heads=3),
    "one_token": Case(1, 2, 2, ranks=4, first_head=1, head_dim=128, empty=(0, 3)),
    "no_multiple_of_eight": Case(33, 2, 1, ranks=2, first_head=1, head_dim=128, dtype="float16"),
    "two_words_of_bits": Case(64, 1, 1, ranks=4, empty=(2,)),
    # More parts than shared memory holds at once.
    "slots_used_again": Case(64, 1, 1, ranks=6, empty=(0, 5)),
    "ranks_without_keys": Case(3, 6, 3, ranks=2, first_head=1, own_heads=3, empty=(0, 1)),
}


@functools.cache
def cached_run(case: Case) -> np.ndarray:
    return case.run(case.draw())


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_equals_the_reference_over_tree_and_parts(case, capfd):
    output = cached_run(case)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())
    x = case.draw()
    # Weights and the output are rounded, each to 8 bits in bfloat16 and 11 in float16.
    largest = max(float(jnp.max(jnp.abs(values))) for values in (x["v"], unpack(x["parts"])[0]))
    np.testing.assert_allclose(output, case.reference(x), atol=2**-8 * largest)


def test_siblings_do_not_see_each_other():
    #     0
    #    / \
    #   1   2     and 3 to 5 in a chain below 1
    sees = [0b1, 0b11, 0b101, 0b1011, 0b11011, 0b111011]
    case = Case(6, 1, 1, ranks=2)
    x = case.draw() | dict(ancestors=jnp.array([[[bits, 0] for bits in sees]], jnp.uint32))
    before = case.run(x)[0]
    after = case.run(x | dict(k=x["k"].at[0, 2].set(1e3), v=x["v"].at[0, 2].set(1e3)))[0]
    np.testing.assert_array_equal(np.delete(before, 2, axis=0), np.delete(after, 2, axis=0))
    assert np.all(np.any(before[2] != after[2], axis=-1))


def test_a_node_that_sees_no_node_gets_the_parts_alone_and_without_them_zero():
    case = CASES["heads_from_inside_a_group"]
    x = case.draw()
    x["ancestors"] = x["ancestors"].at[0, 1].set(0)
    np.testing.assert_allclose(case.run(x)[0, 1], merge(*unpack(x["parts"]))[0][0, 1], atol=2**-7)
    empty = pack(jnp.zeros((2, 1, 3, 3, 64)), jnp.full((2, 1, 3, 3), NO_KEYS))
    assert np.all(case.run(x | dict(parts=empty))[0, 1] == 0)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (dict(head_dim=32), "head_dim=32 must be one of"),
        (dict(dtype="float32"), "dtype=float32 must be bfloat16 or float16"),
        (dict(tokens=65), "65 query tokens must be 1 to 64"),
        (dict(heads=3, kv_heads=2), "3 query heads must be 1 to 16 times the 2 KV heads"),
        (dict(kv_dtype="float16"), "k is float16 and q bfloat16: both must be the same"),
        (dict(parts_dtype="bfloat16"), "parts are bfloat16 and must be float32"),
        (dict(own_heads=3), "first_head=0 and the 3 heads of parts must lie within the 2 query heads"),
        (dict(first_head=2), "first_head=2 and the 1 heads of parts must lie within the 2 query heads"),
        (dict(scale=0.0), "scale=0.0 must be positive"),
        (dict(scale=float("inf")), "scale=inf must be positive and finite"),
    ],
    ids=str,
)
def test_what_the_kernel_does_not_take_is_refused_with_the_rule_and_the_remedy(change, rule):
    x = (
        dict(tokens=1, heads=2, kv_heads=1, head_dim=64, dtype="bfloat16", own_heads=1, first_head=0, scale=1.0)
        | change
    )
    q = jnp.zeros((1, x["tokens"], x["heads"], x["head_dim"]), x["dtype"])
    k = jnp.zeros((1, x["tokens"], x["kv_heads"], x["head_dim"]), x.get("kv_dtype", x["dtype"]))
    parts = jnp.zeros((2, 1, x["tokens"], x["own_heads"], x["head_dim"] + 8), x.get("parts_dtype", "float32"))
    with pytest.raises(ValueError, match=rule) as raised:
        tree_join(q, k, k, jnp.zeros((1, x["tokens"], 2), jnp.uint32), x["first_head"], parts, scale=x["scale"])
    assert "use the reference" in str(raised.value)


def test_a_visit_of_two_ranks_with_the_kernels_is_a_visit_of_one_with_the_reference(monkeypatch):
    """Two ranks one after another on one device; what they would exchange comes from plain JAX."""
    batch, nodes, chunk, kv_heads, group, head_dim, page_size, ranks = 2, 3, 10, 1, 2, 64, 32, 2
    random = np.random.default_rng(5)
    rows = batch * nodes + chunk
    q = jnp.asarray(random.standard_normal((rows, kv_heads * group, head_dim)), jnp.bfloat16)
    k, v = jnp.asarray(random.standard_normal((2, rows, kv_heads, head_dim)), jnp.bfloat16)
    pages = jnp.asarray(random.standard_normal((1, 1, 2, 5, page_size, kv_heads, head_dim)), jnp.bfloat16)
    ancestors = jnp.asarray(np.tile(np.array([[0b1, 0], [0b11, 0], [0b101, 0]], np.uint32), (batch, 1, 1)))
    lane = LaneRows(
        tokens=jnp.zeros(chunk, jnp.int32),
        start=jnp.int32(21),
        length=jnp.int32(chunk),
        next_token=jnp.int32(0),
        slot=jnp.int32(-1),
        page_row=jnp.array([2, 4]),
    )

    def visit(pages, rank, dcp, kind, exchange):
        for module in (attention, paged):
            monkeypatch.setattr(module, "rank", lambda axes: rank)
        cache = TargetCache(pages, jnp.zeros((1, 1, 2, batch, nodes, kv_heads, head_dim), jnp.bfloat16))
        return VisitAttention(
            cache=cache,
            geometry=PageGeometry(page_size, dcp),
            first_slot=jnp.int32(0),
            is_occupied=jnp.bool(True),
            lengths=jnp.array([0, 40]),
            page_table=jnp.array([[0, 0], [3, 1]]),
            ancestors=ancestors,
            lane=lane,
            attention=kind,
            collectives=SimpleNamespace(exchange=exchange),
        )((), 0, q, k, v)[0]

    def visit_of_rank(pages, rank, kind, received):
        sent = []

        def exchange(x, axis):
            sent.append(x)
            return x if received is None else received[len(sent) - 1]

        return visit(pages, rank, ranks, kind, exchange), sent

    expected = visit(pages, 0, 1, "reference", None).reshape(rows, ranks, -1)
    shards = pages.reshape(*pages.shape[:4], ranks, -1, kv_heads, head_dim)
    sent = [visit_of_rank(shards[:, :, :, :, i], i, "reference", None)[1] for i in range(ranks)]
    trees_and_chunk = [jnp.stack(each) for each in zip(*sent, strict=True)]
    assert len(trees_and_chunk) == 2
    of_rank = jax.jit(functools.partial(visit_of_rank, kind="pallas"))
    for i in range(ranks):
        received = [each[:, i] for each in trees_and_chunk]
        actual, sent_by_kernel = of_rank(shards[:, :, :, :, i], jnp.int32(i), received=received)
        for found, wanted in zip(sent_by_kernel, sent[i], strict=True):
            np.testing.assert_allclose(found, wanted, atol=2**-6)
        np.testing.assert_allclose(actual.astype(np.float32), expected[:, i].astype(np.float32), atol=2**-6)


@NEEDS_COMPILER
@pytest.mark.parametrize(("tokens", "ranks"), [(1, 2), (8, 2), (64, 4), (64, 8)])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_compiles_for_an_h200_without_spills_and_reads_all_in_place(tokens, ranks, head_dim, monkeypatch, capfd):
    batch, kv_heads, group = 8, 8, 4
    tree = jax.ShapeDtypeStruct((batch, tokens, kv_heads, head_dim), jnp.bfloat16)
    arguments = [
        jax.ShapeDtypeStruct((batch, tokens, kv_heads * group, head_dim), jnp.bfloat16),
        tree,
        tree,
        jax.ShapeDtypeStruct((batch, tokens, 2), jnp.uint32),
        jax.ShapeDtypeStruct((), jnp.int32),
        jax.ShapeDtypeStruct((ranks, batch, tokens, kv_heads * group // ranks, head_dim + 8), jnp.float32),
    ]
    joined = functools.partial(tree_join, scale=head_dim**-0.5, interpret=False)
    compiled, report = compile_for_h200(jax.jit(joined), arguments, monkeypatch, capfd)
    assert_without_spills(report)
    words = batch * 2 * 64 * 4
    assert compiled.memory_analysis().temp_size_in_bytes <= 2 * words
