"""Data from a user's files, with a stand-in for the model that answers."""

import dataclasses
import itertools
import json
import shutil
from types import SimpleNamespace

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
def target(tmp_path):
    return make_target(tmp_path / "chat", chat_template=TEMPLATE, eos="w3")


@pytest.fixture
def tokenizer(target):
    return Tokenizer.load(target.path)


def make_target(directory, **settings):
    """What of a checkpoint is read where its model is not run."""
    directory.mkdir()
    shutil.copy(FIXTURES / PAIR_TARGET / "config.json", directory)
    write_tokenizer(directory, **settings)
    (directory / "jaxspec.json").write_text("{}")
    return SimpleNamespace(path=directory, config=json.loads((directory / "config.json").read_text()))


@pytest.fixture
def answered(monkeypatch):
    """Lets the answer to anything be its temperature and seed; counts, and can fail after so many."""
    log = {"asked": [], "limit": None}

    def answer(llm, asked, max_tokens, num_seqs):
        assert llm == "a model"
        for each in reversed(asked):  # answers are finished in any order
            if log["limit"] is not None and len(log["asked"]) >= log["limit"]:
                raise KeyboardInterrupt
            log["asked"].append(each)
            said = [int(10 * each.temperature), each.seed % 251]
            tokens = np.array([*each.tokens, *said], np.int32)
            yield each, Record(tokens, np.arange(len(tokens)) >= len(each.tokens))

    monkeypatch.setattr(answers, "answer", answer)
    monkeypatch.setattr(answers, "_SHARD_ITEMS", 4)
    return log


def data_config(tmp_path, **changes) -> DataConfig:
    prompts = write_prompts(tmp_path / "prompts.jsonl", 20)
    settings = dict(
        path=tmp_path / "data", prompts=(prompts,), temperatures=(0.0, 0.5), max_tokens=40, heldout_every=10
    )
    return DataConfig(**settings | changes)


def make(config, target, contexts=None, say=lambda line: None):
    def start(context, chunk_size):
        if contexts is not None:
            contexts.append((context, chunk_size))
        return "a model"

    return open_or_make(config, target, start, say)


def all_of(dataset, split):
    source = dataset.source(split)
    return [tuple(source[index].tokens.tolist()) for index in range(len(source))]


def test_prompts_are_answered_at_every_temperature_and_held_out_ones_greedily(tmp_path, target, answered):
    contexts = []
    dataset = make(data_config(tmp_path, max_tokens=30), target, contexts)
    train, heldout = all_of(dataset, TRAIN), all_of(dataset, HELDOUT)
    assert (len(train), len(heldout)) == (36, 2) and len(answered["asked"]) == 38
    assert [tokens[-2] for tokens in train] == [0, 5] * 18 and [tokens[-2] for tokens in heldout] == [0, 0]
    assert len({each.seed for each in answered["asked"] if each.temperature}) == 18
    # w1 is a user's turn, w2 the assistant's, as the template has them.
    assert all((tokens[0], tokens[3], tokens[4], len(tokens)) == (1, 3, 2, 7) for tokens in train)
    assert contexts == [(5 + 30, 64)]
    assert make(data_config(tmp_path, max_tokens=30), target) == dataset  # and nothing is asked again
    assert len(answered["asked"]) == 38


def test_conversations_are_made_up_from_the_beginning_of_the_chat_template(tmp_path, target, answered):
    dataset = make(data_config(tmp_path, prompts=(), made_up=12, made_up_temperature=0.7), target)
    assert (len(all_of(dataset, TRAIN)), len(all_of(dataset, HELDOUT))) == (10, 2)
    assert {(each.tokens, each.temperature, each.goes_on) for each in answered["asked"]} == {((1,), 0.7, True)}
    assert len({each.seed for each in answered["asked"]}) == 12
    with pytest.raises(UserError, match=r"made_up_temperature was 0\.7"):
        make(data_config(tmp_path, prompts=(), made_up=12), target)


