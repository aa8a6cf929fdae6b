"""Grown trees against the paper written out in plain Python, with a fake drafter whose scores depend on whole paths."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxspec.drafts.growth import Candidates, grow
from jaxspec.speculate.trees import TOPOLOGIES, Beam, TreeSpec, ancestor_bits, depths, is_ancestor

BATCH, VOCAB, CODES = 24, 8, 4093
ROOT = np.arange(BATCH, dtype=np.int32) * 100
# Chains, fewer nodes than steps, as many nodes as candidates, and what lies between.
BEAMS = [
    Beam(steps=1, topk=1, nodes=2),
    Beam(steps=1, topk=5, nodes=6),
    Beam(steps=4, topk=1, nodes=5),
    Beam(steps=5, topk=3, nodes=4),
    Beam(steps=2, topk=5, nodes=31),
    Beam(steps=3, topk=4, nodes=16),
    Beam(steps=3, topk=4, nodes=37),
]
RANDOM_PARENTS = [int(np.random.default_rng(node).integers(0, node)) for node in range(1, 24)]
STATIC = ["none", "chain:4", *(f"static:{name}" for name in TOPOLOGIES), "static:" + ",".join(map(str, RANDOM_PARENTS))]


def make_table(kind: str) -> np.ndarray:
    """Log-probabilities of the next token, one row for each code of a path."""
    random = np.random.default_rng(0)
    scores = 2 * random.standard_normal((CODES, VOCAB)).astype(np.float32)
    if kind == "ties":  # a few values, 0 among them: a child may have its parent's score
        return -random.integers(0, 3, scores.shape).astype(np.float32)
    table = scores - np.log(np.sum(np.exp(scores), axis=-1, keepdims=True))
    if kind == "gaps":
        table[random.random(table.shape) < 0.7] = -np.inf
        table[ROOT[0]] = -np.inf  # not one candidate in the whole tree
    return table


TABLES = {kind: make_table(kind) for kind in ("distinct", "ties", "gaps")}
TABLED = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)


def spec_of(beam: Beam) -> TreeSpec:
    return TreeSpec.parse(f"dynamic:steps={beam.steps},topk={beam.topk},nodes={beam.nodes}")


def code_after(code, token):
    return (31 * code + token + 7) % CODES


@functools.cache
def jitted_grow(tree: TreeSpec):
    """Grows a tree from a table, and tells all levels and how many children were asked for in each."""

    def run(table, root):
        asked = []

        def expand(drafted, level, k):
            asked.append(((level.tokens, level.parents, level.sees), k))
            if level.depth > 0:
                drafted = jnp.concatenate([drafted, level.tokens], axis=1)
            code = jnp.broadcast_to(root[:, None], level.tokens.shape)
            for row in range(level.sees.shape[2]):
                code = jnp.where(level.sees[:, :, row], code_after(code, drafted[:, row, None]), code)
            log_probs, tokens = lax.top_k(table[code], k)
            return drafted, Candidates(jnp.where(log_probs > -jnp.inf, tokens, -1), log_probs)

        drafted = grow(tree, root, expand, jnp.zeros((len(root), 0), jnp.int32))
        return drafted.tokens, drafted.parents, asked

    return jax.jit(run)


@functools.partial(jax.jit, static_argnames="max_depth")
def jitted_ancestors(parents, max_depth: int):
    bits = ancestor_bits(parents, max_depth)
    return depths(bits), is_ancestor(bits)


def best_children(table: np.ndarray, root: int, path: tuple[int, ...], k: int) -> list[tuple[int, np.float32]]:
    """The k best (token, log-probability) after the root and a path below it; of equal ones the lowest token first."""
    log_probs = table[functools.reduce(code_after, path, root)]
    best = sorted(range(VOCAB), key=lambda token: log_probs[token], reverse=True)[:k]
    return [(token if log_probs[token] > -np.inf else -1, log_probs[token]) for token in best]


def slow_dynamic(table: np.ndarray, root: int, beam: Beam) -> list[tuple[int, ...]]:
    """Paths from below the root to each node, best first; of equal ones the first created first."""

    def best(candidates, count):
        return sorted(candidates, key=lambda candidate: candidate[1], reverse=True)[:count]

    survivors = [((), np.float32(0))]
    candidates = [*survivors]
    for _ in range(beam.steps):
        level = []
        for path, score in survivors:
            for token, log_prob in best_children(table, root, path, beam.topk):
                together = score + log_prob
                level.append(((*path, token if together > -np.inf else -1), together))
        candidates += level
        survivors = best(level, beam.topk)
    return [path for path, _ in best(candidates, beam.nodes)]


def slow_static(table: np.ndarray, root: int, parents: tuple[int, ...]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(parents)):
        above, siblings_before = paths[parents[node]], parents[:node].count(parents[node])
        paths.append((*above, best_children(table, root, above, VOCAB)[siblings_before][0]))
    return paths


def paths_of(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    paths: list[tuple[int, ...]] = [()]
    for node in range(1, len(tokens)):
        paths.append((*paths[parents[node]], tokens[node]))
    return paths


def grow_paths(tree: TreeSpec, table: np.ndarray) -> list[list[tuple[int, ...]]]:
    tokens, parents, _ = jitted_grow(tree)(table, ROOT)
    return [paths_of(*row) for row in zip(tokens.tolist(), parents.tolist(), strict=True)]


@TABLED
@pytest.mark.parametrize("beam", BEAMS, ids=str)
def test_a_dynamic_tree_is_the_one_of_the_paper_ordered_by_rank(beam, table):
    assert grow_paths(spec_of(beam), table) == [slow_dynamic(table, root, beam) for root in ROOT.tolist()]


@TABLED
@pytest.mark.parametrize("name", STATIC)
def test_the_children_of_a_static_node_are_the_best_after_its_path_in_order(name, table):
    tree = TreeSpec.parse(name)
    tokens, parents, _ = jitted_grow(tree)(table, ROOT)
    np.testing.assert_array_equal(parents, [tree.parents] * BATCH)
    expected = [slow_static(table, root, tree.parents) for root in ROOT.tolist()]
    assert tokens.tolist() == [
        [root, *(path[-1] for path in paths[1:])] for root, paths in zip(ROOT.tolist(), expected, strict=True)
    ]


@TABLED
@pytest.mark.parametrize("beam", BEAMS, ids=str)
def test_every_prefix_of_a_dynamic_tree_is_closed_under_ancestors(beam, table):
    tokens, parents, _ = jitted_grow(spec_of(beam))(table, ROOT)
    np.testing.assert_array_equal(tokens[:, 0], ROOT)
    assert np.all(parents[:, 0] == -1)
    assert tokens.shape == parents.shape == (BATCH, beam.nodes)
    assert np.all((parents[:, 1:] >= 0) & (parents[:, 1:] < np.arange(1, beam.nodes)))


@TABLED
def test_a_prefix_of_a_dynamic_tree_is_the_tree_of_that_size(table):
    large, small = (grow_paths(spec_of(beam), table) for beam in (BEAMS[-1], BEAMS[-2]))
    assert [paths[:16] for paths in large] == small


@TABLED
@pytest.mark.parametrize("beam", BEAMS, ids=str)
def test_siblings_are_distinct(beam, table):
    tokens, parents, _ = jitted_grow(spec_of(beam))(table, ROOT)
    for row in range(BATCH):
        drafted = [
            (parent, token)
            for parent, token in zip(parents[row].tolist(), tokens[row].tolist(), strict=True)
            if token >= 0
        ]
        assert len(drafted) == len(set(drafted))


@pytest.mark.parametrize("beam", BEAMS, ids=str)
def test_ancestor_bits_and_depths_of_a_dynamic_tree_are_those_of_its_paths(beam):
    tree = spec_of(beam)
    tokens, parents, _ = jitted_grow(tree)(TABLES["distinct"], ROOT)
    tokens = np.asarray(tokens)
    depth, above = (np.asarray(x) for x in jitted_ancestors(parents, tree.max_depth))
    for row, paths in enumerate(grow_paths(tree, TABLES["distinct"])):
        assert depth[row].tolist() == [len(path) for path in paths]
        assert [tuple(tokens[row, above[row, node]].tolist()) for node in range(beam.nodes)] == [
            (int(ROOT[row]), *path) for path in paths
        ]


@TABLED
@pytest.mark.parametrize("tree", [*map(spec_of, BEAMS), *map(TreeSpec.parse, STATIC)], ids=lambda tree: tree.name)
def test_a_row_sees_the_rows_that_it_came_from_and_itself(tree, table):
    _, _, asked = jax.tree.map(np.asarray, jitted_grow(tree)(table, ROOT))
    for b in range(BATCH):
        lineages: list[list[int]] = [[]]  # drafted rows that each row of the level comes from, with itself
        num_rows = 0
        for depth, ((_, parents, sees), _) in enumerate(asked):
            if depth > 0:
                lineages = [[*lineages[parent], num_rows + row] for row, parent in enumerate(parents[b].tolist())]
                num_rows += len(lineages)
            assert sees.shape[2] == num_rows
            assert [np.flatnonzero(row).tolist() for row in sees[b]] == lineages


@pytest.mark.parametrize("beam", BEAMS, ids=str)
def test_a_dynamic_tree_runs_the_root_and_then_as_many_rows_a_step_as_a_node_gets_children(beam):
    _, _, asked = jitted_grow(spec_of(beam))(TABLES["distinct"], ROOT)
    assert [tokens.shape[1] for (tokens, _, _), _ in asked] == [1] + [beam.topk] * (beam.steps - 1)
    assert [int(k) for _, k in asked] == [beam.topk] * beam.steps


@pytest.mark.parametrize("name", STATIC)
def test_a_static_tree_runs_the_nodes_that_have_children_and_asks_for_as_many_as_the_most_have(name):
    tree = TreeSpec.parse(name)
    drafted, _, asked = jitted_grow(tree)(TABLES["distinct"], ROOT)
    for depth, ((tokens, _, _), k) in enumerate(asked):
        rows = [node for node in range(tree.num_nodes) if tree.depths[node] == depth and node in tree.parents]
        np.testing.assert_array_equal(tokens, drafted[:, np.array(rows)])
        assert int(k) == max(tree.parents.count(node) for node in rows)
    assert len(asked) == tree.max_depth


def test_a_chain_runs_one_row_for_each_of_its_tokens():
    _, _, asked = jitted_grow(TreeSpec.parse("chain:4"))(TABLES["distinct"], ROOT)
    assert [(tokens.shape[1], int(k)) for (tokens, _, _), k in asked] == [(1, 1)] * 4


@pytest.mark.parametrize("beam", BEAMS, ids=str)
def test_a_dynamic_tree_without_candidates_is_its_root_and_empty_nodes(beam):
    tokens, _, _ = jitted_grow(spec_of(beam))(TABLES["gaps"], ROOT)
    assert tokens[0].tolist() == [ROOT[0]] + [-1] * (beam.nodes - 1)


def test_the_tables_have_the_cases_that_they_are_for():
    tokens, parents, _ = jitted_grow(spec_of(BEAMS[-1]))(TABLES["gaps"], ROOT)
    is_empty = np.asarray(tokens) < 0
    assert np.any(is_empty) and not np.all(is_empty[1:, 1:])
    assert np.any(is_empty & np.take_along_axis(is_empty, np.maximum(parents, 0), axis=1))
    assert np.mean(TABLES["ties"] == 0) > 0.3
