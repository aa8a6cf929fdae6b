"""The Mosaic kernel against the plain-JAX parts that it fuses: in interpret mode, races looked for.

On a Hopper GPU the same tests run the kernel itself:

    JAX_PLATFORMS=cuda python -m pytest -n 0 tests/kernels/test_context_decode_kernel.py
"""

import dataclasses
import functools
import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200 import NEEDS_COMPILER, assert_without_spills, compile_for_h200
from jax.sharding import PartitionSpec as P
from kernel_cases import INTERPRET, assert_same_attention, random_ancestors, steepness

from jaxspec.cache.paged import TargetCache
from jaxspec.cache.pages import PageGeometry
from jaxspec.errors import UserError
from jaxspec.mesh import MODEL_AXES, MeshShape, make_mesh
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import DecoderLayout
from jaxspec.speculate.attention import VisitAttention, attend_to_pages, choose_attention
from jaxspec.speculate.lane import LaneRows
from pallas_kernels.context_decode import context_decode as decode_reference
from pallas_kernels.context_decode.kernel import context_decode, tree_decode
from pallas_kernels.context_decode.plan import Plan, stages_for, unsupported
from pallas_kernels.lse_merge import merge
from pallas_kernels.tree_attention import tree_attention

LAYERS, LAYER = 2, 1
# Empty, one token, and both sides of every boundary of a page of 16 and a tile of 64 that matters, up to full.
BOUNDARIES = (0, 1, 16, 17, 63, 64, 65, 127, 128, 129, 191, 192, 193, 319, 320)


