"""Records on disk, and batches of them."""

import itertools
import json

import numpy as np
import pytest

from jaxspec.errors import UserError
from jaxspec.train.dataset import (
    HELDOUT,
    MANIFEST,
    TRAIN,
    Dataset,
    Record,
    finish_dataset,
    heldout_batches,
    shard_path,
    training_batches,
    write_records,
)

LENGTH = 32


def records_of(count, seed):
    random = np.random.default_rng(seed)
    lengths = random.integers(2, LENGTH + 9, count)
    return [Record(random.integers(1, 90, n).astype(np.int32), random.random(n) < 0.7) for n in lengths]


@pytest.fixture
def written(tmp_path):
    records = records_of(150, seed=0)
    write_records(shard_path(tmp_path, TRAIN, 0), records[:100])
    write_records(shard_path(tmp_path, TRAIN, 1), records[100:])
    write_records(shard_path(tmp_path, HELDOUT, 0), records_of(9, seed=1))
    finish_dataset(tmp_path, {TRAIN: 150, HELDOUT: 9}, {"a": 1})
    return tmp_path, records


def texts_of(batches):
    """(tokens, is_answer) of each conversation in some batches."""
    for batch in batches:
        for row in zip(*(batch[name] for name in ("tokens", "documents", "positions", "is_answer")), strict=True):
            tokens, documents, positions, is_answer = row
            assert not tokens[documents == 0].any() and not is_answer[documents == 0].any()
            for number in range(1, documents.max() + 1):
                own = documents == number
                assert positions[own].tolist() == list(range(own.sum()))
                yield tuple(tokens[own].tolist()), tuple(is_answer[own].tolist())


def test_records_come_back_as_they_were(written):
    directory, records = written
    source = Dataset.open(directory).source(TRAIN)
    for record, wanted in zip((source[index] for index in range(len(source))), records, strict=True):
        np.testing.assert_array_equal(record.tokens, wanted.tokens)
        np.testing.assert_array_equal(record.is_answer, wanted.is_answer)
    counts = np.bincount(np.concatenate([r.tokens[r.is_answer] for r in records]), minlength=100)
    dataset = Dataset.open(directory)
    assert dataset.token_counts(100).tolist() == counts.tolist() and dataset.made_from == {"a": 1}
    beyond, total = sum(max(0, len(r.tokens) - LENGTH) for r in records), sum(len(r.tokens) for r in records)
    assert dataset.share_beyond(LENGTH) == beyond / total > 0
    assert dataset.share_beyond(999) == 0


def test_every_conversation_is_read_once_before_any_is_read_again(written):
    directory, records = written
    batches = training_batches(Dataset.open(directory), 4, LENGTH, seed=3)
    seen = list(texts_of(itertools.islice(batches, 36)))
    wanted = {tuple(r.tokens[:LENGTH].tolist()): tuple(r.is_answer[:LENGTH].tolist()) for r in records}
    assert all(wanted[tokens] == is_answer for tokens, is_answer in seen)
    counts = {tokens: sum(text == tokens for text, _ in seen) for tokens in wanted}
    assert set(counts.values()) == {1, 2}  # the second time through has begun
    other = training_batches(Dataset.open(directory), 4, LENGTH, seed=4)
    assert (
        next(other)["tokens"].tolist()
        != next(training_batches(Dataset.open(directory), 4, LENGTH, 3))["tokens"].tolist()
    )


def test_a_restored_iterator_goes_on_where_it_was(written):
    dataset = Dataset.open(written[0])
    batches = training_batches(dataset, 4, LENGTH, seed=3)
    for _ in range(7):
        next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    wanted = [next(batches) for _ in range(40)]
    again = training_batches(dataset, 4, LENGTH, seed=3)
    again.set_state(state)
    for expected in wanted:
        found = next(again)
        assert all(np.array_equal(found[name], expected[name]) for name in expected)


def test_held_out_rows_are_all_there_and_the_last_batch_is_filled(written):
    batches = heldout_batches(Dataset.open(written[0]), 4, LENGTH, most=8)
    seen = sorted(tokens for tokens, _ in texts_of(batches))
    assert seen == sorted(tuple(r.tokens[:LENGTH].tolist()) for r in records_of(9, seed=1))
    assert all(batch["tokens"].shape == (4, LENGTH) for batch in batches)
    assert len(heldout_batches(Dataset.open(written[0]), 1, LENGTH, most=2)) == 2


def damage(path):
    content = bytearray(path.read_bytes())
    content[400] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("harm", "says"),
    [
        (lambda path: damage(shard_path(path, TRAIN, 0)), "is damaged, record"),
        (lambda path: shard_path(path, TRAIN, 0).write_bytes(b"not a record"), "damaged file"),
        (lambda path: shard_path(path, TRAIN, 1).unlink(), "holds 100 train records, its manifest says 150"),
        (lambda path: (path / MANIFEST).write_text("{"), "dataset.json"),
        (lambda path: (path / MANIFEST).write_text('{"format": 9}'), "data format 9"),
        (lambda path: (path / MANIFEST).write_text('{"format": 1}'), "is damaged"),
        (lambda path: (path / "statistics.safetensors").write_text("{"), "is damaged"),
    ],
    ids=["a byte", "no records", "a file less", "the manifest", "another format", "half a manifest", "statistics"],
)
def test_damage_is_found(written, harm, says):
    directory, _ = written
    harm(directory)
    with pytest.raises(UserError, match=says):
        dataset = Dataset.open(directory)
        source = dataset.source(TRAIN)
        [source[index] for index in range(len(source))]
        dataset.token_counts(100)
