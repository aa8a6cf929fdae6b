import functools

import jax
import numpy as np
import pytest

from jaxspec.drafts.ngram import NGram, look_up, match_lengths
from jaxspec.drafts.none import NoDraft
from jaxspec.errors import UserError
from jaxspec.speculate.trees import TreeSpec

LONGEST = 4


@functools.cache
def jitted(tree: TreeSpec):
    return jax.jit(lambda tokens, newest: look_up(tokens, newest, tree, LONGEST))


def match_length(text: list[int], place: int) -> int:
    """Tokens up to `place` that equal the last ones of the text, LONGEST at most."""
    newest, count = len(text) - 1, 0
    while count < LONGEST and count <= place and text[place - count] == text[newest - count]:
        count += 1
    return count


def slow_look_up(text: list[int], parents: tuple[int, ...]) -> list[int]:
    """Each node takes the continuation of the best place that agrees with its path and differs from its siblings."""
    newest = len(text) - 1
    places = [place for place in range(newest) if match_length(text, place) > 0]
    places.sort(key=lambda place: (match_length(text, place), place), reverse=True)
    paths: list[list[int]] = [[]]  # tokens from below the root to each node
    for node in range(1, len(parents)):
        above = paths[parents[node]]
        siblings = [paths[other][-1] for other in range(1, node) if parents[other] == parents[node]]
        token = -1
        for place in places:
            following = text[place + 1 :][: len(above) + 1]
            if len(following) == len(above) + 1 and following[:-1] == above and following[-1] not in siblings:
                token = following[-1]
                break
        paths.append([*above, token])
    return [text[-1], *(path[-1] for path in paths[1:])]


def draft(text: list[int], tree: str, padding: int = 0) -> list[int]:
    """Drafts after `text`, with something else behind it in the history."""
    tokens = np.array([text + [text[-1]] * padding])
    return look_up(tokens, np.array([len(text) - 1]), TreeSpec.parse(tree), LONGEST)[0].tolist()


@pytest.mark.parametrize(
    "name", ["chain:1", "chain:5", "static:0,0,0", "static:fork2x4", "static:fan12", "static:0,0,1,1,2,3,3,5"]
)
@pytest.mark.parametrize("alphabet", [2, 4, 12])
def test_look_up_equals_a_search_place_by_place(name, alphabet):
    random = np.random.default_rng(alphabet)
    tree = TreeSpec.parse(name)
    tokens = random.integers(0, alphabet, (150, 40))
    newest = random.integers(0, 40, 150)
    drafted = jitted(tree)(tokens, newest)
    for row, last, actual in zip(tokens.tolist(), newest, drafted.tolist(), strict=True):
        assert actual == slow_look_up(row[: last + 1], tree.parents)


def test_siblings_are_distinct():
    random = np.random.default_rng(1)
    tree = TreeSpec.parse("static:fan12")
    drafted = np.asarray(jitted(tree)(random.integers(0, 4, (150, 40)), np.full(150, 39)))
    for row in drafted:
        for parent in range(tree.num_nodes):
            children = [row[node] for node in range(1, 12) if tree.parents[node] == parent and row[node] >= 0]
            assert len(children) == len(set(children))


def test_match_lengths_count_backwards_and_stop_at_the_longest():
    text = [1, 2, 3, 9, 1, 2, 3, 1, 2, 3]
    lengths = match_lengths(np.array([text]), np.array([9]), LONGEST)[0]
    assert lengths.tolist() == [0, 0, 3, 0, 0, 0, 3, 0, 0, 4]


def test_a_text_that_never_had_its_last_token_before_drafts_nothing():
    assert draft([1, 2, 3, 4], "static:0,0,1") == [4, -1, -1, -1]


def test_a_text_of_one_token_drafts_nothing():
    assert draft([4], "chain:2", padding=5) == [4, -1, -1]


def test_the_longest_match_wins_over_a_more_recent_one():
    # "2 3" stood before a 7; "3" alone stood later, before an 8.
    assert draft([2, 3, 7, 5, 3, 8, 2, 3], "chain:1") == [3, 7]


def test_among_equal_matches_the_most_recent_wins():
    assert draft([3, 7, 3, 8, 3], "chain:1") == [3, 8]


def test_matches_beyond_the_longest_count_the_same():
    # Both agree in LONGEST tokens; the older one agrees in one more.
    assert draft([9, 1, 2, 3, 4, 7, 8, 1, 2, 3, 4, 6, 9, 1, 2, 3, 4], "chain:1") == [4, 6]


def test_siblings_come_from_the_best_places_in_order():
    # "3 7 3" stood before the 8; of the two places of a mere "3" both went on with a 7.
    assert draft([3, 7, 3, 8, 3, 7, 3], "static:0,0,0") == [3, 8, 7, -1]


def test_a_continuation_ends_at_the_newest_token():
    # The place is one before the end: one token is known, the second would be past the newest.
    assert draft([5, 5], "chain:2", padding=6) == [5, 5, -1]


def test_what_lies_behind_the_newest_token_is_not_read():
    random = np.random.default_rng(2)
    tree = TreeSpec.parse("static:fork2x4")
    tokens = random.integers(0, 3, (150, 40))
    newest = random.integers(0, 40, 150)
    other = np.where(np.arange(40) > newest[:, None], random.integers(0, 3, (150, 40)), tokens)
    np.testing.assert_array_equal(jitted(tree)(tokens, newest), jitted(tree)(other, newest))


def test_a_chain_follows_one_place():
    # After "1 2" stood "3 4", and elsewhere "3 5" later: the most recent place gives both tokens.
    assert draft([1, 2, 3, 4, 1, 2, 3, 5, 1, 2], "chain:4") == [2, 3, 5, 1, 2]


def test_a_tree_with_nothing_to_draft_is_refused():
    with pytest.raises(UserError, match=r"'none'.*choose chain:D"):
        NGram().check_tree(TreeSpec.parse("none"))


@pytest.mark.parametrize(
    ("drafter", "advice"), [(NGram(), "choose chain:D or static:"), (NoDraft(), "--tree none")], ids=["ngram", "none"]
)
def test_a_dynamic_tree_is_refused_by_drafters_that_score_no_tokens(drafter, advice):
    name = "dynamic:steps=3,topk=4,nodes=16"
    with pytest.raises(UserError, match=f"'{name}' needs a draft.*{advice}"):
        drafter.check_tree(TreeSpec.parse(name))
