"""A Hugging Face directory (safetensors) as a source of canonical tensors, and the reading of such directories."""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open

from jaxspec.checkpoint.json_file import read_json
from jaxspec.checkpoint.source import Source
from jaxspec.drafts.eagle3_config import HEAD_FOR_TARGET, is_eagle3
from jaxspec.errors import UserError
from jaxspec.models.tensors import HEAD

SINGLE = "model.safetensors"
FETCH_AGAIN = "fetch the directory again"


class TensorFile(Protocol):
    """One open file of weights: names and shapes, and values on request."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...

    def read(self, name: str) -> np.ndarray: ...


def open_huggingface(directory: Path) -> Source:
    """Opens a directory with `config.json`, `model.safetensors` (or its index and parts) and `tokenizer.json`.

    RoPE buffers, and a stored head that `tie_word_embeddings` makes a copy, are left out. The end tokens of
    `generation_config.json` join those of the config.

    Raises:
      UserError: a file is missing or damaged, the weights are quantised or not safetensors, or it is a draft head.
    """
    config = read_config_file(directory)
    _refuse_head(directory, config, ())
    if (generation := directory / "generation_config.json").is_file():
        stops = _ids(config.get("eos_token_id")) + _ids(read_json(generation, FETCH_AGAIN).get("eos_token_id"))
        stops = list(dict.fromkeys(stops))
        config["eos_token_id"] = stops[0] if len(stops) == 1 else stops or None
    if not has_weights(directory, SINGLE):
        found = sorted(path.name for path in directory.glob("*.bin"))
        instead = f", only {found[0]}" if found else ""
        raise UserError(
            f"{directory} has no {SINGLE}{instead}: jaxspec reads safetensors; fetch the model's safetensors files or "
            "save it with save_pretrained(..., safe_serialization=True)"
        )
    is_tied = bool(config.get("tie_word_embeddings"))
    weights = open_weights(
        directory,
        SINGLE,
        SafetensorsFile.open,
        is_ignored=lambda name: name.endswith("rotary_emb.inv_freq") or (name == HEAD and is_tied),
    )
    _refuse_head(directory, config, weights.shapes)
    return Source(config=config, tokenizer_files=_tokenizer_files(directory), shapes=weights.shapes, read=weights.read)


def read_config_file(directory: Path) -> dict[str, Any]:
    """The `config.json` of unquantised weights.

    Raises:
      UserError: it is missing or damaged, or says that the weights are quantised.
    """
    if not (directory / "config.json").is_file():
        raise UserError(f"{directory} has no config.json: give a Hugging Face model directory or a GGUF file")
    config = read_json(directory / "config.json", FETCH_AGAIN)
    if quantisation := config.get("quantization_config"):
        method = quantisation.get("quant_method") if isinstance(quantisation, Mapping) else quantisation
        raise UserError(
            f"{directory} has quantised weights (quant_method={method!r}): jaxspec reads "
            "float32, float16 and bfloat16; use the unquantised model"
        )
    return config


def has_weights(directory: Path, single: str) -> bool:
    """Whether there is a file `single`, or the index of its parts."""
    return (directory / single).is_file() or (directory / f"{single}.index.json").is_file()


@dataclasses.dataclass(frozen=True)
class Weights:
    """All tensors of a directory, whichever file each is in."""

    files: Mapping[str, TensorFile]

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: file.shapes[name] for name, file in self.files.items()}

    def read(self, name: str) -> np.ndarray:
        return self.files[name].read(name)


def open_weights(
    directory: Path,
    single: str,
    open_file: Callable[[Path], TensorFile],
    is_ignored: Callable[[str], bool] = lambda name: False,
) -> Weights:
    """The tensors of the file `single`, or of the parts that its index lists.

    Raises:
      UserError: a file is missing or damaged.
    """
    index = f"{single}.index.json"
    if not (directory / index).is_file():
        file = open_file(directory / single)
        return Weights({name: file for name in file.shapes if not is_ignored(name)})
    listed: Mapping[str, str] = read_json(directory / index, FETCH_AGAIN).get("weight_map", {})
    files: dict[str, TensorFile] = {}
    for part in sorted(set(listed.values())):
        if not (directory / part).is_file():
            raise UserError(f"{directory} lacks {part}, which {index} names: {FETCH_AGAIN}")
        file = open_file(directory / part)
        for name in [name for name, its_part in listed.items() if its_part == part and not is_ignored(name)]:
            if name not in file.shapes:
                raise UserError(f"{directory / part} has no tensor {name!r}, which {index} puts there: {FETCH_AGAIN}")
            files[name] = file
    return Weights(files)


@dataclasses.dataclass(frozen=True)
class SafetensorsFile:
    path: Path
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def open(cls, path: Path) -> "SafetensorsFile":
        with _reading(path) as handle:
            return cls(path, {name: tuple(handle.get_slice(name).get_shape()) for name in sorted(handle.keys())})

    def read(self, name: str) -> np.ndarray:
        with _reading(self.path) as handle:
            return handle.get_tensor(name)


@contextlib.contextmanager
def _reading(file: Path) -> Iterator[Any]:
    try:
        with safe_open(file, framework="np") as handle:
            yield handle
    except (SafetensorError, OSError, TypeError) as error:
        raise UserError(
            f"{file} cannot be read ({error}): it is damaged or of a type unknown; {FETCH_AGAIN}"
        ) from error


def _refuse_head(directory: Path, config: Mapping[str, Any], names: Collection[str]) -> None:
    if is_eagle3(config, names):
        raise UserError(HEAD_FOR_TARGET.format(directory))
    if (kind := config.get("speculators_model_type")) is not None:
        raise UserError(f"{directory} is a draft of type {kind!r}, which jaxspec does not read: use an eagle3 head")


def _ids(value: int | list[int] | None) -> list[int]:
    return [] if value is None else value if isinstance(value, list) else [value]


def _tokenizer_files(directory: Path) -> dict[str, str]:
    if not (directory / "tokenizer.json").is_file():
        raise UserError(
            f"{directory} has no tokenizer.json: fetch it, or write it with save_pretrained of its AutoTokenizer"
        )
    path = directory / "tokenizer_config.json"
    config = read_json(path, FETCH_AGAIN) if path.is_file() else {}
    if (template := directory / "chat_template.jinja").is_file():
        config["chat_template"] = template.read_text(encoding="utf-8")
    return {
        "tokenizer.json": (directory / "tokenizer.json").read_text(encoding="utf-8"),
        "tokenizer_config.json": json.dumps(config, indent=2, ensure_ascii=False),
    }
