"""The device mesh, and the collectives that cross it: the one place that names its axes.

`pp` holds pipeline stages, `tp` splits the weights of a layer, `dcp` splits the key-value cache along the sequence
(and the weights of a layer further). Code that runs inside `jax.shard_map` talks across devices only through the
functions below. It gets them as a `Collectives`, so that whoever builds a program can put a faster exchange in their
place (`peers.py` has one); those of XLA are the portable ones.
"""

import dataclasses
import os
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec
from jaxtyping import Array, Int, Shaped

from jaxspec.errors import UserError

PP, TP, DCP = "pp", "tp", "dcp"
AXES = (PP, TP, DCP)
# Weights of a layer are split over both of these; query heads too.
MODEL_AXES = (TP, DCP)

type AxisNames = tuple[str, ...]

_MOST_SIMULATED = 64


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """Sizes of the mesh axes; 1 is valid for each."""

    pp: int = 1
    tp: int = 1
    dcp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            size = getattr(self, axis)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise UserError(f"mesh axis {axis}={size!r} must be an integer of at least 1, as in mesh 2,1,2")

    @classmethod
    def parse(cls, text: str) -> "MeshShape":
        """Reads `pp,tp,dcp`, for instance `2,1,2`."""
        parts = text.split(",")
        if len(parts) != 3 or not all(part.strip().isdecimal() for part in parts):
            raise UserError(f"mesh {text!r} must be three integers pp,tp,dcp of at least 1, for instance 2,1,2")
        return cls(*(int(part) for part in parts))

    @property
    def size(self) -> int:
        return self.pp * self.tp * self.dcp

    def axis_size(self, axes: AxisNames) -> int:
        size = 1
        for axis in axes:
            size *= getattr(self, axis)
        return size

    def __str__(self) -> str:
        return f"{self.pp},{self.tp},{self.dcp}"


def split(*axes: str | AxisNames | None) -> Any:
    """The partition spec of an array. It stands where the array will, in a tree of the same type, hence `Any`."""
    return PartitionSpec(*axes)


def make_mesh(shape: MeshShape) -> Mesh:
    """A mesh over the first devices there are.

    On CPUs a mesh larger than one device is simulated, which must be settled before JAX is first used.

    Raises:
      UserError: there are fewer devices than the mesh needs.
    """
    devices = find_devices(shape.size, f"mesh {shape}")
    return jax.make_mesh((shape.pp, shape.tp, shape.dcp), AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def find_devices(count: int, name: str) -> list[jax.Device]:
    """The first `count` devices, simulated on CPUs where they must be; `name` is who needs them.

    Raises:
      UserError: there are fewer.
    """
    if 1 < count <= _MOST_SIMULATED:
        _simulate_cpu_devices(count)
    devices = jax.devices()
    if len(devices) < count:
        if devices[0].platform != "cpu":
            remedy = "choose a smaller mesh"
        elif count > _MOST_SIMULATED:
            remedy = f"choose a smaller mesh; at most {_MOST_SIMULATED} devices are simulated"
        else:
            remedy = f"make the largest mesh before JAX is used, or start with JAX_NUM_CPU_DEVICES={count}"
        raise UserError(f"{name} needs {count} devices but there are {len(devices)}: {remedy}")
    return devices[:count]


def is_simulated(mesh: Mesh) -> bool:
    return mesh.size > 1 and mesh.devices.flat[0].platform == "cpu"


def _simulate_cpu_devices(count: int) -> None:
    if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        try:
            jax.config.update("jax_num_cpu_devices", max(count, jax.config.jax_num_cpu_devices))
        except RuntimeError:
            return  # JAX is in use already: `make_mesh` counts what there is
    # Several programs queued on simulated devices can starve each other's collectives, and XLA then aborts.
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def _long(axes: AxisNames) -> AxisNames:
    """Those with more than one device: what a device sends to itself XLA keeps, apart from its other work."""
    return tuple(axis for axis in axes if lax.axis_size(axis) > 1)


def all_reduce(x: Shaped[Array, "*S"], axes: AxisNames) -> Shaped[Array, "*S"]:
    """Sum over the devices along `axes`; every rank gets the same bits."""
    return lax.psum(x, long) if (long := _long(axes)) else x


def all_max(x: Shaped[Array, "*S"], axes: AxisNames) -> Shaped[Array, "*S"]:
    return lax.pmax(x, long) if (long := _long(axes)) else x


def gather(x: Shaped[Array, "*S"], axes: AxisNames) -> Shaped[Array, "n *S"]:
    """Stacks every rank's `x`, in the order of `rank(axes)`."""
    return lax.all_gather(x, long) if (long := _long(axes)) else x[None]


def exchange(x: Shaped[Array, "n *S"], axis: str) -> Shaped[Array, "n *S"]:
    """All-to-all: row i goes to rank i of `axis`, and row j of the result came from rank j."""
    return lax.all_to_all(x, axis, split_axis=0, concat_axis=0, tiled=True)


def to_next_stage(x: Shaped[Array, "*S"], stages: int) -> Shaped[Array, "*S"]:
    """Hands `x` to the next pipeline stage; the last stage's goes to stage 0, which ignores it."""
    if stages == 1:
        return x
    return lax.ppermute(x, PP, [(stage, (stage + 1) % stages) for stage in range(stages)])


def broadcast_from_last_stage(x: Shaped[Array, "*S"], stages: int) -> Shaped[Array, "*S"]:
    return all_reduce(only_last_stage(x, stages), (PP,))


def only_last_stage(x: Shaped[Array, "*S"], stages: int) -> Shaped[Array, "*S"]:
    """What adds up to the last stage's `x`."""
    return jnp.where(lax.axis_index(PP) == stages - 1, x, jnp.zeros_like(x))


def publish(x: Int[Array, "*S"], stages: int) -> Int[Array, "*S"]:
    """Every device takes the integers that the first rank of the last stage decided.

    One source for a decision, so that devices can't drift apart over a rounding difference.
    """
    return all_reduce(only_source(x, stages), AXES)


def only_source(x: Int[Array, "*S"], stages: int) -> Int[Array, "*S"]:
    """What adds up to the integers of the first rank of the last stage."""
    is_source = rank(AXES) == (stages - 1) * lax.axis_size(TP) * lax.axis_size(DCP)
    return jnp.where(is_source, x, 0)


class Collectives:
    """The collectives of a program: here those of XLA."""

    all_reduce = staticmethod(all_reduce)
    all_max = staticmethod(all_max)
    gather = staticmethod(gather)
    exchange = staticmethod(exchange)
    to_next_stage = staticmethod(to_next_stage)
    broadcast_from_last_stage = staticmethod(broadcast_from_last_stage)
    publish = staticmethod(publish)


XLA = Collectives()


def rank(axes: AxisNames) -> Int[Array, ""]:
    """This device's index along `axes`, the last axis fastest."""
    return lax.axis_index(axes)
