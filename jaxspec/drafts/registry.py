"""Which drafter a name means."""

from jaxspec.drafts.interface import Drafter
from jaxspec.drafts.ngram import NGram
from jaxspec.drafts.none import NoDraft
from jaxspec.errors import UserError

DRAFTERS: dict[str, Drafter] = {"none": NoDraft(), "ngram": NGram()}


def find_drafter(name: str) -> Drafter:
    if name not in DRAFTERS:
        raise UserError(f"draft {name!r} is unknown: choose one of {', '.join(DRAFTERS)}")
    return DRAFTERS[name]
