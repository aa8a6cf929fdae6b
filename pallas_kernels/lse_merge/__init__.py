"""Joins attention over parts of the keys into attention over all of them."""

from pallas_kernels.lse_merge.reference import join, merge

__all__ = ["join", "merge"]
