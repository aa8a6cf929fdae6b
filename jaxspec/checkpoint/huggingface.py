"""A Hugging Face directory (safetensors) as a source of canonical tensors."""

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxspec.checkpoint.json_file import read_json
from jaxspec.checkpoint.source import Source
from jaxspec.errors import UserError
from jaxspec.models.tensors import HEAD

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FETCH_AGAIN = "fetch the directory again"


def open_huggingface(directory: Path) -> Source:
    """Opens a directory with `config.json`, `model.safetensors` (or its index and parts) and `tokenizer.json`.

    RoPE buffers, and a stored head that `tie_word_embeddings` makes a copy, are left out. The end tokens of
    `generation_config.json` join those of the config.

    Raises:
      UserError: a file is missing or damaged, or the weights are quantised or not safetensors.
    """
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory} has no config.json: give a Hugging Face model directory or a GGUF file")
    config = read_json(directory / "config.json", _FETCH_AGAIN)
    if quantisation := config.get("quantization_config"):
        raise UserError(
            f"{directory} has quantised weights (quant_method={quantisation.get('quant_method')!r}): jaxspec reads "
            "float32, float16 and bfloat16; use the unquantised model"
        )
    if (generation := directory / "generation_config.json").is_file():
        stops = _ids(config.get("eos_token_id")) + _ids(read_json(generation, _FETCH_AGAIN).get("eos_token_id"))
        stops = list(dict.fromkeys(stops))
        config["eos_token_id"] = stops[0] if len(stops) == 1 else stops or None
    is_tied = bool(config.get("tie_word_embeddings"))
    shapes: dict[str, tuple[int, ...]] = {}
    file_of: dict[str, Path] = {}
    for file, listed in _parts(directory).items():
        with _reading(file) as handle:
            present = set(handle.keys())
            for name in sorted(present) if listed is None else listed:
                if name.endswith("rotary_emb.inv_freq") or (name == HEAD and is_tied):
                    continue
                if name not in present:
                    raise UserError(f"{file} has no tensor {name!r}, which {_INDEX} puts there: {_FETCH_AGAIN}")
                shapes[name], file_of[name] = tuple(handle.get_slice(name).get_shape()), file

    def read(name: str) -> np.ndarray:
        with _reading(file_of[name]) as handle:
            return handle.get_tensor(name)

    return Source(config=config, tokenizer_files=_tokenizer_files(directory), shapes=shapes, read=read)


def _ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _parts(directory: Path) -> dict[Path, list[str] | None]:
    """The tensors to take from each file; None for all that it has."""
    if (directory / _INDEX).is_file():
        weight_map: Mapping[str, str] = read_json(directory / _INDEX, _FETCH_AGAIN).get("weight_map", {})
        parts: dict[Path, list[str] | None] = {}
        for file in sorted(set(weight_map.values())):
            if not (directory / file).is_file():
                raise UserError(f"{directory} lacks {file}, which {_INDEX} names: {_FETCH_AGAIN}")
            parts[directory / file] = [name for name, part in weight_map.items() if part == file]
        return parts
    if (directory / _SINGLE).is_file():
        return {directory / _SINGLE: None}
    found = sorted(path.name for path in directory.glob("*.bin"))
    instead = f", only {found[0]}" if found else ""
    raise UserError(
        f"{directory} has no {_SINGLE}{instead}: jaxspec reads safetensors; fetch the model's safetensors files or "
        "save it with save_pretrained(..., safe_serialization=True)"
    )


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="np") as handle:
            yield handle
    except (SafetensorError, OSError, TypeError) as error:
        raise UserError(
            f"{file} cannot be read ({error}): it is damaged or of a type unknown; {_FETCH_AGAIN}"
        ) from error


def _tokenizer_files(directory: Path) -> dict[str, str]:
    if not (directory / "tokenizer.json").is_file():
        raise UserError(
            f"{directory} has no tokenizer.json: fetch it, or write it with save_pretrained of its AutoTokenizer"
        )
    path = directory / "tokenizer_config.json"
    config = read_json(path, _FETCH_AGAIN) if path.is_file() else {}
    if (template := directory / "chat_template.jinja").is_file():
        config["chat_template"] = template.read_text(encoding="utf-8")
    return {
        "tokenizer.json": (directory / "tokenizer.json").read_text(encoding="utf-8"),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False),
    }
