"""What a benchmark of kernels runs: chains of calls inside one program, and the check before them."""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_CHAINED = 8  # calls in one iteration at least: few enough to compile, enough for the host to stay ahead of the device
_SECONDS = 0.02  # of one measurement
_TOLERANCE = 5e-3  # bfloat16 rounds the weights of kernel and reference

# Output for queries, on set i of the inputs.
type Attend = Callable[[jax.Array, Any, int | jax.Array], jax.Array]


def after(q: jax.Array, output: jax.Array) -> jax.Array:
    """The same queries, known only when the output is."""
    return q + (0 * output).astype(q.dtype)


@dataclasses.dataclass(frozen=True)
class Work:
    """One case.

    Attributes:
      draw: inputs of all sets, among them the queries `q`.
      sets: so many that a set has left the L2 cache when it is read again.
      kernel: what is measured.
      peers: what is measured beside it.
      error: of the kernel, relative, on the first set.
      seconds: of one call, at a guess.
      columns: what a time in microseconds amounts to.
      after: queries of the next call, of these and their output.
    """

    name: str
    draw: Callable[[jax.Array], Any]
    sets: int
    kernel: Attend
    peers: dict[str, Attend]
    error: Callable[[Any], jax.Array]
    seconds: float
    columns: Callable[[float], dict[str, object]]
    after: Callable[[jax.Array, jax.Array], jax.Array] = after


@dataclasses.dataclass(frozen=True)
class Chain:
    """Calls that wait for each other, in one program."""

    program: Callable[[Any], jax.Array]
    calls: int

    @staticmethod
    def compile(work: Work, attend: Attend, shapes: Any) -> "Chain":
        """As many calls as take a while."""
        rounds = -(-_CHAINED // work.sets)
        is_whole = rounds * work.sets <= 2 * _CHAINED  # every iteration goes round all sets: no index is to be computed
        calls = rounds * work.sets if is_whole else _CHAINED
        iterations = max(2, int(_SECONDS / work.seconds / calls))

        def chain(x):
            def body(n, q):
                for call in range(calls):
                    output = attend(q, x, call % work.sets if is_whole else lax.rem(n * calls + call, work.sets))
                    q = work.after(q, output)
                return q

            return lax.fori_loop(0, iterations, body, x.q)

        return Chain(jax.jit(chain).lower(shapes).compile(), iterations * calls)

    def microseconds(self, x: Any) -> float:
        """Of one call: the median of five runs after three that warm up (the first ones record graphs)."""
        times = []
        for _ in range(8):
            started = time.perf_counter()
            self.program(x).block_until_ready()
            times.append(time.perf_counter() - started)
        return 1e6 * float(np.median(times[3:])) / self.calls


def idle_microseconds(q: jax.Array) -> float:
    """Of a call that attends to nothing: what the chain itself adds to every one, where nothing is fused into it."""
    calls, iterations = _CHAINED, 100

    def body(_, q):
        for _ in range(calls):
            q = lax.optimization_barrier(after(q, q))
        return q

    program = jax.jit(lambda q: lax.fori_loop(0, iterations, body, q)).lower(q).compile()
    return Chain(program, calls * iterations).microseconds(q)


@dataclasses.dataclass(frozen=True)
class Programs:
    """All that a case runs. A peer that can't be compiled leaves the reason."""

    work: Work
    draw: Callable[[jax.Array], Any]
    error: Callable[[Any], jax.Array]
    kernel: Chain
    peers: dict[str, Chain | str]

    @staticmethod
    def compile(work: Work) -> "Programs":
        key = jax.random.key(0)
        shapes = jax.eval_shape(work.draw, key)
        peers: dict[str, Chain | str] = {}
        for name, attend in work.peers.items():
            peers[name] = or_reason(functools.partial(Chain.compile, work, attend, shapes))
        return Programs(
            work=work,
            draw=jax.jit(work.draw).lower(key).compile(),
            error=jax.jit(work.error).lower(shapes).compile(),
            kernel=Chain.compile(work, work.kernel, shapes),
            peers=peers,
        )

    def measure(self) -> dict[str, object]:
        x = self.draw(jax.random.key(0))
        error = float(self.error(x))
        row: dict[str, object] = {"case": self.work.name, "error": f"{error:.1e}"}
        if not error < _TOLERANCE:
            return row | {"µs": "WRONG"}
        time_of_kernel = self.kernel.microseconds(x)
        row |= {"µs": round(time_of_kernel, 1)} | self.work.columns(time_of_kernel)
        for name, peer in self.peers.items():
            row[f"{name} µs"] = peer if isinstance(peer, str) else round(peer.microseconds(x), 1)
        return row


def or_reason[Compiled](compile: Callable[[], Compiled]) -> Compiled | str:
    """Why something can't be compiled, where it can't: a plan may ask for too much, a peer for what is not there."""
    try:
        return compile()
    except (ValueError, RuntimeError, NotImplementedError, ImportError) as reason:
        return f"{type(reason).__name__}: {str(reason)[:60]}"


def relative_error(got: jax.Array, want: jax.Array) -> jax.Array:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.linalg.norm(got - want) / jnp.linalg.norm(want)


def binary_tree(nodes: int) -> np.ndarray:
    """Ancestor bits: node n > 0 is a child of (n - 1) // 2."""
    words = np.zeros((nodes, 2), np.uint32)
    for node in range(nodes):
        if node:
            words[node] = words[(node - 1) // 2]
        words[node, node // 32] |= np.uint32(1 << node % 32)
    return words
