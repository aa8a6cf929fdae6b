"""How sure the target was where two runs part: a wide lead that was lost is an error, a narrow one is rounding."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from jaxspec.checkpoint.restore import TensorReader, restore_decoder
from jaxspec.mesh import MeshShape, make_mesh
from jaxspec.models.config import ModelConfig
from jaxspec.models.decoder import DecoderLayout, ignore
from jaxspec.models.whole_text import read_whole
from jaxspec.precision import matmul_precision
from jaxspec.progress import progress_bar

_SHORTEST = 256


def leads(
    checkpoint: TensorReader, config: ModelConfig, dtype: np.dtype, texts: Sequence[Sequence[int]]
) -> list[float]:
    """By how much the likeliest token after each text leads the second, in logits.

    The target reads each text whole, on one device, in `dtype`.
    """
    if not texts:
        return []
    shape = MeshShape(1, 1, 1)
    mesh, layout = make_mesh(shape), DecoderLayout(config, shape, (), dtype)
    graph, weights = restore_decoder(checkpoint, layout, mesh)

    def lead(weights: Any, tokens: Int[Array, "S"], length: Int[Array, ""]) -> Float[Array, ""]:
        target, size = nnx.merge(graph, weights), len(tokens)
        positions, mask = jnp.arange(size)[None], jnp.tri(size, dtype=bool)[None]
        hidden, _ = read_whole(target, tokens[None], positions, mask, ignore, None)
        best, second = lax.top_k(target.logits(hidden[0, length - 1]), 2)[0]
        return best - second

    specs = nnx.get_partition_spec(weights)
    sharded = jax.shard_map(lead, mesh=mesh, in_specs=(specs, P(), P()), out_specs=P(), check_vma=False)
    with matmul_precision(dtype), progress_bar("margins", len(texts), is_shown=True) as advance:
        measure = functools.partial(jax.jit(sharded), weights)
        found = []
        for text in texts:
            padded = np.zeros(max(_SHORTEST, 1 << (len(text) - 1).bit_length()), np.int32)
            padded[: len(text)] = text
            found.append(float(measure(padded, np.int32(len(text)))))
            advance(1)
    return found
