"""`LLM`: a model, a draft and a mesh, ready to generate."""

import dataclasses
import itertools
import os
import secrets
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from jaxspec.cache.pages import PageGeometry
from jaxspec.cache.plan import check_memory, plan_memory
from jaxspec.checkpoint.default_model import DEFAULT_MODEL, open_model
from jaxspec.checkpoint.restore import restore_decoder
from jaxspec.drafts.interface import Drafter
from jaxspec.drafts.registry import find_drafter
from jaxspec.engine import sequence as sequences
from jaxspec.engine.engine import Engine
from jaxspec.engine.output import RequestOutput, StreamChunk, Transcript
from jaxspec.errors import UserError
from jaxspec.mesh import MODEL_AXES, PP, MeshShape, is_simulated, make_mesh
from jaxspec.models.decoder import DecoderLayout
from jaxspec.models.registry import read_config
from jaxspec.peers import BY_PEERS, BY_XLA, Peers, choose_exchange
from jaxspec.precision import DTYPES, choose_dtype
from jaxspec.progress import peak_host_memory, progress_bar
from jaxspec.sampling_params import SamplingParams
from jaxspec.speculate.attention import AUTO, PALLAS, REFERENCE, choose_attention
from jaxspec.speculate.program import Variant
from jaxspec.speculate.state import StepSpec
from jaxspec.speculate.trees import TreeSpec
from jaxspec.tokenizer import Tokenizer

TAIL_AXES = {"last": MODEL_AXES, "spread": (PP, *MODEL_AXES)}
ATTENTION = (AUTO, REFERENCE, PALLAS)
EXCHANGE = (AUTO, BY_XLA, BY_PEERS)
_PAGE_TOKENS_PER_RANK = 64
_LONGEST_DEFAULT_CONTEXT = 4096

# Text (wrapped in the chat template where the model has one), chat messages, or token ids.
type Prompt = str | Sequence[Mapping[str, Any]] | Sequence[int]


