"""Attention among the nodes of a drafted tree: each node sees itself and its ancestors."""

from pallas_kernels.tree_attention.reference import is_ancestor, masked_attention, tree_attention

__all__ = ["is_ancestor", "masked_attention", "tree_attention"]
