"""How one request is decoded, in the terms that users of vLLM and SGLang know."""

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxspec.errors import UserError

_LEAST_TEMPERATURE = 1e-3  # below it logits over temperature leave float32
_LEAST_TOP_P = 1e-6  # it keeps the most probable token alone, as every smaller one would


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Sampling of one request.

    Attributes:
      temperature: 0 is greedy; the larger, the flatter the distribution.
      top_p: keeps the fewest tokens whose probabilities add up to at least this, in (0, 1].
      top_k: keeps this many of the most probable tokens; 0 (or -1) keeps all.
      min_p: drops tokens less probable than this times the most probable one, in [0, 1].
      seed: of the request's noise, in [0, 2^64); the same seed gives the same tokens. None draws one.
      max_tokens: tokens generated at most.
      stop: strings that end the text; they are not part of it.
      stop_token_ids: tokens that end the sequence, besides the model's own end token.
      ignore_eos: don't stop at the model's end token.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int = 128
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_tuple("stop", self.stop))
        object.__setattr__(self, "stop_token_ids", _as_tuple("stop_token_ids", self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise UserError(f"ignore_eos={self.ignore_eos!r} must be True or False")
        _check_number("temperature", self.temperature)
        if self.temperature != 0 and not _LEAST_TEMPERATURE <= self.temperature <= 100:
            raise UserError(
                f"temperature={self.temperature} must be 0 (greedy) or between {_LEAST_TEMPERATURE} and 100"
            )
        _check_number("top_p", self.top_p)
        if not _LEAST_TOP_P <= self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must be between {_LEAST_TOP_P} and 1; 1 keeps all tokens")
        _check_number("min_p", self.min_p)
        if not 0 <= self.min_p <= 1:
            raise UserError(f"min_p={self.min_p} must be between 0 and 1; 0 keeps all tokens")
        _check_integer("top_k", self.top_k, -1, 2**31 - 1, "0 keeps all tokens")
        _check_integer("max_tokens", self.max_tokens, 1, 2**31 - 1, "ask for at least one token")
        if self.seed is not None:
            _check_integer("seed", self.seed, 0, 2**64 - 1, "or None to draw one")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise UserError(f"stop={list(self.stop)!r} must hold non-empty strings")
        for token in self.stop_token_ids:
            _check_integer("stop_token_ids", token, 0, 2**31 - 1, "token ids of the model")

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def _as_tuple(name: str, value: Any) -> tuple:
    """A list as a tuple, one string as a tuple of one, None as an empty one."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple):
        return tuple(value)
    raise UserError(f"{name}={value!r} must be a list")


def _check_number(name: str, value: Any) -> None:
    is_number = isinstance(value, float | int | np.floating) and not isinstance(value, bool)
    if not (is_number and abs(value) < math.inf):
        raise UserError(f"{name}={value!r} must be a finite number")


def _check_integer(name: str, value: Any, least: int, most: int, remedy: str) -> None:
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not (is_integer and least <= value <= most):
        raise UserError(f"{name}={value!r} must be an integer between {least} and {most}; {remedy}")
