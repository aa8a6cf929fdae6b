"""How a head that projects concatenated taps gets them from the stages that compute them.

Both kinds give `fc(concat(taps))`, with the norms that the head has before it. `WholeTaps` carries the taps, each in
its own slot, and projects in the tail. `ProjectedTaps` lets every stage add its own part of the projection to one
running sum, so that a hop carries one vector a row whatever the number of taps.
"""

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from jaxspec.drafts.eagle3_config import FC, FC_BIAS, FC_INPUT_NORM, Eagle3Config, tap_norm
from jaxspec.mesh import MODEL_AXES, PP, AxisNames, gather, rank
from jaxspec.models.decoder import DecoderLayout, pad_axis, parameter, rms_norm, round_up
from jaxspec.speculate.taps import tap_places


class WholeTaps(nnx.Module):
    """Every tap of a row travels, in the order of `config.taps`."""

    axes: AxisNames = ()

    def __init__(self, config: Eagle3Config, target: DecoderLayout):
        self.config, self.target = config, target
        columns = round_up(config.layer.hidden_size, target.mesh.axis_size(target.tail_axes))
        inputs = config.num_taps * config.target_hidden_size
        self.fc = parameter((inputs, columns), P(None, target.tail_axes), target.dtype)
        if config.norm_before_fc:
            self.input_norm = parameter((inputs,), P(), target.dtype)
        if config.fc_norm:
            self.tap_norms = parameter((config.num_taps, config.target_hidden_size), P(), target.dtype)
        if config.fc_bias:
            self.bias = parameter((config.layer.hidden_size,), P(), target.dtype)

    @staticmethod
    def width(config: Eagle3Config, target: DecoderLayout) -> int:
        assert config.taps is not None
        return len(config.taps) * config.target_hidden_size

    def observe(self, features: Float[Array, "N F"], layer: int, x: Float[Array, "N E"]) -> Float[Array, "N F"]:
        assert self.config.taps is not None
        width = x.shape[-1]
        for slot, (stage, after) in enumerate(tap_places(self.config.taps, self.target.stage_sizes)):
            if after == layer:
                kept = features[:, slot * width : (slot + 1) * width]
                tap = x if self.target.mesh.pp == 1 else jnp.where(rank((PP,)) == stage, x, kept)
                features = lax.dynamic_update_slice_in_dim(features, tap, slot * width, axis=1)
        return features

    def project(self, features: Float[Array, "N F"]) -> Float[Array, "N H"]:
        eps = self.config.layer.norm_eps
        if self.config.norm_before_fc:
            features = rms_norm(features, self.input_norm[...], eps)
        if self.config.fc_norm:
            parts = features.reshape(*features.shape[:-1], self.config.num_taps, -1)
            features = rms_norm(parts, self.tap_norms[...], eps).reshape(features.shape)
        projected = _all_columns(features @ self.fc[...], self.target.tail_axes, self.config.layer.hidden_size)
        return projected + self.bias[...] if self.config.fc_bias else projected

    @staticmethod
    def pack(config: Eagle3Config, target: DecoderLayout, canonical: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        columns = round_up(config.layer.hidden_size, target.mesh.axis_size(target.tail_axes))
        packed = {"fc": pad_axis(canonical[FC].T, 1, columns)}
        if config.norm_before_fc:
            packed["input_norm"] = canonical[FC_INPUT_NORM]
        if config.fc_norm:
            packed["tap_norms"] = np.stack([canonical[tap_norm(part)] for part in range(config.num_taps)])
        if config.fc_bias:
            packed["bias"] = canonical[FC_BIAS]
        return packed


class ProjectedTaps(nnx.Module):
    """A row carries the running sum of its taps' projections, each device of a stage its columns of it.

    With `norm_before_fc` one more column is the running sum of squares. The weights of norms before the projection are
    folded into it.
    """

    axes: AxisNames = MODEL_AXES

    def __init__(self, config: Eagle3Config, target: DecoderLayout):
        self.config, self.target = config, target
        columns = round_up(config.layer.hidden_size, target.mesh.axis_size(MODEL_AXES))
        shape = (target.mesh.pp, config.target_hidden_size, columns)
        # A stage without a tap after this layer slot has zeros there.
        self.parts = nnx.Dict(
            {name: parameter(shape, P(PP, None, MODEL_AXES), target.dtype) for name in _part_names(config, target)}
        )
        if config.fc_bias:
            self.bias = parameter((config.layer.hidden_size,), P(), target.dtype)

    @staticmethod
    def width(config: Eagle3Config, target: DecoderLayout) -> int:
        ranks = target.mesh.axis_size(MODEL_AXES)
        return round_up(config.layer.hidden_size, ranks) + ranks * config.norm_before_fc

    def observe(self, features: Float[Array, "N F"], layer: int, x: Float[Array, "N E"]) -> Float[Array, "N F"]:
        assert self.config.taps is not None
        name = _part_name(layer)
        if name not in self.parts:
            return features
        tap = rms_norm(x, jnp.ones(x.shape[-1], x.dtype), self.config.layer.norm_eps) if self.config.fc_norm else x
        added = tap @ self.parts[name][0]
        if self.config.norm_before_fc:
            places = tap_places(self.config.taps, self.target.stage_sizes)
            is_here = jnp.any(jnp.array([stage for stage, after in places if after == layer]) == rank((PP,)))
            squares = jnp.sum(jnp.square(x.astype(jnp.float32)), axis=-1, keepdims=True)
            added = jnp.concatenate([added, jnp.where(is_here, squares, 0).astype(x.dtype)], axis=-1)
        return features + added

    def project(self, features: Float[Array, "N F"]) -> Float[Array, "N H"]:
        config = self.config
        if config.norm_before_fc:
            features, squares = features[..., :-1], features[..., -1:].astype(jnp.float32)
            mean = squares / (config.num_taps * config.target_hidden_size)
            features = (features * lax.rsqrt(mean + config.layer.norm_eps)).astype(features.dtype)
        projected = _all_columns(features, MODEL_AXES, config.layer.hidden_size)
        return projected + self.bias[...] if config.fc_bias else projected

    @staticmethod
    def pack(
        config: Eagle3Config, target: DecoderLayout, canonical: dict[str, np.ndarray]
    ) -> dict[str, np.ndarray | dict[str, np.ndarray]]:
        assert config.taps is not None
        columns = round_up(config.layer.hidden_size, target.mesh.axis_size(MODEL_AXES))
        matrices = np.split(canonical[FC].T.astype(np.float32), config.num_taps)
        if config.norm_before_fc:
            norms = np.split(canonical[FC_INPUT_NORM].astype(np.float32), config.num_taps)
            matrices = [norm[:, None] * matrix for norm, matrix in zip(norms, matrices, strict=True)]
        if config.fc_norm:
            norms = [canonical[tap_norm(part)].astype(np.float32) for part in range(config.num_taps)]
            matrices = [norm[:, None] * matrix for norm, matrix in zip(norms, matrices, strict=True)]
        shape = (target.mesh.pp, config.target_hidden_size, columns)
        parts = {name: np.zeros(shape, np.float32) for name in _part_names(config, target)}
        for (stage, after), matrix in zip(tap_places(config.taps, target.stage_sizes), matrices, strict=True):
            parts[_part_name(after)][stage] = pad_axis(matrix, 1, columns)
        packed: dict[str, np.ndarray | dict[str, np.ndarray]] = {"parts": parts}
        if config.fc_bias:
            packed["bias"] = canonical[FC_BIAS]
        return packed


def _part_name(layer: int) -> str:
    return f"after_{layer}" if layer >= 0 else "entering"


def _part_names(config: Eagle3Config, target: DecoderLayout) -> list[str]:
    assert config.taps is not None
    return sorted({_part_name(after) for _, after in tap_places(config.taps, target.stage_sizes)})


def _all_columns(x: Float[Array, "N local_H"], axes: AxisNames, columns: int) -> Float[Array, "N H"]:
    """Every device's columns side by side, without the padding."""
    if not axes:
        return x[..., :columns]
    parts = gather(x, axes)
    return jnp.moveaxis(parts, 0, -2).reshape(*x.shape[:-1], -1)[..., :columns]
