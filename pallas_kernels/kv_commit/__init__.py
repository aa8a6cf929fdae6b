"""Moves the keys and values of accepted tree nodes from the pending buffer into pages."""

from pallas_kernels.kv_commit.reference import commit_rows

__all__ = ["commit_rows"]
