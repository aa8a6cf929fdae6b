"""Which drafter a name or a path means."""

from pathlib import Path

from jaxspec.drafts.eagle3 import Eagle3
from jaxspec.drafts.interface import Drafter
from jaxspec.drafts.ngram import NGram
from jaxspec.drafts.none import NoDraft
from jaxspec.errors import UserError

DRAFTERS: dict[str, Drafter] = {"none": NoDraft(), "ngram": NGram()}


def find_drafter(name_or_path: str) -> Drafter:
    """A drafter without weights by its name, or a trained one by the directory that holds it.

    Raises:
      UserError: it is neither.
    """
    if name_or_path in DRAFTERS:
        return DRAFTERS[name_or_path]
    path = Path(name_or_path)
    if path.is_dir():
        return Eagle3.open(path)
    if path.exists():
        raise UserError(f"draft {name_or_path!r} is a file: give the directory that holds it and its config.json")
    raise UserError(
        f"draft {name_or_path!r} is neither a directory nor one of {', '.join(DRAFTERS)}: choose one of these, or give "
        "the directory of an EAGLE-3 head, as it was published or as `jaxspec convert SRC DST` made it"
    )
