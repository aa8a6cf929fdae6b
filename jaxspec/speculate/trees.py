"""Trees of drafted tokens: their shape, who sees whom, and the walk that accepts a path.

Nodes are numbered so that a parent comes before its children; node 0 is the root, the last token emitted. A chain is
a tree with one child a node.
"""

import dataclasses
import functools
import re

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, UInt32

from jaxspec.errors import UserError
from pallas_kernels.tree_attention import is_ancestor

MAX_NODES = 64  # ancestor bits are two 32-bit words
_WORDS = MAX_NODES // 32


def _forks(count: int, depth: int) -> tuple[int, ...]:
    """`count` chains of `depth` below the root, level by level."""
    return (-1, *(max(0, node - count + 1) for node in range(count * depth)))


# Parents of every node. A fork is several chains; a fan gets narrower with depth.
TOPOLOGIES: dict[str, tuple[int, ...]] = {
    "fork2x4": _forks(2, 4),
    "fork3x3": _forks(3, 3),
    "fork4x4": _forks(4, 4),
    "fan12": (-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 7, 10),
}


@dataclasses.dataclass(frozen=True)
class Beam:
    """How a dynamic tree grows (EAGLE-2, arXiv 2406.16858, section 4).

    Attributes:
      steps: levels of candidates below the root.
      topk: children proposed of a node, and nodes of a level that get children.
      nodes: the best candidates that are verified, with the root.
    """

    steps: int
    topk: int
    nodes: int

    @property
    def num_candidates(self) -> int:
        return self.topk + (self.steps - 1) * self.topk**2


@dataclasses.dataclass(frozen=True)
class TreeSpec:
    """The shape of every tree of an engine.

    Attributes:
      name: as the user wrote it: `none`, `chain:D`, `static:NAME`, `static:0,0,1,…`, `dynamic:steps=S,topk=K,nodes=N`.
      parents: parent of each node, -1 for the root. A dynamic tree has others in every round, of the same number and
        not deeper.
      beam: how a dynamic tree grows; None for trees that never change.
    """

    name: str
    parents: tuple[int, ...]
    beam: Beam | None = None

    def __post_init__(self) -> None:
        if len(self.parents) > MAX_NODES:
            raise UserError(f"tree {self.name!r} has too many nodes: at most {MAX_NODES} fit, root included")
        for node, parent in enumerate(self.parents):
            if (parent != -1) if node == 0 else not 0 <= parent < node:
                raise UserError(
                    f"tree {self.name!r}: node {node} has parent {parent}, but a parent must be an earlier node; "
                    "list the parents of nodes 1, 2, … where node 0 is the root, for instance static:0,0,1,2"
                )

    @classmethod
    def parse(cls, text: str) -> "TreeSpec":
        kind, _, rest = text.partition(":")
        if text == "none":
            return cls(text, (-1,))
        if kind == "chain" and re.fullmatch(r"0*[1-9][0-9]*", rest):
            # A number of many digits is too large whatever it is; it need not be read.
            depth = int(rest) if len(rest.lstrip("0")) <= len(str(MAX_NODES)) else 10 * MAX_NODES
            return cls(text, tuple(range(-1, depth)))
        if kind == "static" and rest in TOPOLOGIES:
            return cls(text, TOPOLOGIES[rest])
        if kind == "static" and re.fullmatch(r"[0-9]{1,3}(,[0-9]{1,3})*", rest):
            return cls(text, (-1, *(int(part) for part in rest.split(","))))
        if kind == "dynamic" and re.fullmatch(r"[a-z]+=[0-9]{1,3}(,[a-z]+=[0-9]{1,3}){2}", rest):
            sizes = {name: int(size) for name, size in (part.split("=") for part in rest.split(","))}
            if sizes.keys() == {"steps", "topk", "nodes"}:
                return cls._dynamic(text, Beam(**sizes))
        raise UserError(
            f"tree {text!r} must be none, chain:D with D of at least 1, static:… with one of "
            f"{', '.join(TOPOLOGIES)} or the parents of nodes 1, 2, … as in static:0,0,1,2, or "
            "dynamic:steps=S,topk=K,nodes=N"
        )

    @classmethod
    def _dynamic(cls, text: str, beam: Beam) -> "TreeSpec":
        for name, value, least, most in (
            ("steps", beam.steps, 1, MAX_NODES - 1),
            ("topk", beam.topk, 1, MAX_NODES - 1),
            ("nodes", beam.nodes, 2, min(MAX_NODES, 1 + beam.num_candidates)),
        ):
            if not least <= value <= most:
                because = ""
                if name == "nodes":
                    because = (
                        f": steps={beam.steps} and topk={beam.topk} give {beam.num_candidates} candidates besides the "
                        f"root, and at most {MAX_NODES} nodes fit"
                    )
                raise UserError(f"tree {text!r}: {name}={value} must be between {least} and {most}{because}")
        # A chain as deep as it may get, and the rest below the root: the right number and depth.
        deepest = min(beam.steps, beam.nodes - 1)
        return cls(text, (*range(-1, deepest), *(0,) * (beam.nodes - 1 - deepest)), beam)

    @property
    def num_nodes(self) -> int:
        return len(self.parents)

    @functools.cached_property
    def depths(self) -> tuple[int, ...]:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return tuple(depths)

    @functools.cached_property
    def max_depth(self) -> int:
        return max(self.depths)


