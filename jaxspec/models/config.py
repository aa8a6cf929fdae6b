"""What a target model is, read from a Hugging Face `config.json`."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jaxspec.errors import UserError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """Llama 3's change of the RoPE frequencies for long contexts (its `rope_type` is "llama3"), or plain "linear"."""

    kind: str
    factor: float
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_positions: int = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of a decoder, whatever mesh it runs on.

    The booleans say what a family adds to the plain Llama block: biases on the projections, and an RMS norm of
    each query and key head before RoPE (QK norm).
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    rope_scaling: RopeScaling | None = None
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise UserError(f"{field.name}={value!r} of config.json must be a positive integer; check the file")
            if field.type is float and not (isinstance(value, float | int) and 0 < value < math.inf):
                raise UserError(f"{field.name}={value!r} of config.json must be a positive number; check the file")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"num_attention_heads={self.num_heads} must be a multiple of num_key_value_heads={self.num_kv_heads}: "
                "every KV head serves the same number of query heads; check config.json"
            )

    @property
    def queries_per_kv_head(self) -> int:
        return self.num_heads // self.num_kv_heads


def read_decoder_config(family: str, raw: Mapping[str, Any], **switches: Any) -> ModelConfig:
    """The fields that Llama-like families share, from a `config.json` as a mapping.

    Args:
      family: the registry's name of the family.
      raw: the parsed file.
      switches: fields of `ModelConfig` that the family decides itself.

    Raises:
      UserError: a field is missing, or asks for something that the family's module does not compute.
    """

    def field(name: str, default: Any = None) -> Any:
        value = raw.get(name)
        if value is None:
            value = default
        if value is None:
            raise UserError(f"config.json has no {name!r}, which a {family} model needs: add it or convert again")
        return value

    def refuse(name: str, value: Any, accepted: str) -> None:
        raise UserError(f"{name}={value!r} in config.json is not supported for {family}: jaxspec computes {accepted}")

    if (activation := field("hidden_act", "silu")) not in ("silu", "swish"):
        refuse("hidden_act", activation, "silu")
    # A window may be given and switched off; Llama has no switch.
    if raw.get("use_sliding_window", family == "llama" and raw.get("sliding_window")):
        refuse("sliding_window", raw.get("sliding_window"), "full attention only")
    heads = field("num_attention_heads")
    return ModelConfig(
        family=family,
        vocab_size=field("vocab_size"),
        hidden_size=field("hidden_size"),
        intermediate_size=field("intermediate_size"),
        num_layers=field("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=field("num_key_value_heads", heads),
        head_dim=field("head_dim", _quotient(field("hidden_size"), heads)),
        norm_eps=field("rms_norm_eps", 1e-6),
        max_positions=field("max_position_embeddings", 2048),
        tie_embeddings=bool(raw.get("tie_word_embeddings", False)),
        mlp_bias=bool(raw.get("mlp_bias", False)),
        **_read_rope(raw, refuse),
        **switches,
    )


def _quotient(hidden_size: Any, heads: Any) -> Any:
    """Head size where the file gives none; what is not two positive integers is left for the checks to name."""
    return hidden_size // heads if isinstance(hidden_size, int) and isinstance(heads, int) and heads > 0 else 1


def _read_rope(raw: Mapping[str, Any], refuse: Any) -> dict[str, Any]:
    """RoPE base and scaling: `rope_theta` and `rope_scaling`, or both inside `rope_parameters` (transformers 5)."""
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(raw.get(name) or {}, Mapping):
            refuse(name, raw[name], "an object with rope_type and its numbers")
    parameters = raw.get("rope_parameters") or {}
    theta = parameters.get("rope_theta") or raw.get("rope_theta") or 10000.0
    scaling = raw.get("rope_scaling") or parameters
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    for source in (raw, parameters):
        if source.get("partial_rotary_factor", 1.0) != 1.0:
            refuse("partial_rotary_factor", source["partial_rotary_factor"], "RoPE over the whole head")
    if kind == "default":
        return {"rope_theta": float(theta)}
    if kind not in ("llama3", "linear"):
        refuse("rope_type", kind, "default, linear and llama3")
    if not (isinstance(scaling.get("factor"), int | float) and math.isfinite(scaling["factor"])):
        refuse("rope_scaling.factor", scaling.get("factor"), "a finite number")
    return {
        "rope_theta": float(theta),
        "rope_scaling": RopeScaling(
            kind=kind,
            factor=float(scaling["factor"]),
            low_frequency_factor=float(scaling.get("low_freq_factor", 1.0)),
            high_frequency_factor=float(scaling.get("high_freq_factor", 4.0)),
            original_positions=int(scaling.get("original_max_position_embeddings", 8192)),
        ),
    }
