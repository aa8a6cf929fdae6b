"""A GGUF file as a source of canonical tensors, with the `config.json` that its metadata amounts to."""

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint.gguf_file import GGUFFile
from jaxspec.checkpoint.gguf_tokenizer import tokenizer_files
from jaxspec.checkpoint.source import Source
from jaxspec.errors import UserError
from jaxspec.models.tensors import layer_tensor

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ROPE_FACTORS = "rope_freqs.weight"


def open_gguf(path: Path) -> Source:
    """Opens a GGUF file of a dense llama, qwen2 or qwen3 model.

    Raises:
      UserError: the file is damaged, or holds a model, tensor, type or tokenizer that jaxspec does not read.
    """
    file = GGUFFile.open(path)
    architecture = file.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise UserError(
            f"general.architecture={architecture!r} in {path} is not supported: "
            f"jaxspec reads {', '.join(ARCHITECTURES)}"
        )
    if file.metadata.get("split.count", 0) > 1:
        raise UserError(
            f"{path} is one of {file.metadata['split.count']} parts: merge them into one file first "
            "(llama-gguf-split --merge)"
        )
    stored = {_canonical(path, architecture, name): name for name in file.tensors if name != _ROPE_FACTORS}
    config = _config(file, architecture, stored)
    permuted = {"self_attn.q_proj": config["num_attention_heads"], "self_attn.k_proj": config["num_key_value_heads"]}

    def read(name: str) -> np.ndarray:
        tensor = file.read(stored[name])
        heads = permuted.get(".".join(name.split(".")[3:5]))
        return unpermute(tensor, heads) if architecture == "llama" and heads else tensor

    return Source(
        config=config,
        tokenizer_files=tokenizer_files(path, file.metadata),
        shapes={name: file.tensors[original].shape for name, original in stored.items()},
        read=read,
    )


def unpermute(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a query or key projection (or its bias) from interleaved RoPE pairs to half-split ones.

    llama.cpp stores, of each head, the rows 0, D/2, 1, D/2 + 1, ...; this puts 0, 1, ..., D/2, D/2 + 1, ... back.
    """
    half = tensor.shape[0] // num_heads // 2
    return tensor.reshape(num_heads, half, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def _canonical(path: Path, architecture: str, name: str) -> str:
    """`blk.3.attn_q.weight` becomes `model.layers.3.self_attn.q_proj.weight`."""
    base, _, kind = name.rpartition(".")
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", base)
    if kind in ("weight", "bias"):
        if base in _OUTER:
            return f"{_OUTER[base]}.{kind}"
        if layer and layer[2] in _LAYER:
            return layer_tensor(int(layer[1]), f"{_LAYER[layer[2]]}.{kind}")
    raise UserError(
        f"tensor {name!r} in {path} has no place in a dense {architecture} model: jaxspec does not serve this variant; "
        "use a dense one"
    )


def _config(file: GGUFFile, architecture: str, stored: Mapping[str, str]) -> dict[str, Any]:
    metadata = file.metadata

    def field(name: str, default: Any = None) -> Any:
        value = metadata.get(f"{architecture}.{name}", default)
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if not isinstance(value, int | float) or value <= 0:
            raise UserError(
                f"{architecture}.{name}={value!r} in {file.path} must be one positive number for all layers: "
                "use a file of a plain model"
            )
        return value

    def has(suffix: str) -> bool:
        return any(name.endswith(suffix) for name in stored)

    if "model.embed_tokens.weight" not in stored:
        raise UserError(f"{file.path} has no tensor 'token_embd.weight': it holds no whole model; use another file")
    heads = field("attention.head_count")
    hidden_size = field("embedding_length")
    head_dim = field("attention.key_length", field("rope.dimension_count", hidden_size // heads))
    if (value_dim := field("attention.value_length", head_dim)) != head_dim:
        raise UserError(f"{file.path} has keys of {head_dim} and values of {value_dim}: jaxspec serves equal ones only")
    tokens = {kind: metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("bos", "eos", "eot", "eom", "padding")}
    stops = list(dict.fromkeys(tokens[kind] for kind in ("eos", "eot", "eom") if tokens[kind] is not None))
    config = {
        "architectures": [ARCHITECTURES[architecture]],
        "model_type": architecture,
        "vocab_size": file.tensors[stored["model.embed_tokens.weight"]].shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": field("context_length"),
        # Stored as float32, in which 1e-5 is 9.999999747378752e-06.
        "rms_norm_eps": float(str(np.float32(field("attention.layer_norm_rms_epsilon")))),
        "rope_theta": float(str(np.float32(field("rope.freq_base", 10000.0)))),
        "tie_word_embeddings": "lm_head.weight" not in stored,
        "attention_bias": has("self_attn.q_proj.bias"),
        "mlp_bias": has("mlp.up_proj.bias"),
        "bos_token_id": tokens["bos"],
        "eos_token_id": stops[0] if len(stops) == 1 else stops or None,
        "pad_token_id": tokens["padding"],
    }
    if (rotated := field("rope.dimension_count", head_dim)) != head_dim:
        config["partial_rotary_factor"] = rotated / head_dim
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none":
        config["rope_scaling"] = {
            "rope_type": scaling,
            "factor": field("rope.scaling.factor"),
            "original_max_position_embeddings": field("rope.scaling.original_context_length", field("context_length")),
        }
    if _ROPE_FACTORS in file.tensors:
        config |= _llama3_scaling(file, head_dim, config["rope_theta"])
    return config


def _llama3_scaling(file: GGUFFile, head_dim: int, theta: float) -> dict[str, Any]:
    """The `rope_scaling` whose frequency divisors the file stores, with Llama 3's constants and any factor.

    llama.cpp keeps the divisors alone, one for each pair of dimensions: 1 for short waves, the factor for long ones.
    """
    stored = file.read(_ROPE_FACTORS).astype(np.float64)
    factor, low, high, original = round(float(stored.max()), 4), 1.0, 4.0, 8192
    if np.all(stored == 1):
        return {}
    wavelengths = 2 * math.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0, 1)
    divisors = 1 / ((1 - smooth) / factor + smooth)
    if stored.shape != divisors.shape or not np.allclose(stored, divisors, rtol=1e-3):
        raise UserError(
            f"tensor {_ROPE_FACTORS!r} in {file.path} does not hold Llama 3's RoPE scaling "
            "(low 1, high 4, 8192 positions): jaxspec cannot serve this variant; convert the Hugging Face directory"
        )
    return {
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": low,
            "high_freq_factor": high,
            "original_max_position_embeddings": original,
        }
    }
