"""How much memory of each device the engine takes, before it takes it."""

import dataclasses
import math
import os
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.checkpoint.restore import abstract_decoder
from jaxspec.errors import UserError
from jaxspec.speculate.state import StepSpec, StepState

_USABLE = 0.9  # of a device's memory; the rest is for temporaries and the runtime


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """Bytes on each device."""

    weights: int
    pages: int
    pending: int
    other: int

    @property
    def total(self) -> int:
        return self.weights + self.pages + self.pending + self.other

    def __str__(self) -> str:
        parts = {"weights": self.weights, "pages": self.pages, "pending KV": self.pending, "other state": self.other}
        return ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in parts.items())


def plan_memory(spec: StepSpec, mesh: Mesh) -> MemoryPlan:
    """What a device will hold; nothing is allocated."""
    _, weights = abstract_decoder(spec.layout)
    weight_shapes, weight_specs = (
        jax.tree.leaves(weights),
        jax.tree.leaves(nnx.get_partition_spec(weights), is_leaf=_is_spec),
    )
    state, specs = jax.eval_shape(lambda: StepState.empty(spec, spec.slots_per_group)), StepState.specs()

    def local(x: Any, split: Any) -> int:
        return math.prod(NamedSharding(mesh, split).shard_shape(x.shape)) * np.dtype(x.dtype).itemsize

    pages = local(state.cache.pages, specs.cache.pages)
    pending = local(state.cache.pending, specs.cache.pending)
    replicated = jax.tree.leaves((state.history, state.slots))
    return MemoryPlan(
        weights=sum(local(x, split) for x, split in zip(weight_shapes, weight_specs, strict=True)),
        pages=pages,
        pending=pending,
        other=sum(x.size * x.dtype.itemsize for x in replicated),
    )


def _is_spec(x: object) -> bool:
    return isinstance(x, P)


def check_memory(plan: MemoryPlan, mesh: Mesh) -> None:
    """Raises `UserError` where a device's memory can't hold the plan. Simulated devices share that of the host."""
    stats = mesh.devices.flat[0].memory_stats() or {}
    limit = stats.get("bytes_limit", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / mesh.size)
    if plan.total > _USABLE * limit:
        raise UserError(
            f"each device needs {plan.total / 2**30:.1f} GiB ({plan}) but may use {_USABLE * limit / 2**30:.1f}: "
            "lower max_num_seqs, max_model_len or num_pages, or use a larger mesh"
        )
