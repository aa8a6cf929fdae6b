"""Ranks that exchange messages: their workspaces, and the tables that kernels find them by."""

import ctypes
import dataclasses
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int, Int64

from pallas_kernels.peer_exchange.layout import MAX_RANKS, Workspace

_HOPPER = "9.0"
_ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"


@dataclasses.dataclass(frozen=True)
class PeerGroup:
    """The exchange over some axes of a mesh. One serves all programs that run on its devices, one after the other.

    It must live as long as a program that uses it may run: XLA does not know that the workspaces are in use. Nobody may
    donate them. Within a program, calls are ordered by the `failure` ref that all of them write.

    Attributes:
      axes: a rank is the index along them, the last axis fastest.
      ranks: how many exchange.
      workspace: int32, of each device its own; only kernels touch it.
      table: int32[*mesh, entries], split over the whole mesh; what kernels take.
    """

    axes: tuple[str, ...]
    ranks: int
    workspace: jax.Array
    table: jax.Array

    @staticmethod
    def connect(mesh: Mesh, axes: tuple[str, ...]) -> "PeerGroup":
        """Makes the workspaces.

        Raises:
          ValueError: the devices can't reach each other's memory (see `unreachable`).
        """
        if broken := unreachable(mesh, axes):
            raise ValueError(broken)
        shape, layout = mesh.devices.shape, Workspace(_axis_size(mesh, axes))
        sharding = NamedSharding(mesh, PartitionSpec(*mesh.axis_names))

        def zeros() -> Int[Array, "*mesh words"]:
            return jnp.zeros((*shape, layout.words), jnp.int32)

        # Zeroed before any kernel of a peer may write.
        workspace = jax.jit(zeros, out_shardings=sharding)().block_until_ready()
        bases = np.zeros(shape, np.int64)
        for shard in workspace.addressable_shards:
            bases[tuple(index.start or 0 for index in shard.index[:-1])] = shard.data.unsafe_buffer_pointer()
        tables = peer_tables(bases, [mesh.axis_names.index(axis) for axis in axes])
        return PeerGroup(axes, layout.ranks, workspace, jax.device_put(tables.view(np.int32), sharding))


def peer_tables(bases: Int64[np.ndarray, "*mesh"], axes: list[int]) -> Int64[np.ndarray, "*mesh entries"]:
    """The table of every device, from the addresses of their workspaces; a device's name is 1 + its place in the mesh.

    Args:
      axes: dimensions of the mesh along which the ranks of a group lie, the last one fastest.
    """
    names = 1 + np.arange(bases.size).reshape(bases.shape)
    layout = Workspace(int(np.prod([bases.shape[axis] for axis in axes])))
    tables = np.zeros((*bases.shape, layout.table_size), np.int64)
    for place in np.ndindex(bases.shape):
        group: list[slice | int] = [slice(None) if axis in axes else index for axis, index in enumerate(place)]
        # A group's axes are in the order of the mesh.
        me = int(np.ravel_multi_index([place[axis] for axis in axes], [bases.shape[axis] for axis in axes]))
        tables[place] = layout.table(bases[tuple(group)].ravel(), me, names[tuple(group)].ravel())
    return tables


def unreachable(mesh: Mesh, axes: tuple[str, ...]) -> str | None:
    """Why devices of a mesh can't exchange along these axes, as the rule that is broken, or None where they can."""
    devices, ranks = list(mesh.devices.flat), _axis_size(mesh, axes)
    if list(axes) != [name for name in mesh.axis_names if name in axes]:
        return f"axes {axes} must be in the order of the mesh, {mesh.axis_names}"
    if not 2 <= ranks <= MAX_RANKS:
        return f"{ranks} devices along {', '.join(axes)} must be 2 to {MAX_RANKS}"
    if any(getattr(device, "compute_capability", None) != _HOPPER for device in devices):
        return f"the devices must be Hopper GPUs, not {devices[0].device_kind}"
    if len({device.process_index for device in devices}) > 1:
        return "the devices must belong to one process, which can address the memory of all"
    if (allocator := _allocator()) not in ("default", "bfc"):
        return f"the allocator {allocator!r} must be JAX's default, whose memory peers can see: unset {_ALLOCATOR}"
    for device in devices:
        for peer in devices:
            if device != peer and not _can_access(device.local_hardware_id, peer.local_hardware_id):
                return f"device {device} must be able to access the memory of {peer}"
    return None


def _axis_size(mesh: Mesh, axes: tuple[str, ...]) -> int:
    return int(np.prod([mesh.shape[axis] for axis in axes]))


def _allocator() -> str:
    """Of the GPUs' memory, by its name in lower case: what JAX was told as an option, else by the environment."""
    told = jax.config.jax_pjrt_client_create_options or {}
    if isinstance(told, str):
        told = dict(option.split(":", 1) for option in told.split(";") if ":" in option)
    return str(told.get("allocator", os.environ.get(_ALLOCATOR) or "default")).lower()


def _can_access(ordinal: int, peer: int) -> bool:
    """Asks the driver, which JAX has initialised."""
    answer = ctypes.c_int(0)
    error = ctypes.CDLL("libcuda.so.1").cuDeviceCanAccessPeer(ctypes.byref(answer), ordinal, peer)
    return error == 0 and answer.value == 1
