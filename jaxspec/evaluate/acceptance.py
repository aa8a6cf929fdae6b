"""How much of what is drafted the target accepts: runs over a set of questions, and their statistics."""

import dataclasses
import time
from collections.abc import Callable, Sequence

from jaxspec.engine.output import RequestOutput
from jaxspec.errors import UserError
from jaxspec.evaluate.questions import Question, prompt_for
from jaxspec.llm import LLM
from jaxspec.sampling_params import SamplingParams
from jaxspec.speculate.trees import TreeSpec
from jaxspec.tokenizer import Tokenizer

_CONTEXT_STEP = 256


@dataclasses.dataclass(frozen=True)
class Answer:
    """One turn of a question, as one run answered it.

    Attributes:
      turn: counted from 1.
      first_difference: index of the first token that is not plain decoding's; None where all are the same.
      lead: by how much the target's likeliest token led the second there, in logits; None where it is not measured.
    """

    question: Question
    turn: int
    output: RequestOutput
    first_difference: int | None
    lead: float | None = None


@dataclasses.dataclass(frozen=True)
class Run:
    """All questions, answered with one draft and one tree.

    Attributes:
      dtype, attention, exchange: as the model ran.
      depth: tokens that a round can accept of a drafted tree.
      answers: all first turns in the order of the questions, then all second turns, and so on.
      seconds: from the first request to the last token of each turn, prompts included and compiling left out.
    """

    draft: str
    tree: str
    dtype: str
    attention: str
    exchange: str
    depth: int
    answers: tuple[Answer, ...]
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.output.token_ids) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


@dataclasses.dataclass(frozen=True)
class Acceptance:
    """Statistics of some answers.

    Attributes:
      rounds: in which drafted trees were verified; a request's first token comes from its prompt, not from a round.
      mean_accepted_length: tokens a round, the target's own included; None where there was no round.
      by_position: share of rounds that accept at least 1, 2, … drafted tokens.
      identical: share of answers whose tokens are those of plain decoding.
    """

    requests: int
    tokens: int
    rounds: int
    mean_accepted_length: float | None
    by_position: tuple[float, ...]
    identical: float


def acceptance(answers: Sequence[Answer], depth: int) -> Acceptance:
    """Statistics of these answers; a round counts the same whichever answer it is of."""
    lengths = [length for answer in answers for length in answer.output.accepted_lengths]
    return Acceptance(
        requests=len(answers),
        tokens=sum(len(answer.output.token_ids) for answer in answers),
        rounds=len(lengths),
        mean_accepted_length=sum(lengths) / len(lengths) if lengths else None,
        by_position=shares_by_position(lengths, depth),
        identical=sum(answer.first_difference is None for answer in answers) / len(answers),
    )


def shares_by_position(accepted_lengths: Sequence[int], depth: int) -> tuple[float, ...]:
    """Share of rounds that accept at least d drafted tokens, for d from 1 to `depth`; lengths count the bonus too."""
    if not accepted_lengths:
        return ()
    return tuple(sum(length > d for length in accepted_lengths) / len(accepted_lengths) for d in range(1, depth + 1))


def by_category(run: Run) -> dict[str, Acceptance]:
    """Statistics of each category, in the order in which they are first met."""
    answers: dict[str, list[Answer]] = {}
    for answer in run.answers:
        answers.setdefault(answer.question.category, []).append(answer)
    return {category: acceptance(each, run.depth) for category, each in answers.items()}


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    """Index of the first token that differs, also where one of them has ended; None where they are the same."""
    if list(tokens) == list(others):
        return None
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(tokens), len(others)))


def measure(llm: LLM, questions: Sequence[Question], params: SamplingParams, num_seqs: int, plain: Run | None) -> Run:
    """Asks all questions, a turn of all of them at a time.

    Later turns hold the answers of plain decoding, whatever the draft: so all runs have the same prompts.

    Args:
      params: of the first question; the seed grows by one with each.
      num_seqs: requests that `llm` serves at once.
      plain: the run without a draft, or None if this is it.
    """
    texts: list[list[str]] = [[] for _ in questions]
    reference = iter(plain.answers if plain else ())
    answers: list[Answer] = []
    seconds = 0.0
    for turn in range(max(len(question.turns) for question in questions)):
        asked = [index for index, question in enumerate(questions) if turn < len(question.turns)]
        prompts = [prompt_for(questions[index], texts[index], llm.chat) for index in asked]
        each = [_with_seed(params, index) for index in asked]
        _warm_up(llm, prompts[:num_seqs], each[:num_seqs])
        started = time.perf_counter()
        outputs = llm.generate(prompts, each)
        seconds += time.perf_counter() - started
        for index, output in zip(asked, outputs, strict=True):
            expected = next(reference).output if plain else output
            difference = first_difference(output.token_ids, expected.token_ids)
            answers.append(Answer(questions[index], turn + 1, output, difference))
            texts[index].append(expected.text)
    return Run(
        draft=llm.draft,
        tree=llm.tree,
        dtype=llm.dtype,
        attention=llm.attention,
        exchange=llm.exchange,
        depth=TreeSpec.parse(llm.tree).max_depth,
        answers=tuple(answers),
        seconds=seconds,
    )


def with_leads(runs: Sequence[Run], measure: Callable[[Sequence[Sequence[int]]], Sequence[float]]) -> list[Run]:
    """The runs with the leads of all answers that differ from plain decoding's.

    Args:
      measure: the leads after some texts, given as tokens; called once, for all runs.
    """
    texts = [
        [*answer.output.prompt_token_ids, *answer.output.token_ids[: answer.first_difference]]
        for run in runs
        for answer in run.answers
        if answer.first_difference is not None
    ]
    leads = iter(measure(texts))

    def led(answer: Answer) -> Answer:
        return answer if answer.first_difference is None else dataclasses.replace(answer, lead=next(leads))

    return [dataclasses.replace(run, answers=tuple(map(led, run.answers))) for run in runs]


def context_for(questions: Sequence[Question], max_tokens: int, tokenizer: Tokenizer, limit: int) -> int:
    """Tokens of context that hold any of the questions with its answers; attention costs grow with it.

    Raises:
      UserError: a question needs more than `limit`.
    """
    longest = 0
    for question in questions:
        rest = len(question.turns) - 1
        prompt = prompt_for(question, [""] * rest, tokenizer.has_chat_template)
        ids = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_messages(prompt)
        # Text can take a few more tokens as part of a prompt than it was generated with.
        needed = len(ids) + max_tokens + rest * max_tokens * 5 // 4
        if needed > limit:
            raise UserError(
                f"question {question.id} of {question.category} needs a context of {needed} tokens with its answers, "
                f"but the model's is {limit}: take it out of the file or lower --max-tokens"
            )
        longest = max(longest, needed)
    return min(-(-longest // _CONTEXT_STEP) * _CONTEXT_STEP, limit)


def _with_seed(params: SamplingParams, index: int) -> SamplingParams:
    """Requests that share a seed would share their noise."""
    return params if params.seed is None else dataclasses.replace(params, seed=(params.seed + index) % 2**64)


def _warm_up(llm: LLM, prompts: Sequence, params: Sequence[SamplingParams]) -> None:
    """Compiles what a batch of these needs, and runs it once: what a program does at its first start is left out."""
    few = [dataclasses.replace(each, max_tokens=min(2, each.max_tokens)) for each in params]
    llm.generate(prompts, few, show_progress=False)
