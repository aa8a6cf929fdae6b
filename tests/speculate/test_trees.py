import jax
import numpy as np
import pytest

from jaxspec.errors import UserError
from jaxspec.speculate.trees import MAX_NODES, TOPOLOGIES, Beam, TreeSpec, ancestor_bits, depths, is_ancestor, walk

jitted_walk = jax.jit(walk, static_argnames="max_path")


def draw_parents(random: np.random.Generator, nodes: int, reach: int = MAX_NODES) -> list[int]:
    """A random tree; a small `reach` makes it deep."""
    return [-1, *(int(random.integers(max(0, node - reach), node)) for node in range(1, nodes))]


def ancestors_of(node: int, parents) -> list[int]:
    above = [node]
    while parents[above[-1]] >= 0:
        above.append(parents[above[-1]])
    return above


def unpack(words: np.ndarray, nodes: int) -> np.ndarray:
    """bool[T, T] from two words a row."""
    return np.array([[int(row[n // 32]) >> (n % 32) & 1 == 1 for n in range(nodes)] for row in words])


@pytest.mark.parametrize(
    ("text", "parents"),
    [
        ("none", (-1,)),
        ("chain:1", (-1, 0)),
        ("chain:4", (-1, 0, 1, 2, 3)),
        ("static:0", (-1, 0)),
        ("static:0,0,1,2", (-1, 0, 0, 1, 2)),
        ("static:fork2x4", (-1, 0, 0, 1, 2, 3, 4, 5, 6)),
        ("static:fan12", (-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 10)),
    ],
)
def test_parse_reads_every_form(text, parents):
    tree = TreeSpec.parse(text)
    assert tree.parents == parents
    assert tree.num_nodes == len(parents)
    assert tree.name == text


def test_the_sizes_of_a_dynamic_tree_may_come_in_any_order():
    tree, other = TreeSpec.parse("dynamic:topk=4,nodes=16,steps=3"), TreeSpec.parse("dynamic:steps=3,topk=4,nodes=16")
    assert (tree.beam, tree.parents) == (other.beam, other.parents)


def test_a_tree_may_have_as_many_nodes_as_there_are_bits():
    assert TreeSpec.parse("chain:63").num_nodes == MAX_NODES
    with pytest.raises(UserError, match="'chain:64' has too many nodes: at most 64 fit, root included"):
        TreeSpec.parse("chain:64")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "None",
        "none:",
        "none:1",
        "chain",
        "chain:",
        "chain:0",
        "chain:-1",
        "chain:2.5",
        "chain:x",
        "chain: 4",
        "chain:٣",
        "static",
        "static:",
        "static:fork",
        "static:0,",
        "static:,0",
        "static:0,,1",
        "static:0,-1",
        "static:0, 0",
        "star:3",
        "dynamic",
        "dynamic:",
        "dynamic:3,4,16",
        "dynamic:steps=3,topk=4",
        "dynamic:steps=3,topk=4,nodes=",
        "dynamic:steps=3,topk=4,nodes=-1",
        "dynamic:steps=3,topk=4,nodes=1000",
        "dynamic:steps=3,steps=4,nodes=16",
        "dynamic:steps=3,topk=4,nodes=16,",
        "dynamic:steps=3, topk=4, nodes=16",
        "dynamic:steps=3,top_k=4,nodes=16",
        "Dynamic:steps=3,topk=4,nodes=16",
    ],
)
def test_a_form_that_does_not_exist_is_refused_by_name_with_the_forms_that_do(text):
    with pytest.raises(UserError) as raised:
        TreeSpec.parse(text)
    message = str(raised.value)
    assert repr(text) in message
    assert "chain:D" in message and "static:0,0,1,2" in message and "dynamic:steps=S,topk=K,nodes=N" in message
    assert all(name in message for name in TOPOLOGIES)


@pytest.mark.parametrize(("text", "node", "parent"), [("static:1", 1, 1), ("static:0,2", 2, 2), ("static:0,0,9", 3, 9)])
def test_a_parent_that_is_not_an_earlier_node_is_refused_with_an_example(text, node, parent):
    with pytest.raises(UserError) as raised:
        TreeSpec.parse(text)
    message = str(raised.value)
    assert f"{text!r}: node {node} has parent {parent}" in message
    assert "static:0,0,1,2" in message


@pytest.mark.parametrize(
    ("beam", "max_depth"),
    [
        (Beam(3, 4, 16), 3),
        (Beam(3, 4, 37), 3),  # all candidates
        (Beam(5, 3, 4), 3),  # fewer nodes than steps
        (Beam(6, 10, 60), 6),
        (Beam(1, 1, 2), 1),
        (Beam(63, 1, 64), 63),
        (Beam(1, 63, 64), 1),
    ],
    ids=str,
)
def test_a_dynamic_tree_has_its_number_of_nodes_and_the_depth_that_it_may_reach(beam, max_depth):
    tree = TreeSpec.parse(f"dynamic:steps={beam.steps},topk={beam.topk},nodes={beam.nodes}")
    assert tree.beam == beam
    assert (tree.num_nodes, tree.max_depth) == (beam.nodes, max_depth)


def test_trees_that_never_change_have_no_beam():
    assert all(TreeSpec.parse(text).beam is None for text in ("none", "chain:4", "static:fan12"))


@pytest.mark.parametrize(
    ("sizes", "refused", "least", "most"),
    [
        ((0, 4, 16), "steps=0", 1, 63),
        ((64, 4, 16), "steps=64", 1, 63),
        ((3, 0, 16), "topk=0", 1, 63),
        ((3, 64, 16), "topk=64", 1, 63),
        ((3, 4, 0), "nodes=0", 2, 37),
        ((3, 4, 1), "nodes=1", 2, 37),
        ((3, 4, 38), "nodes=38", 2, 37),
        ((1, 1, 3), "nodes=3", 2, 2),
        ((6, 10, 65), "nodes=65", 2, 64),
    ],
)
def test_a_size_of_a_dynamic_tree_out_of_range_is_refused_with_the_range(sizes, refused, least, most):
    text = "dynamic:steps={},topk={},nodes={}".format(*sizes)
    with pytest.raises(UserError) as raised:
        TreeSpec.parse(text)
    assert f"{text!r}: {refused} must be between {least} and {most}" in str(raised.value)


def test_too_many_nodes_are_refused_with_the_number_of_candidates():
    with pytest.raises(
        UserError, match=r"steps=3 and topk=4 give 36 candidates besides the root, and at most 64 nodes"
    ):
        TreeSpec.parse("dynamic:steps=3,topk=4,nodes=38")


@pytest.mark.parametrize("text", ["chain:999999999999", "chain:" + "9" * 5000], ids=["large", "many_digits"])
def test_a_chain_of_absurd_depth_is_refused_at_once(text):
    with pytest.raises(UserError, match="64"):
        TreeSpec.parse(text)


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_every_prefix_of_a_named_topology_is_closed_under_ancestors(name):
    parents = TOPOLOGIES[name]
    for size in range(1, len(parents) + 1):
        assert all(above < size for node in range(size) for above in ancestors_of(node, parents))


@pytest.mark.parametrize(("name", "count", "depth"), [("fork2x4", 2, 4), ("fork3x3", 3, 3), ("fork4x4", 4, 4)])
def test_a_fork_is_chains_below_the_root(name, count, depth):
    parents = TOPOLOGIES[name]
    leaves = [node for node in range(1, len(parents)) if node not in parents]
    paths = [ancestors_of(leaf, parents)[:-1] for leaf in leaves]
    assert [len(path) for path in paths] == [depth] * count
    assert sorted(node for path in paths for node in path) == list(range(1, count * depth + 1))


def test_a_fan_gets_narrower_with_depth():
    widths = np.bincount(TreeSpec.parse("static:fan12").depths)
    assert np.all(np.diff(widths[1:]) <= 0)


@pytest.mark.parametrize("nodes", [1, 2, 9, 33, 64])
@pytest.mark.parametrize("reach", [1, 3, MAX_NODES], ids=["chain", "deep", "wide"])
def test_ancestor_bits_are_the_path_to_the_root(nodes, reach):
    random = np.random.default_rng(nodes)
    batch = [draw_parents(random, nodes, reach) for _ in range(3)]
    trees = [TreeSpec("test", tuple(parents)) for parents in batch]
    bits = ancestor_bits(np.array(batch), max(tree.max_depth for tree in trees))
    assert bits.dtype == np.uint32
    assert bits.shape == (3, nodes, 2)
    for b, parents in enumerate(batch):
        expected = np.zeros((nodes, nodes), bool)
        for node in range(nodes):
            expected[node, ancestors_of(node, parents)] = True
        np.testing.assert_array_equal(unpack(np.asarray(bits[b]), nodes), expected)
        np.testing.assert_array_equal(is_ancestor(bits)[b], expected)
        np.testing.assert_array_equal(depths(bits)[b], trees[b].depths)


def test_bits_past_the_last_node_are_clear():
    bits = np.asarray(ancestor_bits(np.array([draw_parents(np.random.default_rng(0), 40)]), 40))
    assert np.all(bits[..., 1] >> 8 == 0)


def test_depths_of_a_spec_count_edges_from_the_root():
    tree = TreeSpec.parse("static:0,0,1,3,2")
    assert tree.depths == (0, 1, 1, 2, 3, 2)
    assert tree.max_depth == 3


def test_a_chain_of_four_nodes_is_causal():
    tree = TreeSpec.parse("chain:3")
    bits = ancestor_bits(np.array([tree.parents]), tree.max_depth)
    length = 10
    np.testing.assert_array_equal(length + depths(bits)[0], [length, length + 1, length + 2, length + 3])
    np.testing.assert_array_equal(is_ancestor(bits)[0], np.tril(np.ones((4, 4), bool)))


def slow_walk(targets, tokens, parents) -> list[int]:
    """From the root on to the child that the target chose, while there is one."""
    path = [0]
    while True:
        matching = [
            child for child in range(len(parents)) if parents[child] == path[-1] and tokens[child] == targets[path[-1]]
        ]
        if not matching:
            return path
        path += matching


def draw_tokens(random: np.random.Generator, parents: list[int], empty: float) -> np.ndarray:
    """Random tokens of a small alphabet such that siblings differ; some nodes are empty."""
    tokens = np.full(len(parents), -1)
    for node in range(len(parents)):
        taken = [tokens[other] for other in range(node) if parents[other] == parents[node]]
        free = [token for token in range(4) if token not in taken]
        if free and (node == 0 or random.random() >= empty):
            tokens[node] = random.choice(free)
    return tokens


@pytest.mark.parametrize("empty", [0.0, 0.2], ids=["full", "with_empty_nodes"])
@pytest.mark.parametrize("reach", [2, 4], ids=["deep", "wide"])
def test_walk_takes_the_path_that_the_target_would_have_written(reach, empty):
    random = np.random.default_rng(reach)
    nodes, batch = 16, 400
    parents = np.array([draw_parents(random, nodes, reach) for _ in range(batch)])
    tokens = np.stack([draw_tokens(random, row, empty) for row in parents.tolist()])
    targets = random.integers(0, 4, (batch, nodes))
    # Half of the targets agree with some child, so that long paths occur.
    for b in range(batch):
        for node in range(nodes):
            children = [c for c in range(nodes) if parents[b, c] == node and tokens[b, c] >= 0]
            if children and random.random() < 0.5:
                targets[b, node] = tokens[b, random.choice(children)]
    path, count = jitted_walk(targets, tokens, parents, ancestor_bits(parents, nodes), nodes)
    lengths = set()
    for b in range(batch):
        expected = slow_walk(targets[b], tokens[b], parents[b])
        lengths.add(len(expected))
        assert int(count[b]) == len(expected)
        assert path[b].tolist() == expected + [0] * (nodes - len(expected))
    assert {1, 2, 3, 4, 5} <= lengths


def test_an_empty_node_is_never_accepted():
    tree = TreeSpec.parse("static:0,0,1,2")
    parents = np.array([tree.parents] * 2)
    # Below an empty node the tokens agree, but its path is broken.
    tokens = np.array([[5, -1, -1, 6, 6], [5, -1, 7, 6, 6]])
    targets = np.array([[7, 6, 6, 0, 0], [7, 6, 6, 0, 0]])
    path, count = walk(targets, tokens, parents, ancestor_bits(parents, 2), 3)
    assert count.tolist() == [1, 3]
    assert path.tolist() == [[0, 0, 0], [0, 2, 4]]


def test_the_root_is_accepted_whatever_its_token_is():
    parents = np.array([[-1, 0]])
    path, count = walk(np.array([[1, 1]]), np.array([[-1, 2]]), parents, ancestor_bits(parents, 1), 2)
    assert (path.tolist(), count.tolist()) == ([[0, 0]], [1])
