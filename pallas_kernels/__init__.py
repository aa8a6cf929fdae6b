"""Attention over a paged, context-sharded cache, and exchange between GPUs. Independent of jaxspec: arrays in and out.

One folder a kernel: `reference.py` is what it computes in plain JAX, `kernel.py` the same for Hopper GPUs.

Letters in shapes: B sequences, T query tokens of each, H query heads, K key-value heads, D head size, L layers,
P pages, S tokens of a page that are on this device, M pages of a sequence.
"""
