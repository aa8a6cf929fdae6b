"""Llama 2 and 3.x and what shares their block (SmolLM2): RMSNorm, grouped-query attention with RoPE, SwiGLU."""

from collections.abc import Mapping
from typing import Any

from jaxspec.models.config import ModelConfig, read_decoder_config


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    bias = bool(raw.get("attention_bias", False))
    return read_decoder_config("llama", raw, qkv_bias=bias, output_bias=bias)
