"""A state dict that `torch.save` wrote (`pytorch_model.bin`), read without torch and without running what it says.

Since torch 1.6 such a file is a zip archive, nothing in it compressed: `data.pkl`, a pickle of the dict whose tensors
refer to storages by key, and the storages `data/KEY`. A pickle can name any function to call; this reader lets it name
only those that rebuild tensors, and has its own stand-ins for them.
"""

import collections
import contextlib
import dataclasses
import functools
import io
import pickle
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, NamedTuple

import ml_dtypes
import numpy as np

from jaxspec.errors import UserError

_AGAIN = "fetch it again"
_AS_SAFETENSORS = "load it with torch and save it with safetensors.torch.save_file"
_DTYPES = {
    "FloatStorage": np.dtype(np.float32),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
    "LongStorage": np.dtype(np.int64),
    "IntStorage": np.dtype(np.int32),
    "BoolStorage": np.dtype(np.bool_),
}


# Nothing that a pickle could get hold of may be mutable: it can set attributes of what it has built.
class _Storage(NamedTuple):
    key: str
    dtype: str
    size: int


class _Tensor(NamedTuple):
    """A view of a storage; offset and strides count elements."""

    storage: _Storage
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype:
        return _DTYPES[self.storage.dtype]

    @property
    def extent(self) -> int:
        """Elements of the storage from the first to the last of the tensor."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))


@dataclasses.dataclass(frozen=True)
class TorchFile:
    """The tensors of one file; their values are read on request, each by itself."""

    path: Path
    _tensors: Mapping[str, _Tensor]
    _directory: str

    @classmethod
    def open(cls, path: Path) -> "TorchFile":
        """Reads names and shapes.

        Raises:
          UserError: the file is damaged or of another format, or its pickle is not that of a plain state dict.
        """
        with _reading(path) as archive:
            pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(pickles) != 1:
                raise UserError(f"{path} holds no state dict of torch.save: {_AS_SAFETENSORS}")
            directory = pickles[0].removesuffix("data.pkl")
            order = f"{directory}byteorder"  # only torch 2.1 and later write it
            if order in archive.namelist() and _read_member(archive, order) != b"little":
                raise UserError(f"{path} is not of little byte order: {_AS_SAFETENSORS}")
            tensors = _unpickle(path, _read_member(archive, pickles[0]))
            sizes = {member.filename: member.file_size for member in archive.infolist()}
        for name, tensor in tensors.items():
            stored = sizes.get(f"{directory}data/{tensor.storage.key}")
            if stored != tensor.storage.size * tensor.dtype.itemsize:
                raise UserError(f"{path} is damaged, the storage of tensor {name!r} has {stored} bytes: {_AGAIN}")
        return cls(path, tensors, directory)

    @functools.cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        """One tensor: float32, float16, bfloat16, int64, int32 or bool, contiguous.

        Raises:
          UserError: the file is damaged.
        """
        tensor = self._tensors[name]
        dtype = tensor.dtype
        with (
            _reading(self.path) as archive,
            _open_member(archive, f"{self._directory}data/{tensor.storage.key}") as file,
        ):
            # A seek ends the check of the storage's checksum, which whole storages are to have.
            if tensor.offset:
                file.seek(tensor.offset * dtype.itemsize)
            values = np.frombuffer(file.read(tensor.extent * dtype.itemsize), dtype)
        if values.size < tensor.extent:
            raise UserError(f"{self.path} is damaged, it ends within tensor {name!r}: {_AGAIN}")
        strides = [stride * dtype.itemsize for stride in tensor.strides]
        return np.lib.stride_tricks.as_strided(values, tensor.shape, strides).copy()


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[zipfile.ZipFile]:
    try:
        with path.open("rb") as file:
            is_zip = file.read(4) == b"PK\3\4"
        if not is_zip:
            raise UserError(f"{path} is not in the zip format of torch.save (torch 1.6 and later): {_AS_SAFETENSORS}")
        with zipfile.ZipFile(path) as archive:
            yield archive
    except UserError:
        raise
    # zipfile raises several kinds for a file that is cut or changed.
    except (OSError, zipfile.BadZipFile, EOFError, ValueError, RuntimeError, KeyError) as error:
        raise UserError(f"{path} cannot be read ({error}): it is damaged; {_AGAIN}") from error


def _open_member(archive: zipfile.ZipFile, name: str) -> IO[bytes]:
    if archive.getinfo(name).compress_type != zipfile.ZIP_STORED:
        raise UserError(f"{archive.filename} is compressed, which torch.save does not do: {_AS_SAFETENSORS}")
    return archive.open(name)


def _read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    with _open_member(archive, name) as file:
        return file.read()


def _unpickle(path: Path, data: bytes) -> dict[str, _Tensor]:
    try:
        state = _StateDictUnpickler(io.BytesIO(data)).load()
        entries = dict(dict.items(state))
    except _ForbiddenGlobal as error:
        raise UserError(
            f"{path} refers to {str(error)!r}, which no plain state dict does, and nothing of it was run: if you trust "
            f"the file, {_AS_SAFETENSORS}"
        ) from error
    except Exception as error:  # a damaged pickle raises almost any kind
        raise UserError(f"{path} holds no state dict ({error!r}): {_AGAIN}, or {_AS_SAFETENSORS}") from error
    for name, value in entries.items():
        if not (isinstance(name, str) and isinstance(value, _Tensor)):
            raise UserError(f"{path} holds {name!r}, which is no named tensor: {_AS_SAFETENSORS}")
    return entries


class _ForbiddenGlobal(Exception):
    pass


class _StateDictUnpickler(pickle.Unpickler):
    """Knows no globals but those of a state dict: whatever else a pickle names is neither imported nor called."""

    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "collections", "OrderedDict":
                return collections.OrderedDict
            case "torch._utils", "_rebuild_tensor_v2":
                return self._rebuild_tensor
            case "torch._utils", "_rebuild_parameter":
                return self._rebuild_parameter
            case "torch", _ if name in _DTYPES:
                return name
        raise _ForbiddenGlobal(f"{module}.{name}")

    def persistent_load(self, pid: Any) -> _Storage:
        kind, dtype, key, _device, size = pid
        if kind != "storage" or dtype not in _DTYPES or not isinstance(key, str) or type(size) is not int:
            raise ValueError(f"storage {pid!r}")
        return _Storage(key, dtype, size)

    def _rebuild_tensor(
        self,
        storage: _Storage,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        _requires_grad: bool,
        _hooks: Any,
        metadata: Any = None,
    ) -> _Tensor:
        if metadata:  # a negated view, say, whose values are not those that are stored
            raise ValueError(f"tensor metadata {metadata!r}")
        numbers = (offset, *shape, *strides)
        if not isinstance(storage, _Storage) or any(type(number) is not int or number < 0 for number in numbers):
            raise ValueError(f"shape {shape}, strides {strides}, offset {offset}")
        tensor = _Tensor(storage, offset, tuple(shape), tuple(strides))
        if offset + tensor.extent > storage.size:
            raise ValueError(f"a tensor beyond the {storage.size} elements of storage {storage.key!r}")
        return tensor

    def _rebuild_parameter(self, data: _Tensor, _requires_grad: bool, _hooks: Any) -> _Tensor:
        return data
