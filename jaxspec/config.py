"""YAML files as frozen dataclasses: every key must be a field, and every value of the field's type."""

import dataclasses
import difflib
import sys
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import yaml

from jaxspec.errors import UserError

# A field's rule: (what must hold, in words; whether a value holds it).
type Rule = tuple[str, typing.Callable[[Any], bool]]
_RULE = "rule"


def at_least(least: float) -> Mapping[str, Rule]:
    """`metadata` of a field, or of each member of a list."""
    return {_RULE: (f"at least {least}", lambda value: value >= least)}


def above(bound: float) -> Mapping[str, Rule]:
    return {_RULE: (f"more than {bound}", lambda value: value > bound)}


def between(least: float, most: float) -> Mapping[str, Rule]:
    return {_RULE: (f"between {least} and {most}", lambda value: least <= value <= most)}


def one_of(*choices: str) -> Mapping[str, Rule]:
    return {_RULE: (f"one of {', '.join(choices)}", lambda value: value in choices)}


def read_config[Config](path: Path, kind: type[Config]) -> Config:
    """Reads a file into the dataclass `kind`.

    Raises:
      UserError: the file can't be read or is not YAML; a key is unknown or missing; a value is not of its field's type.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): give a YAML file") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is not YAML ({' '.join(str(error).split())}): correct it") from error
    return build(raw, kind, str(path))


def build[Config](raw: Any, kind: type[Config], where: str, section: str = "") -> Config:
    """The dataclass `kind` from a parsed mapping; `section` is the path of keys to it, with a dot at its end.

    Raises:
      UserError: as of `read_config`.
    """
    if not isinstance(raw, Mapping):
        raise UserError(f"{where}: {section.rstrip('.') or 'the file'} must be keys with values, not {raw!r}")
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in raw:
        if key not in fields:
            close = difflib.get_close_matches(str(key), fields, n=1)
            remedy = f"did you mean {close[0]}?" if close else f"it can have {', '.join(fields)}"
            raise UserError(f"{where}: unknown key {section}{key}: {remedy}")
    types_ = typing.get_type_hints(kind)
    values = {}
    for name, field in fields.items():
        if name in raw:
            values[name] = _value(raw[name], types_[name], field.metadata.get(_RULE), where, section + name)
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise UserError(f"{where}: key {section}{name} is missing: add it")
    return kind(**values)


def _value(raw: Any, kind: Any, rule: Rule | None, where: str, key: str) -> Any:
    members = typing.get_args(kind)
    if isinstance(kind, types.UnionType):
        if raw is None and type(None) in members:
            return None
        (kind,) = (member for member in members if member is not type(None))
        return _value(raw, kind, rule, where, key)
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return build({} if raw is None else raw, kind, where, f"{key}.")  # a section with nothing in it
    if typing.get_origin(kind) is tuple:
        if not isinstance(raw, list):
            raise UserError(f"{where}: {key}={raw!r} must be a list")
        return tuple(_value(each, members[0], rule, where, f"{key}[{index}]") for index, each in enumerate(raw))
    value = _scalar(raw, kind)
    if value is None or (rule is not None and not rule[1](value)):
        names = {int: "an integer", float: "a number", bool: "true or false", str: "a text", Path: "a path"}
        wanted = names[kind] if rule is None else f"{names[kind]}, {rule[0]}"
        raise UserError(f"{where}: {key}={raw!r} must be {wanted}")
    return value


def _scalar(raw: Any, kind: Any) -> Any:
    """The value as `kind`, or None where it is something else."""
    if kind is float and isinstance(raw, str):
        # YAML 1.1 reads 1e-4, without a dot, as a text.
        try:
            raw = float(raw)
        except ValueError:
            return None
    if kind is float and isinstance(raw, int | float) and not isinstance(raw, bool):
        return float(raw) if abs(raw) <= sys.float_info.max else None
    if kind is Path and isinstance(raw, str) and raw:
        return Path(raw).expanduser()
    return raw if type(raw) is kind else None


def refuse_changes(
    stored: Any, wanted: Any, where: str, remedy: str, free: Collection[str] = (), section: str = ""
) -> None:
    """Requires two parsed mappings to say the same.

    Args:
      where: what holds the stored one, at the beginning of the message.
      free: keys, with their sections, that may differ.

    Raises:
      UserError: they don't; it names the first key that differs, and both values.
    """
    for key in sorted({*stored, *wanted}):
        name, before, now = f"{section}{key}", stored.get(key), wanted.get(key)
        if isinstance(before, Mapping) and isinstance(now, Mapping):
            refuse_changes(before, now, where, remedy, free, f"{name}.")
        elif before != now and name not in free:
            raise UserError(f"{where}: {name} was {before!r} and is {now!r}; {remedy}")
