"""Where the time of a program goes on a GPU, kernel by kernel."""

import re
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import jax


def print_kernels(run: Callable[[], object], count: int = 25) -> None:
    """Prints the kernels that take longest; those whose names differ in numbers alone are one.

    Kernels inside a recorded graph may be reported as one: XLA_FLAGS=--xla_gpu_enable_command_buffer= records none.

    Args:
      run: does the work and waits for it.
    """
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory):
            run()
        found = [jax.profiler.ProfileData.from_file(str(path)) for path in Path(directory).rglob("*.xplane.pb")]
    times: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for plane in (plane for data in found for plane in data.planes if plane.name.startswith("/device:GPU")):
        for event in (event for line in plane.lines if line.name.startswith("Stream") for event in line.events):
            name = re.sub(r"\d+", "#", event.name)[:70]
            times[name] += event.duration_ns
            calls[name] += 1
    total = sum(times.values())
    print(f"  {total / 1e3:,.0f} µs in {sum(calls.values())} kernels", flush=True)
    for name, time in times.most_common(count):
        print(f"  {time / 1e3:9.1f} µs {time / total:5.1%} {calls[name]:5} x {name}", flush=True)
