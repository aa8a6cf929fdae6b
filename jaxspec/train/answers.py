"""Training data from a user's files: prompts that the target answers itself, conversations, and plain texts.

The work is a list of items in a fixed order, cut into shards. A shard is written when all its items are done, and one
that is there is not made again, so that a run that was stopped goes on where it was.
"""

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.engine.sequence import Sequence as Request
from jaxspec.errors import UserError
from jaxspec.evaluate.questions import Question, prompt_for, read_questions
from jaxspec.llm import LLM
from jaxspec.progress import progress_bar
from jaxspec.sampling_params import SamplingParams
from jaxspec.tokenizer import Tokenizer
from jaxspec.train.config import DataConfig
from jaxspec.train.dataset import FORMAT, HELDOUT, MANIFEST, TRAIN, Dataset, Record, shard_path, write_records

_SHARD_ITEMS = 2048
_LOCK = ".writing"


@dataclasses.dataclass(frozen=True)
class Item:
    """One record to be: `answered` with these tokens at this temperature, or given as it is."""

    tokens: tuple[int, ...] = ()
    temperature: float = 0.0
    seed: int = 0
    given: Record | None = None


def open_or_make(
    config: DataConfig,
    target: str,
    tokenizer: Tokenizer,
    start: Callable[[int], LLM],
    seed: int,
    say: Callable[[str], None],
) -> Dataset:
    """The dataset of `config`, made now as far as it is not there yet.

    Args:
      target: what the manifest says of the model that answers.
      start: gives that model for contexts of so many tokens; called only where there is something to answer.

    Raises:
      UserError: a file is wrong, or the directory holds data of other settings.
    """
    made_from = describe(config, target, seed)
    manifest = config.path / MANIFEST
    if manifest.is_file():
        dataset = Dataset.open(config.path)
        _check_same(config.path, dataset.made_from, made_from)
        return dataset
    items = read_items(config, tokenizer, seed)
    _make_directory(config.path, made_from)
    shards = {
        split: [of_split[at : at + _SHARD_ITEMS] for at in range(0, len(of_split), _SHARD_ITEMS)]
        for split, of_split in items.items()
    }
    missing = [
        (shard_path(config.path, split, number), shard)
        for split, of_split in shards.items()
        for number, shard in enumerate(of_split)
        if not shard_path(config.path, split, number).is_file()
    ]
    todo = [item for _, shard in missing for item in shard if item.given is None]
    if todo:
        say(f"{len(todo):,} prompts to answer, in {sum(map(len, items.values())):,} records of {config.path}")
        llm = start(max(len(item.tokens) for item in todo) + config.max_tokens)
        answers = answer(llm, todo, config.max_tokens, config.max_num_seqs)
    else:
        answers = iter(())
    _write_shards(missing, answers, say)
    records = {split: len(of_split) for split, of_split in items.items()}
    partial = manifest.with_name(f".{MANIFEST}.partial")
    partial.write_text(json.dumps({"format": FORMAT, "records": records, "made_from": made_from}, indent=1) + "\n")
    partial.replace(manifest)
    (config.path / _LOCK).unlink()
    return Dataset.open(config.path)


def describe(config: DataConfig, target: str, seed: int) -> dict[str, Any]:
    """What decides the records of a dataset."""
    kinds = {"prompts": config.prompts, "conversations": config.conversations, "texts": config.texts}
    described: dict[str, Any] = {"target": target, "seed": seed, "heldout_every": config.heldout_every}
    described |= {kind: [[path.name, _digest(path)] for path in paths] for kind, paths in kinds.items()}
    if config.prompts:
        described |= {"temperatures": list(config.temperatures), "max_tokens": config.max_tokens}
    if config.texts:
        described["sequence_length"] = config.sequence_length
    return described


