"""Qwen3: the Llama block with an RMS norm of every query and key head; head_dim is free of hidden_size / heads."""

from collections.abc import Mapping
from typing import Any

from jaxspec.models.config import ModelConfig, read_decoder_config


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    bias = bool(raw.get("attention_bias", False))
    return read_decoder_config("qwen3", raw, qkv_bias=bias, output_bias=bias, qk_norm=True)
