import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from gguf_writer import model_tensors, write_model
from safetensors.numpy import save_file

from jaxspec.checkpoint import store
from jaxspec.checkpoint.convert import convert
from jaxspec.checkpoint.gguf import open_gguf
from jaxspec.checkpoint.huggingface import open_huggingface
from jaxspec.checkpoint.store import Checkpoint
from jaxspec.errors import UserError

HEAD = "lm_head.weight"


@pytest.fixture
def directory(tmp_path, gguf) -> Path:
    """The tiny model as a Hugging Face directory in bfloat16."""
    source = open_gguf(gguf)
    path = tmp_path / "hf"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(source.config))
    for name, content in source.tokenizer_files.items():
        (path / name).write_text(content)
    save_file({name: source.read(name).astype(ml_dtypes.bfloat16) for name in source.names}, path / "model.safetensors")
    return path


def refused(action, *parts: str) -> None:
    with pytest.raises(UserError) as raised:
        action()
    assert "\n" not in str(raised.value)
    for part in parts:
        assert part in str(raised.value)


def test_a_gguf_file_becomes_a_checkpoint_of_its_tensors(tmp_path, gguf):
    checkpoint = convert(gguf, tmp_path / "out", show_progress=False)
    source = open_gguf(gguf)
    for name, array in checkpoint.read(source.names).items():
        np.testing.assert_array_equal(array, source.read(name))
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())["bos_token"] == "<s>"


def test_a_huggingface_directory_becomes_a_checkpoint_of_its_tensors(tmp_path, directory, gguf):
    checkpoint = convert(directory, tmp_path / "out", show_progress=False)
    source = open_gguf(gguf)
    for name, array in checkpoint.read(source.names).items():
        assert array.dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(array, source.read(name).astype(ml_dtypes.bfloat16))


def test_size_and_memory_are_reported_on_stderr(tmp_path, gguf, capsys):
    convert(gguf, tmp_path / "out")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(r"M parameters, .* MB on disk, .* peak host memory \d+ MB", captured.err)
    convert(gguf, tmp_path / "quiet", show_progress=False)
    assert capsys.readouterr().err == ""


def test_parts_listed_by_an_index_are_joined(tmp_path, directory, gguf):
    source = open_gguf(gguf)
    (directory / "model.safetensors").unlink()
    names = list(source.names)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, members in parts.items():
        save_file({name: source.read(name) for name in members}, directory / file)
    index = {"weight_map": {name: file for file, members in parts.items() for name in members}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert open_huggingface(directory).shapes == source.shapes
    convert(directory, tmp_path / "out", show_progress=False)
    (directory / "b.safetensors").unlink()
    refused(lambda: open_huggingface(directory), "b.safetensors")


def test_a_stored_copy_of_a_tied_head_and_rope_buffers_are_left_out(directory, gguf):
    source = open_gguf(gguf)
    tensors = {name: source.read(name) for name in source.names}
    extra = {HEAD: np.ones((260, 64), np.float32), "model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8)}
    save_file(tensors | extra, directory / "model.safetensors")
    assert set(open_huggingface(directory).names) == set(tensors)


def test_an_untied_head_is_kept(tmp_path):
    untied = write_model(tmp_path / "untied.gguf", tensors=model_tensors(untied=True))
    checkpoint = convert(untied, tmp_path / "out", show_progress=False)
    assert checkpoint.read([HEAD])[HEAD].shape == (260, 64)


def test_generation_config_and_template_file_are_merged(directory):
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, 259]}))
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    source = open_huggingface(directory)
    assert source.config["eos_token_id"] == [259, 258]
    assert json.loads(source.tokenizer_files["tokenizer_config.json"])["chat_template"] == "{{ messages }}"


def test_weights_that_are_not_safetensors_are_refused(directory):
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    refused(lambda: open_huggingface(directory), "pytorch_model.bin", "safetensors")


def test_a_directory_without_tokenizer_is_refused(directory):
    (directory / "tokenizer.json").unlink()
    refused(lambda: open_huggingface(directory), "tokenizer.json")