@dataclasses.dataclass(frozen=True)
class Case:
    """A batch of one sequence for each length; `plan` replaces parts of the default one."""

    tokens: int
    group: int
    kv_heads: int
    head_dim: int
    page_size: int
    lengths: tuple[int, ...]
    dtype: str = "bfloat16"
    plan: tuple[tuple[str, int], ...] = ()
    pages_per_sequence: int = 0
    has_tree: bool = True
    is_steep: bool = False

    def how(self) -> Plan:
        tiles = -(-self.table_width * self.page_size // 64) + self.has_tree
        rows = self.tokens * self.group
        plan = Plan.of(len(self.lengths), rows, self.kv_heads, self.head_dim, tiles, may_cluster=False)
        return dataclasses.replace(plan, **dict(self.plan))

    @property
    def table_width(self) -> int:
        return self.pages_per_sequence or max(1, -(-max(self.lengths) // self.page_size))

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    def draw(self, poison: float = np.nan) -> dict[str, jax.Array]:
        """Random inputs, shuffled pages; `poison` wherever no sequence has a token, the trash page included."""
        random = np.random.default_rng(self.tokens)
        batch, width = len(self.lengths), self.table_width
        table = random.permutation(np.arange(1, 1 + batch * width)).reshape(batch, width)
        shape = (LAYERS, 2, 1 + batch * width, self.page_size, self.kv_heads, self.head_dim)
        pages = np.full(shape, poison, np.float32)
        for owned, length in zip(table, self.lengths, strict=True):
            for m in range(-(-length // self.page_size)):
                rows = min(self.page_size, length - m * self.page_size)
                pages[LAYER, :, owned[m], :rows] = random.standard_normal((2, rows, *shape[4:]))
        is_granted = np.arange(width) * self.page_size < np.array(self.lengths)[:, None]
        q = random.standard_normal((batch, self.tokens, self.kv_heads * self.group, self.head_dim))
        if self.is_steep:
            q *= steepness(random, q.shape[:-1])
        tree_k, tree_v = random.standard_normal((2, batch, self.tokens, self.kv_heads, self.head_dim))
        arrays = dict(q=q, pages=pages, tree_k=tree_k, tree_v=tree_v)
        return {name: jnp.asarray(x, self.dtype) for name, x in arrays.items()} | dict(
            page_table=jnp.asarray(np.where(is_granted, table, 0), jnp.int32),
            lengths=jnp.asarray(self.lengths, jnp.int32),
            ancestors=jnp.asarray(random_ancestors(random, batch, self.tokens)),
        )

    def run(self, x: dict[str, jax.Array]) -> tuple[np.ndarray, np.ndarray]:
        prefix = (x["q"], x["pages"], LAYER, x["page_table"], x["lengths"])
        interpret = INTERPRET if jax.default_backend() == "cpu" else False
        options = dict(scale=self.scale, plan=self.how(), interpret=interpret)
        if self.has_tree:
            output, lse = tree_decode(*prefix, x["tree_k"], x["tree_v"], x["ancestors"], **options)
        else:
            output, lse = context_decode(*prefix, **options)
        return np.asarray(output), np.asarray(lse)

    def reference(self, x: dict[str, jax.Array]) -> tuple[np.ndarray, np.ndarray]:
        output, lse = _reference(dataclasses.replace(self, plan=()), x)
        return np.asarray(output), np.asarray(lse)


@functools.partial(jax.jit, static_argnums=0)
@jax.default_matmul_precision("highest")
def _reference(case: Case, x: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Compiled whole: one by one its operations would take longer to compile."""
    x = x | {name: x[name].astype(jnp.float32) for name in ("q", "pages", "tree_k", "tree_v")}
    parts = [decode_reference(x["q"], x["pages"], LAYER, x["page_table"], x["lengths"], scale=case.scale)]
    if case.has_tree:
        parts.append(tree_attention(x["q"], x["tree_k"], x["tree_v"], x["ancestors"], scale=case.scale))
    return merge(*(jnp.stack(each) for each in zip(*parts, strict=True)))


CLUSTER_OF_2 = (("splits", 2), ("is_cluster", True))
CASES = {
    # Four KV tiles a split at most, and fewer tiles of memory than that: slots are used again.
    "tree_of_8": Case(8, 4, 1, 64, 16, (0, 1, 17, 64, 129, 320), plan=(("splits", 1), ("stages", 2))),
    "tree_of_8_in_splits": Case(8, 4, 1, 64, 16, BOUNDARIES, plan=(("splits", 3), ("stages", 2))),
    "prefix_only": Case(3, 1, 2, 64, 32, (0, 1, 64, 95, 160), plan=CLUSTER_OF_2, has_tree=False),
    "one_token": Case(1, 3, 2, 128, 64, (0, 200)),
    "two_words_of_bits": Case(64, 1, 1, 64, 64, (0, 70), plan=(("splits", 1),)),
    "two_warpgroups": Case(
        40, 3, 1, 128, 128, (1, 330), dtype="float16", plan=(("splits", 1), ("stages", 2)), pages_per_sequence=4
    ),
    "several_row_blocks": Case(20, 16, 1, 64, 64, (65,), plan=CLUSTER_OF_2),
    "cluster_of_8": Case(2, 1, 1, 64, 16, (0, 350), plan=(("splits", 8), ("is_cluster", True))),
    "cluster_of_4": Case(2, 1, 1, 64, 16, (0, 200), plan=(("splits", 4), ("is_cluster", True))),
    "cluster_of_two_warpgroups": Case(40, 3, 1, 128, 64, (330,), plan=(*CLUSTER_OF_2, ("stages", 2))),
    "one_token_in_splits": Case(1, 2, 1, 64, 16, BOUNDARIES, plan=(("splits", 3), ("stages", 2))),
    "turns": Case(3, 2, 1, 64, 64, BOUNDARIES, plan=(("warpgroups", 2), ("splits", 1), ("stages", 4))),
    "turns_long": Case(2, 2, 1, 64, 64, (1100,), plan=(("warpgroups", 2), ("splits", 1), ("stages", 4))),
    "turns_prefix_only": Case(
        2, 2, 1, 64, 64, (0, 64, 200), plan=(("warpgroups", 2), ("splits", 2), ("stages", 4)), has_tree=False
    ),
    "turns_in_splits": Case(8, 4, 1, 128, 16, (0, 1, 129, 600), plan=(("warpgroups", 2), ("splits", 2), ("stages", 4))),
    "turns_in_a_cluster": Case(1, 3, 1, 64, 64, (0, 65, 700), plan=(("warpgroups", 2), *CLUSTER_OF_2, ("stages", 4))),
    # What weights are relative to rises more than once, in some rows of a warp.
    "steep": Case(8, 4, 1, 64, 16, (0, 65, 700), plan=(("splits", 1), ("stages", 2)), is_steep=True),
    "steep_in_splits": Case(2, 4, 2, 128, 64, (129, 700), plan=(("splits", 2), ("stages", 2)), is_steep=True),
    "steep_two_warpgroups": Case(
        40, 3, 1, 64, 64, (600,), dtype="float16", plan=(("splits", 1), ("stages", 2)), is_steep=True
    ),
    "turns_steep": Case(
        8, 4, 1, 64, 64, (129, 700), plan=(("warpgroups", 2), ("splits", 1), ("stages", 4)), is_steep=True
    ),
    "pages_of_8": Case(4, 2, 1, 128, 8, (0, 7, 72, 300), plan=(("splits", 1), ("stages", 3))),
    "pages_of_512": Case(4, 2, 1, 64, 512, (0, 300, 513), plan=(("splits", 3), ("stages", 2))),
}
FETCHING = {"by_the_first_warpgroup": {"producer": False}, "by_one_more": {"producer": True}}
RUNS = {
    f"{name}-{way}": dataclasses.replace(case, plan=(*case.plan, *fetching.items()))
    for name, case in CASES.items()
    for way, fetching in FETCHING.items()
    if fetching["producer"] or not name.startswith("turns")  # which need it
}
_SIMULATED_THREADS = 8  # at once, however many cores there are


@functools.cache
def poisoned_run(case: Case) -> tuple[np.ndarray, np.ndarray]:
    return case.run(case.draw(poison=np.nan))


@pytest.mark.parametrize("case", RUNS.values(), ids=RUNS)
def test_equals_the_reference_over_prefix_and_tree_whatever_unused_pages_hold(case, capfd):
    plan = case.how()
    together = (plan.splits if plan.is_cluster else 1) * (plan.warpgroups + plan.producer)
    if jax.default_backend() == "cpu" and together > _SIMULATED_THREADS:
        pytest.skip(f"{together} threads wait for each other, more than are simulated at once")
    got = poisoned_run(case)
    assert "RACE DETECTED" not in "".join(capfd.readouterr())
    clean = case.draw(poison=0.0)
    assert_same_attention(got, case.reference(clean), (clean["pages"], clean["tree_v"]), case.dtype)


def test_without_keys_the_output_is_zero_with_a_finite_log_sum_exp():
    output, lse = poisoned_run(CASES["prefix_only"])
    assert CASES["prefix_only"].lengths[0] == 0
    assert np.all(output[0] == 0)
    assert np.all(lse[0] == np.float32(-1e30))


def test_huge_values_in_unused_rows_do_not_change_a_bit():
    case = CASES["one_token"]
    for got, expected in zip(case.run(case.draw(poison=1e4)), poisoned_run(case), strict=True):
        np.testing.assert_array_equal(got, expected)


def test_what_a_node_gets_does_not_depend_on_the_queries_of_others():
    # This one has scores that are not far enough above those before in tiles in which others of its warp have.
    case, node = CASES["steep"], 1
    x = case.draw()
    alone = jnp.zeros_like(x["q"]).at[:, node].set(x["q"][:, node])
    for got, expected in zip(case.run(x | {"q": alone}), poisoned_run(case), strict=True):
        np.testing.assert_array_equal(got[:, node], expected[:, node])
        assert np.any(got != expected)


def test_siblings_do_not_see_each_other():
    #     0
    #    / \
    #   1   2     and 3 below 1, 4 below 2
    case = Case(5, 2, 1, 64, 64, (3, 3))
    x = case.draw()
    x = {name: value if name in ("pages", "page_table") else value.at[1].set(value[0]) for name, value in x.items()}
    x["page_table"] = x["page_table"].at[1].set(x["page_table"][0])
    sees = jnp.array([[0b1, 0], [0b11, 0], [0b101, 0], [0b1011, 0], [0b10101, 0]], jnp.uint32)
    x["ancestors"] = jnp.stack([sees, sees])
    x["tree_k"], x["tree_v"] = x["tree_k"].at[1, 2].set(1e3), x["tree_v"].at[1, 2].set(1e3)
    (before, after), _ = case.run(x)
    np.testing.assert_array_equal(before[[0, 1, 3]], after[[0, 1, 3]])
    assert np.all(np.any(before[[2, 4]] != after[[2, 4]], axis=-1))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (dict(head_dim=32), "head_dim=32 must be one of"),
        (dict(dtype="float32"), "dtype=float32 must be bfloat16 or float16"),
        (dict(tokens=65), "65 query tokens must be 1 to 64"),
        (dict(heads=17), "17 query heads must be 1 to 16 times the 1 KV heads"),
        (dict(page_size=24), "pages of 24 tokens"),
        (dict(page_size=4), "pages of 4 tokens"),
        (dict(scale=0.0), "scale=0.0 must be positive"),
        (dict(scale=float("inf")), "scale=inf must be positive and finite"),
    ],
    ids=str,
)
def test_what_the_kernel_does_not_take_is_refused_with_the_rule_and_the_remedy(change, rule):
    sizes = dict(tokens=1, heads=1, head_dim=64, page_size=16, dtype="bfloat16", scale=1.0) | change
    q = jnp.zeros((1, sizes["tokens"], sizes["heads"], sizes["head_dim"]), sizes["dtype"])
    pages = jnp.zeros((1, 2, 2, sizes["page_size"], 1, sizes["head_dim"]), sizes["dtype"])
    with pytest.raises(ValueError, match=rule) as raised:
        context_decode(q, pages, 0, jnp.ones((1, 1), jnp.int32), jnp.ones(1, jnp.int32), scale=sizes["scale"])
    assert "use the reference" in str(raised.value)


def test_queries_and_cache_of_different_types_are_refused():
    q, pages = jnp.zeros((1, 1, 1, 64), jnp.float16), jnp.zeros((1, 2, 2, 16, 1, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="q is float16 and the cache bfloat16: both must be the same"):
        context_decode(q, pages, 0, jnp.ones((1, 1), jnp.int32), jnp.ones(1, jnp.int32), scale=1.0)


@pytest.mark.parametrize(
    ("batch", "context", "splits", "is_cluster", "turns"),
    [
        (1, 64, 2, True, 1),
        (1, 1024, 8, True, 1),
        (1, 8192, 15, False, 1),
        (8, 8192, 2, True, 2),
        (16, 4096, 1, False, 2),
        (32, 2048, 1, False, 1),
        (1, 131072, 33, False, 1),
    ],
)
def test_splits_fill_the_multiprocessors_and_warpgroups_take_turns_where_blocks_have_many_tiles(
    batch, context, splits, is_cluster, turns
):
    plan = Plan.of(batch, rows=32, kv_heads=8, head_dim=128, tiles=context // 64 + 1)
    assert (plan.splits, plan.is_cluster, plan.turns) == (splits, is_cluster, turns)


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (dict(splits=3), "splits=3 must be one of"),
        (dict(stages=1), "stages=1 must be at least 2 with a producer"),
        (dict(warpgroups=2, stages=2), "stages=2 must be at least 4 with a producer, by steps of 2"),
        (dict(warpgroups=2, stages=5), "stages=5 must be at least 4 with a producer, by steps of 2"),
        (dict(warpgroups=2, producer=False), "producer=False must be True for two warpgroups that take turns"),
        (dict(warpgroups=3, stages=6), "warpgroups=3 must be 1, or 2"),
        (dict(warpgroups=2, row_tiles=3), "or 2 where row_tiles=3 is 1 or even"),
        (dict(warpgroups=4, row_tiles=2), "warpgroups=4 must be 1, or 2"),
    ],
    ids=str,
)
def test_a_plan_that_would_wait_for_ever_or_leave_rows_out_is_refused(change, rule):
    with pytest.raises(ValueError, match=rule):
        dataclasses.replace(Plan.of(1, 32, 8, 128, 17), **change)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("row_sets", [1, 2])
@pytest.mark.parametrize("blocks", [1, 2])
def test_shared_memory_holds_as_many_stages_as_blocks_admit(blocks, row_sets, head_dim):
    stages = stages_for(head_dim, row_sets, is_alone=blocks == 1)
    of_system = 1024  # for each block

    def needed(stages: int) -> int:
        plan = dataclasses.replace(Plan.of(1, 64 * row_sets, 8, head_dim, 17), stages=stages)
        return blocks * (plan.shared_bytes(head_dim) + of_system)

    assert needed(stages) <= 228 * 1024 < needed(2 * stages)


@pytest.mark.parametrize("has_lane", [False, True], ids=["trees", "trees_and_chunk"])
def test_a_visit_with_the_kernel_is_a_visit_with_the_reference(has_lane):
    batch, nodes, chunk, kv_heads, group, head_dim, page_size = 2, 3, 4, 1, 2, 64, 16
    random = np.random.default_rng(5)
    rows = batch * nodes + has_lane * chunk + 2
    q = random.standard_normal((rows, kv_heads * group, head_dim))
    k, v = random.standard_normal((2, rows, kv_heads, head_dim))
    cache = TargetCache(
        jnp.asarray(random.standard_normal((1, LAYERS, 2, 7, page_size, kv_heads, head_dim)), jnp.bfloat16),
        jnp.zeros((1, LAYERS, 2, batch, nodes, kv_heads, head_dim), jnp.bfloat16),
    )
    lane = LaneRows(
        tokens=np.zeros(chunk, np.int32),
        start=np.int32(14),
        length=np.int32(chunk),
        next_token=np.int32(0),
        slot=np.int32(-1),
        page_row=np.array([5, 6], np.int32),
    )
    ancestors = np.tile(np.array([[0b1, 0], [0b11, 0], [0b101, 0]], np.uint32), (batch, 1, 1))

    def visit(attention):
        def body(cache, q, k, v, lane):
            visit = VisitAttention(
                cache=cache,
                geometry=PageGeometry(page_size, 1),
                first_slot=jnp.int32(0),
                is_occupied=jnp.bool(True),
                lengths=jnp.array([0, 17]),
                page_table=jnp.array([[0, 0], [3, 1]]),
                ancestors=jnp.asarray(ancestors),
                lane=lane if has_lane else None,
                attention=attention,
            )
            rows, new = visit((), LAYER, q, k, v)
            return rows, visit.written(new * LAYERS, rows)[0]

        mesh = make_mesh(MeshShape(1, 1, 1))
        mapped = jax.shard_map(body, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
        return jax.jit(mapped)(cache, *(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v)), lane)

    expected, expected_cache = visit("reference")
    actual, actual_cache = visit("pallas")
    np.testing.assert_allclose(actual.astype(np.float32), expected.astype(np.float32), atol=2**-6)
    for a, b in zip(jax.tree.leaves(actual_cache), jax.tree.leaves(expected_cache), strict=True):
        np.testing.assert_array_equal(a.astype(np.float32), b.astype(np.float32))


HOPPER = SimpleNamespace(platform="gpu", compute_capability="9.0", device_kind="NVIDIA H200")
AMPERE = SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="NVIDIA A100")
CPU = SimpleNamespace(platform="cpu", device_kind="cpu")


def choose(wanted, device, *, head_dim=64, dtype="bfloat16", mesh=(1, 1, 1), page_size=64):
    config = ModelConfig(
        family="llama",
        vocab_size=8,
        hidden_size=64,
        intermediate_size=8,
        num_layers=1,
        num_heads=9,
        num_kv_heads=3,
        head_dim=head_dim,
        norm_eps=1e-5,
        rope_theta=1e4,
        max_positions=64,
    )
    shape = MeshShape(*mesh)
    layout = DecoderLayout(config, shape, MODEL_AXES, jnp.dtype(dtype))
    return choose_attention(wanted, device, layout, nodes=5, geometry=PageGeometry(page_size, shape.dcp))


def test_auto_is_the_kernel_on_hopper_for_what_it_takes_and_else_the_reference_with_the_reason():
    assert choose("auto", HOPPER)[0] == "pallas"
    assert choose("auto", HOPPER, mesh=(2, 2, 2))[0] == "pallas"
    assert choose("auto", HOPPER, dtype="float32") == ("reference", unsupported_reason(dtype="float32"))
    assert choose("auto", HOPPER, head_dim=32) == ("reference", unsupported_reason(head_dim=32))
    assert choose("auto", HOPPER, mesh=(1, 1, 2), page_size=48) == ("reference", unsupported_reason(page_size=24))
    assert choose("auto", AMPERE)[0] == choose("auto", CPU)[0] == "reference"
    assert choose("reference", HOPPER)[0] == "reference"


def unsupported_reason(**change) -> str | None:
    return unsupported(**(dict(dtype="bfloat16", tokens=5, heads=9, kv_heads=3, head_dim=64, page_size=64) | change))


def test_a_kernel_that_cannot_be_had_is_refused_with_the_rule_and_the_remedy():
    assert choose("pallas", CPU)[0] == choose("pallas", HOPPER)[0] == "pallas"
    for options, rule in [
        (dict(device=AMPERE), "runs on Hopper GPUs, not on NVIDIA A100"),
        (dict(device=CPU, mesh=(1, 1, 2), page_size=128), "simulated on one device only"),
        (dict(device=HOPPER, dtype="float32"), "must be bfloat16 or float16"),
    ]:
        with pytest.raises(UserError, match=rule) as raised:
            choose("pallas", **options)
        remedy = "use dtype 'bfloat16', or attention" if "dtype" in options else "use attention"
        assert f"{remedy} 'reference' or 'auto'" in str(raised.value)


@NEEDS_COMPILER
@pytest.mark.parametrize(("batch", "tokens"), [(8, 1), (8, 8), (8, 32), (1, 8), (32, 8)])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("fetching", FETCHING.values(), ids=FETCHING)
def test_compiles_for_an_h200_without_spills_and_reads_the_cache_in_place(
    batch, tokens, head_dim, fetching, monkeypatch, capfd
):
    kv_heads, group, page_size = 8, 4, 64
    width = 1024 // batch
    plan = Plan.of(batch, tokens * group, kv_heads, head_dim, width + 1)
    if not fetching["producer"] and plan.turns > 1:  # which need it
        plan = dataclasses.replace(plan, warpgroups=1, is_cluster=False, producer=False)
    stages = stages_for(head_dim, plan.row_sets, fetching["producer"] or plan.row_sets == 2)
    plan = dataclasses.replace(plan, stages=stages, **fetching)
    pages = jax.ShapeDtypeStruct((LAYERS, 2, 1 + batch * width, page_size, kv_heads, head_dim), jnp.bfloat16)
    tree = jax.ShapeDtypeStruct((batch, tokens, kv_heads, head_dim), jnp.bfloat16)

    def decode(q, pages, page_table, lengths, *tree):
        return tree_decode(
            q, pages, LAYER, page_table, lengths, *tree, scale=head_dim**-0.5, plan=plan, interpret=False
        )

    arguments = [
        jax.ShapeDtypeStruct((batch, tokens, kv_heads * group, head_dim), jnp.bfloat16),
        pages,
        jax.ShapeDtypeStruct((batch, width), jnp.int32),
        jax.ShapeDtypeStruct((batch,), jnp.int32),
        tree,
        tree,
        jax.ShapeDtypeStruct((batch, tokens, 2), jnp.uint32),
    ]
    monkeypatch.setenv("MOSAIC_GPU_DUMP_RESOURCES", "1")
    compiled, report = compile_for_h200(jax.jit(decode), arguments, monkeypatch, capfd)
    assert_without_spills(report)
    barriers = 512
    assert int(re.search(r"smem_scratch_bytes=(\d+)", report)[1]) + barriers <= plan.shared_bytes(head_dim)
    assert compiled.memory_analysis().temp_size_in_bytes < pages.size // 8


@pytest.mark.parametrize("tokens", [4, 65], ids=["taken", "not_taken"])
def test_a_draft_attends_to_its_pages_by_the_kernel_where_it_takes_them(tokens):
    case = Case(min(tokens, 64), 2, 1, 64, 16, (5, 33), has_tree=False)
    x = case.draw(poison=0.0)
    q = jnp.tile(x["q"], (1, 2, 1, 1))[:, :tokens]
    arguments = (q, x["pages"], LAYER, x["page_table"], x["lengths"])
    found = attend_to_pages("pallas", *arguments)
    plain = attend_to_pages("reference", *arguments)
    names = [
        eqn.params.get("name")
        for eqn in jax.make_jaxpr(functools.partial(attend_to_pages, "pallas", *arguments))().jaxpr.eqns
    ]
    assert ("_planned" in names) == (tokens == 4)
    for ours, theirs in zip(found, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-2)
