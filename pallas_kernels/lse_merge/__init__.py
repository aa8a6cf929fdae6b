"""Joins attention over parts of the keys into attention over all of them."""

from pallas_kernels.lse_merge.packed import LSE_COLUMNS, pack, unpack
from pallas_kernels.lse_merge.reference import join, merge

__all__ = ["LSE_COLUMNS", "join", "merge", "pack", "unpack"]
