"""Conversations as token ids on disk, and batches of them: ArrayRecord files that grain reads in any order.

dataset.json               what the files were made from, and how many records each has
train-00000.arrayrecord    records of `encode`, in the order in which they were asked for
heldout-00000.arrayrecord  the same of what is kept for the evaluation
statistics.safetensors     how often each token is in the answers, and how long conversations are
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter
from jaxtyping import Array, Bool, Int
from safetensors import SafetensorError
from safetensors.numpy import load, load_file, save, save_file

from jaxspec.checkpoint.json_file import read_json
from jaxspec.checkpoint.staging import whole_file
from jaxspec.errors import UserError

FORMAT = 1
MANIFEST = "dataset.json"
TRAIN, HELDOUT = "train", "heldout"
_SUFFIX = ".arrayrecord"
_STATISTICS = "statistics.safetensors"
_MAKE_AGAIN = "remove the directory, and it is made again"
# grain reads records alone and in any order.
_WRITER_OPTIONS = "group_size:1"
# More bins leave less padding; rows are handed out in batches of as many anyway.
_PACKING_BINS = 64
# Records are small and on a local disk: grain's defaults are 16 threads and 500 records, whose bookkeeping costs more
# than they save.
_READING = grain.ReadOptions(num_threads=2, prefetch_buffer_size=64)
_BATCHES_AHEAD = 4


@dataclasses.dataclass(frozen=True)
class Record:
    """One conversation.

    Attributes:
      tokens: of everything that was said.
      is_answer: which of them the target said, or would be asked to say.
    """

    tokens: Int[np.ndarray, "N"]
    is_answer: Bool[np.ndarray, "N"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of packed conversations.

    Attributes:
      documents: 1, 2, … for the conversations of a row; 0 for padding at its end.
      positions: of each token in its conversation.
      is_answer: as in `Record`.
    """

    tokens: Int[Array, "B S"]
    documents: Int[Array, "B S"]
    positions: Int[Array, "B S"]
    is_answer: Bool[Array, "B S"]


def encode(record: Record) -> bytes:
    is_small = record.tokens.max(initial=0) < 2**16
    tokens = record.tokens.astype(np.uint16 if is_small else np.int32)
    return save({"tokens": tokens, "is_answer": record.is_answer.astype(np.bool_)})


def decode(stored: bytes) -> Record:
    arrays = load(stored)
    return Record(arrays["tokens"].astype(np.int32), arrays["is_answer"])


def write_records(path: Path, records: Sequence[Record]) -> None:
    """A file that is there whole or not at all."""
    with whole_file(path) as partial:
        try:
            writer = ArrayRecordWriter(str(partial), _WRITER_OPTIONS)
            for record in records:
                writer.write(encode(record))
            writer.close()
        except (RuntimeError, OSError) as error:  # a full disk is the former
            raise UserError(f"cannot write {path} ({_first_line(error)}): free space there") from error


def finish_dataset(directory: Path, records: Mapping[str, int], made_from: Mapping[str, Any]) -> None:
    """Writes `dataset.json`, with the number of records of each split, and the lengths and counts of `Dataset`."""
    source = Dataset((directory,), dict(made_from)).source(TRAIN)
    counts, lengths = np.zeros(0, np.int64), np.zeros(len(source), np.int32)
    for index in range(len(source)):
        record = source[index]
        said = np.bincount(record.tokens[record.is_answer])
        counts = np.pad(counts, (0, max(0, len(said) - len(counts))))
        counts[: len(said)] += said
        lengths[index] = len(record.tokens)
    with whole_file(directory / _STATISTICS) as partial:
        save_file({"counts": counts, "lengths": lengths}, partial)
    with whole_file(directory / MANIFEST) as partial:
        partial.write_text(json.dumps({"format": FORMAT, "records": records, "made_from": made_from}, indent=1) + "\n")


