"""Canonical tensors into the arrays of one mesh: read, pad, fuse and place, a layer slot at a time.

The host holds the tensors of one layer of every stage at most, and a device only its own parts.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.models import tensors
from jaxspec.models.decoder import Decoder, DecoderLayer, DecoderLayout


class TensorReader(Protocol):
    """A checkpoint, as far as restoring goes."""

    def read(self, names: Sequence[str]) -> Mapping[str, np.ndarray]: ...


def abstract_decoder(layout: DecoderLayout) -> tuple[Any, Any]:
    """The target's graph definition, and its state as shapes."""
    return abstract_module(lambda: Decoder(layout))


def abstract_module(make: Callable[[], nnx.Module]) -> tuple[Any, Any]:
    """The graph definition of what `make` makes, and its state as shapes: nothing is allocated."""
    with nnx.use_eager_sharding(False):
        return nnx.split(nnx.eval_shape(make))


def place(array: np.ndarray, dtype: np.dtype, mesh: Mesh, spec: P) -> jax.Array:
    """An array of the host on the devices, each its part."""
    array = array.astype(dtype, copy=False)
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), array.__getitem__)


def restore_decoder(
    checkpoint: TensorReader, layout: DecoderLayout, mesh: Mesh, on_step: Callable[[int], None] = lambda steps: None
) -> tuple[Any, Any]:
    """Reads a checkpoint straight into the shards of `mesh`.

    Args:
      checkpoint: canonical tensors by name.
      on_step: called with 1 after each of `layout.layer_slots + 1` steps.

    Returns:
      The decoder's graph definition and its weights, for `nnx.merge`.
    """
    graph, state = abstract_decoder(layout)
    specs = nnx.get_partition_spec(state)
    pure, pure_specs = nnx.to_pure_dict(state), nnx.to_pure_dict(specs)
    for slot in range(layout.layer_slots):
        by_stage = [_pack_layer(checkpoint, layout, layout.layer_of(stage, slot)) for stage in range(layout.mesh.pp)]
        for name, abstract in pure["layers"][slot].items():
            pure["layers"][slot][name] = _place_stages(
                [None if packed is None else packed[name] for packed in by_stage],
                abstract,
                mesh,
                pure_specs["layers"][slot][name],
            )
        on_step(1)
    for name in [name for name in pure if name != "layers"]:
        source = Decoder.end_tensor(layout.config, name)
        array = Decoder.pack_end(layout, name, checkpoint.read([source])[source])
        pure[name] = place(array, layout.dtype, mesh, pure_specs[name])
    nnx.replace_by_pure_dict(state, pure)
    on_step(1)
    return graph, state


def _pack_layer(checkpoint: TensorReader, layout: DecoderLayout, layer: int | None) -> dict[str, np.ndarray] | None:
    if layer is None:
        return None
    names = {name: tensors.layer_tensor(layer, name) for name in tensors.layer_shapes(layout.config)}
    read = checkpoint.read(list(names.values()))
    packed = DecoderLayer.pack(layout.layer, {name: read[full] for name, full in names.items()})
    return {name: array.astype(layout.dtype, copy=False) for name, array in packed.items()}


def _place_stages(
    stages: Sequence[np.ndarray | None], abstract: jax.ShapeDtypeStruct, mesh: Mesh, spec: P
) -> jax.Array:
    """One array `[pp, ...]` from each stage's part; a stage without this layer gets zeros."""

    def part(index: Any) -> np.ndarray:
        stage = stages[index[0].start or 0]
        if stage is None:
            return np.zeros(
                [len(range(*cut.indices(n))) for cut, n in zip(index, abstract.shape, strict=True)], abstract.dtype
            )
        return np.ascontiguousarray(stage[index[1:]])[None]

    return jax.make_array_from_callback(abstract.shape, NamedSharding(mesh, spec), part)
