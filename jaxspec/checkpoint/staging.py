"""Directories that appear whole or not at all."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from jaxspec.errors import UserError


@contextlib.contextmanager
def staged_directory(destination: Path) -> Iterator[Path]:
    """Yields a temporary sibling of `destination` that takes its name when the body succeeds.

    The sibling is locked while its process lives, so what a killed process left is known by its missing lock, and
    removed by the next one that writes to the same destination.

    Raises:
      UserError: `destination` is a file or a directory that is not empty, before or after the body.
    """
    _refuse_existing(destination)
    destination.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(destination)
    staging, lock = _locked_sibling(destination)
    try:
        yield staging
        try:
            staging.rename(destination)
        except OSError:
            _refuse_existing(destination)
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        os.close(lock)


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A file beside `path` that takes its place when it is complete, and else is gone."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def _refuse_existing(destination: Path) -> None:
    if destination.is_dir() and not any(destination.iterdir()):
        return
    if destination.exists() or destination.is_symlink():
        raise UserError(f"{destination} exists and is not an empty directory: give another destination or remove it")


def _prefix(destination: Path) -> str:
    return f".{destination.name}.partial-"


def _remove_abandoned(destination: Path) -> None:
    for sibling in destination.parent.glob(f"{_prefix(destination)}*"):
        with contextlib.suppress(OSError):
            lock = os.open(sibling, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(sibling)
            finally:
                os.close(lock)


def _locked_sibling(destination: Path) -> tuple[Path, int]:
    while True:
        staging = Path(tempfile.mkdtemp(prefix=_prefix(destination), dir=destination.parent))
        lock = os.open(staging, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Another process may have taken it for abandoned before the lock was held.
        if staging.exists():
            umask = os.umask(0)
            os.umask(umask)
            staging.chmod(0o777 & ~umask)
            return staging, lock
        os.close(lock)
