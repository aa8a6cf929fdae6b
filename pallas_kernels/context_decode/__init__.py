"""Attention of a few query tokens over this device's slice of the paged prefix."""

from pallas_kernels.context_decode.reference import context_decode

__all__ = ["context_decode"]
