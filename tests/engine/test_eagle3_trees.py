"""Whole trees that the engine plants, node by node, against a slow recomputation of target, head and EAGLE-2's growth.

Accepted lengths alone would not notice a row that takes the wrong parent's output or sees its siblings: on the pair
such trees are accepted nearly as well. Here everything is recomputed from the text, in float64, without a cache.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from models_on_mesh import ONE, PAIR_TARGET, FileReader, engine, load
from test_eagle3_meshes import head, independent

from jaxspec.drafts.eagle3 import Eagle3
from jaxspec.drafts.eagle3_config import eagle3_tensor_shapes
from jaxspec.engine.sequence import Sequence
from jaxspec.mesh import MeshShape
from jaxspec.sampling_params import SamplingParams
from jaxspec.speculate.trees import TreeSpec

EPS = 1e-5


def norm(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * weight


def rotate(x, base):
    """Rows at positions 0, 1, …"""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None, None] * base ** -(np.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def layer(residual, inputs, weight, config):
    """A causal layer over all rows; `inputs` are what its attention reads."""
    n = len(inputs)
    q, k, v = ((inputs @ weight(f"self_attn.{name}_proj").T).reshape(n, -1, config.head_dim) for name in "qkv")
    q, k = rotate(q, config.rope_theta), rotate(k, config.rope_theta)
    k, v = (np.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = np.einsum("ihd,jhd->hij", q, k) / np.sqrt(config.head_dim)
    scores = np.where(np.tri(n, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    attended = np.einsum("hij,jhd->ihd", weights / weights.sum(-1, keepdims=True), v).reshape(n, -1)
    x = residual + attended @ weight("self_attn.o_proj").T
    y = norm(x, weight("post_attention_layernorm"))
    gate = y @ weight("mlp.gate_proj").T
    return x + (gate / (1 + np.exp(-gate)) * (y @ weight("mlp.up_proj").T)) @ weight("mlp.down_proj").T


def residual_streams(tokens) -> list[np.ndarray]:
    """R_0 … R_n of the target."""
    config, tensors, _ = load(PAIR_TARGET)
    streams = [tensors["model.embed_tokens.weight"].astype(np.float64)[tokens]]
    for index in range(config.num_layers):

        def weight(name, index=index):
            return tensors[f"model.layers.{index}.{name}.weight"].astype(np.float64)

        streams.append(layer(streams[-1], norm(streams[-1], weight("input_layernorm")), weight, config))
    return streams


class SlowHead:
    """Drafts below one text, recomputing every path from its beginning."""

    def __init__(self, drafter: Eagle3, text: list[int]):
        self.config = drafter.config
        names = list(eagle3_tensor_shapes(self.config))
        self.tensors = {name: np.asarray(x, np.float64) for name, x in drafter.files.read(names).items()}
        self.embedding = load(PAIR_TARGET)[1]["model.embed_tokens.weight"].astype(np.float64)
        self.target_ids = np.arange(self.config.draft_vocab_size) + self.tensors["d2t"].astype(int)
        streams = residual_streams(text[:-1])
        taps = np.concatenate([streams[tap] for tap in self.config.taps], axis=-1)
        self.features, self.text = taps @ self.tensors["fc.weight"].T, text
        self.output = functools.cache(self._output)

    def _output(self, path: tuple[int, ...]) -> np.ndarray:
        """Of the row of the last token of `path`, before the final norm."""
        recycled = [self.output(path[:length]) for length in range(len(path))]
        x = np.stack([*self.features, *recycled])
        embedded = self.embedding[[*self.text[1:], *path]]

        def weight(name):
            return self.tensors[f"layers.0.{name}.weight"]

        inputs = np.concatenate([norm(embedded, weight("input_layernorm")), norm(x, weight("hidden_norm"))], axis=-1)
        return layer(x, inputs, weight, self.config.layer)[-1]

    def best(self, path: tuple[int, ...], count: int) -> list[tuple[int, float]]:
        logits = norm(self.output(path), self.tensors["norm.weight"]) @ self.tensors["lm_head.weight"].T
        log_probs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
        return [(int(self.target_ids[i]), log_probs[i]) for i in np.argsort(-log_probs, kind="stable")[:count]]

    def tree(self, spec: TreeSpec) -> list[tuple[int, ...]]:
        """Paths of all nodes, the best first: EAGLE-2, section 4."""
        beam = spec.beam

        def first(candidates, count):
            return sorted(candidates, key=lambda candidate: -candidate[1])[:count]

        survivors = [((), 0.0)]
        candidates = list(survivors)
        for _ in range(beam.steps):
            level = [((*path, t), score + s) for path, score in survivors for t, s in self.best(path, beam.topk)]
            candidates += level
            survivors = first(level, beam.topk)
        return [path for path, _ in first(candidates, beam.nodes)]


@functools.cache
def decisive_head() -> Eagle3:
    """The head with weights that are not on a grid, so that no two candidates are as good."""
    right, random = head(), np.random.default_rng(0)
    tensors = right.files.read(list(eagle3_tensor_shapes(right.config)))
    moved = {
        name: x if name == "d2t" else np.float32(x * (1 + 1e-3 * random.standard_normal(x.shape)))
        for name, x in tensors.items()
    }
    return dataclasses.replace(right, files=FileReader(moved))


def paths_of(tokens, parents) -> list[tuple[int, ...]]:
    paths = [()]
    for node in range(1, len(tokens)):
        paths.append((*paths[parents[node]], tokens[node]))
    return paths


@pytest.mark.parametrize(("mesh", "placement"), [(ONE, "last"), (MeshShape(2, 2, 1), "spread")], ids=str)
def test_every_node_of_every_dynamic_tree_is_that_of_a_slow_recomputation(mesh, placement):
    name = "dynamic:steps=4,topk=4,nodes=16"
    built = engine(PAIR_TARGET, mesh, draft=decisive_head(), tree=name, placement=placement)
    for order, prompt in enumerate(independent()["prompts"][3:6]):
        built.add(Sequence(order, prompt, SamplingParams(max_tokens=24), 0, []))
    checked = set()
    while built.has_work:
        for _ in built.step():
            pass
        slots, history = jax.tree.map(np.asarray, built._state.slots), np.asarray(built._state.history)
        for row in np.flatnonzero(slots.is_active):
            length = int(slots.length[row])
            text = tuple(history[slots.page_table[row]].reshape(-1)[: length + 1].tolist())
            if text in checked or slots.tokens[row, 0] != text[-1]:
                continue
            checked.add(text)
            drafted = paths_of(slots.tokens[row].tolist(), slots.parents[row].tolist())
            assert drafted == SlowHead(decisive_head().fit(load(PAIR_TARGET)[0]), list(text)).tree(TreeSpec.parse(name))
    assert len(checked) > 15