def test_finished_data_is_learned_from_too(tmp_path, target, answered):
    first = make(data_config(tmp_path), target)
    both = make(data_config(tmp_path, path=tmp_path / "more", seed=1, also=(tmp_path / "data",)), target)
    alone = make(data_config(tmp_path, path=tmp_path / "more", seed=1), target)
    for split in (TRAIN, HELDOUT):
        assert all_of(both, split) == all_of(alone, split) + all_of(first, split)
    np.testing.assert_array_equal(both.token_counts(256), alone.token_counts(256) + first.token_counts(256))
    other = make_target(tmp_path / "other", chat_template=TEMPLATE, eos="w4")
    with pytest.raises(UserError, match="data was made with another tokenizer: give data of the same target"):
        make(data_config(tmp_path, path=tmp_path / "else", also=(tmp_path / "data",)), other)
    with pytest.raises(UserError, match="nothing holds no finished data"):
        make(data_config(tmp_path, also=(tmp_path / "nothing",)), target)


def test_work_that_was_stopped_goes_on_with_the_shards_that_are_missing(tmp_path, target, answered):
    whole = make(data_config(tmp_path, path=tmp_path / "whole"), target)
    answered |= {"asked": [], "limit": 15}
    with pytest.raises(KeyboardInterrupt):
        make(data_config(tmp_path), target)
    kept = sorted(path.name for path in (tmp_path / "data").glob("*.arrayrecord"))
    assert 2 <= len(kept) <= 4 and not (tmp_path / "data" / MANIFEST).exists()
    with pytest.raises(UserError, match=r"holds data of other settings: temperatures was \[0.0, 0.5\]"):
        make(data_config(tmp_path, temperatures=(0.0, 0.9)), target)
    answered |= {"asked": [], "limit": None}
    again = make(data_config(tmp_path), target)
    assert len(answered["asked"]) == 38 - sum(2 if name.startswith(HELDOUT) else 4 for name in kept)
    for split in (TRAIN, HELDOUT):
        assert all_of(again, split) == all_of(whole, split)


def test_data_of_other_settings_is_refused(tmp_path, target, answered):
    make(data_config(tmp_path), target)
    for change, says in (
        ({"temperatures": (0.0,)}, "temperatures was"),
        ({"max_tokens": 7}, "max_tokens was"),
        ({"heldout_every": 5}, "heldout_every was"),
        ({"seed": 5}, "seed was"),
    ):
        with pytest.raises(UserError, match=says):
            make(data_config(tmp_path, **change), target)
    config = data_config(tmp_path)
    config.prompts[0].write_text('{"prompt": "w5"}\n')
    with pytest.raises(UserError, match="prompts was"):
        make(config, target)
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    with pytest.raises(UserError, match="holds files but no dataset"):
        make(data_config(tmp_path, path=tmp_path / "taken"), target)
    assert [path.name for path in (tmp_path / "taken").iterdir()] == ["file"]


def test_a_target_with_other_weights_answers_anew_but_texts_don_t_care(tmp_path, target, answered):
    text = tmp_path / "text.txt"
    text.write_text("w5 w6 " * 30)
    texts = data_config(tmp_path, path=tmp_path / "texts", prompts=(), texts=(text,), sequence_length=10)
    make(texts, target)
    make(data_config(tmp_path), target)
    (target.path / "jaxspec.json").write_text('{"other": "weights"}')
    make(texts, target)
    with pytest.raises(UserError, match="target was"):
        make(data_config(tmp_path), target)


def test_settings_may_still_change_before_anything_is_answered(tmp_path, target, answered):
    answered["limit"] = 0
    with pytest.raises(KeyboardInterrupt):
        make(data_config(tmp_path), target)
    answered["limit"] = None
    assert len(all_of(make(data_config(tmp_path, temperatures=(0.2,)), target), TRAIN)) == 18


def test_two_processes_don_t_make_the_same_data_at_once(tmp_path, target, answered):
    with answers._alone_in(tmp_path / "data"), pytest.raises(UserError, match="another process is making the data"):
        make(data_config(tmp_path), target)
    make(data_config(tmp_path), target)


