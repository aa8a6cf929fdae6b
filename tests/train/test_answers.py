"""Data from a user's files, with a stand-in for the model that answers."""

import itertools
import json
import shutil

import numpy as np
import pytest
from models_on_mesh import FIXTURES, PAIR_TARGET
from tiny import TEMPLATE, write_prompts, write_tokenizer

from jaxspec.errors import UserError
from jaxspec.tokenizer import Tokenizer
from jaxspec.train import answers
from jaxspec.train.answers import open_or_make, read_conversations, read_text
from jaxspec.train.config import DataConfig
from jaxspec.train.dataset import HELDOUT, MANIFEST, TRAIN, Record


@pytest.fixture
def tokenizer(tmp_path):
    return make_tokenizer(tmp_path / "chat", chat_template=TEMPLATE, eos="w3")


def make_tokenizer(directory, **settings):
    directory.mkdir()
    shutil.copy(FIXTURES / PAIR_TARGET / "config.json", directory)
    write_tokenizer(directory, **settings)
    return Tokenizer.load(directory)


@pytest.fixture
def answered(monkeypatch):
    """Lets the answer to anything be its temperature and seed; counts, and can fail after so many."""
    log = {"asked": [], "limit": None}

    def answer(llm, items, max_tokens, num_seqs):
        assert llm == "a model"
        for item in reversed(items):  # answers are finished in any order
            if log["limit"] is not None and len(log["asked"]) >= log["limit"]:
                raise KeyboardInterrupt
            log["asked"].append(item)
            said = [int(10 * item.temperature), item.seed % 251]
            tokens = np.array([*item.tokens, *said], np.int32)
            yield item, Record(tokens, np.arange(len(tokens)) >= len(item.tokens))

    monkeypatch.setattr(answers, "answer", answer)
    monkeypatch.setattr(answers, "_SHARD_ITEMS", 4)
    return log


def data_config(tmp_path, **changes) -> DataConfig:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 20)
    settings = dict(path=tmp_path / "data", prompts=(prompts,), temperatures=(0.0, 0.5), heldout_every=10)
    return DataConfig(**settings | changes)


def make(config, tokenizer, contexts=None):
    def start(context):
        if contexts is not None:
            contexts.append(context)
        return "a model"

    return open_or_make(config, "a-model", tokenizer, start, seed=0, say=lambda line: None)


def all_of(dataset, split):
    source = dataset.source(split)
    return [tuple(source[index].tokens.tolist()) for index in range(len(source))]


def test_prompts_are_answered_at_every_temperature_and_held_out_ones_greedily(tmp_path, tokenizer, answered):
    contexts = []
    dataset = make(data_config(tmp_path, max_tokens=30), tokenizer, contexts)
    train, heldout = all_of(dataset, TRAIN), all_of(dataset, HELDOUT)
    assert (len(train), len(heldout)) == (36, 2) and len(answered["asked"]) == 38
    assert [tokens[-2] for tokens in train] == [0, 5] * 18 and [tokens[-2] for tokens in heldout] == [0, 0]
    assert len({item.seed for item in answered["asked"] if item.temperature}) == 18
    # w1 is a user's turn, w2 the assistant's, as the template has them.
    assert all((tokens[0], tokens[3], tokens[4], len(tokens)) == (1, 3, 2, 7) for tokens in train)
    assert contexts == [5 + 30]
    assert make(data_config(tmp_path, max_tokens=30), tokenizer) == dataset  # and nothing is asked again
    assert len(answered["asked"]) == 38


def test_work_that_was_stopped_goes_on_with_the_shards_that_are_missing(tmp_path, tokenizer, answered):
    whole = make(data_config(tmp_path, path=tmp_path / "whole"), tokenizer)
    answered |= {"asked": [], "limit": 15}
    with pytest.raises(KeyboardInterrupt):
        make(data_config(tmp_path), tokenizer)
    kept = sorted(path.name for path in (tmp_path / "data").glob("*.arrayrecord"))
    assert 2 <= len(kept) <= 4 and not (tmp_path / "data" / MANIFEST).exists()
    with pytest.raises(UserError, match="temperatures was"):
        make(data_config(tmp_path, temperatures=(0.0, 0.9)), tokenizer)
    answered |= {"asked": [], "limit": None}
    again = make(data_config(tmp_path), tokenizer)
    assert len(answered["asked"]) == 38 - sum(2 if name.startswith(HELDOUT) else 4 for name in kept)
    for split in (TRAIN, HELDOUT):
        assert all_of(again, split) == all_of(whole, split)


