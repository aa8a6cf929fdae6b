"""Compiles for an H200 where there is none."""

import importlib.util
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

NEEDS_COMPILER = pytest.mark.skipif(
    not importlib.util.find_spec("jax_plugins.xla_cuda13") if importlib.util.find_spec("jax_plugins") else True,
    reason="needs the CUDA plugin and its compiler: uv sync --extra cuda13",
)

_H200 = """gpu_device_info { threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
 shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535 memory_bandwidth: 4800000000000
 l2_cache_size: 52428800 clock_rate_ghz: 1.98 device_memory_size: 151397597184
 shared_memory_per_block_optin: 232448 cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
 registers_per_core_limit: 65536 registers_per_block_limit: 65536 thread_dim_limit_x: 1024 thread_dim_limit_y: 1024
 thread_dim_limit_z: 64 device_vendor: "NVIDIA Corporation" device_address_bits: 64 name: "NVIDIA H200"
 driver_version: "13.0.0" runtime_version: "13.0.0" compile_time_toolkit_version: "13.0.0" dnn_version: "9.12.0"
 device_interconnect_info { active_links: 18 } } platform_name: "CUDA" dnn_version_info { major: 9 minor: 12 }
 device_description_str: "NVIDIA H200\""""


def h200_mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> jax.sharding.Mesh:
    """Of GPUs that are not there."""
    count = int(np.prod(shape))
    devices = topologies.get_topology_desc(platform="cuda", target_config=_H200, topology=f"1x1x{count}").devices
    return jax.sharding.Mesh(np.array(devices).reshape(shape), names, axis_types=(AxisType.Auto,) * len(names))


def compile_for_h200(
    function: Callable[..., Any], arguments: Sequence[Any], monkeypatch: pytest.MonkeyPatch, capfd
) -> tuple[jax.stages.Compiled, str]:
    """The program, and what the assembler says of its kernels: registers, spills, serialisation.

    Args:
      function: jitted.
      arguments: their shapes; they lie on one device where they don't say otherwise.
    """
    tools = [str(Path(path) / "cu13" / "bin") for path in importlib.util.find_spec("nvidia").submodule_search_locations]
    monkeypatch.setenv("PATH", os.pathsep.join([*tools, os.environ["PATH"]]))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTXAS", "1")
    on_one = NamedSharding(h200_mesh((1,), ("device",)), P())
    placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding or on_one), arguments)
    compiled = function.lower(*placed).compile()
    report = "".join(capfd.readouterr())
    assert "sm_90a" in report
    return compiled, report


def assert_without_spills(report: str) -> None:
    """Of any kernel in it."""
    spills = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", report)
    assert spills and set(spills) == {("0", "0")}, spills
    assert "Registers are spilled" not in report
