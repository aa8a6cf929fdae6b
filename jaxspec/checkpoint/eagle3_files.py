"""Published EAGLE-3 heads as sources of canonical tensors: safetensors or `pytorch_model.bin`, in any layout."""

import dataclasses
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint import huggingface
from jaxspec.checkpoint.huggingface import SafetensorsFile, Weights, has_weights, open_weights, read_config_file
from jaxspec.checkpoint.source import Source
from jaxspec.checkpoint.store import MANIFEST, Checkpoint, check_dtype, check_finite, check_tensors
from jaxspec.checkpoint.torch_file import TorchFile
from jaxspec.drafts.eagle3_config import (
    DRAFT_TO_TARGET,
    TARGET_TO_DRAFT,
    check_vocabulary,
    is_eagle3,
    read_eagle3_config,
)
from jaxspec.errors import UserError

_TORCH_SINGLE = "pytorch_model.bin"
# The reference's name of its only layer, and SGLang's first names of the norms before `fc`.
_ALIASES = {
    "midlayer.": "layers.0.",
    "aux_norm_low.": "fc_norm.0.",
    "aux_norm_mid.": "fc_norm.1.",
    "aux_norm_high.": "fc_norm.2.",
}


@dataclasses.dataclass(frozen=True)
class PublishedHead:
    """A head in the directory in which it was published; weights are read on request, as from a `Checkpoint`."""

    path: Path
    source: Source

    @property
    def config(self) -> Mapping[str, Any]:
        return self.source.config

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self.source.shapes

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Brings the named tensors into host memory in their stored dtype.

        Raises:
          UserError: a name is not that of a tensor, its file is damaged, or it holds a NaN or an infinity.
        """
        read = {}
        for name in names:
            if name not in self.shapes:
                raise UserError(f"{self.path} has no tensor {name!r}: its config asks for other tensors")
            read[name] = self.source.read(name)
            check_dtype(self.path, name, read[name])
            check_finite(self.path, name, read[name])
        return read


def open_head(path: str | Path) -> Checkpoint | PublishedHead:
    """Opens a head from a checkpoint that `jaxspec convert` made, or from the directory in which it was published.

    Raises:
      UserError: there is none, or it is damaged or not one that jaxspec computes.
    """
    path = Path(path)
    if (path / MANIFEST).is_file():
        return Checkpoint.open(path, is_draft=True)
    return PublishedHead(path, open_eagle3(path))


def is_head(directory: Path) -> bool:
    """Whether a directory has the files of an EAGLE-3 head.

    Raises:
      UserError: its files are damaged.
    """
    if not (directory / "config.json").is_file():
        return False
    config = read_config_file(directory)
    return is_eagle3(config, ()) or is_eagle3(config, _open_weights(directory).files)


def open_eagle3(directory: Path) -> Source:
    """Opens a directory with `config.json` and `model.safetensors` or `pytorch_model.bin` (or an index and parts).

    Tensors get their canonical names; copies of the target's (`verifier_*`) and RoPE buffers are left out. `t2d`, and a
    `d2t` of a head that drafts from the whole vocabulary, are only checked.

    Raises:
      UserError: it is not a head; a file is missing or damaged; or config and tensors do not agree.
    """
    if not (directory / "config.json").is_file():
        raise UserError(
            f"{directory} has no config.json, so it is not the directory of an EAGLE-3 head: give one as it was "
            "published, or a checkpoint that `jaxspec convert` made of it"
        )
    config = read_config_file(directory)
    weights = _open_weights(directory)
    if not is_eagle3(config, weights.files):
        raise UserError(
            f"{directory} is no EAGLE-3 head (architectures={config.get('architectures')!r}): give the directory of a "
            "head as draft, and a target model as the model"
        )
    if not weights.files:
        raise UserError(f"{directory} has neither {huggingface.SINGLE} nor {_TORCH_SINGLE}: fetch the head again")
    published = _canonical_names(directory, weights.files)
    stored = weights.shapes
    shapes = {name: stored[its_name] for name, its_name in published.items()}
    head = read_eagle3_config(config, shapes)

    def read(name: str) -> np.ndarray:
        array = weights.read(published[name])
        return array.astype(np.int64) if name == DRAFT_TO_TARGET and array.dtype == np.int32 else array

    if DRAFT_TO_TARGET in shapes:
        t2d = read(TARGET_TO_DRAFT) if TARGET_TO_DRAFT in shapes else None
        check_vocabulary(read(DRAFT_TO_TARGET), t2d, head.layer.vocab_size)
    is_reduced = head.draft_vocab_size < head.layer.vocab_size
    only_checked = {TARGET_TO_DRAFT} if is_reduced else {TARGET_TO_DRAFT, DRAFT_TO_TARGET}
    shapes = {name: shape for name, shape in shapes.items() if name not in only_checked}
    check_tensors(directory, config, shapes)
    return Source(config=config, tokenizer_files={}, shapes=shapes, read=read)


def _open_weights(directory: Path) -> Weights:
    if has_weights(directory, huggingface.SINGLE):
        return open_weights(directory, huggingface.SINGLE, SafetensorsFile.open)
    if has_weights(directory, _TORCH_SINGLE):
        return open_weights(directory, _TORCH_SINGLE, TorchFile.open)
    return Weights({})


def _canonical_names(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """Published names by canonical ones."""
    published: dict[str, str] = {}
    for its_name in names:
        name = its_name.removeprefix("model.")
        for alias, canonical in _ALIASES.items():
            if name.startswith(alias):
                name = canonical + name.removeprefix(alias)
        if name.startswith("verifier_") or ".rotary_emb." in f".{name}":
            continue
        if name in published:
            raise UserError(
                f"{directory} has tensor {name!r} twice, as {published[name]!r} and {its_name!r}: remove one of them"
            )
        published[name] = its_name
    # SGLang names the input norm of later layers after the only one that its own later layers have.
    for name in list(published):
        later = re.fullmatch(r"(layers\.[1-9]\d*)\.hidden_norm\.weight", name)
        if later and f"{later[1]}.input_layernorm.weight" not in published:
            published[f"{later[1]}.input_layernorm.weight"] = published.pop(name)
    return published
