"""Which module serves which `model_type` of `config.json`.

A new model is one file beside this one: it defines a `Family` and is listed in `FAMILIES`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jaxspec.errors import UserError
from jaxspec.models import llama, qwen2, qwen3
from jaxspec.models.config import ModelConfig

FAMILIES: dict[str, Callable[[Mapping[str, Any]], ModelConfig]] = {
    "llama": llama.read_config,
    "qwen2": qwen2.read_config,
    "qwen3": qwen3.read_config,
}


def read_config(raw: Mapping[str, Any]) -> ModelConfig:
    """The model that a parsed Hugging Face `config.json` describes.

    Raises:
      UserError: the `model_type` is not in the registry, or the file asks for what its family does not compute.
    """
    model_type = raw.get("model_type")
    if model_type not in FAMILIES:
        raise UserError(
            f"model_type={model_type!r} in config.json is not supported: jaxspec serves {', '.join(sorted(FAMILIES))}"
        )
    return FAMILIES[model_type](raw)
