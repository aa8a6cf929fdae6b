"""What a user sees of long work."""

import contextlib
import resource
import sys
from collections.abc import Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


class Advance(Protocol):
    """Adds steps to a bar; `note` replaces what stands at its end."""

    def __call__(self, steps: int, note: str | None = None, /) -> None: ...


@contextlib.contextmanager
def progress_bar(title: str, total: int, is_shown: bool, done: int = 0) -> Iterator[Advance]:
    """A bar on stderr that vanishes when it is full; gives a function that adds steps. Nothing off a terminal.

    Args:
      done: steps that were done before.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not (is_shown and sys.stderr.isatty())) as bar:
        task = bar.add_task(title, total=total, completed=done, note="")

        def advance(steps: int, note: str | None = None, /) -> None:
            bar.advance(task, steps)
            if note is not None:
                bar.update(task, note=note)

        yield advance


def peak_host_memory() -> int:
    """Bytes of memory that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
