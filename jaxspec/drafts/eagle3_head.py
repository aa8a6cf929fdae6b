"""An EAGLE-3 head (Li et al. 2025, arXiv 2503.01840) in the view of one device: its arrays and what it computes.

A head lies in the tail: matrices are split over the tail's axes, attention over those of them that divide its KV heads.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxspec.drafts.eagle3_config import (
    DRAFT_TO_TARGET,
    EMBEDDING,
    FC,
    FC_BIAS,
    FC_INPUT_NORM,
    FINAL_NORM,
    Eagle3Config,
    tap_norm,
)
from jaxspec.mesh import XLA, AxisNames, Collectives, rank
from jaxspec.models.decoder import (
    Decoder,
    DecoderLayer,
    DecoderLayout,
    LayerLayout,
    pad_axis,
    pad_rows,
    parameter,
    rms_norm,
)
from jaxspec.models.tensors import HEAD, layer_shapes

# (cache, layer, residual, q, k, v) -> (residual of the rows that go on, their attention output, cache).
type Attend[Cache] = Callable[
    [Cache, int, Float[Array, "N H"], Float[Array, "N Q D"], Float[Array, "N K D"], Float[Array, "N K D"]],
    tuple[Float[Array, "R H"], Float[Array, "R Q*D"], Cache],
]


class Eagle3Head(nnx.Module):
    """Attributes:
    target_ids: the target's token of each of this device's rows of `head`, ascending.
    """

    def __init__(self, config: Eagle3Config, target: DecoderLayout):
        width, dtype = config.layer.hidden_size, target.dtype
        inputs = config.num_taps * config.target_hidden_size
        self.config, self.target = config, target
        if config.has_fc:
            self.fc = parameter((inputs, target.padded_for_tail(width)), P(None, target.tail_axes), dtype)
        if config.fc_bias:
            self.fc_bias = parameter((width,), P(), dtype)
        if config.norm_before_fc:
            self.input_norm = parameter((inputs,), P(), dtype)
        if config.fc_norm:
            self.tap_norms = parameter((config.num_taps, config.target_hidden_size), P(), dtype)
        self.hidden_norm = parameter((width,), P(), dtype)
        self.layers = nnx.List([DecoderLayer(layout) for layout in layer_layouts(config, target)])
        self.norm = parameter((width,), P(), dtype)
        if config.has_embedding:
            self.embedding = parameter((config.layer.vocab_size, width), P(), dtype)
        if config.has_head:
            rows = target.padded_for_tail(config.draft_vocab_size)
            self.head = parameter((rows, width), P(target.tail_axes), dtype)
            self.target_ids = nnx.Variable(jnp.zeros(rows, jnp.int32), out_sharding=P(target.tail_axes))

    def embed(self, tokens: Int[Array, "N"], target: Decoder) -> Float[Array, "N H"]:
        if not self.config.has_embedding:
            return target.embed(tokens)
        return self.embedding[...][jnp.maximum(tokens, 0)]

    def features(self, taps: Float[Array, "N taps E"], collectives: Collectives = XLA) -> Float[Array, "N H"]:
        """What true rows start from: all taps of the target, projected to the width of the head."""
        config, eps = self.config, self.config.layer.norm_eps
        joined = taps.reshape(len(taps), -1)
        if config.norm_before_fc:
            joined = rms_norm(joined, self.input_norm[...], eps)
        if config.fc_norm:
            joined = rms_norm(joined.reshape(taps.shape), self.tap_norms[...], eps).reshape(len(taps), -1)
        if not config.has_fc:
            return joined
        columns = collectives.gather(joined @ self.fc[...], self.target.tail_axes)
        projected = jnp.moveaxis(columns, 0, 1).reshape(len(taps), -1)[:, : config.layer.hidden_size]
        return projected + self.fc_bias[...] if config.fc_bias else projected

    def rows[Cache](
        self,
        features: Float[Array, "N H"],
        embedded: Float[Array, "N H"],
        positions: Int[Array, "N"],
        attend: Attend[Cache],
        cache: Cache,
        collectives: Collectives = XLA,
    ) -> tuple[Float[Array, "R H"], Cache]:
        """Outputs before the final norm.

        Args:
          features: of true rows as `features` gives them, `recycled` outputs for rows of drafted tokens.
          embedded: of the token that follows each row's position.
          positions: of the features.
          attend: may let fewer rows go on than it gets, in the last layer.
        """
        eps, x = self.config.layer.norm_eps, features
        for index, layer in enumerate(self.layers):
            residual = x
            if index == 0:
                normed = rms_norm(x, self.hidden_norm[...], eps)
                residual = normed if self.config.norm_before_residual else x
                # A second input beside the features: the token, each with a norm of its own.
                inputs = jnp.concatenate([layer.input_norm(embedded), normed], axis=-1)
            else:
                inputs = layer.input_norm(x)
            heads = (part[: len(x)] for part in layer.heads_of(pad_rows(inputs), pad_rows(positions)))
            residual, attended, cache = attend(cache, index, residual, *heads)
            x = layer.finish(pad_rows(residual), pad_rows(attended), collectives)[: len(residual)]
        return x, cache

    def recycled(self, outputs: Float[Array, "R H"]) -> Float[Array, "R H"]:
        """What a row of the next drafted token takes as its features."""
        return self.normed(outputs) if self.config.norm_output else outputs

    def logits(
        self, outputs: Float[Array, "*R H"], target: Decoder
    ) -> tuple[Float[Array, "*R local_V"], Int[Array, "local_V"]]:
        """Float32 logits of this device's part of the vocabulary, -inf for padding, and the target's id of each."""
        matrix, ids = self.vocabulary(target)
        logits = jnp.einsum("...e,ve->...v", self.normed(outputs), matrix, preferred_element_type=jnp.float32)
        numbers = rank(self.target.tail_axes) * logits.shape[-1] + jnp.arange(logits.shape[-1])
        return jnp.where(numbers < self.config.draft_vocab_size, logits, -jnp.inf), ids

    def vocabulary(self, target: Decoder) -> tuple[Float[Array, "local_V H"], Int[Array, "local_V"]]:
        """Rows of this device's part of the padded vocabulary, the target's where it has none, and their ids."""
        if self.config.has_head:
            return self.head[...], self.target_ids[...]
        matrix = target.vocabulary
        return matrix, rank(self.target.tail_axes) * len(matrix) + jnp.arange(len(matrix))

    def normed(self, outputs: Float[Array, "*R H"]) -> Float[Array, "*R H"]:
        """Outputs after the final norm."""
        return rms_norm(outputs, self.norm[...], self.config.layer.norm_eps)


def head_axes(config: Eagle3Config, target: DecoderLayout) -> AxisNames:
    """Of the tail's axes those that the KV heads are split over: as many devices as divide them."""
    axes = target.tail_axes
    subsets = [s for size in range(len(axes) + 1) for s in itertools.combinations(axes, size)]
    dividing = [s for s in subsets if config.layer.num_kv_heads % target.mesh.axis_size(s) == 0]
    return max(dividing, key=target.mesh.axis_size)


