"""jaxspec's own checkpoints: a directory of canonical tensors that any mesh loads layer by layer.

jaxspec.json            manifest: format version; shape, dtype and CRC-32 of each tensor
config.json             as Hugging Face writes it
tokenizer.json          tokenizer_config.json
params/embed            one Orbax checkpoint for the embedding,
params/layer_000 ...    one for each layer,
params/head             and one for the final norm and the head

A draft head is stored the same way: its config.json as it was published, no tokenizer, and in params/head also what
stands before its layers.
"""

import dataclasses
import json
import re
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp

from jaxspec.checkpoint.gguf_file import MAGIC
from jaxspec.checkpoint.json_file import read_json
from jaxspec.checkpoint.source import Source
from jaxspec.checkpoint.staging import staged_directory
from jaxspec.drafts import eagle3_config
from jaxspec.errors import UserError
from jaxspec.models.registry import read_config
from jaxspec.models.tensors import EMBEDDING, tensor_shapes

FORMAT = 1
MANIFEST = "jaxspec.json"
DTYPES = {np.dtype(dtype).name: np.dtype(dtype) for dtype in (np.float32, np.float16, ml_dtypes.bfloat16)}
_CONVERT = "make one with `jaxspec convert SRC DST`"
_CONVERT_AGAIN = "make it anew with `jaxspec convert SRC DST`"
_TARGET_FOR_HEAD = "{} is a target model, not a draft head: give it as the model, and an EAGLE-3 head of it as draft"


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    shape: tuple[int, ...]
    dtype: str
    crc32: int


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk; weights are read on request.

    `config` is the raw Hugging Face mapping; `tensors` what the manifest says of each tensor.
    """

    path: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    @property
    def is_draft(self) -> bool:
        """Whether it holds a draft head instead of a target model."""
        return eagle3_config.is_eagle3(self.config, self.tensors)

    @classmethod
    def open(cls, path: str | Path, is_draft: bool | None = None) -> "Checkpoint":
        """Checks that `path` is a whole checkpoint whose tensors are those that its config asks for.

        Args:
          path: its directory.
          is_draft: whether a draft head or a target model is wanted; None for either.

        Raises:
          UserError: it is not; the message says what it is instead, and the remedy.
        """
        path = Path(path)
        if not (path / MANIFEST).is_file():
            raise UserError(_not_a_checkpoint(path))
        manifest = read_json(path / MANIFEST, _CONVERT_AGAIN)
        if manifest.get("format") != FORMAT:
            raise UserError(
                f"{path} has checkpoint format {manifest.get('format')!r}, this jaxspec reads {FORMAT}: "
                f"{_CONVERT_AGAIN}"
            )
        config = read_json(path / "config.json", _CONVERT_AGAIN)
        try:
            tensors = {
                name: StoredTensor(tuple(entry["shape"]), entry["dtype"], entry["crc32"])
                for name, entry in manifest["tensors"].items()
            }
        except (KeyError, TypeError, AttributeError) as error:
            raise UserError(f"{path / MANIFEST} is damaged ({error!r}): {_CONVERT_AGAIN}") from error
        checkpoint = cls(path, config, tensors)
        if is_draft is not None and is_draft != checkpoint.is_draft:
            said = eagle3_config.HEAD_FOR_TARGET if checkpoint.is_draft else _TARGET_FOR_HEAD
            raise UserError(said.format(path))
        check_tensors(path, config, checkpoint.shapes)
        for item in _by_item(tensors):
            if not (path / "params" / item).is_dir():
                raise UserError(f"{path} lacks params/{item}, which its manifest names: {_CONVERT_AGAIN}")
        return checkpoint

    def read(self, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Brings the named tensors, and only those, into host memory in their stored dtype.

        Raises:
          UserError: a name is not in the checkpoint, its file is damaged, or it holds a NaN or an infinity.
        """
        names = list(names)
        for name in names:
            if name not in self.tensors:
                raise UserError(f"{self.path} has no tensor {name!r}: its config asks for other tensors")
        read: dict[str, np.ndarray] = {}
        checkpointer = _checkpointer()
        for item, members in _by_item(names).items():
            restore_args = {name: ocp.RestoreArgs(restore_type=np.ndarray) for name in members}
            request = ocp.args.PyTreeRestore(
                item=dict.fromkeys(members, 0), restore_args=restore_args, partial_restore=True
            )
            try:
                read |= checkpointer.restore((self.path / "params" / item).absolute(), args=request)
            except Exception as error:  # Orbax and TensorStore raise many kinds for a damaged file
                raise UserError(
                    f"{self.path}/params/{item} is damaged, cannot read {', '.join(members)} ({_first_line(error)}): "
                    f"{_CONVERT_AGAIN}"
                ) from error
        for name, array in read.items():
            self._check(name, array)
        return {name: read[name] for name in names}

    def _check(self, name: str, array: np.ndarray) -> None:
        stored = self.tensors[name]
        if not isinstance(array, np.ndarray):  # Orbax hands the placeholder back for a tensor that its files lack
            raise UserError(f"{self.path} is damaged, its params lack {name!r}: {_CONVERT_AGAIN}")
        if (array.shape, array.dtype.name) != (stored.shape, stored.dtype):
            raise UserError(
                f"tensor {name!r} in {self.path} is {array.dtype.name}{list(array.shape)}, its manifest says "
                f"{stored.dtype}{list(stored.shape)}: {_CONVERT_AGAIN}"
            )
        if _crc32(array) != stored.crc32:
            raise UserError(f"tensor {name!r} in {self.path} is damaged, its checksum differs: {_CONVERT_AGAIN}")
        check_finite(self.path, name, array)


