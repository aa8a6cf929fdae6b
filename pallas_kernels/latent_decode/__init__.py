"""Attention of a few query tokens over this device's slice of a paged prefix of latents (MLA)."""

from pallas_kernels.latent_decode.reference import latent_decode, latent_tree_attention

__all__ = ["latent_decode", "latent_tree_attention"]