class LLM:
    """A target model with a draft on a mesh of devices.

    Args:
      model: name of a known model, or a directory made by `jaxspec convert`.
      draft: None or "none" for plain decoding, "ngram", "eagle3" (the head that comes with jaxspec, for its default
        model), or the directory of an EAGLE-3 head that was made for this model, as it was published or as
        `jaxspec convert` stored it.
      mesh: sizes of the axes (pp, tp, dcp). On CPUs a larger mesh than there are devices is simulated, which must be
        settled before JAX is first used: make the largest mesh of a process first.
      tree: shape of the drafted trees, as `chain:4`, `static:fork2x4` or, with a head,
        `dynamic:steps=3,topk=4,nodes=16`; None takes the drafter's own default.
      dtype: "auto" (bfloat16 on GPUs, float32 on CPUs), "float32" or "bfloat16".
      tail_placement: "last" or "spread"; None measures both on GPUs and keeps the faster.
      attention: "auto" by the kernels for Hopper GPUs where there is such a GPU and they take the model's shapes, else
        in plain JAX; "reference" always in plain JAX; "pallas" by the kernels (on a CPU simulated, one device only).
      exchange: how devices talk: "auto" by stores into each other's memory where that can be had (Hopper GPUs of one
        host and one process; messages of up to 512 KiB), else by the collectives of XLA; "xla" always by these; "peers"
        by stores, or an error where several devices can't.
      draft_taps: which residual streams of the model the head reads, ascending: i is the one after i layers, whatever
        the tool that made the head counts. None takes those that its files name, else (2, n // 2, n - 3) of n layers.
      max_num_seqs: sequences that decode at once; more wait their turn.
      max_model_len: tokens of a prompt and its answer together; None is the model's own, up to 4096.
      page_size: tokens of a KV page, a multiple of dcp; None is 64 for each dcp rank.
      num_pages: pages in all; None has room for `max_num_seqs` sequences of full length.
      chunk_size: prompt tokens that enter in one tick.
      rounds_per_dispatch: rounds queued at once; more saves host time and delays what the host sees.
      chat: wrap text prompts in the model's chat template; None does where there is one.

    Raises:
      UserError: something of this can't be had; the message says what to do.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] = DEFAULT_MODEL,
        draft: str | os.PathLike[str] | None = None,
        mesh: tuple[int, int, int] | str | MeshShape = (1, 1, 1),
        tree: str | None = None,
        dtype: str = "auto",
        tail_placement: str | None = None,
        *,
        attention: str = AUTO,
        exchange: str = AUTO,
        draft_taps: Sequence[int] | None = None,
        max_num_seqs: int = 8,
        max_model_len: int | None = None,
        page_size: int | None = None,
        num_pages: int | None = None,
        chunk_size: int = 64,
        rounds_per_dispatch: int | None = None,
        chat: bool | None = None,
        report: Callable[[str], None] | None = None,
    ):
        self._report = report or (lambda line: None)
        model = _as_text(model)
        draft = None if draft is None else _as_text(draft)
        drafter, tree_spec = check_options(draft, tree, dtype, tail_placement, draft_taps)
        _check_choice("attention", attention, ATTENTION)
        _check_choice("exchange", exchange, EXCHANGE)
        for name, value, least in (
            ("max_num_seqs", max_num_seqs, 1),
            ("max_model_len", max_model_len, 1),
            ("chunk_size", chunk_size, 1),
            ("page_size", page_size, 1),
            ("num_pages", num_pages, 2),
            ("rounds_per_dispatch", rounds_per_dispatch, 1),
        ):
            if value is not None:
                check_at_least(name, value, least)
        self.mesh_shape = _as_mesh_shape(mesh)
        self.draft, self.tree = "none" if draft is None else draft, tree_spec.name
        pp, dcp = self.mesh_shape.pp, self.mesh_shape.dcp
        geometry = PageGeometry(page_size or _PAGE_TOKENS_PER_RANK * dcp, dcp)

        self._mesh = make_mesh(self.mesh_shape)
        is_gpu = self._mesh.devices.flat[0].platform != "cpu"
        if is_simulated(self._mesh):
            self._report(f"mesh {self.mesh_shape} is simulated on the CPU: right results, no measure of speed")
        self.dtype = choose_dtype(dtype, self._mesh.devices.flat[0])
        self._checkpoint = open_model(model)
        self.tokenizer = Tokenizer.load(self._checkpoint.path)
        self.config = read_config(self._checkpoint.config)
        self.chat = self.tokenizer.has_chat_template if chat is None else chat
        if self.chat and not self.tokenizer.has_chat_template:
            raise UserError(f"model {model!r} has no chat template: give plain text (chat=False, --no-chat)")
        length = min(self.config.max_positions, _LONGEST_DEFAULT_CONTEXT) if max_model_len is None else max_model_len
        if length > self.config.max_positions:
            raise UserError(f"max_model_len={length} must be at most the model's {self.config.max_positions}")

        slots_per_group, pages_per_slot = -(-max_num_seqs // pp), geometry.pages_for(length)
        layout = DecoderLayout(self.config, self.mesh_shape, MODEL_AXES, DTYPES[self.dtype])
        device = self._mesh.devices.flat[0]
        self.attention, reason = choose_attention(attention, device, layout, tree_spec.num_nodes, geometry)
        self._spec = StepSpec(
            layout=layout,
            drafter=drafter.fit(self.config, draft_taps),
            tree=tree_spec,
            geometry=geometry,
            num_pages=num_pages or 1 + slots_per_group * pp * pages_per_slot,
            pages_per_slot=pages_per_slot,
            slots_per_group=slots_per_group,
            chunk=min(chunk_size, length),
            rounds=rounds_per_dispatch or (4 if is_gpu else 1),
            attention=self.attention,
        )
        self._report(f"attention: {self.attention} ({reason})")
        self.exchange, reason = choose_exchange(exchange, self._mesh)
        self._report(f"exchange between devices: {self.exchange} ({reason})")
        # One for all engines: it is memory that no program owns.
        self._peers = Peers.connect(self._mesh, self.mesh_shape) if self.exchange == BY_PEERS else None
        if tail_placement is None and pp > 1 and is_gpu:
            self.tail_placement, self.engine = self._faster_placement()
        else:
            self.tail_placement = tail_placement or "last"
            self.engine = self._make_engine(self.tail_placement)
        self._arrivals = itertools.count()
        self._is_busy = False

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        show_progress: bool = True,
    ) -> list[RequestOutput]:
        """Answers to all prompts, in their order.

        Args:
          prompts: one prompt or many; more than `max_num_seqs` wait their turn.
          params: for all, or one for each.
          show_progress: where there are several prompts, a bar on stderr; where that is no terminal, `report` gets a
            line now and then.
        """
        many: list[Any] = [prompts] if _is_one_prompt(prompts) else list(prompts)
        each: list[Any] = list(params) if isinstance(params, list | tuple) else [params or SamplingParams()] * len(many)
        if len(each) != len(many):
            raise UserError(f"{len(each)} sampling parameters for {len(many)} prompts: give one, or one for each")
        transcripts = [self._open(prompt, own) for prompt, own in zip(many, each, strict=True)]
        is_shown = show_progress and len(many) > 1
        started, tokens = time.perf_counter(), 0
        with progress_bar("generating", len(many), is_shown, say=self._report) as advance:
            for transcript, update in self._run(transcripts):
                if transcript.needs_every_round:
                    self._read(transcript, update)
                tokens += len(update.token_ids)
                if update.sequence.is_finished:  # a round is too short for more
                    advance(1, f"{tokens / (time.perf_counter() - started):,.0f} tokens/s")
        return [transcript.output(prompt) for transcript, prompt in zip(transcripts, many, strict=True)]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None
    ) -> Generator[StreamChunk, None, RequestOutput]:
        """The answer as it is accepted, a chunk a round. Closing the iterator cancels the request.

        The iterator's `return` value is the `RequestOutput`.
        """
        transcript = self._open(prompt, params or SamplingParams())
        for _, update in self._run([transcript]):
            yield self._read(transcript, update)
        return transcript.output(prompt)

    def warm_up(self, num_seqs: int = 1, params: SamplingParams | None = None) -> None:
        """Compiles what so many requests like this need. `generate` and `stream` begin with it, off their clock."""
        self.engine.warm_up(num_seqs, (params or SamplingParams()).is_greedy)

    def _open(self, prompt: Prompt, params: SamplingParams) -> Transcript:
        if not isinstance(params, SamplingParams):
            raise UserError(f"params={params!r} must be SamplingParams, or a list with one for each prompt")
        stop_ids = [self._check_token("stop token", int(token)) for token in params.stop_token_ids]
        stop_ids += [] if params.ignore_eos else self.tokenizer.eos_token_ids
        request = sequences.Sequence(
            order=next(self._arrivals),
            prompt=self.encode(prompt),
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            stop_ids=sorted(set(stop_ids)),
        )
        self.engine.scheduler.check(request)
        return Transcript(request, self.tokenizer)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt as the model gets it."""
        if isinstance(prompt, str):
            return self.tokenizer.encode_chat(prompt) if self.chat else self.tokenizer.encode(prompt)
        if isinstance(prompt, list | tuple | np.ndarray):
            items: list[Any] = prompt.tolist() if isinstance(prompt, np.ndarray) else list(prompt)
            if items and all(isinstance(item, Mapping) for item in items):
                return self.tokenizer.encode_messages(items)
            if all(isinstance(item, int | np.integer) and not isinstance(item, bool) for item in items):
                return [self._check_token("prompt token", int(item)) for item in items]
        raise UserError(
            f"prompt {str(prompt)[:40]!r} of type {type(prompt).__name__} is not a prompt: give text, a list of chat "
            "messages with role and content, or a list of token ids"
        )

    def _check_token(self, name: str, token: int) -> int:
        if not 0 <= token < self.config.vocab_size:
            raise UserError(f"{name} {token} must be an id between 0 and {self.config.vocab_size - 1}")
        return token

    def _read(self, transcript: Transcript, update: sequences.Update) -> StreamChunk:
        """The text of a round, which may end the request."""
        chunk = transcript.add(update)
        if chunk.finish_reason is not None:
            self.engine.finish(update.sequence, chunk.finish_reason)
        return chunk

    def _run(self, transcripts: list[Transcript]) -> Iterator[tuple[Transcript, sequences.Update]]:
        """Serves requests to their ends, which a reader of an update may bring about (`_read`).

        Those left when the iterator is closed are cancelled.
        """
        if self._is_busy:
            raise UserError("this LLM is generating already: finish or close the other iterator first")
        unfinished = {id(transcript.sequence): transcript for transcript in transcripts}
        self._is_busy = True
        try:
            is_greedy = all(transcript.sequence.params.is_greedy for transcript in transcripts)
            self.engine.warm_up(len(transcripts), is_greedy)
            for transcript in transcripts:
                transcript.sequence.arrived_at = time.perf_counter()
                self.engine.add(transcript.sequence)
            while unfinished:
                for update in self.engine.step():
                    yield unfinished[id(update.sequence)], update
                    if update.sequence.is_finished:
                        del unfinished[id(update.sequence)]
        finally:
            self._is_busy = False
            for transcript in transcripts:
                self.engine.finish(transcript.sequence, "cancelled")

    def _make_engine(self, placement: str) -> Engine:
        layout = dataclasses.replace(self._spec.layout, tail_axes=TAIL_AXES[placement])
        spec = dataclasses.replace(self._spec, layout=layout)
        self.memory = plan_memory(spec, self._mesh)
        check_memory(self.memory, self._mesh)
        with progress_bar("loading weights", layout.layer_slots + 1, is_shown=True) as advance:
            graph, weights = restore_decoder(self._checkpoint, layout, self._mesh, advance)
        self._report(f"memory of each device: {self.memory}; peak of the host: {peak_host_memory() / 2**20:,.0f} MiB")
        draft_weights = spec.drafter.restore(layout, self._mesh)
        return Engine(spec, self._mesh, graph, weights, draft_weights, self._peers, on_compile=self._announce)

    def _faster_placement(self) -> tuple[str, Engine]:
        """Measures a round with either placement of the tail, one engine at a time: no device holds the model twice."""
        seconds: dict[str, float] = {}
        for placement in ("spread", "last"):
            engine = None  # frees the one before
            engine = self._make_engine(placement)
            batch = engine.scheduler.batch_for(self._spec.num_slots)
            seconds[placement] = engine.seconds_per_dispatch(batch) / self._spec.rounds
        best = min(seconds, key=lambda placement: seconds[placement])
        times = ", ".join(f"{placement} {1e3 * each:.2f} ms" for placement, each in seconds.items())
        self._report(f"tail placement {best}: a round takes {times}")
        if best != placement:
            engine = None
            engine = self._make_engine(best)
        assert engine is not None
        return best, engine

    def _announce(self, variant: Variant, seconds: float | None) -> None:
        what = "prompts" if variant.has_lane else "decoding"
        self._report(
            f"compiling the program for {what}, {variant.batch} sequences a group …"
            if seconds is None
            else f"compiled the program for {what} in {seconds:.1f} s"
        )


