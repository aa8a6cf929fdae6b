"""Lets the race detector of interpret mode see what products of the tensor cores read from shared memory.

In jax 0.11.2 it compares loads, stores and copies, and overlooks the operands of `wgmma`, so that a tile refilled too
early passes for right. Importing this module adds those reads, as the detector has them for the products of later GPUs.
It uses private names of that version; remove it once jax does the same.
"""

from typing import Any

import jax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

_multiply = gpu_callbacks.wgmma


def _multiply_watched(**call: Any) -> Any:
    memory = gpu_callbacks._get_shared_memory()
    if memory.detect_races:
        thread = call["thread"]
        clock = memory.get_clock(thread)
        clock.inc(memory.get_next_tma_thread_id())
        for operand in "ab":
            key = gpu_callbacks.HostAllocationKey.from_array(call[f"{operand}_allocation_key_as_array"])
            transforms = jax.tree.map(int, gpu_callbacks._remove_noop_transforms(call[f"{operand}_transforms"]))
            gpu_callbacks.get_races().check_read(
                thread,
                clock.async_smem_clock.copy(),
                key,
                memory.access(key, transforms),
                source_info=call["source_info"],
            )
        with memory.lock:  # the interpreter's products are over when they return
            memory.clocks[thread].update(clock)
    return _multiply(**call)


gpu_callbacks.wgmma = _multiply_watched
