"""JSON objects in files, with errors that a user can act on."""

import json
from pathlib import Path
from typing import Any

from jaxspec.errors import UserError


def read_json(path: Path, remedy: str) -> dict[str, Any]:
    """The object in `path`.

    Raises:
      UserError: the file is missing, or holds something else; `remedy` ends its message.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read as JSON ({error}): {remedy}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path} holds a JSON {type(value).__name__}, not an object: {remedy}")
    return value