def test_rows_of_a_split_are_held_out_where_a_file_says_so(tmp_path, target, answered):
    rows = [{"prompt": f"w{number}", "split": HELDOUT if number in (7, 8) else TRAIN} for number in range(5, 15)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    dataset = make(data_config(tmp_path, prompts=(tmp_path / "rows.jsonl",)), target)
    assert [tokens[1] for tokens in all_of(dataset, HELDOUT)] == [7, 8]


RUN_OF_TWELVE = " ".join(f"w{number}" for number in range(100, 112))
SHORT_QUESTION = "w50 w51 w52 w53 w54?"


def write_avoid(path):
    turns = [f"A document of the evaluation.\n{SHORT_QUESTION}", f"Hello {RUN_OF_TWELVE}"]
    path.write_text(json.dumps({"turns": turns}) + "\n")
    return path


def test_prompts_that_hold_a_measured_question_are_left_out(tmp_path, target, answered):
    held = [f"w9 {RUN_OF_TWELVE} w9", f"w8 w9\n\nQuestion: {SHORT_QUESTION}", SHORT_QUESTION]
    others = [f"w{number} w9" for number in range(20, 29)] + ["w52 w53 w54", f"w9 {SHORT_QUESTION}"]
    prompts = others[:2] + held[:1] + others[2:6] + held[1:] + others[6:]
    rows = [{"prompt": prompt} for prompt in prompts]
    for role, content in (("user", SHORT_QUESTION), ("system", RUN_OF_TWELVE)):  # the latter is no question
        rows.append({"prompt": [{"role": role, "content": content}, {"role": "user", "content": "w9"}]})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = dict(prompts=(tmp_path / "rows.jsonl",), max_tokens=30, heldout_every=5)
    avoid = (write_avoid(tmp_path / "avoid.jsonl"),)
    everything = make(data_config(tmp_path, path=tmp_path / "all", **settings), target)
    said = []
    dataset = make(data_config(tmp_path, avoid=avoid, **settings), target, say=said.append)
    assert said[0] == "4 prompts and conversations hold a question of data.avoid and are left out"
    kept = [*all_of(dataset, TRAIN), *all_of(dataset, HELDOUT)]
    assert len({tokens[:-2] for tokens in kept}) == len(others) + 1
    for split in (TRAIN, HELDOUT):  # what is kept has the split, the seed and the answer that it would have had
        assert set(all_of(dataset, split)) <= set(all_of(everything, split))
    assert "avoid" in dataset.made_from and "avoid" not in everything.made_from


def test_a_measured_prompt_may_be_longer_than_the_context(tmp_path, target, answered):
    prompts = write_prompts(tmp_path / "long.jsonl", 20)
    with prompts.open("a") as file:
        file.write(json.dumps({"prompt": "w9 " * 600 + RUN_OF_TWELVE}))
    with pytest.raises(UserError, match="question 21: its 615 tokens"):
        make(data_config(tmp_path, prompts=(prompts,)), target)
    make(data_config(tmp_path, prompts=(prompts,), avoid=(write_avoid(tmp_path / "avoid.jsonl"),)), target)


def test_conversations_are_left_out_by_what_their_users_say(tmp_path, target, answered):
    talks = [("w10", "w20"), ("w11", RUN_OF_TWELVE), ("w12", "w21", SHORT_QUESTION, "w22"), ("w13", "w23")]
    rows = [
        {"messages": [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(talk)]}
        for talk in talks
    ]
    (tmp_path / "talk.jsonl").write_text("\n".join(map(json.dumps, rows)))
    avoid = (write_avoid(tmp_path / "avoid.jsonl"),)
    said = []
    config = data_config(tmp_path, prompts=(), conversations=(tmp_path / "talk.jsonl",), avoid=avoid, heldout_every=3)
    dataset = make(config, target, say=said.append)
    assert said[0].startswith("1 prompts and conversations")
    assert [tokens[1] for tokens in all_of(dataset, TRAIN)] == [11]
    assert [tokens[1] for tokens in all_of(dataset, HELDOUT)] == [10, 13]


def test_what_is_avoided_decides_the_data(tmp_path, target, answered):
    avoid = write_avoid(tmp_path / "avoid.jsonl")
    make(data_config(tmp_path, avoid=(avoid,)), target)
    with pytest.raises(UserError, match=r"avoid was \[\['avoid.jsonl', '\w+'\]\] and is None"):
        make(data_config(tmp_path), target)
    avoid.write_text('{"prompt": "w5"}\n')
    with pytest.raises(UserError, match="holds data of other settings: avoid was"):
        make(data_config(tmp_path, avoid=(avoid,)), target)
    with pytest.raises(UserError, match=r"none\.jsonl cannot be read"):
        make(data_config(tmp_path, avoid=(tmp_path / "none.jsonl",)), target)
    avoid.write_text('{"text": "w5"}\n')
    with pytest.raises(UserError, match=r"avoid\.jsonl, line 1 asks nothing"):
        make(data_config(tmp_path, path=tmp_path / "else", avoid=(avoid,)), target)


def test_where_all_is_avoided_nothing_is_made(tmp_path, target, answered):
    config = data_config(tmp_path, max_tokens=30)
    config.prompts[0].write_text((json.dumps({"prompt": SHORT_QUESTION}) + "\n") * 20)
    config = dataclasses.replace(config, avoid=(write_avoid(tmp_path / "avoid.jsonl"),))
    with pytest.raises(
        UserError, match=r"nothing for the train split \(20 prompts and .* data.avoid and are left out\)"
    ):
        make(config, target)
    assert not (tmp_path / "data").exists()


def test_of_conversations_what_assistants_say_is_learned(tmp_path, tokenizer):
    path = tmp_path / "talk.jsonl"
    turns = [("user", "w10 w11"), ("assistant", "w20"), ("user", "w12"), ("assistant", "w21 w22")]
    messages = [{"role": role, "content": content} for role, content in turns]
    path.write_text(json.dumps({"messages": messages}) + "\n\n" + json.dumps({"messages": messages[:2]}))
    (long, _), (short, split) = read_conversations(path, tokenizer)
    assert split is None
    assert long.tokens.tolist() == [1, 10, 11, 3, 2, 20, 3, 1, 12, 3, 2, 21, 22, 3]
    assert np.flatnonzero(long.is_answer).tolist() == [5, 6, 11, 12, 13]  # end tokens too
    assert short.tokens.tolist() == long.tokens[:7].tolist()


def test_texts_are_cut_and_all_is_learned(tmp_path, answered, monkeypatch):
    target = make_target(tmp_path / "plain")
    tokenizer = Tokenizer.load(target.path)
    path = tmp_path / "text.txt"
    path.write_text(" ".join(f"w{10 + number}" for number in range(41)))
    pieces = read_text(path, tokenizer, 10)
    wanted = [np.arange(at, at + 10) for at in range(10, 50, 10)]
    assert [piece.tokens.tolist() for piece in pieces] == [p.tolist() for p in wanted]
    assert all(piece.is_answer.all() for piece in pieces)  # a last piece of one token has nothing to learn
    config = data_config(tmp_path, prompts=(), texts=(path,), sequence_length=10, heldout_every=3)
    dataset = make(config, target)
    assert (len(all_of(dataset, TRAIN)), len(all_of(dataset, HELDOUT)), answered["asked"]) == (2, 2, [])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"text": "w1"}', "line 1: needs messages"),
        ('{"messages": [{"role": "user", "content": "w1"}]}', "the last message must be an assistant's"),
        ("[1]", "line 1 holds a JSON list"),
        ('{"messages": 1}\n{', "line 1: needs messages"),
        ("\n{", "line 2 is not JSON"),
        ("", "holds no conversations"),
    ],
)
def test_what_is_no_conversation_is_named(tmp_path, tokenizer, line, says):
    path = tmp_path / "talk.jsonl"
    path.write_text(line)
    with pytest.raises(UserError, match=says):
        read_conversations(path, tokenizer)


def test_files_that_are_missing_or_too_small(tmp_path, target, answered):
    for config, says in (
        (data_config(tmp_path, prompts=(tmp_path / "none.jsonl",)), "cannot be read"),
        (data_config(tmp_path, prompts=(write_prompts(tmp_path / "one.jsonl", 1),)), "nothing for the train split"),
        (data_config(tmp_path, texts=(tmp_path / "none.txt",)), "cannot be read"),
        (data_config(tmp_path, max_tokens=600), "question 1: its 5 tokens and data.max_tokens=600 exceed"),
    ):
        with pytest.raises(UserError, match=says):
            make(config, target)
        assert not (tmp_path / "data").exists()


def test_seeds_of_answers_differ(tmp_path):
    seeds = [answers._seed(*parts) for parts in itertools.product(range(3), repeat=3)]
    assert len(set(seeds)) == 27 and all(0 <= seed < 2**63 for seed in seeds)
