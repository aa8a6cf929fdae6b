"""Which head goes with which target, taps and tree: what is refused is refused in one line."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest

from jaxspec.checkpoint.convert import convert
from jaxspec.drafts.eagle3 import Eagle3
from jaxspec.drafts.ngram import NGram
from jaxspec.drafts.none import NoDraft
from jaxspec.drafts.registry import find_drafter
from jaxspec.errors import UserError
from jaxspec.models.config import ModelConfig
from jaxspec.speculate.trees import TreeSpec

FIXTURES = Path(__file__).parents[1] / "fixtures"
HEADS = FIXTURES / "eagle3"
TARGET = FIXTURES / "eagle3_pair" / "target"


@functools.cache
def head(name: str = "plain") -> Eagle3:
    """`plain` names its taps (2, 4, 5), `reference_layout` none; both are 64 wide and know 128 of 256 tokens."""
    return Eagle3.open(HEADS / name)


def target(num_layers: int = 8, **changes: Any) -> ModelConfig:
    """What these heads were made for."""
    return dataclasses.replace(head().config.layer, num_layers=num_layers, **changes)


def refused(action, *parts: str) -> None:
    with pytest.raises(UserError) as raised:
        action()
    assert "\n" not in str(raised.value)
    for part in parts:
        assert part in str(raised.value)


def taps_of(drafter: Eagle3) -> tuple[int, ...] | None:
    return drafter.config.taps


@pytest.mark.parametrize(("layers", "taps"), [(7, (2, 3, 4)), (8, (2, 4, 5)), (30, (2, 15, 27)), (32, (2, 16, 29))])
def test_taps_are_those_of_the_reference_where_the_files_name_none(layers, taps):
    assert taps_of(head("reference_layout").fit(target(layers))) == taps


def test_taps_are_those_of_the_files_where_they_name_some():
    assert taps_of(head().fit(target(32))) == (2, 4, 5)


@pytest.mark.parametrize("name", ["plain", "reference_layout"])
def test_given_taps_replace_both(name):
    fitted = head(name).fit(target(), [0, 3, 8])
    assert taps_of(fitted) == (0, 3, 8)
    assert fitted.config == dataclasses.replace(head(name).config, taps=(0, 3, 8))
    assert taps_of(head("reference_layout").fit(target(4), (1, 2, 3))) == (1, 2, 3)


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5, 6])
def test_a_target_too_small_for_the_usual_taps_needs_them_given(layers):
    usual = [2, layers // 2, layers - 3]
    small = target(layers)
    refused(lambda: head("reference_layout").fit(small), "no layers", str(usual), f"{layers} layers", "--draft-taps")


def test_the_head_of_another_target_is_refused_with_both_sizes():
    refused(lambda: head().fit(target(hidden_size=96)), "target_hidden_size=64", "96", "this model")
    refused(lambda: head().fit(target(vocab_size=512)), "vocab_size=256", "512", "this model")
    # Also where its taps would not fit either.
    refused(lambda: head().fit(target(4, vocab_size=512)), "vocab_size=256", "512")


def test_taps_that_the_target_does_not_have_are_refused():
    refused(lambda: head().fit(target(4)), "[2, 4, 5]", "4 layers", "--draft-taps", "1,3,4")
    refused(lambda: head().fit(target(), [2, 4, 9]), "tap 9", "between 0", "8")
    refused(lambda: head().fit(target(), [5, 4, 2]), "[5, 4, 2]", "ascending")
    refused(lambda: head().fit(target(), [2, 4, 4]), "[2, 4, 4]", "each once")


@pytest.mark.parametrize("taps", [[], [2], [2, 4], [1, 2, 4, 5]])
def test_as_many_taps_as_the_head_reads_are_needed(taps):
    refused(lambda: head().fit(target(), taps), f"{taps} are {len(taps)}", "reads 3")


def test_a_head_of_the_final_state_alone_takes_no_taps():
    config = dataclasses.replace(head().config, taps=(), num_taps=1, has_fc=False)
    final = dataclasses.replace(head(), config=config)
    assert taps_of(final.fit(target())) == ()
    refused(lambda: final.fit(target(), [5]), "[5]", "'fc.weight'", "final hidden state")


@pytest.mark.parametrize("drafter", [NGram(), NoDraft()], ids=["ngram", "none"])
def test_drafters_that_read_no_layers_take_no_taps(drafter):
    assert drafter.fit(target()) is drafter
    refused(lambda: drafter.fit(target(), [2, 4, 5]), "[2, 4, 5]", "reads the target's layers")


def test_a_tree_with_nothing_to_draft_is_refused():
    refused(lambda: head().check_tree(TreeSpec.parse("none")), "'none'", "chain:D", "dynamic:")


def test_a_node_has_no_more_children_than_the_draft_knows_tokens():
    narrow = dataclasses.replace(head(), config=dataclasses.replace(head().config, draft_vocab_size=3))
    for tree in ("chain:4", "static:0,0,0,1", "dynamic:steps=2,topk=3,nodes=6"):
        narrow.check_tree(TreeSpec.parse(tree))
    for tree in ("static:0,0,0,0,1", "dynamic:steps=2,topk=4,nodes=6"):
        refused(lambda tree=tree: narrow.check_tree(TreeSpec.parse(tree)), tree, "4 children", "3 tokens")


def test_plain_decoding_names_the_drafts_that_a_tree_could_have():
    refused(lambda: NoDraft().check_tree(TreeSpec.parse("chain:4")), "'chain:4'", "ngram", "EAGLE-3", "--tree none")
    dynamic = TreeSpec.parse("dynamic:steps=2,topk=3,nodes=6")
    refused(lambda: NoDraft().check_tree(dynamic), dynamic.name, "EAGLE-3", "--tree none")
    with pytest.raises(UserError) as raised:
        NoDraft().check_tree(dynamic)
    assert "ngram" not in str(raised.value)


def test_drafters_are_found_by_name_or_directory(tmp_path):
    assert find_drafter("ngram") == NGram()
    found = find_drafter(str(HEADS / "plain"))
    assert isinstance(found, Eagle3) and found.config == head().config
    convert(HEADS / "plain", tmp_path / "head", show_progress=False)
    converted = find_drafter(str(tmp_path / "head"))
    assert isinstance(converted, Eagle3) and converted.config == head().config


def test_what_is_no_draft_is_refused_with_what_would_be(tmp_path):
    for missing in ("eagle9", str(tmp_path / "nothing")):
        refused(lambda missing=missing: find_drafter(missing), repr(missing), "none, ngram", "EAGLE-3", "convert")
    weights = str(HEADS / "plain" / "model.safetensors")
    refused(lambda: find_drafter(weights), weights, "is a file", "directory")
    refused(lambda: find_drafter(str(tmp_path)), str(tmp_path), "no config.json", "EAGLE-3 head")
    refused(lambda: find_drafter(str(TARGET)), str(TARGET), "no EAGLE-3 head", "target model as the model")
