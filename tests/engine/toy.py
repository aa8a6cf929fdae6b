"""A model that computes nothing but labels, so that the schedule can be checked alone.

A token is `tag * ALPHABET + symbol`: the tag names its request. Keys and values carry (tag, position, symbol, 1);
queries are zero, so attention is the mean over all that a row sees, and its sums give away any row that is missing,
foreign, stale or doubled. The token that follows is a checksum of the symbols of the whole context; anything wrong on
the way gives `BAD` instead. Each layer also counts itself, so a row that misses a stage or meets one twice is noticed.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P

from jaxspec.cache.pages import PageGeometry
from jaxspec.drafts.registry import find_drafter
from jaxspec.engine.engine import Engine
from jaxspec.engine.sequence import Sequence
from jaxspec.mesh import MODEL_AXES, PP, MeshShape, make_mesh, rank
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import DecoderLayout
from jaxspec.sampling_params import SamplingParams
from jaxspec.speculate.state import StepSpec
from jaxspec.speculate.trees import TreeSpec

ALPHABET = 4
TAGS = 64
BAD = TAGS * ALPHABET
_VOCAB = BAD + 8
_LAYERS = 4
# Columns of a hidden row.
_TAG, _SYMBOL, _POSITION, _COUNT, _FAULT, _NEXT = range(6)


class ToyModel(nnx.Module):
    def __init__(self, layout: DecoderLayout):
        self.layout = layout
        self.unused = nnx.Param(jnp.zeros(()), out_sharding=P())

    def embed(self, tokens):
        tag, symbol = jnp.divmod(jnp.maximum(tokens, 0), ALPHABET)
        zero = jnp.zeros_like(tag)
        return jnp.stack([tag, symbol, zero, zero, zero, zero], axis=-1).astype(jnp.float32)

    def stage(self, x, positions, attend, cache, observe, observed, collectives):
        layout = self.layout
        heads = layout.heads
        local_kv = heads.kv_heads // layout.mesh.tp
        for slot in range(layout.layer_slots):
            is_mine = slot < jnp.array(layout.stage_sizes)[rank((PP,))]
            layer = jnp.array(np.cumsum([0, *layout.stage_sizes[:-1]]))[rank((PP,))] + slot
            label = jnp.stack([x[:, _TAG], positions.astype(jnp.float32), x[:, _SYMBOL], jnp.ones(len(x))], axis=-1)
            kv = jnp.broadcast_to(label[:, None], (len(x), local_kv, 4))
            q = jnp.zeros((len(x), local_kv * heads.queries_per_kv, 4))
            seen, cache = attend(cache, slot, q, kv, kv)
            own = seen.reshape(len(x), -1, 4)
            mean = collectives.all_reduce(own.mean(axis=1), MODEL_AXES) / layout.mesh.axis_size(MODEL_AXES)
            spread = jnp.abs(own - mean[:, None]).max(axis=(1, 2))
            count = (positions + 1).astype(jnp.float32)
            faults = [
                jnp.abs(mean[:, 0] - x[:, _TAG]) > 1e-3,
                jnp.abs(mean[:, 1] - (count - 1) / 2) > 1e-3,
                jnp.abs(mean[:, 3] - 1) > 1e-4,
                jnp.abs(x[:, _COUNT] - layer) > 0.5,
                spread > 1e-3,
            ]
            checksum = jnp.round(mean[:, 2] * count) % ALPHABET
            y = jnp.stack(
                [
                    x[:, _TAG],
                    x[:, _SYMBOL],
                    positions.astype(jnp.float32),
                    x[:, _COUNT] + 1,
                    jnp.maximum(x[:, _FAULT], jnp.stack(faults).any(axis=0).astype(jnp.float32)),
                    checksum,
                ],
                axis=-1,
            )
            x = jnp.where(is_mine, y, x)
        return x, cache, observed

    def final_hidden(self, x):
        return x

    def logits(self, hidden):
        local = self.layout.padded_vocab // self.layout.mesh.axis_size(self.layout.tail_axes)
        ids = rank(self.layout.tail_axes) * local + jnp.arange(local)
        symbol = (3 * hidden[..., _NEXT] + hidden[..., _POSITION]) % ALPHABET
        is_good = (hidden[..., _FAULT] == 0) & (hidden[..., _COUNT] == _LAYERS)
        token = jnp.where(is_good, hidden[..., _TAG] * ALPHABET + symbol, BAD)
        # The next symbol is a close second, so that sampled requests have a choice.
        second = jnp.where(is_good, hidden[..., _TAG] * ALPHABET + (symbol + 1) % ALPHABET, BAD)
        return jnp.where(ids == token[..., None], 2.0, jnp.where(ids == second[..., None], 1.0, -30.0))


def expected_tokens(prompt: list[int], count: int) -> list[int]:
    """What a greedy request must get."""
    symbols = [token % ALPHABET for token in prompt]
    tag, tokens = prompt[0] // ALPHABET, []
    for _ in range(count):
        position = len(symbols) - 1
        symbol = (3 * (sum(symbols) % ALPHABET) + position) % ALPHABET
        symbols.append(symbol)
        tokens.append(tag * ALPHABET + symbol)
    return tokens


@functools.lru_cache(maxsize=6)  # a program of XLA:CPU takes hundreds of the 65,530 memory maps of a process
def toy_engine(
    mesh: MeshShape,
    *,
    draft: str = "ngram",
    tree: str = "chain:3",
    slots_per_group: int = 2,
    pages: int = 64,
    page_size: int = 4,
    pages_per_slot: int = 16,
    chunk: int = 4,
    rounds: int = 1,
    tail_axes=MODEL_AXES,
) -> Engine:
    """One engine for tests that ask for the same: it serves any number of requests, one after another."""
    config = ModelConfig(
        family="toy",
        vocab_size=_VOCAB,
        hidden_size=6,
        intermediate_size=1,
        num_layers=_LAYERS,
        num_heads=mesh.tp * mesh.dcp,
        num_kv_heads=mesh.tp,
        head_dim=4,
        norm_eps=1e-5,
        rope_theta=1e4,
        max_positions=1024,
    )
    spec = StepSpec(
        layout=DecoderLayout(config, mesh, tail_axes, np.dtype("float32")),
        drafter=find_drafter(draft),
        tree=TreeSpec.parse(tree),
        geometry=PageGeometry(page_size, mesh.dcp),
        num_pages=pages,
        pages_per_slot=pages_per_slot,
        slots_per_group=slots_per_group,
        chunk=chunk,
        rounds=rounds,
    )
    device_mesh = make_mesh(mesh)
    with nnx.use_eager_sharding(False):
        graph, weights = nnx.split(ToyModel(spec.layout))
    weights = jax.device_put(weights, jax.sharding.NamedSharding(device_mesh, P()))
    return Engine(spec, device_mesh, graph, weights)


@dataclasses.dataclass
class Requests:
    """Makes requests with tags of their own and remembers them."""

    rng: np.random.Generator
    made: list[Sequence] = dataclasses.field(default_factory=list)

    def make(self, prompt_length: int, max_tokens: int, **options) -> Sequence:
        tag = len(self.made) % TAGS
        symbols = self.rng.integers(0, ALPHABET, prompt_length)
        stop_ids = options.pop("stop_ids", [])
        sequence = Sequence(
            order=len(self.made),
            prompt=[int(tag * ALPHABET + symbol) for symbol in symbols],
            params=SamplingParams(max_tokens=max_tokens, **options),
            seed=len(self.made),
            stop_ids=stop_ids,
        )
        self.made.append(sequence)
        return sequence


def run(engine: Engine, sequences: list[Sequence]) -> list[Sequence]:
    """Serves all to their ends."""
    for sequence in sequences:
        engine.add(sequence)
    while engine.has_work:
        for _ in engine.step():
            pass
    return sequences


def trash_page(engine: Engine) -> np.ndarray:
    """What is in the page that belongs to nobody, of the cache and of the history."""
    state = engine._state
    return np.concatenate([np.ravel(state.cache.pages[:, :, :, 0]), np.ravel(state.history[0])])