def shard_path(directory: Path, split: str, number: int) -> Path:
    return directory / f"{split}-{number:05d}{_SUFFIX}"


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Attributes:
    made_from: what `dataset.json` says of its sources, that of the first directory.
    """

    directories: tuple[Path, ...]
    made_from: dict[str, Any]

    @classmethod
    def open(cls, directory: Path) -> "Dataset":
        """Checks that all files are there with all their records.

        Raises:
          UserError: one is missing or damaged.
        """
        manifest = read_json(directory / MANIFEST, _MAKE_AGAIN)
        if manifest.get("format") != FORMAT:
            raise UserError(
                f"{directory} has data format {manifest.get('format')!r}, this jaxspec reads {FORMAT}: {_MAKE_AGAIN}"
            )
        try:
            dataset = cls((directory,), manifest["made_from"])
            records = {split: manifest["records"][split] for split in (TRAIN, HELDOUT)}
        except (KeyError, TypeError) as error:
            raise UserError(f"{directory / MANIFEST} is damaged ({error!r}): {_MAKE_AGAIN}") from error
        for split, wanted in records.items():
            found = len(dataset.source(split))
            if found != wanted:
                raise UserError(f"{directory} holds {found} {split} records, its manifest says {wanted}: {_MAKE_AGAIN}")
        return dataset

    @classmethod
    def of(cls, *datasets: "Dataset") -> "Dataset":
        """All of them, one after the other."""
        return cls(tuple(path for each in datasets for path in each.directories), datasets[0].made_from)

    @property
    def where(self) -> str:
        return ", ".join(map(str, self.directories))

    def digest(self) -> str:
        """Of what the files were made from, and of all tokens as far as they can be told by their statistics."""
        digest = hashlib.blake2b(digest_size=16)
        for directory in self.directories:
            for name in (MANIFEST, _STATISTICS):
                digest.update((directory / name).read_bytes())
        return digest.hexdigest()

    def source(self, split: str) -> "RecordSource":
        return RecordSource([path for each in self.directories for path in sorted(each.glob(f"{split}-*{_SUFFIX}"))])

    def token_counts(self, vocab_size: int) -> Int[np.ndarray, "V"]:
        """How often each token is in the answers of the training split."""
        return np.sum([np.pad(each, (0, vocab_size - len(each))) for each in self._statistics("counts")], axis=0)

    def share_beyond(self, length: int) -> float:
        """Share of the training split's tokens that stand beyond so many of their conversation."""
        lengths = np.concatenate(self._statistics("lengths"))
        return float(np.maximum(lengths - length, 0).sum() / max(lengths.sum(), 1))

    def _statistics(self, name: str) -> list[np.ndarray]:
        return [_statistics(directory, name) for directory in self.directories]


def _statistics(directory: Path, name: str) -> np.ndarray:
    try:
        return load_file(directory / _STATISTICS)[name]
    except (OSError, KeyError, SafetensorError) as error:
        raise UserError(f"{directory / _STATISTICS} is damaged ({error}): {_MAKE_AGAIN}") from error


class RecordSource:
    """The records of some files, for grain; what can't be read says which file it is in."""

    def __init__(self, paths: Sequence[Path]):
        self._paths = [str(path) for path in paths]
        try:
            self._records = grain.sources.ArrayRecordDataSource(self._paths) if paths else []
        except Exception as error:  # array_record raises several kinds for a file that is none
            raise UserError(f"{self._directory} has a damaged file ({_first_line(error)}): {_MAKE_AGAIN}") from error

    @property
    def _directory(self) -> str:
        return ", ".join(dict.fromkeys(str(Path(path).parent) for path in self._paths))

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        try:
            return decode(self._records[index])
        except (RuntimeError, ValueError, IndexError, TypeError, KeyError, SafetensorError) as error:
            raise UserError(
                f"{self._directory} is damaged, record {index} cannot be read ({_first_line(error)}): {_MAKE_AGAIN}"
            ) from error

    def __repr__(self) -> str:  # part of what grain checks when an iterator is restored
        return f"RecordSource({len(self)} records)"


def training_batches(dataset: Dataset, batch_size: int, sequence_length: int, seed: int) -> grain.DatasetIterator:
    """Endless batches of packed rows, shuffled anew each time through; its state can be stored and restored.

    Each element is a dict of the arrays of a `Batch`.
    """
    records = grain.MapDataset.source(dataset.source(TRAIN)).seed(seed).shuffle().repeat()
    rows = _rows(records.to_iter_dataset(_READING), sequence_length, seed)
    # Batches ahead are packed while the device works on the last one.
    batches = rows.batch(batch_size, drop_remainder=True)
    return iter(grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=_BATCHES_AHEAD))


def heldout_batches(dataset: Dataset, batch_size: int, sequence_length: int, most: int) -> list[dict[str, np.ndarray]]:
    """At most so many batches of held-out rows, always the same; the last one is filled with padding."""
    records = grain.MapDataset.source(dataset.source(HELDOUT)).to_iter_dataset()
    rows = list(_rows(records, sequence_length, seed=0))[: batch_size * most]
    empty = {name: np.zeros_like(array) for name, array in rows[0].items()} if rows else {}
    rows += [empty] * (-len(rows) % batch_size)
    return [
        {name: np.stack([row[name] for row in rows[start : start + batch_size]]) for name in empty}
        for start in range(0, len(rows), batch_size)
    ]


def _rows(records: grain.IterDataset, sequence_length: int, seed: int) -> grain.IterDataset:
    def cut(record: Record) -> dict[str, np.ndarray]:
        return {"tokens": record.tokens[:sequence_length], "is_answer": record.is_answer[:sequence_length]}

    def name_parts(packed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {
            "tokens": packed["tokens"],
            "documents": packed["tokens_segment_ids"],
            "positions": packed["tokens_positions"],
            "is_answer": packed["is_answer"].astype(np.bool_),
        }

    packed = grain.experimental.FirstFitPackIterDataset(
        records.map(cut),
        length_struct={"tokens": sequence_length, "is_answer": sequence_length},
        num_packing_bins=_PACKING_BINS,
        seed=seed,
    )
    return packed.map(name_parts)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
