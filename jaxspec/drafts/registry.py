"""Which drafter a name or a path means."""

from pathlib import Path

from jaxspec.drafts.eagle3 import Eagle3
from jaxspec.drafts.interface import Drafter
from jaxspec.drafts.ngram import NGram
from jaxspec.drafts.none import NoDraft
from jaxspec.errors import UserError

DRAFTERS: dict[str, Drafter] = {"none": NoDraft(), "ngram": NGram()}
# Heads that come with jaxspec, each made for one model.
HEADS = {"eagle3": Path(__file__).parents[1] / "heads" / "smollm2-135m-instruct-eagle3"}


def find_drafter(name_or_path: str) -> Drafter:
    """A drafter by its name, or a trained one by the directory that holds it (`./NAME` where a name is the same).

    Raises:
      UserError: it is neither.
    """
    if name_or_path in DRAFTERS:
        return DRAFTERS[name_or_path]
    path = HEADS.get(name_or_path, Path(name_or_path).expanduser())
    if path.is_dir():
        return Eagle3.open(path)
    if path.exists():
        raise UserError(f"draft {name_or_path!r} is a file: give the directory that holds it and its config.json")
    names = ", ".join([*DRAFTERS, *HEADS])
    raise UserError(
        f"draft {name_or_path!r} is neither a directory nor one of {names}: choose one of these, or give "
        "the directory of an EAGLE-3 head, as it was published or as `jaxspec convert SRC DST` made it"
    )
