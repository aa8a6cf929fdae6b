"""How the scores of a draft become a tree, level by level: shared by all drafters that score tokens step by step.

In a static tree a node's children are its best candidates in order. A dynamic tree (EAGLE-2, arXiv 2406.16858) also
chooses where to grow: the nodes that get children, and the candidates that are verified, are the best by cumulative
log-probability.
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.drafts.interface import DraftTree
from jaxspec.speculate.trees import Beam, TreeSpec


@dataclasses.dataclass(frozen=True)
class Candidates:
    """Children proposed for R rows, best first.

    Attributes:
      tokens: ids of the target's vocabulary, -1 where there is none; those of a row differ.
      log_probs: never above 0; -inf where there is none.
    """

    tokens: Int[Array, "B R K"]
    log_probs: Float[Array, "B R K"]


@dataclasses.dataclass(frozen=True)
class Level:
    """Rows of one depth, whose children a drafter proposes next.

    Attributes:
      depth: static; 0 is the root alone, whose output a drafter has from its extend pass.
      tokens: -1 where the tree has no token; what is proposed below it is never accepted.
      parents: which row of the level above each came from; 0 for the root.
      sees: of all N drafted rows so far, in order and with this level's, a row's ancestors and itself. The root is none
        of them: its KV is in pages.
    """

    depth: int
    tokens: Int[Array, "B R"]
    parents: Int[Array, "B R"]
    sees: Bool[Array, "B R N"]


# (state, level, k) to the next state and k children for each row of the level.
type Expand[State] = Callable[[State, Level, int], tuple[State, Candidates]]


def grow[State](tree: TreeSpec, root: Int[Array, "B"], expand: Expand[State], state: State) -> DraftTree:
    """Drafts a tree of `tree.num_nodes` nodes below the last emitted token.

    Args:
      tree: static or dynamic.
      root: last emitted token.
      expand: runs the rows of a level; called once a level, from the root's down.
      state: what `expand` takes first, for instance the keys and values of drafted rows.

    Returns:
      Nodes of a static tree in its own order. Those of a dynamic tree by rank, the best first (EAGLE sorts them by
      creation). A child is never better than its parent and is created later, so every prefix of this order is closed
      under ancestors, and is the tree that fewer nodes would have given.
    """
    level = Level(0, root[:, None], jnp.zeros((len(root), 1), jnp.int32), jnp.zeros((len(root), 1, 0), bool))
    if tree.beam is None:
        return _grow_static(tree, level, expand, state)
    return _grow_dynamic(tree.beam, level, expand, state)


def _grow_static[State](tree: TreeSpec, level: Level, expand: Expand[State], state: State) -> DraftTree:
    siblings_before = [tree.parents[:node].count(parent) for node, parent in enumerate(tree.parents)]
    tokens = {0: level.tokens[:, 0]}
    above: list[int] = []
    for depth in range(tree.max_depth):
        rows = [node for node in range(tree.num_nodes) if tree.depths[node] == depth and node in tree.parents]
        if depth > 0:
            parents = jnp.array([above.index(tree.parents[node]) for node in rows])
            level = _level_below(level, parents, jnp.stack([tokens[node] for node in rows], axis=1))
        children = [node for node in range(tree.num_nodes) if tree.parents[node] in rows]
        state, found = expand(state, level, 1 + max(siblings_before[child] for child in children))
        for child in children:
            tokens[child] = found.tokens[:, rows.index(tree.parents[child]), siblings_before[child]]
        above = rows
    drafted = jnp.stack([tokens[node] for node in range(tree.num_nodes)], axis=1)
    return DraftTree(drafted, jnp.broadcast_to(jnp.array(tree.parents), drafted.shape))


def _grow_dynamic[State](beam: Beam, level: Level, expand: Expand[State], state: State) -> DraftTree:
    batch = len(level.tokens)
    scores = jnp.zeros((batch, 1), jnp.float32)
    # Candidates are numbered as they are created, the root first; these are the numbers of the level's rows.
    created = jnp.zeros((batch, 1), jnp.int32)
    candidates = [(scores, level.tokens, created - 1)]
    num_candidates = 1
    for _ in range(beam.steps):
        state, found = expand(state, level, beam.topk)
        scores = (scores[:, :, None] + found.log_probs).reshape(batch, -1)
        tokens = jnp.where(scores > -jnp.inf, found.tokens.reshape(batch, -1), -1)
        candidates.append((scores, tokens, jnp.repeat(created, beam.topk, axis=1)))
        scores, best = lax.top_k(scores, beam.topk)
        level = _level_below(level, best // beam.topk, jnp.take_along_axis(tokens, best, axis=1))
        created = num_candidates + best
        num_candidates += tokens.shape[1]
    scores, tokens, parents = (jnp.concatenate(parts, axis=1) for parts in zip(*candidates, strict=True))
    # Of equal scores the first stays first, so parents come before children, and the root before all.
    _, ranked = lax.top_k(scores, beam.nodes)
    tokens, parents = (jnp.take_along_axis(x, ranked, axis=1) for x in (tokens, parents))
    node_of_parent = jnp.argmax(parents[:, :, None] == ranked[:, None, :], axis=-1)
    return DraftTree(tokens, jnp.where(parents < 0, -1, node_of_parent))


def _level_below(level: Level, parents: Int[Array, "#B R"], tokens: Int[Array, "B R"]) -> Level:
    """Rows see what the row that they came from sees, and themselves."""
    batch, rows = tokens.shape
    parents = jnp.broadcast_to(parents, tokens.shape)
    inherited = jnp.take_along_axis(level.sees, parents[:, :, None], axis=1)
    itself = jnp.broadcast_to(jnp.eye(rows, dtype=bool), (batch, rows, rows))
    return Level(level.depth + 1, tokens, parents, jnp.concatenate([inherited, itself], axis=-1))
