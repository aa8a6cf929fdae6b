"""What a user sees of long work."""

import contextlib
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

_SECONDS_BETWEEN_LINES = 30


class Advance(Protocol):
    """Adds steps to a bar; `note` replaces what stands at its end."""

    def __call__(self, steps: int, note: str | None = None, /) -> None: ...


@contextlib.contextmanager
def progress_bar(
    title: str, total: int, is_shown: bool, done: int = 0, say: Callable[[str], None] | None = None
) -> Iterator[Advance]:
    """A bar on stderr that vanishes when it is full; gives a function that adds steps.

    Args:
      done: steps that were done before.
      say: off a terminal, where there is no bar, it is told now and then how far the work is.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    console, is_terminal = Console(stderr=True), sys.stderr.isatty()
    with Progress(*columns, console=console, transient=True, disable=not (is_shown and is_terminal)) as bar:
        task = bar.add_task(title, total=total, completed=done, note="")
        said, last = done, ""
        at = time.monotonic()

        def advance(steps: int, note: str | None = None, /) -> None:
            nonlocal said, last, at
            said, last = said + steps, last if note is None else note
            bar.advance(task, steps)
            bar.update(task, note=last)
            if say is not None and is_shown and not is_terminal and time.monotonic() - at > _SECONDS_BETWEEN_LINES:
                at = time.monotonic()
                say(f"{title}: {said:,} of {total:,}" + (f", {last}" if last else ""))

        yield advance


def peak_host_memory() -> int:
    """Bytes of memory that this process has held at most."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
