"""Prompt lookup (Saxena 2023): what followed the last tokens where they stood before, drafted again.

Earlier places are ranked by how many tokens up to them equal the newest ones, then by how recent they are. A tree
takes its siblings from different places: a node's children are the distinct continuations of its path, best first.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jaxspec.cache import history
from jaxspec.drafts.interface import DraftContext, Drafter, DraftTree
from jaxspec.errors import UserError
from jaxspec.speculate.trees import TreeSpec


@dataclasses.dataclass(frozen=True)
class NGram(Drafter):
    """Attributes:
    longest_match: tokens that are compared at most; a longer match counts as this long.
    """

    longest_match: int = 8
    default_tree = "chain:4"

    def check_tree(self, tree: TreeSpec) -> None:
        if tree.num_nodes == 1:
            raise UserError("tree 'none' leaves --draft ngram nothing to draft: choose chain:D or static:…")
        if tree.beam is not None:
            raise UserError(
                f"tree {tree.name!r} needs a draft that scores its tokens, which ngram doesn't: "
                "choose chain:D or static:…, or a trained draft"
            )

    def draft(self, weights: Any, state: Any, context: DraftContext, tree: TreeSpec) -> tuple[DraftTree, Any]:
        tokens = history.read(context.history, context.page_table)
        drafted = look_up(tokens, context.length, tree, self.longest_match)
        parents = jnp.broadcast_to(jnp.array(tree.parents), drafted.shape)
        return DraftTree(drafted, parents), state


def look_up(
    tokens: Int[Array, "B N"], newest: Int[Array, "B"], tree: TreeSpec, longest_match: int
) -> Int[Array, "B T"]:
    """Fills a tree from earlier occurrences.

    Args:
      tokens: history; position `newest[b]` holds the root, later ones anything.
      newest: position of the newest token.
      tree: its parents and depths are used.
      longest_match: tokens compared at most.

    Returns:
      Token of each node, the root first; -1 where no place is left to take one from.
    """
    position = jnp.arange(tokens.shape[1])
    is_past = position < newest[:, None]
    rank = jnp.where(is_past, match_lengths(tokens, newest, longest_match), 0) * tokens.shape[1] + position
    drafted = [jnp.take_along_axis(tokens, newest[:, None], axis=1)[:, 0]]
    # Places whose continuation agrees with the path to each node.
    agrees: list[Bool[Array, "B N"]] = [is_past & (rank >= tokens.shape[1])]
    for node in range(1, tree.num_nodes):
        parent, depth = tree.parents[node], tree.depths[node]
        continuation = jnp.roll(tokens, -depth, axis=1)
        is_open = agrees[parent] & (position + depth <= newest[:, None])
        for sibling in range(1, node):
            if tree.parents[sibling] == parent:
                is_open &= continuation != drafted[sibling][:, None]
        best = jnp.argmax(jnp.where(is_open, rank, -1), axis=1)[:, None]
        token = jnp.where(jnp.any(is_open, axis=1), jnp.take_along_axis(continuation, best, axis=1)[:, 0], -1)
        drafted.append(token)
        agrees.append(is_open & (continuation == token[:, None]))
    return jnp.stack(drafted, axis=1)


def match_lengths(tokens: Int[Array, "B N"], newest: Int[Array, "B"], longest: int) -> Int[Array, "B N"]:
    """How many tokens up to each position equal those up to `newest`, `longest` at most."""
    position = jnp.arange(tokens.shape[1])
    is_running = jnp.ones(tokens.shape, bool)
    length = jnp.zeros(tokens.shape, jnp.int32)
    for back in range(longest):
        wanted = jnp.take_along_axis(tokens, jnp.maximum(newest - back, 0)[:, None], axis=1)
        is_running &= (jnp.roll(tokens, back, axis=1) == wanted) & (position >= back) & (newest[:, None] >= back)
        length += is_running
    return length