def read_items(config: DataConfig, tokenizer: Tokenizer, seed: int) -> dict[str, list[Item]]:
    """All that is to become records, for each split."""
    asked: dict[str, list[tuple[int, ...]]] = {TRAIN: [], HELDOUT: []}
    items: dict[str, list[Item]] = {TRAIN: [], HELDOUT: []}
    for path in config.prompts:
        splits = _splits(path, config.heldout_every)
        for question, split in zip(read_questions(path), splits, strict=True):
            asked[split].append(tuple(_encode_question(question, tokenizer)))
    for split, prompts in asked.items():
        # What is held out is asked greedily once: the evaluation estimates greedy decoding.
        temperatures = config.temperatures if split == TRAIN else (0.0,)
        items[split] = [
            Item(tokens, temperature, seed=_seed(seed, index, round_))
            for index, tokens in enumerate(prompts)
            for round_, temperature in enumerate(temperatures)
        ]
    for path in config.conversations:
        for record, split in zip(read_conversations(path, tokenizer), _splits(path, config.heldout_every), strict=True):
            items[split].append(Item(given=record))
    for path in config.texts:
        pieces = read_text(path, tokenizer, config.sequence_length)
        for index, record in enumerate(pieces):
            items[HELDOUT if index % config.heldout_every == 0 else TRAIN].append(Item(given=record))
    for split, found in items.items():
        if not found:
            raise UserError(f"the files of data leave nothing for the {split} split: give more, or lower heldout_every")
    return items


def read_conversations(path: Path, tokenizer: Tokenizer) -> list[Record]:
    """Conversations of a JSONL file with `messages` (a role and a content each); what assistants say is learned.

    Raises:
      UserError: a line is something else, or the tokenizer has no chat template.
    """
    records = []
    for number, row in _rows(path):
        messages = row.get("messages")
        if not (isinstance(messages, list) and messages and all(_is_message(message) for message in messages)):
            raise UserError(f"{path}, line {number}: needs messages, a list of objects with role and content")
        if messages[-1]["role"] != "assistant":
            raise UserError(f"{path}, line {number}: the last message must be an assistant's, whose answer is learned")
        records.append(_conversation(messages, tokenizer))
    if not records:
        raise UserError(f"{path} holds no conversations: give a JSONL file with messages in each line")
    return records


def read_text(path: Path, tokenizer: Tokenizer, length: int) -> list[Record]:
    """A text in pieces of `length` tokens, all of which are learned."""
    try:
        tokens = np.array(tokenizer.encode(path.read_text(encoding="utf-8")), np.int32)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): give a text file in UTF-8") from error
    starts = range(0, len(tokens) - 1, length)
    return [Record(piece := tokens[at : at + length], np.ones(len(piece), np.bool_)) for at in starts]


def answer(llm: LLM, items: Sequence[Item], max_tokens: int, num_seqs: int) -> Iterator[tuple[Item, Record]]:
    """The target's answers, as they are finished; the next items enter as slots become free."""
    stop_ids = list(llm.tokenizer.eos_token_ids)
    waiting, asked = iter(enumerate(items)), dict[int, Item]()
    is_greedy = all(item.temperature == 0 for item in items)
    llm.engine.warm_up(min(num_seqs, len(items)), is_greedy)
    started, tokens = time.perf_counter(), 0
    with progress_bar("answering prompts", len(items), is_shown=True) as advance:
        while True:
            # Few wait in the engine: it looks through all that do in every round.
            while len(asked) < num_seqs + 8 and (following := next(waiting, None)) is not None:
                order, item = following
                request = Request(
                    order=order,
                    prompt=list(item.tokens),
                    params=SamplingParams(temperature=item.temperature, max_tokens=max_tokens),
                    seed=item.seed,
                    stop_ids=stop_ids,
                )
                llm.engine.add(request)
                asked[order] = item
            if not asked:
                return
            for update in llm.engine.step():
                request = update.sequence
                tokens += len(update.token_ids)
                if request.is_finished and request.order in asked:
                    advance(1, f"{tokens / (time.perf_counter() - started):,.0f} tokens/s")
                    yield asked.pop(request.order), _answered(request)


def _answered(request: Request) -> Record:
    tokens = np.array(request.prompt + request.token_ids, np.int32)
    return Record(tokens, np.arange(len(tokens)) >= len(request.prompt))


