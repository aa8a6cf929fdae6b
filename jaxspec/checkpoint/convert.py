"""From a GGUF file, a Hugging Face directory or a published draft head to a jaxspec checkpoint."""

import math
import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from jaxspec.checkpoint import store
from jaxspec.checkpoint.eagle3_files import is_head, open_eagle3
from jaxspec.checkpoint.gguf import open_gguf
from jaxspec.checkpoint.huggingface import open_huggingface
from jaxspec.checkpoint.source import Source
from jaxspec.checkpoint.store import Checkpoint
from jaxspec.errors import UserError
from jaxspec.progress import peak_host_memory


def convert(src: Path, dst: Path, show_progress: bool = True) -> Checkpoint:
    """Writes the model or draft head at `src` to the new directory `dst`.

    Args:
      src: a GGUF file, a Hugging Face directory or the directory of an EAGLE-3 head.
      dst: a path that does not exist, or an empty directory.
      show_progress: a bar, then the size and the peak host memory, on stderr.

    Raises:
      UserError: `src` is none of them or is damaged, `dst` is taken, or the two do not fit jaxspec's models.
    """
    started = time.monotonic()
    source = open_source(src)
    elements = sum(math.prod(shape) for shape in source.shapes.values())
    console = Console(stderr=True, quiet=not show_progress, highlight=False, soft_wrap=True)
    columns = (TextColumn("converting"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not show_progress) as bar:
        task = bar.add_task("convert", total=elements)
        try:
            checkpoint = store.write(dst, source, lambda done: bar.advance(task, done))
        except OSError as error:
            raise UserError(f"cannot write {dst} ({error}): choose a writable place with room for the model") from error
    size = sum(path.stat().st_size for path in dst.rglob("*") if path.is_file())
    console.print(
        f"{dst}: {elements / 1e6:.1f} M parameters, {size / 1e6:.0f} MB on disk, {time.monotonic() - started:.1f} s, "
        f"peak host memory {peak_host_memory() / 1e6:.0f} MB",
        markup=False,
    )
    return checkpoint


def open_source(src: Path) -> Source:
    """The model or draft head at `src`, by what is there.

    Raises:
      UserError: nothing is there, or nothing that can be converted.
    """
    if not src.exists():
        raise UserError(f"{src} does not exist: give a GGUF file or a Hugging Face directory (fetch a model first)")
    if src.is_file():
        if src.suffix in (".safetensors", ".bin"):
            raise UserError(f"{src} is one file of a model: give the directory that holds it and its config.json")
        return open_gguf(src)
    if (src / store.MANIFEST).is_file():
        raise UserError(f"{src} is a jaxspec checkpoint already: use it as it is")
    if not (src / "config.json").is_file() and (files := sorted(src.glob("*.gguf"))):
        raise UserError(f"{src} is a directory of GGUF files: give one of them, such as {files[0]}")
    return open_eagle3(src) if is_head(src) else open_huggingface(src)