def write(destination: Path, source: Source, progress: Callable[[int], None] = lambda elements: None) -> Checkpoint:
    """Stores a model, one layer in memory at a time; `destination` appears at the end, whole.

    Args:
      destination: a path that does not exist, or an empty directory.
      source: the model.
      progress: called with the number of elements just stored.

    Raises:
      UserError: `destination` is taken or cannot be written, or the tensors are not those that the config asks for.
    """
    if jax.process_index() != 0:
        # Orbax drops numpy arrays that another process than the first saves.
        raise UserError(
            f"cannot write {destination} from process {jax.process_index()} of a run of several: "
            "run `jaxspec convert SRC DST` by itself first"
        )
    check_tensors("the source", source.config, source.shapes)
    with staged_directory(destination) as staging:
        manifest = {}
        checkpointer = _checkpointer()
        for item, members in _by_item(source.names).items():
            arrays = {name: np.ascontiguousarray(source.read(name)) for name in members}
            for name, array in arrays.items():
                check_dtype("the source", name, array)
                check_finite("the source", name, array)
                manifest[name] = {"shape": array.shape, "dtype": array.dtype.name, "crc32": _crc32(array)}
            try:
                checkpointer.save((staging / "params" / item).absolute(), args=ocp.args.PyTreeSave(arrays))
            except (OSError, ValueError) as error:
                raise UserError(
                    f"cannot write {destination} ({_first_line(error)}): free space there or give another place"
                ) from error
            progress(sum(array.size for array in arrays.values()))
        for name, content in source.tokenizer_files.items():
            (staging / name).write_bytes(content.encode() if isinstance(content, str) else content)
        (staging / "config.json").write_text(json.dumps(source.config, indent=2), encoding="utf-8")
        (staging / MANIFEST).write_text(json.dumps({"format": FORMAT, "tensors": manifest}, indent=1), encoding="utf-8")
    return Checkpoint.open(destination)