def _write_shards(
    missing: Sequence[tuple[Path, Sequence[Item]]], answers: Iterator[tuple[Item, Record]], say: Callable[[str], None]
) -> None:
    """Writes each shard when it is complete, whatever the order in which answers come."""
    started, tokens = time.perf_counter(), 0
    records = {path: [item.given for item in shard] for path, shard in missing}
    place = {id(item): (path, index) for path, shard in missing for index, item in enumerate(shard)}
    open_ = {path: sum(record is None for record in shard) for path, shard in records.items()}

    def write_if_whole(path: Path) -> None:
        if open_[path] == 0:
            write_records(path, [record for record in records.pop(path) if record is not None])

    for path, _ in missing:
        write_if_whole(path)
    for item, record in answers:
        tokens += int(np.count_nonzero(record.is_answer))
        path, index = place[id(item)]
        records[path][index] = record
        open_[path] -= 1
        write_if_whole(path)
        if path not in records:
            speed = tokens / (time.perf_counter() - started)
            say(f"{path.name} is written, {len(records)} files are to come; {speed:,.0f} answer tokens/s")


def _encode_question(question: Question, tokenizer: Tokenizer) -> list[int]:
    prompt = prompt_for(question, [], tokenizer.has_chat_template)
    return tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_messages(prompt)


def _conversation(messages: list[dict[str, Any]], tokenizer: Tokenizer) -> Record:
    """All turns as the chat template writes them, and which tokens the assistant said, end tokens included."""
    text = ""
    tokens: list[int] = []
    is_answer: list[bool] = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.apply_chat_template(messages[:index])
        after = tokenizer.apply_chat_template(messages[: index + 1], for_answer=False)
        if not (before.startswith(text) and after.startswith(before)):
            raise UserError("the chat template changes earlier turns as a conversation grows: give single turns")
        asked, said = (tokenizer.encode_part(part) for part in (before[len(text) :], after[len(before) :]))
        ends = [at for at, token in enumerate(said) if token in tokenizer.eos_token_ids]
        length = ends[-1] + 1 if ends else len(said)
        tokens += asked + said
        is_answer += [False] * len(asked) + [True] * length + [False] * (len(said) - length)
        text = after
    return Record(np.array(tokens, np.int32), np.array(is_answer, np.bool_))


def _splits(path: Path, heldout_every: int) -> list[str]:
    return [
        HELDOUT if (row["split"] == HELDOUT if "split" in row else index % heldout_every == 0) else TRAIN
        for index, (_, row) in enumerate(_rows(path))
    ]


def _rows(path: Path) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """The objects of a JSONL file with their line numbers."""
    try:
        with path.open(encoding="utf-8", newline="\n") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                row = json.loads(line)
                if not isinstance(row, dict):
                    raise UserError(f"{path}, line {number} holds a JSON {type(row).__name__}: it must be an object")
                yield number, row
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(
            f"{path} cannot be read ({error}): give a JSONL file, a JSON object a line, in UTF-8"
        ) from error


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _seed(seed: int, index: int, round_: int) -> int:
    """Of an answer's noise: the same whenever and in whatever company it is asked for."""
    digest = hashlib.blake2b(f"{seed} {round_} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def _digest(path: Path) -> str:
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give a file that is there") from error


def _make_directory(path: Path, made_from: Mapping[str, Any]) -> None:
    """A new directory, or one that a run with the same settings has begun."""
    lock = path / _LOCK
    try:
        path.mkdir(parents=True, exist_ok=True)
        if lock.is_file():
            _check_same(path, json.loads(lock.read_text()), made_from)
        elif any(path.iterdir()):
            raise UserError(f"{path} holds files but no {MANIFEST}: give another data.path, or an empty directory")
        else:
            lock.write_text(json.dumps(made_from))
    except (OSError, ValueError) as error:
        raise UserError(f"data.path {path} cannot be used ({error}): give another one") from error


def _check_same(path: Path, stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for key in sorted({*stored, *wanted}):
        if stored.get(key) != wanted.get(key):
            raise UserError(
                f"{path} holds data of other settings: {key} was {stored.get(key)!r} and is {wanted.get(key)!r}; "
                "give another data.path, or remove the directory"
            )
