"""Attention of a chunk of prompt tokens: over the paged prefix before it, and causally among themselves."""

from pallas_kernels.chunk_prefill.reference import causal_attention

__all__ = ["causal_attention"]