def ancestor_bits(parents: Int[Array, "B T"], max_depth: int) -> UInt32[Array, "B T 2"]:
    """Bit n % 32 of word n // 32 of row t is set where n is t or an ancestor of t; a parent of -1 is none."""
    t = parents.shape[1]
    node = jnp.arange(t)
    reach = (parents[:, :, None] == node) | (node[:, None] == node)
    for _ in range(max(1, max_depth).bit_length()):  # each squaring doubles the distance that is covered
        reach = jnp.einsum("btm,bmn->btn", reach.astype(jnp.float32), reach.astype(jnp.float32)) > 0
    padded = jnp.pad(reach, ((0, 0), (0, 0), (0, MAX_NODES - t))).reshape(*reach.shape[:2], _WORDS, 32)
    weights = jnp.array(1 << np.arange(32, dtype=np.uint64), jnp.uint32)
    return jnp.sum(jnp.where(padded, weights, 0), axis=-1, dtype=jnp.uint32)


def depths(ancestors: UInt32[Array, "B T 2"]) -> Int[Array, "B T"]:
    """Edges between each node and the root."""
    return jnp.sum(is_ancestor(ancestors), axis=-1) - 1


def walk(
    targets: Int[Array, "B T"],
    tokens: Int[Array, "B T"],
    parents: Int[Array, "B T"],
    ancestors: UInt32[Array, "B T 2"],
    max_path: int,
) -> tuple[Int[Array, "B A"], Int[Array, "B"]]:
    """The accepted path: a node is on it when its parent is and its token is the target's token at the parent.

    Siblings differ, so at most one path is accepted.

    Args:
      targets: the target's token after each node.
      tokens, parents, ancestors: the tree.
      max_path: A, nodes on the longest path.

    Returns:
      Nodes of the path from the root (0 beyond its end), and how many they are, root included.
    """
    expected = jnp.take_along_axis(targets, jnp.maximum(parents, 0), axis=1)
    is_match = (parents < 0) | (tokens == expected)
    above = is_ancestor(ancestors)
    is_accepted = jnp.all(is_match[:, None, :] | ~above, axis=-1)
    depth = jnp.sum(above, axis=-1) - 1
    deepest = jnp.argmax(jnp.where(is_accepted, depth, -1), axis=1)
    on_path = jnp.take_along_axis(above, deepest[:, None, None], axis=1)[:, 0]
    at_depth = on_path[:, None, :] & (depth[:, None, :] == jnp.arange(max_path)[:, None])
    path = jnp.sum(jnp.where(at_depth, jnp.arange(tokens.shape[1]), 0), axis=-1)
    return path, jnp.take_along_axis(depth, deepest[:, None], axis=1)[:, 0] + 1
