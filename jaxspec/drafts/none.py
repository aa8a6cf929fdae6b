"""Plain decoding: the tree is its root."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jaxspec.drafts.interface import DraftContext, Drafter, DraftTree
from jaxspec.errors import UserError
from jaxspec.speculate.trees import TreeSpec


@dataclasses.dataclass(frozen=True)
class NoDraft(Drafter):
    default_tree = "none"

    def check_tree(self, tree: TreeSpec) -> None:
        if tree.num_nodes > 1:
            head = "the directory of an EAGLE-3 head"
            draft = head if tree.beam else f"ngram or {head}"
            raise UserError(f"tree {tree.name!r} needs a draft: choose --draft {draft}, or --tree none")

    def draft(self, weights: Any, state: Any, context: DraftContext, tree: TreeSpec) -> tuple[DraftTree, Any]:
        return DraftTree(context.root[:, None], jnp.full((len(context.root), 1), -1)), state
