"""`small.bin` was written by torch itself, with `tools/make_torch_fixture.py`."""

import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxspec.checkpoint.torch_file import TorchFile
from jaxspec.errors import UserError

SMALL = Path(__file__).parents[1] / "fixtures" / "torch" / "small.bin"
GRID = np.arange(12, dtype=np.float32).reshape(3, 4)
TENSORS = {
    "float32": GRID,
    "float16": (GRID / 8).astype(np.float16),
    "bfloat16": (GRID / 8).astype(ml_dtypes.bfloat16),
    "int64": np.arange(5) - 2,
    "int32": np.arange(5, dtype=np.int32) - 2,
    "bool": np.array([True, False, True]),
    "transposed": GRID.T,
    "head": np.arange(4, dtype=np.float32),
    "tail": np.arange(4, 10, dtype=np.float32).reshape(2, 3),
    "every_other": np.arange(1, 10, 2, dtype=np.float32),
    "expanded": np.full((2, 3), 3, np.float32),
    "empty": np.empty((0, 3), np.float32),
    "scalar": np.array(2.5, np.float32),
    "parameter": GRID + 100,
}


def rewrite(path: Path, directory: str = "small/", compression: int = zipfile.ZIP_STORED, **members: bytes) -> Path:
    """The file with other contents of some members, named by what follows its last dot or slash."""
    with zipfile.ZipFile(SMALL) as old, zipfile.ZipFile(path, "w", compression) as new:
        for name in old.namelist():
            content = members.get(name.split("/")[-1].split(".")[-1], old.read(name))
            new.writestr(directory + name.removeprefix("small/"), content)
    return path


def old_pickle() -> bytes:
    with zipfile.ZipFile(SMALL) as archive:
        return archive.read("small/data.pkl")


def refused(action, *parts: str) -> None:
    with pytest.raises(UserError) as raised:
        action()
    assert "\n" not in str(raised.value)
    for part in parts:
        assert part in str(raised.value)


def test_every_tensor_that_torch_wrote_is_read():
    file = TorchFile.open(SMALL)
    assert file.shapes == {name: array.shape for name, array in TENSORS.items()}
    for name, array in TENSORS.items():
        read = file.read(name)
        assert read.dtype == array.dtype and read.flags.c_contiguous and read.flags.writeable
        np.testing.assert_array_equal(read, array)


def test_the_directory_inside_may_have_any_name(tmp_path):
    file = TorchFile.open(rewrite(tmp_path / "a.bin", directory="archive/"))
    np.testing.assert_array_equal(file.read("parameter"), TENSORS["parameter"])


def test_a_tensor_is_read_without_the_others(tmp_path):
    path = rewrite(tmp_path / "a.bin")
    file = TorchFile.open(path)
    content = bytearray(path.read_bytes())
    at = content.index(TENSORS["parameter"].tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    np.testing.assert_array_equal(file.read("float32"), TENSORS["float32"])
    refused(lambda: file.read("parameter"), "a.bin", "damaged")


class Hostile:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("wrap", [lambda bad: bad, lambda bad: {"weight": bad}, lambda bad: OrderedDict(a=bad)])
def test_a_call_that_a_pickle_asks_for_is_refused_and_not_made(tmp_path, protocol, wrap):
    told = tmp_path / "told"
    data = pickle.dumps(wrap(Hostile(os.system, f"touch {told}")), protocol)
    refused(lambda: TorchFile.open(rewrite(tmp_path / "a.bin", pkl=data)), "a.bin", "'posix.system'", "not", "run")
    assert not told.exists()


@pytest.mark.parametrize(
    "function", [eval, getattr, __import__, open, np.array, pickle.loads], ids=lambda function: function.__name__
)
def test_no_other_global_is_admitted(tmp_path, function):
    refused(
        lambda: TorchFile.open(rewrite(tmp_path / "a.bin", pkl=pickle.dumps(Hostile(function, "x")))),
        function.__name__,
        "nothing of it was run",
    )


@pytest.mark.parametrize(
    "name", ["torch\nFloatStorage", "torch._utils\n_rebuild_tensor_v2", "collections\nOrderedDict"]
)
def test_attributes_of_what_a_pickle_names_cannot_be_set(tmp_path, name):
    """By BUILD, the opcode for it; a changed stand-in would read other files wrongly."""
    data = b"\x80\x02c" + name.encode() + b"\nN}X\x01\x00\x00\x00xK\x01s\x86b."
    refused(lambda: TorchFile.open(rewrite(tmp_path / "a.bin", pkl=data)), "attribute")


def test_a_dtype_that_is_not_read_is_named(tmp_path):
    data = old_pickle().replace(b"ctorch\nHalfStorage\n", b"ctorch\nDoubleStorage\n")
    refused(lambda: TorchFile.open(rewrite(tmp_path / "a.bin", pkl=data)), "'torch.DoubleStorage'", "safetensors")


def test_a_view_beyond_its_storage_is_refused(tmp_path):
    """The first tensor is [3, 4] with strides [4, 1], small integers that a pickle writes as K and a byte."""
    data = old_pickle().replace(b"K\x03K\x04\x86", b"K\x03K\x05\x86", 1)
    refused(lambda: TorchFile.open(rewrite(tmp_path / "a.bin", pkl=data)), "beyond the 12 elements")


@pytest.mark.parametrize(
    "content", [pickle.dumps([1, 2]), pickle.dumps({"a": 1}), pickle.dumps({3: "a"}), b"", b"\x80"]
)
def test_what_is_no_state_dict_is_refused(tmp_path, content):
    refused(lambda: TorchFile.open(rewrite(tmp_path / "a.bin", pkl=content)), "a.bin", "safetensors")


def test_other_byte_orders_and_compressed_files_are_refused(tmp_path):
    refused(lambda: TorchFile.open(rewrite(tmp_path / "a.bin", byteorder=b"big")), "byte order", "safetensors")
    packed = rewrite(tmp_path / "b.bin", compression=zipfile.ZIP_DEFLATED)
    refused(lambda: TorchFile.open(packed), "b.bin", "compressed")


def test_the_format_before_torch_1_6_is_refused(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2))
    refused(lambda: TorchFile.open(path), "a.bin", "torch 1.6", "safetensors")


@pytest.mark.parametrize("kept", [0.1, 0.5, 0.99])
def test_a_cut_file_is_refused(tmp_path, kept):
    path = tmp_path / "a.bin"
    content = SMALL.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    refused(lambda: TorchFile.open(path), "a.bin", "damaged", "again")


def test_a_lost_storage_is_refused(tmp_path):
    with zipfile.ZipFile(SMALL) as old, zipfile.ZipFile(tmp_path / "a.bin", "w") as new:
        for name in old.namelist():
            if name != "small/data/1":
                new.writestr(name, old.read(name))
    refused(lambda: TorchFile.open(tmp_path / "a.bin"), "a.bin", "damaged", "float16")