def test_quantised_weights_are_refused(directory):
    (directory / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    refused(lambda: open_huggingface(directory), "'gptq'")


def test_a_cut_safetensors_file_is_refused(tmp_path, directory):
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(lambda: convert(directory, tmp_path / "out", show_progress=False), "model.safetensors", "damaged")


def test_what_cannot_be_converted_is_named(tmp_path, gguf, directory):
    refused(lambda: convert(tmp_path / "none", tmp_path / "out"), "does not exist")
    refused(lambda: convert(directory / "model.safetensors", tmp_path / "out"), "one file of a model")
    refused(lambda: convert(tmp_path, tmp_path / "out"), "tiny.gguf")
    (tmp_path / "empty").mkdir()
    refused(lambda: convert(tmp_path / "empty", tmp_path / "out"), "config.json")
    convert(gguf, tmp_path / "out", show_progress=False)
    refused(lambda: convert(tmp_path / "out", tmp_path / "out2"), "already")
    refused(lambda: convert(gguf, tmp_path / "out"), "not an empty directory")


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, MemoryError])
def test_interrupted_conversion_leaves_nothing(tmp_path, source, interruption):
    def interrupt(elements):
        raise interruption

    with pytest.raises(interruption):
        store.write(tmp_path / "out", source, interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


# Converts, but stops for good once the first layer is on disk.
STUCK = """
import sys, time
from pathlib import Path
from jaxspec.checkpoint import store
from jaxspec.checkpoint.gguf import open_gguf
stored = []
def progress(elements):
    stored.append(elements)
    if len(stored) == 2:
        print("stuck", flush=True)
        time.sleep(600)
store.write(Path(sys.argv[2]), open_gguf(Path(sys.argv[1])), progress)
"""


def test_killed_conversion_leaves_nothing_that_loads_and_the_next_one_tidies_up(tmp_path, gguf, environment):
    out = tmp_path / "out"
    with subprocess.Popen(
        [sys.executable, "-c", STUCK, str(gguf), str(out)], stdout=subprocess.PIPE, text=True, env=environment
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "stuck\n"
        (partial,) = tmp_path.glob(".out.partial-*")
        # While it lives, another conversion to the same place leaves its files alone.
        convert(gguf, out, show_progress=False)
        assert (partial / "params" / "embed").is_dir()
        child.send_signal(signal.SIGKILL)
    for path in (partial, out.rename(tmp_path / "other") and out):
        with pytest.raises(UserError):
            Checkpoint.open(path)
    assert partial.exists()
    convert(gguf, out, show_progress=False)
    assert not partial.exists()
    Checkpoint.open(out)


def test_ctrl_c_in_mid_conversion_leaves_nothing(tmp_path, gguf, environment):
    out = tmp_path / "out"
    with subprocess.Popen(
        [sys.executable, "-c", STUCK, str(gguf), str(out)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment,
    ) as child:
        assert child.stdout is not None and child.stdout.readline() == "stuck\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(30) != 0
    assert sorted(os.listdir(tmp_path)) == ["tiny.gguf"]


def test_memory_of_a_conversion_stays_near_a_layer(tmp_path, environment):
    """400 MB of layers in a process that needs far less than that on top of its imports."""
    code = """
import resource, sys
from pathlib import Path
import numpy as np
from jaxspec.checkpoint import store
from jaxspec.checkpoint.source import Source
from jaxspec.models.registry import read_config
from jaxspec.models.tensors import tensor_shapes
config = dict(model_type="llama", vocab_size=32, hidden_size=512, intermediate_size=2048, num_hidden_layers=24,
              num_attention_heads=8, tie_word_embeddings=True)
shapes = tensor_shapes(read_config(config))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
source = Source(config=config, tokenizer_files={}, shapes=shapes, read=lambda n: np.ones(shapes[n], np.float32))
growth = []
store.write(Path(sys.argv[1]), source, lambda _: growth.append(peak()))
print(growth[-1] - growth[1])
"""
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "out")], capture_output=True, text=True, env=environment, check=True
    )
    assert float(run.stdout) < 130
