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
    draft: int
    other: int

    @property
    def total(self) -> int:
        return self.weights + self.pages + self.pending + self.draft + self.other

    def __str__(self) -> str:
        parts = {
            "weights": self.weights,
            "pages": self.pages,
            "pending KV": self.pending,
            "draft": self.draft,
            "other state": self.other,
        }
        return ", ".join(f"{name} {size / 2**20:,.0f} MiB" for name, size in parts.items() if size or name != "draft")


def plan_memory(spec: StepSpec, mesh: Mesh) -> MemoryPlan:
    """What a device will hold; nothing is allocated."""
    _, weights = abstract_decoder(spec.layout)
    draft_weights = spec.drafter.abstract_weights(spec.layout)
    state, specs = jax.eval_shape(lambda: StepState.empty(spec, spec.slots_per_group)), StepState.specs(spec)

    def local(arrays: Any, splits: Any) -> int:
        """Bytes of a tree of arrays on a device; `splits` is a prefix of it."""

        def each(split: P, part: Any) -> int:
            shapes = [(NamedSharding(mesh, split).shard_shape(x.shape), x.dtype) for x in jax.tree.leaves(part)]
            return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes)

        sizes = jax.tree.map(each, splits, arrays, is_leaf=lambda x: isinstance(x, P))
        return sum(jax.tree.leaves(sizes))

    return MemoryPlan(
        weights=local(weights, nnx.get_partition_spec(weights)),
        pages=local(state.cache.pages, specs.cache.pages),
        pending=local(state.cache.pending, specs.cache.pending),
        draft=local(draft_weights, nnx.get_partition_spec(draft_weights)) + local(state.draft, specs.draft),
        other=local((state.history, state.slots, state.ring), (specs.history, specs.slots, specs.ring)),
    )


def check_memory(plan: MemoryPlan, mesh: Mesh) -> None:
    """Raises `UserError` where a device's memory can't hold the plan. Simulated devices share that of the host."""
    stats = mesh.devices.flat[0].memory_stats() or {}
    limit = stats.get("bytes_limit", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / mesh.size)
    if plan.total > _USABLE * limit:
        raise UserError(
            f"each device needs {plan.total / 2**30:.1f} GiB ({plan}) but may use {_USABLE * limit / 2**30:.1f}: "
            "lower max_num_seqs, max_model_len or num_pages, or use a larger mesh"
        )
