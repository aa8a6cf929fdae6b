"""JSON objects in files, with errors that a user can act on."""

import json
from collections.abc import Iterator
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


def read_json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a JSONL file with the numbers of their lines; blank lines are passed over.

    Raises:
      UserError: the file can't be read, or a line holds something else.
    """
    try:
        with path.open(encoding="utf-8", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield number, _parse_line(line, f"{path}, line {number}")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): give a JSONL file, a JSON object a line, in UTF-8"
        ) from error


def _parse_line(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}): each line must be a JSON object") from error
    if not isinstance(row, dict):
        raise UserError(f"{where} holds a JSON {type(row).__name__}: each line must be a JSON object")
    return row
