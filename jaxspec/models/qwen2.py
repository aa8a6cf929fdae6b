"""Qwen2 and Qwen2.5: the Llama block with a bias on the query, key and value projections."""

from collections.abc import Mapping
from typing import Any

from jaxspec.models.config import ModelConfig, read_decoder_config


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    return read_decoder_config("qwen2", raw, qkv_bias=True)
