"""The GGUF container (versions 2 and 3, little-endian): metadata, and tensors that stay on disk until read."""

import dataclasses
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint.gguf_types import DECODERS, Decoder, type_name
from jaxspec.errors import UserError

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `start` and `num_bytes` in the file; `shape` is row-major, `[out, in]` for a matrix."""

    shape: tuple[int, ...]
    decoder: Decoder
    start: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class GGUFFile:
    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    data: np.ndarray  # the whole file, memory-mapped, u8

    @classmethod
    def open(cls, path: Path) -> "GGUFFile":
        """Reads all but the weights.

        Raises:
          UserError: not a GGUF file of version 2 or 3, cut short, damaged, or with a tensor type that is not read.
        """
        try:
            if path.stat().st_size < 24:
                raise UserError(f"{path} is {path.stat().st_size} bytes, too short for a GGUF file: fetch it again")
            data = np.memmap(path, np.uint8, mode="r")
        except OSError as error:
            raise UserError(f"cannot read {path}: {error.strerror}; give the path of a readable GGUF file") from error
        reader = _Reader(path, memoryview(data))
        if (magic := bytes(data[:4])) != MAGIC:
            raise UserError(f"{path} starts with {magic!r}, not with {MAGIC!r}: it is not a GGUF file; give one")
        reader.position = 4
        if (version := reader.scalar("I")) not in (2, 3):
            raise UserError(
                f"{path} is GGUF version {version:#x}: jaxspec reads 2 and 3, little-endian; convert it anew"
            )
        num_tensors, num_keys = reader.scalar("Q"), reader.scalar("Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = reader.string()
            metadata[key] = reader.value(reader.scalar("I"))
        infos = [(reader.string(), reader.shape(), reader.scalar("I"), reader.scalar("Q")) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise UserError(
                f"general.alignment={alignment!r} in {path} must be a positive number: fetch the file again"
            )
        start = -(-reader.position // alignment) * alignment
        tensors = {}
        for name, shape, code, offset in infos:
            if name in tensors:
                raise UserError(f"{path} has the tensor {name!r} twice: it is damaged; fetch it again")
            tensors[name] = _locate(path, name, shape, code, start + offset)
            if start + offset + tensors[name].num_bytes > data.size:
                raise UserError(
                    f"{path} ends at byte {data.size}, inside the tensor {name!r}: it is cut short; fetch it again"
                )
        return cls(path, metadata, tensors, data)

    def read(self, name: str) -> np.ndarray:
        """One tensor in memory: the stored type for F32, F16 and BF16, float32 for the quantised ones."""
        info = self.tensors[name]
        raw = self.data[info.start : info.start + info.num_bytes].view(np.ndarray)
        return info.decoder.decode(raw.reshape(-1, info.decoder.block_bytes)).reshape(info.shape)


def _locate(path: Path, name: str, shape: tuple[int, ...], code: int, start: int) -> TensorInfo:
    decoder = DECODERS.get(code)
    if decoder is None:
        readable = ", ".join(map(type_name, DECODERS))
        raise UserError(
            f"tensor {name!r} in {path} is stored as {type_name(code)}: jaxspec reads {readable}; "
            "use a file of those types"
        )
    if shape[-1] % decoder.block_elements:
        raise UserError(
            f"tensor {name!r} in {path} has rows of {shape[-1]}, but {type_name(code)} stores blocks of "
            f"{decoder.block_elements}: the file is damaged; fetch it again"
        )
    return TensorInfo(shape, decoder, start, math.prod(shape) // decoder.block_elements * decoder.block_bytes)


class _Reader:
    """A position in the header; running past the end is a `UserError`."""

    def __init__(self, path: Path, buffer: memoryview):
        self.path, self.buffer, self.position = path, buffer, 0

    def take(self, count: int) -> memoryview:
        end = self.position + count
        if end > len(self.buffer):
            raise UserError(
                f"{self.path} ends at byte {len(self.buffer)}, inside its header: it is cut short; fetch it again"
            )
        taken = self.buffer[self.position : end]
        self.position = end
        return taken

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        raw = bytes(self.take(self.scalar("Q")))
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.path} has text that is not UTF-8 ({raw[:20]!r}): it is damaged; fetch it again"
            ) from error

    def shape(self) -> tuple[int, ...]:
        """Stored innermost first."""
        num_dims = self.scalar("I")
        if not 1 <= num_dims <= 4:
            raise UserError(
                f"{self.path} has a tensor of {num_dims} dimensions, not 1 to 4: it is damaged; fetch it again"
            )
        return tuple(self.scalar("Q") for _ in range(num_dims))[::-1]

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            element, count = self.scalar("I"), self.scalar("Q")
            if element in _SCALARS:
                code = _SCALARS[element]
                return np.frombuffer(self.take(count * struct.calcsize("<" + code)), np.dtype("<" + code)).tolist()
            return [self.value(element) for _ in range(count)]
        raise UserError(f"{self.path} has a metadata value of unknown kind {kind}: it is damaged; fetch it again")
