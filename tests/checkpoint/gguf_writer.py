"""Writes small GGUF files for tests."""

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12, "Q6_K": 14, "BF16": 30}
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value(item: Any) -> bytes:
    """Type code and value."""
    match item:
        case bool():
            return struct.pack("<I?", 7, item)
        case int():
            return struct.pack("<Ii", 5, item)
        case float():
            return struct.pack("<If", 6, item)
        case str():
            return struct.pack("<I", 8) + string(item)
        case list():
            elements = [value(element) for element in item]
            return (
                struct.pack("<I", 9)
                + elements[0][:4]
                + struct.pack("<Q", len(item))
                + b"".join(e[4:] for e in elements)
            )
    raise TypeError(item)


def write_gguf(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]], version: int = 3
) -> Path:
    """`tensors` maps a name to its type, its row-major shape and its stored bytes."""
    header = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(metadata))
    for key, item in metadata.items():
        header += string(key) + value(item)
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        data += b"\0" * (-len(data) % 32)
        header += string(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *shape[::-1])
        header += struct.pack("<IQ", TYPES[kind], len(data))
        data += raw
    path.write_bytes(header + b"\0" * (-len(header) % 32) + data)
    return path


def plain(array: np.ndarray, kind: str = "F32") -> tuple[str, tuple[int, ...], bytes]:
    return kind, array.shape, array.astype(DTYPES[kind]).tobytes()


def permute(array: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of query and key."""
    half = array.shape[0] // num_heads // 2
    return array.reshape(num_heads, 2, half, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def byte_tokens() -> list[str]:
    """The 256 symbols that stand for bytes in byte-level BPE, in the order of the bytes."""
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte) if byte in visible else chr(next(others)) for byte in range(256)]


def tokenizer_metadata(pre: str = "gpt-2", **changes: Any) -> dict[str, Any]:
    """256 bytes, two merges ("he", "hel"), then `<s>` (bos) and `</s>` (eos), both special."""
    tokens = [*byte_tokens(), "he", "hel", "<s>", "</s>"]
    metadata = {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [1] * 258 + [3, 3],
        "merges": ["h e", "he l"],
        "bos_token_id": 258,
        "eos_token_id": 259,
    }
    return {f"tokenizer.ggml.{key}": item for key, item in (metadata | changes).items()}


def model_metadata(architecture: str = "llama", **changes: Any) -> dict[str, Any]:
    """Two layers, 64 wide, 4 query and 2 key heads of 16."""
    sizes: dict[str, Any] = {
        "context_length": 128,
        "embedding_length": 64,
        "block_count": 2,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 500000.0,
        "rope.dimension_count": 16,
    }
    fields = {f"{architecture}.{key}": item for key, item in (sizes | changes).items()}
    return {"general.architecture": architecture} | fields | tokenizer_metadata()


def model_tensors(
    seed: int = 0, kind: str = "F32", bias: bool = False, qk_norm: bool = False, untied: bool = False
) -> dict[str, np.ndarray]:
    """Random tensors of that model under GGUF names, rows of query and key as a Hugging Face file has them."""
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (260, 64), "output_norm.weight": (64,)}
    if untied:
        shapes["output.weight"] = (260, 64)
    layer = {"attn_norm": (64,), "ffn_norm": (64,), "attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64)}
    layer |= {"attn_output": (64, 64), "ffn_gate": (96, 64), "ffn_up": (96, 64), "ffn_down": (64, 96)}
    layer |= {"attn_q_norm": (16,), "attn_k_norm": (16,)} if qk_norm else {}
    for n in (0, 1):
        shapes |= {f"blk.{n}.{name}.weight": shape for name, shape in layer.items()}
        if bias:
            shapes |= {f"blk.{n}.attn_{x}.bias": (rows,) for x, rows in (("q", 64), ("k", 32), ("v", 32))}
    random = np.random.default_rng(seed)
    return {name: random.standard_normal(shape).astype(DTYPES[kind]) for name, shape in shapes.items()}


def write_model(path: Path, architecture: str = "llama", tensors: Mapping[str, np.ndarray] | None = None) -> Path:
    """A whole model file; only `llama` files have permuted query and key rows."""
    stored = {}
    for name, array in (model_tensors() if tensors is None else tensors).items():
        heads = {"attn_q": 4, "attn_k": 2}.get(name.split(".")[-2])
        kind = next(kind for kind, dtype in DTYPES.items() if array.dtype == dtype)
        stored[name] = plain(permute(array, heads) if heads and architecture == "llama" else array, kind)
    return write_gguf(path, model_metadata(architecture), stored)
