"""FlashInfer on the cases of `attention.py`, a row each: run it right before or after, on the same card.

    pip install flashinfer-python==0.6.14 apache-tvm-ffi
    python tools/bench/peer_flashinfer.py

One query token goes through its decode kernel (tensor cores), several causally through its prefill kernel and again
with a tree as a mask of their own; without a tree they see the context alone. Its pages hold the same numbers of tokens
in random order. As there, time is that of one call in a chain over several sets of inputs that don't stay in the L2
cache, without the addition by which it waits for the one before; here as the replay of a CUDA graph.
"""

import argparse
import itertools
from collections.abc import Callable

import flashinfer
import numpy as np
import torch
from decode_cases import CASES, Case

_REPLAYS = 20
_WORKSPACE = 2**27


def held(case: Case) -> int:
    """Tokens of a sequence in pages: here the nodes of a tree follow the context."""
    return case.context + (case.tokens if case.has_tree and case.tokens > 1 else 0)


def ways(case: Case) -> list[str]:
    if case.tokens == 1:
        return ["decode"]
    return ["causal", "tree mask"] if case.has_tree else ["context"]


def pages_of(case: Case) -> int:
    return -(-held(case) // case.page_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", choices=names, default=names, metavar="CASE", help=" ".join(names))
    options = parser.parse_args()
    print(
        f"# {torch.cuda.get_device_name()}, FlashInfer {flashinfer.__version__}, {copy_rate() / 1e12:.2f} TB/s copied"
    )
    print("case | how | µs | waiting µs | TB/s", flush=True)
    for case in CASES:
        if case.name in options.cases:
            waiting = idle_microseconds(case)
            for how in ways(case):
                µs = microseconds(case, how) - waiting
                print(f"{case.name} | {how} | {µs:.1f} | {waiting:.1f} | {case.bytes / µs / 1e6:.2f}", flush=True)


def copy_rate() -> float:
    """Bytes read and written a second by a large device-to-device copy."""
    source = torch.rand(2**28, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (1e-6 * timed(lambda: target.copy_(source), 1))


def microseconds(case: Case, how: str) -> float:
    """Of one call and the addition that follows it."""
    count = case.sets * case.batch * pages_of(case)
    shape = (count, 2, case.page_size, case.kv_heads, case.head_dim)
    cache = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    q = queries_of(case)
    tables = torch.randperm(count, device="cuda").to(torch.int32).reshape(case.sets, -1)
    calls = [planned(case, how, table, q) for table in tables]

    def chain() -> None:
        for call in calls:
            wait_for(call(q, cache), q)

    return replayed(chain, case.sets)


def queries_of(case: Case) -> torch.Tensor:
    return torch.randn((case.batch * case.tokens, case.heads, case.head_dim), device="cuda", dtype=torch.bfloat16)


def idle_microseconds(case: Case) -> float:
    """Of a call that attends to nothing: what the chain itself adds to every one."""
    q, count = queries_of(case), 64

    def chain() -> None:
        for _ in range(count):
            wait_for(q, q)

    return replayed(chain, count)


def wait_for(output: torch.Tensor, q: torch.Tensor) -> None:
    """Makes the queries known only when the output is."""
    torch.add(q, output, alpha=0, out=q)


def replayed(chain: Callable[[], None], calls: int) -> float:
    """Microseconds of one of so many calls, in replays of a CUDA graph."""
    for _ in range(3):
        chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    return timed(graph.replay, calls)


def planned(case: Case, how: str, table: torch.Tensor, q: torch.Tensor):
    """A wrapper of FlashInfer for one set of inputs."""
    workspace = torch.empty(_WORKSPACE, dtype=torch.uint8, device="cuda")
    pages = torch.arange(case.batch + 1, dtype=torch.int32) * pages_of(case)
    last = torch.full((case.batch,), held(case) - (pages_of(case) - 1) * case.page_size, dtype=torch.int32)
    sizes = (case.heads, case.kv_heads, case.head_dim, case.page_size)
    if how == "decode":
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(pages, table, last, *sizes, q_data_type=q.dtype, kv_data_type=q.dtype)
        return wrapper.run
    queries = torch.arange(case.batch + 1, dtype=torch.int32) * case.tokens
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    mask = dict(custom_mask=tree_mask(case)) if how == "tree mask" else dict(causal=how == "causal")
    on_device = queries.cuda(), pages.cuda(), table, last.cuda()  # as masks have to be
    wrapper.plan(*on_device, *sizes, q_data_type=q.dtype, kv_data_type=q.dtype, **mask)
    return wrapper.run


def tree_mask(case: Case) -> torch.Tensor:
    """Each node sees the context, its ancestors in a binary tree, and itself."""
    among = np.eye(case.tokens, dtype=bool)
    for node in range(1, case.tokens):
        among[node] |= among[(node - 1) // 2]
    rows = np.concatenate([np.ones((case.tokens, case.context), bool), among], axis=1)
    return torch.from_numpy(np.tile(rows.reshape(-1), case.batch)).cuda()


def timed(run, calls: int) -> float:
    """Microseconds of one of `calls` in a run: the median."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    times = []
    for _ in itertools.repeat(None, _REPLAYS):
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / calls)
    return float(np.median(times))


if __name__ == "__main__":
    main()