def layer_layouts(config: Eagle3Config, target: DecoderLayout) -> list[LayerLayout]:
    axes = head_axes(config, target)
    return [
        LayerLayout(
            config=config.layer,
            mesh=target.mesh,
            dtype=target.dtype,
            input_size=config.layer.hidden_size * (2 if index == 0 else 1),
            stage_axis=None,
            kv_axes=axes,
            out_axes=axes,
            ffn_axes=target.tail_axes,
        )
        for index in range(config.layer.num_layers)
    ]


def pack_head(config: Eagle3Config, target: DecoderLayout, canonical: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """All arrays of a head, by the names of its attributes, from its canonical tensors."""
    layers = {
        index: {
            name: array[None]
            for name, array in DecoderLayer.pack(
                layout, {name: canonical[f"layers.{index}.{name}"] for name in layer_shapes(config.layer)}
            ).items()
        }
        for index, layout in enumerate(layer_layouts(config, target))
    }
    packed: dict[str, Any] = {
        "hidden_norm": canonical["layers.0.hidden_norm.weight"],
        "layers": layers,
        "norm": canonical[FINAL_NORM],
    }
    if config.has_fc:
        packed["fc"] = pad_axis(canonical[FC].T, 1, target.padded_for_tail(config.layer.hidden_size))
    if config.fc_bias:
        packed["fc_bias"] = canonical[FC_BIAS]
    if config.norm_before_fc:
        packed["input_norm"] = canonical[FC_INPUT_NORM]
    if config.fc_norm:
        packed["tap_norms"] = np.stack([canonical[tap_norm(part)] for part in range(config.num_taps)])
    if config.has_embedding:
        packed["embedding"] = canonical[EMBEDDING]
    if config.has_head:
        rows = target.padded_for_tail(config.draft_vocab_size)
        offsets = canonical.get(DRAFT_TO_TARGET, np.zeros(config.draft_vocab_size, np.int64))
        ids = (np.arange(config.draft_vocab_size) + offsets).astype(np.int32)
        packed["head"] = pad_axis(canonical[HEAD], 0, rows)
        packed["target_ids"] = pad_axis(ids, 0, rows)
    return packed


def unpack_head(config: Eagle3Config, target: DecoderLayout, packed: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The inverse of `pack_head`, of a head that no axis splits (`target.tail_axes` is empty)."""
    canonical: dict[str, np.ndarray] = {
        "layers.0.hidden_norm.weight": packed["hidden_norm"],
        FINAL_NORM: packed["norm"],
    }
    for index, layout in enumerate(layer_layouts(config, target)):
        arrays = {name: array[0] for name, array in packed["layers"][index].items()}
        canonical |= {f"layers.{index}.{name}": array for name, array in DecoderLayer.unpack(layout, arrays).items()}
    if config.has_fc:
        canonical[FC] = packed["fc"].T
    if config.fc_bias:
        canonical[FC_BIAS] = packed["fc_bias"]
    if config.norm_before_fc:
        canonical[FC_INPUT_NORM] = packed["input_norm"]
    if config.fc_norm:
        canonical |= {tap_norm(part): norm for part, norm in enumerate(packed["tap_norms"])}
    if config.has_embedding:
        canonical[EMBEDDING] = packed["embedding"]
    if config.has_head:
        canonical[HEAD] = packed["head"]
    if config.draft_vocab_size < config.layer.vocab_size:
        ids = packed["target_ids"].astype(np.int64)
        canonical[DRAFT_TO_TARGET] = ids - np.arange(len(ids))
    return canonical
