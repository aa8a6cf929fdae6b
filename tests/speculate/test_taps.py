import itertools

import pytest

from jaxspec.errors import UserError
from jaxspec.speculate.taps import check_taps, tap_places

SPLIT = (8, 8, 10, 6)  # of 32 layers


def emitted_and_forwarded(taps: tuple[int, ...]) -> list[tuple[list[int], int]]:
    """Of each stage: the slots of taps that it computes, and how many it has from the stages before."""
    stages = [stage for stage, _ in tap_places(taps, SPLIT)]
    return [
        ([slot for slot, owner in enumerate(stages) if owner == stage], sum(owner < stage for owner in stages))
        for stage in range(len(SPLIT))
    ]


def test_taps_2_16_29_are_computed_and_forwarded_as_in_the_worked_example():
    assert emitted_and_forwarded((2, 16, 29)) == [([0], 0), ([1], 1), ([], 2), ([2], 2)]
    # Layers 1 and 15 of the model, and layer 28, the third of the last stage.
    assert tap_places((2, 16, 29), SPLIT) == ((0, 1), (1, 7), (3, 2))


def test_taps_0_8_32_are_computed_and_forwarded_as_in_the_worked_example():
    assert emitted_and_forwarded((0, 8, 32)) == [([0, 1], 0), ([], 2), ([], 2), ([2], 2)]
    assert tap_places((0, 8, 32), SPLIT) == ((0, -1), (0, 7), (3, 5))


def test_a_tap_on_a_border_is_the_last_output_of_the_earlier_stage():
    assert tap_places((8, 16, 26), SPLIT) == ((0, 7), (1, 7), (2, 9))
    assert tap_places((9, 17, 27), SPLIT) == ((1, 0), (2, 0), (3, 0))


def test_every_tap_of_a_model_has_one_place_for_every_split():
    for stages in (1, 2, 3, 4):
        for cuts in itertools.combinations(range(1, 7), stages - 1):
            ends = (0, *cuts, 7)
            sizes = tuple(end - start for start, end in itertools.pairwise(ends))
            # The embedding enters the first stage; every layer of every stage gives one tap, in the model's order.
            layers = [(stage, slot) for stage, size in enumerate(sizes) for slot in range(size)]
            assert tap_places(range(8), sizes) == ((0, -1), *layers)


def test_taps_within_the_target_are_accepted():
    for taps in ((), (0,), (32,), (0, 16, 32), [2, 16, 29], range(33)):
        check_taps(taps, 32)


@pytest.mark.parametrize(
    ("taps", "says"),
    [
        ((2, 16, 33), ["tap 33", "between 0", "32"]),
        ((-1, 2), ["tap -1", "between 0", "32"]),
        ((16, 2, 29), ["[16, 2, 29]", "ascending"]),
        ((2, 2, 29), ["[2, 2, 29]", "each once"]),
    ],
)
def test_other_taps_are_refused_with_the_value_and_what_is_expected(taps, says):
    with pytest.raises(UserError) as raised:
        check_taps(taps, 32)
    for part in says:
        assert part in str(raised.value)
