"""Collectives by plain peer stores, for small messages between the GPUs of one host.

`Peers` are made once for a mesh and live on the host. A program gets their tables as an argument and makes its
`PeerCollectives` of them; a message that no kernel takes goes by XLA.
"""

import dataclasses
import itertools
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int, Shaped

from jaxspec import mesh as xla
from jaxspec.errors import UserError
from jaxspec.mesh import AXES, PP, AxisNames, Collectives, MeshShape
from pallas_kernels import peer_exchange
from pallas_kernels.peer_exchange import PeerGroup

BY_XLA, BY_PEERS = "xla", "peers"

# Of each group of devices, the table of this device's kernels.
type Tables = Mapping[AxisNames, Int[Array, "..."]]


def choose_exchange(wanted: str, mesh: Mesh) -> tuple[str, str]:
    """How devices talk, `BY_XLA` or `BY_PEERS`, and why.

    Args:
      wanted: one of these, or "auto": peer stores where the devices reach each other.

    Raises:
      UserError: peer stores are wanted where they can't be had.
    """
    if wanted == BY_XLA:
        return BY_XLA, "as asked for"
    if mesh.size == 1:
        return BY_XLA, "there is one device"
    broken = peer_exchange.unreachable(mesh, AXES)
    if broken and wanted == BY_PEERS:
        raise UserError(f"exchange 'peers': {broken}; use exchange 'xla' or 'auto'")
    return (BY_XLA, broken) if broken else (BY_PEERS, "larger messages by xla")


@dataclasses.dataclass(frozen=True)
class Peers:
    """What the devices of a mesh keep to talk by peer stores; it must outlive every program that takes its tables.

    Attributes:
      groups: one for every set of axes along which there is more than one device.
    """

    shape: MeshShape
    groups: Mapping[AxisNames, PeerGroup]

    @staticmethod
    def connect(mesh: Mesh, shape: MeshShape) -> "Peers":
        """For a mesh that `choose_exchange` has found fit."""
        return Peers(shape, {axes: PeerGroup.connect(mesh, axes) for axes in axis_sets(shape)})

    @property
    def tables(self) -> Tables:
        """Split over the whole mesh."""
        return {axes: group.table for axes, group in self.groups.items()}

    def check(self, failures: Int[np.ndarray, "devices"]) -> None:
        """Raises `UserError` where a program reports that a device did not answer; its results are worth nothing.

        Args:
          failures: of the mesh in order, 0 or 1 + the place of the device that it waited for in vain.
        """
        waited = [
            f"{self._name(place)} waited in vain for {self._name(to - 1)}" for place, to in enumerate(failures) if to
        ]
        if waited:
            raise UserError(
                f"{' and '.join(waited)}: a GPU hangs, or was held up for many seconds; try again, "
                "and if it comes back, use exchange 'xla'"
            )

    def _name(self, place: int) -> str:
        where = np.unravel_index(place, [self.shape.axis_size((axis,)) for axis in AXES])
        return f"device {place} ({', '.join(f'{axis} {index}' for axis, index in zip(AXES, where, strict=True))})"


def axis_sets(shape: MeshShape) -> list[AxisNames]:
    """All sets of axes longer than 1."""
    long = _long_axes(AXES, shape)
    return [axes for size in range(1, len(long) + 1) for axes in itertools.combinations(long, size)]


def _long_axes(axes: AxisNames, shape: MeshShape) -> AxisNames:
    return tuple(axis for axis in axes if shape.axis_size((axis,)) > 1)


@dataclasses.dataclass(frozen=True)
class PeerCollectives(Collectives):
    """The collectives of one program.

    All of them write `failure`, which puts them in one order on all devices; it is 0, or the first to be missed: 1 +
    its place in the mesh.

    Attributes:
      tables: int32[entries], of this device.
    """

    shape: MeshShape
    tables: Tables
    failure: jax.Ref

    def all_reduce(self, x: Shaped[Array, "*S"], axes: AxisNames) -> Shaped[Array, "*S"]:
        group = self._group(axes, x.dtype, x.size)
        return peer_exchange.all_reduce(x, *group) if group else xla.all_reduce(x, axes)

    def all_max(self, x: Shaped[Array, "*S"], axes: AxisNames) -> Shaped[Array, "*S"]:
        group = self._group(axes, x.dtype, x.size)
        return jnp.max(peer_exchange.all_gather(x, *group), axis=0) if group else xla.all_max(x, axes)

    def gather(self, x: Shaped[Array, "*S"], axes: AxisNames) -> Shaped[Array, "n *S"]:
        group = self._group(axes, x.dtype, x.size)
        return peer_exchange.all_gather(x, *group) if group else xla.gather(x, axes)

    def exchange(self, x: Shaped[Array, "n *S"], axis: str) -> Shaped[Array, "n *S"]:
        group = self._group((axis,), x.dtype, x[0].size)
        return peer_exchange.all_to_all(x, *group) if group else xla.exchange(x, axis)

    def to_next_stage(self, x: Shaped[Array, "*S"], stages: int) -> Shaped[Array, "*S"]:
        # Of two stages the next one is the one before; more would send much that nobody wants.
        group = self._group((PP,), x.dtype, x.size) if stages == 2 else None
        if group is None:
            return xla.to_next_stage(x, stages)
        return peer_exchange.all_gather(x, *group)[(xla.rank((PP,)) + 1) % 2]

    def broadcast_from_last_stage(self, x: Shaped[Array, "*S"], stages: int) -> Shaped[Array, "*S"]:
        return self.all_reduce(xla.only_last_stage(x, stages), (PP,))

    def publish(self, x: Int[Array, "*S"], stages: int) -> Int[Array, "*S"]:
        return self.all_reduce(xla.only_source(x, stages), AXES)

    def _group(self, axes: AxisNames, dtype: jnp.dtype, size: int) -> "tuple[Array, jax.Ref, int] | None":
        """What a kernel takes for a message of so many elements to each rank, or None where it does not."""
        long = _long_axes(axes, self.shape)
        ranks = self.shape.axis_size(long)
        if long not in self.tables or peer_exchange.unsupported(dtype=dtype, size=size, ranks=ranks):
            return None
        return self.tables[long], self.failure, ranks
