"""Tiny real models for tests: engines on any mesh, and plain forward passes to compare with."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import PartitionSpec as P
from safetensors.numpy import load_file

from jaxspec.cache.pages import PageGeometry
from jaxspec.checkpoint.restore import restore_decoder
from jaxspec.drafts.interface import Drafter
from jaxspec.drafts.registry import find_drafter
from jaxspec.engine.engine import Engine
from jaxspec.llm import TAIL_AXES
from jaxspec.mesh import MeshShape, make_mesh
from jaxspec.models.decoder import DecoderLayout, ignore
from jaxspec.models.registry import read_config
from jaxspec.speculate.attention import REFERENCE
from jaxspec.speculate.state import StepSpec
from jaxspec.speculate.trees import TreeSpec
from pallas_kernels.chunk_prefill import causal_attention

FIXTURES = Path(__file__).parent / "fixtures"
MODELS = FIXTURES / "models"
PAIR = FIXTURES / "eagle3_pair"  # a target and a head that was trained on it
PAIR_TARGET = "eagle3_pair/target"
ONE = MeshShape(1, 1, 1)


@dataclasses.dataclass(frozen=True)
class FileReader:
    """Canonical tensors of a Hugging Face directory of one file."""

    tensors: dict

    def read(self, names):
        return {name: self.tensors[name] for name in names}


@functools.cache
def load(name: str):
    """(config, tensors, reference) of a fixture model, or of any directory; the target of the pair has no reference."""
    directory = FIXTURES / name if name == PAIR_TARGET else MODELS / name
    reference = directory / "reference.safetensors"
    return (
        read_config(json.loads((directory / "config.json").read_text())),
        load_file(directory / "model.safetensors"),
        load_file(reference) if reference.exists() else None,
    )


def layout_of(name: str, mesh: MeshShape, placement: str = "last", dtype: str = "float32") -> DecoderLayout:
    return DecoderLayout(load(name)[0], mesh, TAIL_AXES[placement], jnp.dtype(dtype))


@functools.cache
def restored(name: str, mesh: MeshShape, placement: str = "last", dtype: str = "float32"):
    return restore_decoder(FileReader(load(name)[1]), layout_of(name, mesh, placement, dtype), make_mesh(mesh))


@functools.lru_cache(maxsize=3)  # a program of XLA:CPU takes hundreds of the 65,530 memory maps of a process
def engine(
    name: str,
    mesh: MeshShape = ONE,
    *,
    draft: str | Drafter = "none",
    tree: str = "none",
    placement: str = "last",
    chunk: int = 8,
    rounds: int = 1,
    num_slots: int = 4,
    page_size: int = 8,
    num_pages: int = 64,
    dtype: str = "float32",
    attention: str = REFERENCE,
) -> Engine:
    """One engine for tests that follow each other and ask for the same."""
    graph, weights = restored(name, mesh, placement, dtype)
    layout = layout_of(name, mesh, placement, dtype)
    drafter = (find_drafter(draft) if isinstance(draft, str) else draft).fit(layout.config)
    spec = StepSpec(
        layout=layout,
        drafter=drafter,
        tree=TreeSpec.parse(tree),
        geometry=PageGeometry(page_size, mesh.dcp),
        num_pages=num_pages,
        pages_per_slot=128 // page_size,
        slots_per_group=-(-num_slots // mesh.pp),
        chunk=chunk,
        rounds=rounds,
        attention=attention,
    )
    return Engine(spec, make_mesh(mesh), graph, weights, drafter.restore(layout, make_mesh(mesh)))


@functools.cache
def _forward(name: str):
    graph, weights = restored(name, ONE)

    def logits(weights, tokens):
        model = nnx.merge(graph, weights)

        def attend(cache, layer, q, k, v):
            output, _ = causal_attention(q, k, v, scale=q.shape[-1] ** -0.5)
            return output.reshape(len(q), -1), cache

        with jax.default_matmul_precision("highest"):
            x, _, _ = model.stage(model.embed(tokens), jnp.arange(len(tokens)), attend, None, ignore, None)
            return model.logits(model.final_hidden(x))

    sharded = jax.shard_map(
        logits,
        mesh=make_mesh(ONE),
        in_specs=(nnx.get_partition_spec(weights), P()),
        out_specs=P(),
        check_vma=False,
    )
    return functools.partial(jax.jit(sharded), weights)


def full_logits(name: str, tokens) -> np.ndarray:
    """f32[N, V]: logits of the whole text at once, without a cache, on one device."""
    padded = np.zeros(128, np.int32)
    padded[: len(tokens)] = tokens
    return np.asarray(_forward(name)(padded))[: len(tokens)]
