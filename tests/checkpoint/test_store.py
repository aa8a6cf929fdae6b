import dataclasses
import json
import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxspec.checkpoint import store
from jaxspec.checkpoint.source import Source
from jaxspec.checkpoint.store import Checkpoint
from jaxspec.errors import UserError

QUERY = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def tensors(source) -> dict[str, np.ndarray]:
    return {name: source.read(name) for name in source.names}


def source_of(like: Source, tensors: dict[str, np.ndarray]) -> Source:
    """The same model with other tensors."""
    shapes = {name: array.shape for name, array in tensors.items()}
    return dataclasses.replace(like, shapes=shapes, read=tensors.__getitem__)


def refused(action, *parts: str) -> None:
    with pytest.raises(UserError) as raised:
        action()
    assert "\n" not in str(raised.value)
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_what_is_written_is_read_back_bit_for_bit(tmp_path, source, tensors, dtype):
    tensors = {name: array.astype(dtype) for name, array in tensors.items()}
    written = store.write(tmp_path / "out", source_of(source, tensors))
    opened = Checkpoint.open(tmp_path / "out")
    assert opened == written and opened.config == source.config
    assert opened.shapes == {name: array.shape for name, array in tensors.items()}
    read = opened.read(reversed(tensors))
    assert list(read) == list(reversed(tensors))
    for name, array in tensors.items():
        assert read[name].dtype == dtype
        np.testing.assert_array_equal(read[name], array)


def test_a_few_tensors_of_several_layers_are_read_alone(tmp_path, source, tensors):
    checkpoint = store.write(tmp_path / "out", source)
    names = ["model.norm.weight", QUERY, "model.layers.0.mlp.up_proj.weight"]
    read = checkpoint.read(names)
    assert list(read) == names
    np.testing.assert_array_equal(read[QUERY], tensors[QUERY])


def test_progress_adds_up_to_all_elements(tmp_path, source, tensors):
    steps: list[int] = []
    store.write(tmp_path / "out", source, steps.append)
    assert sum(steps) == sum(array.size for array in tensors.values())


def test_a_missing_tensor_is_named(tmp_path, source, tensors):
    del tensors[QUERY]
    refused(lambda: store.write(tmp_path / "out", source_of(source, tensors)), QUERY, "lacks", "[64, 64]")


def test_an_extra_tensor_is_named(tmp_path, source, tensors):
    tensors["model.layers.2.mlp.up_proj.weight"] = np.ones((96, 64), np.float32)
    refused(
        lambda: store.write(tmp_path / "out", source_of(source, tensors)),
        "model.layers.2.mlp.up_proj.weight",
        "[96, 64]",
    )


def test_both_shapes_of_a_misshapen_tensor_are_named(tmp_path, source, tensors):
    tensors[QUERY] = np.ones((64, 32), np.float32)
    refused(lambda: store.write(tmp_path / "out", source_of(source, tensors)), QUERY, "[64, 32]", "[64, 64]")


@pytest.mark.parametrize(("bad", "said"), [(np.nan, "NaN"), (np.inf, "infinity")])
def test_a_tensor_that_is_not_finite_is_named(tmp_path, source, tensors, bad, said):
    tensors[QUERY][3, 5] = bad
    refused(lambda: store.write(tmp_path / "out", source_of(source, tensors)), QUERY, said)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_a_dtype_that_is_not_stored_is_named(tmp_path, source, tensors):
    tensors[QUERY] = tensors[QUERY].astype(np.float64)
    refused(lambda: store.write(tmp_path / "out", source_of(source, tensors)), QUERY, "float64", "bfloat16")


def test_a_destination_in_use_is_left_alone(tmp_path, source):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("kept")
    refused(lambda: store.write(tmp_path / "out", source), str(tmp_path / "out"), "not an empty directory")
    assert (tmp_path / "out" / "mine").read_text() == "kept"


def test_an_empty_destination_is_filled(tmp_path, source):
    (tmp_path / "out").mkdir()
    store.write(tmp_path / "out", source)
    Checkpoint.open(tmp_path / "out")


