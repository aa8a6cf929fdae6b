"""Training data from a user's files: prompts that the target answers itself, conversations, and plain texts.

The work is a list of items in a fixed order, cut into shards. A shard is written when all its items are done, and one
that is there is not made again, so that a run that was stopped goes on where it was.
"""

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checkpoint.json_file import read_json_lines
from jaxspec.checkpoint.staging import whole_file
from jaxspec.checkpoint.store import MANIFEST as CHECKPOINT_MANIFEST
from jaxspec.checkpoint.store import Checkpoint
from jaxspec.config import refuse_changes
from jaxspec.engine.sequence import Sequence as Request
from jaxspec.errors import UserError
from jaxspec.evaluate.questions import prompt_for, read_questions
from jaxspec.llm import LLM
from jaxspec.models.registry import read_config
from jaxspec.progress import progress_bar
from jaxspec.sampling_params import SamplingParams
from jaxspec.tokenizer import Tokenizer
from jaxspec.train.config import DataConfig
from jaxspec.train.contamination import NOTHING, Measured, holds_measured, measured_by, own_questions
from jaxspec.train.dataset import HELDOUT, MANIFEST, TRAIN, Dataset, Record, finish_dataset, shard_path, write_records

# What a run that is stopped loses at most, beside the answers that are being written.
_SHARD_ITEMS = 128
# Text that is tokenised at once.
_TEXT_CHARACTERS = 1 << 20
# Tokens of a prompt that enter in one round.
_LEAST_CHUNK, _LARGEST_CHUNK = 64, 1024
# In place of a split; a row that names it is trained on.
_AVOIDED = "avoided"
_BEGUN = ".begun"
_CHANGED = "give another data.path, or remove the directory"