def test_data_of_other_settings_is_refused(tmp_path, tokenizer, answered):
    make(data_config(tmp_path), tokenizer)
    for change, says in (
        ({"temperatures": (0.0,)}, "temperatures was"),
        ({"max_tokens": 7}, "max_tokens was"),
        ({"heldout_every": 5}, "heldout_every was"),
    ):
        with pytest.raises(UserError, match=says):
            make(data_config(tmp_path, **change), tokenizer)
    config = data_config(tmp_path)
    config.prompts[0].write_text('{"prompt": "w5"}\n')
    with pytest.raises(UserError, match="prompts was"):
        make(config, tokenizer)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(UserError, match="holds files but no dataset"):
        make(data_config(tmp_path, path=tmp_path / "taken"), tokenizer)
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["file"]


def test_rows_of_a_split_are_held_out_where_a_file_says_so(tmp_path, tokenizer, answered):
    rows = [{"prompt": f"w{number}", "split": HELDOUT if number in (7, 8) else TRAIN} for number in range(5, 15)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = make(data_config(tmp_path, prompts=(tmp_path / "rows.jsonl",)), tokenizer)
    assert [tokens[1] for tokens in all_of(dataset, HELDOUT)] == [7, 8]


def test_of_conversations_what_assistants_say_is_learned(tmp_path, tokenizer):
    path = tmp_path / "talk.jsonl"
    turns = [("user", "w10 w11"), ("assistant", "w20"), ("user", "w12"), ("assistant", "w21 w22")]
    messages = [{"role": role, "content": content} for role, content in turns]
    path.write_text(json.dumps({"messages": messages}) + "\n\n" + json.dumps({"messages": messages[:2]}))
    long, short = read_conversations(path, tokenizer)
    assert long.tokens.tolist() == [1, 10, 11, 3, 2, 20, 3, 1, 12, 3, 2, 21, 22, 3]
    assert np.flatnonzero(long.is_answer).tolist() == [5, 6, 11, 12, 13]  # end tokens too
    assert short.tokens.tolist() == long.tokens[:7].tolist()


def test_texts_are_cut_and_all_is_learned(tmp_path, answered):
    tokenizer = make_tokenizer(tmp_path / "plain")
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"w{10 + number}" for number in range(41)))
    pieces = read_text(path, tokenizer, 10)
    assert [piece.tokens.tolist() for piece in pieces] == [list(range(at, at + 10)) for at in range(10, 50, 10)]
    assert all(piece.is_answer.all() for piece in pieces)  # a last piece of one token has nothing to learn
    config = data_config(tmp_path, prompts=(), texts=(path,), sequence_length=10, heldout_every=3)
    dataset = make(config, tokenizer)
    assert (len(all_of(dataset, TRAIN)), len(all_of(dataset, HELDOUT)), answered["asked"]) == (2, 2, [])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"text": "w1"}', "line 1: needs messages"),
        ('{"messages": [{"role": "user", "content": "w1"}]}', "the last message must be an assistant's"),
        ("[1]", "line 1 holds a JSON list"),
        ("{", "cannot be read"),
        ("", "holds no conversations"),
    ],
)
def test_what_is_no_conversation_is_named(tmp_path, tokenizer, line, says):
    path = tmp_path / "talk.jsonl"
    path.write_text(line)
    with pytest.raises(UserError, match=says):
        read_conversations(path, tokenizer)


def test_files_that_are_missing_or_too_small(tmp_path, tokenizer, answered):
    for config, says in (
        (data_config(tmp_path, prompts=(tmp_path / "none.jsonl",)), "cannot be read"),
        (data_config(tmp_path, prompts=(write_prompts(tmp_path / "one.jsonl", 1),)), "nothing for the train split"),
        (data_config(tmp_path, texts=(tmp_path / "none.txt",)), "cannot be read"),
    ):
        with pytest.raises(UserError, match=says):
            make(config, tokenizer)
        assert not (tmp_path / "data").exists()


def test_seeds_of_answers_differ(tmp_path):
    seeds = [answers._seed(seed, index, round_) for seed, index, round_ in itertools.product(range(3), repeat=3)]
    assert len(set(seeds)) == 27 and all(0 <= seed < 2**63 for seed in seeds)