def check_options(
    draft: str | None, tree: str | None, dtype: str, tail_placement: str | None, draft_taps: Sequence[int] | None
) -> tuple[Drafter, TreeSpec]:
    """The drafter and the tree, where these options can be had at all; no model is opened for it.

    Raises:
      UserError: one of them is unknown, or they don't go together.
    """
    for name, value in (("draft", draft), ("tree", tree)):
        if value is not None and not (isinstance(value, str) and value):
            raise UserError(f"{name}={value!r} must be a text that is not empty, or None")
    if draft_taps is not None and not (
        isinstance(draft_taps, list | tuple) and draft_taps and all(type(tap) is int for tap in draft_taps)
    ):
        raise UserError(f"draft_taps={draft_taps!r} must be a list of integers, for instance (2, 16, 29)")
    drafter = find_drafter("none" if draft is None else draft)
    tree_spec = TreeSpec.parse(drafter.default_tree if tree is None else tree)
    drafter.check_tree(tree_spec)
    _check_choice("dtype", dtype, ("auto", *DTYPES))
    if tail_placement is not None:
        _check_choice("tail_placement", tail_placement, tuple(TAIL_AXES))
    return drafter, tree_spec


def check_at_least(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{name}={value!r} must be an integer of at least {least}")


def _as_mesh_shape(mesh: object) -> MeshShape:
    if isinstance(mesh, MeshShape):
        return mesh
    if isinstance(mesh, str):
        return MeshShape.parse(mesh)
    if not isinstance(mesh, list | tuple) or len(mesh) != 3:
        raise UserError(f"mesh={mesh!r} must be three sizes (pp, tp, dcp), for instance (2, 1, 2)")
    return MeshShape(*mesh)


def _as_text(name_or_path: str | os.PathLike[str]) -> str:
    """What is neither is left for the checks to name."""
    return os.fspath(name_or_path) if isinstance(name_or_path, os.PathLike) else name_or_path


def _check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise UserError(f"{name}={value!r} must be one of {', '.join(choices)}")


def _is_one_prompt(prompts: Any) -> bool:
    """Text, chat messages or token ids, rather than a list of them."""
    if not isinstance(prompts, list | tuple):
        return True
    return bool(prompts) and isinstance(prompts[0], int | np.integer | Mapping)