def test_another_process_than_the_first_of_a_run_does_not_write(tmp_path, source, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    refused(lambda: store.write(tmp_path / "out", source), "process 1", "jaxspec convert")


def huggingface(directory: Path) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text("{}")
    return directory


def empty(directory: Path) -> Path:
    directory.mkdir()
    return directory


def half_written(directory: Path) -> Path:
    (directory / "params" / "embed").mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    return directory


def text(path: Path) -> Path:
    path.write_text("hello")
    return path


OTHERS = {
    "nothing": (lambda path: path, "does not exist"),
    "huggingface": (huggingface, "Hugging Face directory"),
    "empty": (empty, "without jaxspec.json"),
    "half_written": (half_written, "half-written"),
    "text": (text, "is a file"),
}


@pytest.mark.parametrize(("make", "said"), OTHERS.values(), ids=OTHERS)
def test_what_is_not_a_checkpoint_is_called_what_it_is(tmp_path, make, said):
    refused(lambda: Checkpoint.open(make(tmp_path / "a")), str(tmp_path / "a"), said, "jaxspec convert")


def test_a_gguf_file_is_called_one(gguf):
    refused(lambda: Checkpoint.open(gguf), "is a GGUF file", f"jaxspec convert {gguf} DST")


def edit(path: Path, change) -> None:
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def test_a_manifest_and_a_config_of_different_models_do_not_open(tmp_path, source):
    store.write(tmp_path / "out", source)
    edit(tmp_path / "out" / "config.json", lambda config: config.update(intermediate_size=128))
    refused(lambda: Checkpoint.open(tmp_path / "out"), "gate_proj", "[96, 64]", "[128, 64]")
    edit(tmp_path / "out" / "config.json", lambda config: config.update(intermediate_size=96, num_hidden_layers=3))
    refused(lambda: Checkpoint.open(tmp_path / "out"), "model.layers.2.", "lacks")


def test_another_format_version_does_not_open(tmp_path, source):
    store.write(tmp_path / "out", source)
    edit(tmp_path / "out" / "jaxspec.json", lambda manifest: manifest.update(format=99))
    refused(lambda: Checkpoint.open(tmp_path / "out"), "format 99", "jaxspec convert")


@pytest.mark.parametrize("content", ["", "[]", '{"format": 1}', '{"format": 1, "tensors": {"a": 3}}'])
def test_a_damaged_manifest_does_not_open(tmp_path, source, content):
    store.write(tmp_path / "out", source)
    (tmp_path / "out" / "jaxspec.json").write_text(content)
    refused(lambda: Checkpoint.open(tmp_path / "out"), "jaxspec.json", "jaxspec convert")


def test_a_lost_layer_does_not_open(tmp_path, source):
    store.write(tmp_path / "out", source)
    shutil.rmtree(tmp_path / "out" / "params" / "layer_001")
    refused(lambda: Checkpoint.open(tmp_path / "out"), "params/layer_001")


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x40
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [truncate, flip, Path.unlink])
def test_damaged_parameters_are_a_user_error_that_names_tensors(tmp_path, source, damage):
    checkpoint = store.write(tmp_path / "out", source)
    files = [path for path in (tmp_path / "out" / "params" / "layer_001").rglob("*") if path.is_file()]
    damage(max(files, key=lambda path: path.stat().st_size))
    members = [name for name in checkpoint.tensors if name.startswith("model.layers.1.")]
    refused(lambda: checkpoint.read(members), "model.layers.1.", "jaxspec convert")
    checkpoint.read(name for name in checkpoint.tensors if name.startswith("model.layers.0."))


def test_a_tensor_that_its_files_lack_is_named(tmp_path, source):
    checkpoint = store.write(tmp_path / "out", source)
    metadata = tmp_path / "out" / "params" / "layer_001" / "_METADATA"
    metadata.write_text(metadata.read_text().replace(QUERY, "other"))
    refused(lambda: checkpoint.read([QUERY]), QUERY, "jaxspec convert")


def test_a_nan_that_was_stored_is_found_on_reading(tmp_path, source, tensors, monkeypatch):
    tensors[QUERY][0, 0] = np.nan
    with monkeypatch.context() as patch:
        patch.setattr(store, "check_finite", lambda *_: None)
        checkpoint = store.write(tmp_path / "out", source_of(source, tensors))
    refused(lambda: checkpoint.read([QUERY]), QUERY, "NaN")


def test_a_name_that_is_not_stored_is_refused(tmp_path, source):
    checkpoint = store.write(tmp_path / "out", source)
    refused(lambda: checkpoint.read(["lm_head.weight"]), "lm_head.weight")
