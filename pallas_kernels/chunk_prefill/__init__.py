"""Attention of a chunk of prompt tokens: over the paged prefix before it, and causally among themselves.

`chunk_prefill` is the kernel for Hopper; `causal_attention` and `context_decode` are its two parts in plain JAX.
"""

from pallas_kernels.chunk_prefill.kernel import Prefix, chunk_prefill
from pallas_kernels.chunk_prefill.reference import causal_attention

__all__ = ["Prefix", "causal_attention", "chunk_prefill"]
