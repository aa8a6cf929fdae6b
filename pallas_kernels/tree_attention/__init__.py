"""Attention among the nodes of a drafted tree: each node sees itself and its ancestors."""

from pallas_kernels.tree_attention.reference import tree_attention

__all__ = ["tree_attention"]