def check_tensors(where: Path | str, config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Requires exactly the tensors, by name and shape, of the model or draft head that `config` describes.

    Raises:
      UserError: it names a tensor that is missing, misshapen (both shapes) or extra.
    """
    expected = expected_tensors(config, shapes)
    if missing := [name for name in expected if name not in shapes]:
        name = missing[0]
        raise UserError(
            f"{where} lacks {_listed(missing)}, with shape {list(expected[name])} by its config.json: "
            "use complete files or correct the config"
        )
    for name, shape in expected.items():
        if tuple(shapes[name]) != shape:
            raise UserError(
                f"tensor {name!r} of {where} has shape {list(shapes[name])}, its config.json asks for {list(shape)}: "
                "use files and a config of one model"
            )
    if extra := [name for name in shapes if name not in expected]:
        name = extra[0]
        raise UserError(
            f"{where} has {_listed(extra)}, with shape {list(shapes[name])}, which its config.json does not ask for: "
            "use files and a config of one model"
        )


def expected_tensors(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that a config asks for; those at hand say what kind of model it is."""
    if eagle3_config.is_eagle3(config, shapes):
        return eagle3_config.eagle3_tensor_shapes(eagle3_config.read_eagle3_config(config, shapes))
    return tensor_shapes(read_config(config))


def check_dtype(where: Path | str, name: str, array: np.ndarray) -> None:
    """Raises:
    UserError: a checkpoint does not hold tensors of this type, or not under this name.
    """
    held = ["int64"] if name == eagle3_config.DRAFT_TO_TARGET else list(DTYPES)
    if array.dtype.name not in held:
        raise UserError(
            f"tensor {name!r} of {where} is {array.dtype.name}: a checkpoint holds it as {', '.join(held)}; "
            "convert it to one of these first"
        )


def check_finite(where: Path | str, name: str, array: np.ndarray) -> None:
    """Raises:
    UserError: the tensor has a NaN or an infinity.
    """
    if not np.isfinite(array).all():
        kind = "NaN" if np.isnan(array).any() else "an infinity"
        raise UserError(f"tensor {name!r} of {where} holds {kind}: weights must be finite; use an undamaged file")


def _listed(names: list[str]) -> str:
    return f"tensor {names[0]!r}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")


def _by_item(names: Iterable[str]) -> dict[str, list[str]]:
    """Tensor names by the directory under `params` that holds them."""
    items: dict[str, list[str]] = {}
    for name in names:
        layer = re.match(r"(?:model\.)?layers\.(\d+)\.", name)
        is_embedding = name in (EMBEDDING, eagle3_config.EMBEDDING)
        item = f"layer_{int(layer[1]):03d}" if layer else "embed" if is_embedding else "head"
        items.setdefault(item, []).append(name)
    return items


def _checkpointer() -> ocp.Checkpointer:
    """One for this process alone: in a multi-process run none waits for the others."""
    here = jax.process_index()
    alone = ocp.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"jaxspec{here}"
    )
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(use_zarr3=True, multiprocessing_options=alone), multiprocessing_options=alone
    )


def _crc32(array: np.ndarray) -> int:
    return zlib.crc32(array.reshape(-1).view(np.uint8).data)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


def _not_a_checkpoint(path: Path) -> str:
    convert = f"run `jaxspec convert {path} DST` and give DST"
    if not path.exists():
        return f"{path} does not exist: give a jaxspec checkpoint, or {_CONVERT}"
    if path.is_file():
        with path.open("rb") as file:
            is_gguf = file.read(4) == MAGIC
        if is_gguf:
            return f"{path} is a GGUF file, not a jaxspec checkpoint: {convert}"
        return f"{path} is a file, not a jaxspec checkpoint: {_CONVERT}"
    if (path / "params").exists():
        return f"{path} is a half-written jaxspec checkpoint (it has no {MANIFEST}): remove it and {_CONVERT}"
    if any(path.glob("*.safetensors")) or (path / "config.json").exists():
        return f"{path} is a Hugging Face directory, not a jaxspec checkpoint: {convert}"
    return f"{path} is a directory without {MANIFEST}, not a jaxspec checkpoint: {_CONVERT}"