type Say = Callable[[str], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Asked:
    """A prompt to be answered.

    Attributes:
      goes_on: beyond tokens that end an answer.
    """

    tokens: tuple[int, ...]
    temperature: float
    seed: int
    goes_on: bool = False


# What a record is made from; a `Record` is there already.
type Item = Asked | Record


def open_or_make(config: DataConfig, target: Checkpoint, start: Callable[[int, int], LLM], say: Say) -> Dataset:
    """The dataset of `config`, made now as far as it is not there yet.

    Args:
      start: gives the target, for contexts of so many tokens and prompts that enter in chunks of so many; called only
        where there is something to answer.

    Raises:
      UserError: a file is wrong, or the directory holds data of other settings.
    """
    made_from = describe(config, target)
    others = _open_others(config, made_from)
    if not (config.path / MANIFEST).is_file():
        items = read_items(config, Tokenizer.load(target.path), read_config(target.config), say)
        with _alone_in(config.path):
            if not (config.path / MANIFEST).is_file():  # another process may have made it meanwhile
                _begin(config.path, made_from)
                _make(config, items, start, say)
                finish_dataset(config.path, {split: len(of_split) for split, of_split in items.items()}, made_from)
    dataset = Dataset.open(config.path)
    refuse_changes(dataset.made_from, made_from, f"{config.path} holds data of other settings", _CHANGED)
    return Dataset.of(dataset, *others)


def _open_others(config: DataConfig, made_from: Mapping[str, Any]) -> list[Dataset]:
    directories = [path.resolve() for path in (config.path, *config.also)]
    if twice := [str(path) for path in directories if directories.count(path) > 1]:
        raise UserError(
            f"data.also: {twice[0]} would be learned from twice: name each directory once, without data.path"
        )
    others = []
    for path in config.also:
        if not (path / MANIFEST).is_file():
            raise UserError(
                f"data.also: {path} holds no finished data: make it first, with `train-draft --data-only` and a "
                "configuration whose data.path it is"
            )
        other = Dataset.open(path)
        for key in ("tokenizer", "target"):
            ours, theirs = made_from.get(key), other.made_from.get(key)
            if ours and theirs and ours != theirs:
                raise UserError(f"data.also: {other.where} was made with another {key}: give data of the same target")
        others.append(other)
    return others


def describe(config: DataConfig, target: Checkpoint) -> dict[str, Any]:
    """What decides the records of a dataset."""
    kinds = {
        "prompts": config.prompts,
        "conversations": config.conversations,
        "texts": config.texts,
        "avoid": config.avoid,
    }
    described: dict[str, Any] = {
        kind: [[path.name, _digest(path)] for path in paths] for kind, paths in kinds.items() if paths
    }
    described["heldout_every"] = config.heldout_every
    described["tokenizer"] = [_digest(path) for path in sorted(target.path.glob("tokenizer*.json"))]
    if config.prompts or config.made_up:
        described["target"] = _digest(target.path / CHECKPOINT_MANIFEST)
        described |= {"max_tokens": config.max_tokens, "seed": config.seed}
    if config.prompts:
        described["temperatures"] = list(config.temperatures)
    if config.made_up:
        described |= {"made_up": config.made_up, "made_up_temperature": config.made_up_temperature}
    if config.texts:
        described["sequence_length"] = config.sequence_length
    return described


def read_items(config: DataConfig, tokenizer: Tokenizer, target: Any, say: Say) -> dict[str, list[Item]]:
    """All that is to become records, for each split.

    Args:
      target: the model's configuration.

    Raises:
      UserError: a file is wrong, or there is nothing for one of the splits.
    """
    measured = measured_by(question for path in config.avoid for question in read_questions(path))
    items: dict[str, list[Item]] = {TRAIN: [], HELDOUT: [], _AVOIDED: []}
    for path in config.prompts:
        prompts = _read_prompts(path, config, tokenizer, target.max_positions, measured)
        for index, (prompt, split) in enumerate(prompts):
            # What is held out is asked greedily once: the evaluation estimates greedy decoding.
            for round_, temperature in enumerate(config.temperatures if split == TRAIN else (0.0,)):
                items[split].append(Asked(prompt, temperature, _seed(config.seed, path.name, index, round_)))
    if config.made_up:
        opening = _opening(tokenizer)
        _check_length(opening, config, target.max_positions, "data.made_up, the beginning of the chat template")
        for index in range(config.made_up):
            asked = Asked(opening, config.made_up_temperature, _seed(config.seed, "made up", index), goes_on=True)
            items[_share_out(index, config.heldout_every)].append(asked)
    for path in config.conversations:
        for index, (record, named) in enumerate(read_conversations(path, tokenizer, measured)):
            items[named or _share_out(index, config.heldout_every)].append(record)
    for path in config.texts:
        for index, record in enumerate(read_text(path, tokenizer, config.sequence_length)):
            items[_share_out(index, config.heldout_every)].append(record)
    avoided = f"{len(items.pop(_AVOIDED)):,} prompts and conversations hold a question of data.avoid and are left out"
    if config.avoid:
        say(avoided)
    for split, found in items.items():
        if not found:
            why = f" ({avoided})" if config.avoid else ""
            raise UserError(
                f"the files of data leave nothing for the {split} split{why}: give more, with lower heldout_every or "
                f"with rows whose split is {split}"
            )
        largest = max(int(np.max(each.tokens)) for each in found)
        if largest >= target.vocab_size:
            raise UserError(
                f"the tokenizer gives token {largest}, but the model knows {target.vocab_size}: use files of one model"
            )
    return items


def _read_prompts(
    path: Path, config: DataConfig, tokenizer: Tokenizer, limit: int, measured: Measured
) -> Iterator[tuple[tuple[int, ...], str]]:
    """Tokens of each prompt of a file, and its split."""
    for index, question in enumerate(read_questions(path)):
        prompt = prompt_for(question, [], tokenizer.has_chat_template)
        try:
            tokens = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_messages(prompt)
        except UserError as error:
            raise UserError(f"{path}, question {question.id}: {error}") from error
        split = _split(question.split) or _share_out(index, config.heldout_every)
        if _is_avoided([*question.context, {"role": "user", "content": question.turns[0]}], measured):
            split = _AVOIDED
        else:
            _check_length(tokens, config, limit, f"{path}, question {question.id}")
        yield tuple(tokens), split


def _is_avoided(messages: Iterable[Mapping[str, Any]], measured: Measured) -> bool:
    asked = (message["content"] for message in messages if message["role"] == "user")
    return any(holds_measured(text, own_questions(text), measured) for text in asked)


def _check_length(tokens: Sequence[int], config: DataConfig, limit: int, where: str) -> None:
    if len(tokens) + config.max_tokens > limit:
        raise UserError(
            f"{where}: its {len(tokens)} tokens and data.max_tokens={config.max_tokens} exceed the model's context of "
            f"{limit}: take it out, or lower data.max_tokens"
        )


def _opening(tokenizer: Tokenizer) -> tuple[int, ...]:
    """What the chat template writes before the first word of a user."""
    word = "opening"
    text = tokenizer.apply_chat_template([{"role": "user", "content": word}])
    return tuple(tokenizer.encode_part(text[: text.rindex(word)]))


def read_conversations(
    path: Path, tokenizer: Tokenizer, measured: Measured = NOTHING
) -> list[tuple[Record, str | None]]:
    """Conversations of a JSONL file with `messages` (a role and a content each), and the split that a row names;
    `_AVOIDED` stands for it where a user asks a measured question.

    Raises:
      UserError: a line is something else, or the tokenizer has no chat template.
    """
    read = []
    for number, row in read_json_lines(path):
        where, messages = f"{path}, line {number}", row.get("messages")
        if not (isinstance(messages, list) and messages and all(_is_message(message) for message in messages)):
            raise UserError(f"{where}: needs messages, a list of objects with role and content")
        if messages[-1]["role"] != "assistant":
            raise UserError(f"{where}: the last message must be an assistant's, whose answer is learned")
        split = _AVOIDED if _is_avoided(messages, measured) else _split(row.get("split"))
        try:
            read.append((_conversation(messages, tokenizer), split))
        except UserError as error:
            raise UserError(f"{where}: {error}") from error
    if not read:
        raise UserError(f"{path} holds no conversations: give a JSONL file with messages in each line")
    return read


def read_text(path: Path, tokenizer: Tokenizer, length: int) -> list[Record]:
    """A text in pieces of `length` tokens, all of which are learned."""
    try:
        with path.open(encoding="utf-8") as file:
            parts = [np.array(tokenizer.encode("".join(lines)), np.int32) for lines in iter(lambda: _some(file), [])]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read ({error}): give a text file in UTF-8") from error
    tokens = np.concatenate([np.zeros(0, np.int32), *parts])
    starts = range(0, len(tokens) - 1, length)
    return [Record(piece := tokens[at : at + length], np.ones(len(piece), np.bool_)) for at in starts]


def answer(llm: LLM, asked: Sequence[Asked], max_tokens: int, num_seqs: int) -> Iterator[tuple[Asked, Record]]:
    """The target's answers, as they are finished; the next prompts enter as slots become free."""
    eos_ids = list(llm.tokenizer.eos_token_ids)
    waiting, running = iter(enumerate(asked)), dict[int, Asked]()
    llm.engine.warm_up(min(num_seqs, len(asked)), is_greedy=all(each.temperature == 0 for each in asked))
    while True:
        # Few wait in the engine: it looks through all that do in every round.
        while len(running) < num_seqs + 8 and (following := next(waiting, None)) is not None:
            order, prompt = following
            request = Request(
                order=order,
                prompt=list(prompt.tokens),
                params=SamplingParams(temperature=prompt.temperature, max_tokens=max_tokens),
                seed=prompt.seed,
                stop_ids=[] if prompt.goes_on else eos_ids,
            )
            llm.engine.add(request)
            running[order] = prompt
        if not running:
            return
        for update in llm.engine.step():
            request = update.sequence
            if request.is_finished and request.order in running:
                tokens = np.array(request.prompt + request.token_ids, np.int32)
                yield running.pop(request.order), Record(tokens, np.arange(len(tokens)) >= len(request.prompt))


def _make(config: DataConfig, items: Mapping[str, Sequence[Item]], start: Callable[[int, int], LLM], say: Say) -> None:
    """Writes all shards that are missing, each when it is complete, in whatever order answers come."""
    shards: dict[Path, list[Item]] = {
        shard_path(config.path, split, number): list(of_split[at : at + _SHARD_ITEMS])
        for split, of_split in items.items()
        for number, at in enumerate(range(0, len(of_split), _SHARD_ITEMS))
    }
    shards = {path: shard for path, shard in shards.items() if not path.is_file()}
    places = {
        item: (path, index)
        for path, shard in shards.items()
        for index, item in enumerate(shard)
        if isinstance(item, Asked)
    }
    left = {path: sum(isinstance(item, Asked) for item in shard) for path, shard in shards.items()}

    def write_if_whole(path: Path) -> None:
        if left[path] == 0:
            write_records(path, [item for item in shards.pop(path) if isinstance(item, Record)])

    for path in list(shards):
        write_if_whole(path)
    if not places:
        return
    say(f"{len(places):,} prompts to answer, for {sum(map(len, items.values())):,} records in {config.path}")
    lengths = sorted(len(asked.tokens) for asked in places)
    llm = start(lengths[-1] + config.max_tokens, _chunk_size(lengths))
    started, tokens = time.perf_counter(), 0
    with progress_bar("answered prompts", len(places), is_shown=True, say=say) as advance:
        for asked, record in answer(llm, list(places), config.max_tokens, config.max_num_seqs):
            path, index = places[asked]
            shards[path][index] = record
            left[path] -= 1
            write_if_whole(path)
            tokens += len(record.tokens) - len(asked.tokens)
            advance(1, f"{tokens / (time.perf_counter() - started):,.0f} tokens/s")


def _chunk_size(lengths: Sequence[int]) -> int:
    """Prompts enter one at a time, a chunk in a round: nine in ten in a single one, where that is not too many."""
    most = lengths[9 * (len(lengths) - 1) // 10]
    return min(max(1 << (most - 1).bit_length(), _LEAST_CHUNK), _LARGEST_CHUNK)


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


def _some(file: Any) -> list[str]:
    """The next lines of a file, some characters of them; none at its end."""
    lines: list[str] = file.readlines(_TEXT_CHARACTERS)
    return lines


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("role"), str) and isinstance(value.get("content"), str)


def _split(named: Any) -> str | None:
    """The split of a row that names one: everything that is not held out is trained on."""
    return None if named is None else HELDOUT if named == HELDOUT else TRAIN


def _share_out(index: int, heldout_every: int) -> str:
    return HELDOUT if index % heldout_every == 0 else TRAIN


def _seed(*parts: object) -> int:
    """Of an answer's noise: the same whenever and in whatever company it is asked for."""
    digest = hashlib.blake2b(json.dumps(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def _digest(path: Path) -> str:
    try:
        return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): give a file that is there") from error


@contextlib.contextmanager
def _alone_in(path: Path) -> Iterator[None]:
    """Makes a directory if need be, and keeps other processes from making data there at the same time."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = path.with_name(f".{path.name}.lock").open("w")
    except OSError as error:
        raise UserError(f"data.path {path} cannot be used ({error}): give another one") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"another process is making the data in {path}: start again when it is done") from error
        yield


def _begin(path: Path, made_from: Mapping[str, Any]) -> None:
    """Requires an empty directory, or one with shards of the same settings."""
    begun = path / _BEGUN
    if any(path.glob(f"{TRAIN}-*")) or any(path.glob(f"{HELDOUT}-*")):
        stored = json.loads(begun.read_text()) if begun.is_file() else {}
        refuse_changes(stored, made_from, f"{path} holds data of other settings", _CHANGED)
    elif any(each != begun for each in path.iterdir()):
        raise UserError(f"{path} holds files but no {MANIFEST}: give another data.path, or an empty directory")
    with whole_file(begun) as partial:
        partial.write_text(json.dumps(made_from))
