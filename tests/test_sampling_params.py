import numpy as np
import pytest

from jaxspec.errors import UserError
from jaxspec.sampling_params import SamplingParams

BAD = {
    "temperature": [-0.1, 1e-4, 100.1, float("nan"), float("inf"), "hot", None, True],
    "top_p": [0, 0.0, -0.5, 1.01, float("nan"), "most", None, False],
    "min_p": [-0.01, 1.01, float("nan"), float("-inf"), "some", None, True],
    "top_k": [-2, 2**31, 1.5, 5.0, "many", None, True],
    "max_tokens": [0, -1, 2**31, 16.0, "all", None, True],
    "seed": [-1, 2**64, 0.5, "lucky", True],
}
GOOD = {
    "temperature": [0, 0.0, 1e-3, 0.7, 1, 100, np.float32(0.5)],
    "top_p": [1e-6, 0.5, 1, 1.0, np.float64(0.9)],
    "min_p": [0, 0.05, 1],
    "top_k": [-1, 0, 1, 50, 2**31 - 1, np.int32(7)],
    "max_tokens": [1, 128, np.int64(3)],
    "seed": [None, 0, 2**64 - 1, np.uint32(5)],
    "stop": [(), [], "end", ["a", "bc"], ("\n",)],
    "stop_token_ids": [(), [0, 5], (2**31 - 1,), [np.int32(3)]],
    "ignore_eos": [True, False],
}


def cases(table):
    return [pytest.param(name, value, id=f"{name}={value!r}") for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), cases(BAD))
def test_a_bad_number_is_refused_with_its_name_and_value(name, value):
    with pytest.raises(UserError) as raised:
        SamplingParams(**{name: value})
    assert f"{name}={value}" in str(raised.value) or f"{name}={value!r}" in str(raised.value)


@pytest.mark.parametrize("stop", ["", [""], ["end", ""], [5], ["end", None]], ids=repr)
def test_stop_strings_that_are_empty_or_no_strings_are_refused(stop):
    with pytest.raises(UserError, match=r"stop=.* must hold non-empty strings") as raised:
        SamplingParams(stop=stop)
    assert repr(stop[-1] if stop else "") in str(raised.value)


@pytest.mark.parametrize("tokens", [[-1], [3, -2], [2**31], [1.0], ["</s>"], [True]], ids=repr)
def test_stop_tokens_that_are_no_token_ids_are_refused(tokens):
    with pytest.raises(UserError) as raised:
        SamplingParams(stop_token_ids=tokens)
    assert f"stop_token_ids={tokens[-1]!r}" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value"), [("stop", 5), ("stop_token_ids", 7), ("temperature", 10**400)], ids=["stop", "tokens", "huge"]
)
def test_a_value_of_another_type_is_refused_with_its_name(name, value):
    with pytest.raises(UserError, match=name):
        SamplingParams(**{name: value})


@pytest.mark.parametrize(("name", "value"), cases(GOOD))
def test_a_good_value_passes(name, value):
    SamplingParams(**{name: value})


def test_a_single_stop_string_is_one_string():
    assert SamplingParams(stop="end").stop == ("end",)


def test_only_a_temperature_of_zero_is_greedy():
    assert SamplingParams().is_greedy
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-3).is_greedy


def test_no_error_runs_over_several_lines():
    for name, values in BAD.items():
        for value in values:
            with pytest.raises(UserError) as raised:
                SamplingParams(**{name: value})
            assert "\n" not in str(raised.value)
