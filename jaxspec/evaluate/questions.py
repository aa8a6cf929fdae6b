"""Questions from JSONL files, and the prompts that ask them turn by turn."""

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxspec.checkpoint.json_file import read_json_lines
from jaxspec.errors import UserError

_ROLES = ("system", "user", "assistant")
_ID_FIELDS = ("question_id", "task_id", "id", "uid")
_SPLITS = ("train", "test", "valid", "validation", "dev")


@dataclasses.dataclass(frozen=True)
class Question:
    """What a user asks, in one turn or several.

    Attributes:
      id: as its file has it, else the number of its line.
      category: as its file has it, else the name of the file (of its folder, where the file is named after a split).
      turns: what the user says, each after the answer to the one before.
      context: chat messages before the first turn, if any: a system prompt, say.
      split: as its file has it, such as train or heldout.
    """

    id: str
    category: str
    turns: tuple[str, ...]
    context: tuple[Mapping[str, str], ...] = ()
    split: str | None = None


def read_questions(path: Path, limit: int | None = None) -> list[Question]:
    """The first `limit` questions of a file with a JSON object a line; blank lines are passed over.

    What is asked is the first of these fields that an object has: `turns`, a list of texts (Spec-Bench, MT-bench);
    `prompt`, a text (HumanEval) or a list of chat messages that ends with the user's; `question`, a text (GSM8K).

    Raises:
      UserError: the file can't be read, holds no questions, or one of its lines is something else.
    """
    questions = [_parse(row, number, path) for number, row in itertools.islice(read_json_lines(path), limit)]
    if not questions:
        raise UserError(f"{path} holds no questions: give a JSONL file, a JSON object a line")
    return questions


def prompt_for(question: Question, answers: Sequence[str], is_chat: bool) -> str | list[dict[str, Any]]:
    """The prompt of the turn after `answers`: all that was said so far, as chat messages or joined by newlines."""
    messages: list[dict[str, Any]] = [dict(message) for message in question.context]
    for turn, text in enumerate(question.turns[: len(answers) + 1]):
        messages.append({"role": "user", "content": text})
        messages += [{"role": "assistant", "content": answer} for answer in answers[turn : turn + 1]]
    return messages if is_chat else "\n".join(message["content"] for message in messages)


def _parse(row: Mapping[str, Any], number: int, path: Path) -> Question:
    where = f"{path}, line {number}"
    id_ = next((row[field] for field in _ID_FIELDS if field in row), number)
    category = row.get("category", path.resolve().parent.name if path.stem in _SPLITS else path.stem)
    if not _is_text(category):
        raise UserError(f"{where}: category={category!r} must be a text; leave it out to take the file's name")
    return Question(str(id_), category, *_asked(row, where), split=row.get("split"))


def _asked(row: Mapping[str, Any], where: str) -> tuple[tuple[str, ...], tuple[Mapping[str, str], ...]]:
    """The turns of a row, and the messages before them."""
    if "turns" in row:
        turns = row["turns"]
        if not (isinstance(turns, list) and turns and all(_is_text(turn) for turn in turns)):
            raise UserError(f"{where}: turns={_shown(turns)} must be a list of texts, one or more and none empty")
        return tuple(turns), ()
    if isinstance(row.get("prompt"), list):
        messages = row["prompt"]
        if not (messages and all(_is_message(message) for message in messages) and messages[-1]["role"] == "user"):
            raise UserError(
                f"{where}: prompt={_shown(messages)} must be a text, or a list of chat messages with a role "
                f"({', '.join(_ROLES)}) and a text as content, the last one of the user"
            )
        return (messages[-1]["content"],), tuple(messages[:-1])
    for field in ("prompt", "question"):
        if field in row:
            if not _is_text(row[field]):
                raise UserError(f"{where}: {field}={_shown(row[field])} must be a text that is not empty")
            return (row[field],), ()
    raise UserError(
        f"{where} asks nothing: it has the fields {', '.join(row) or 'none'}, but needs turns, prompt or question"
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and value.get("role") in _ROLES and isinstance(value.get("content"), str)


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "…"
