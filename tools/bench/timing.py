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
      after: queries of the next call, of these and their output; None where the output is what the next call takes.
    """

    name: str
    draw: Callable[[jax.Array], Any]
    sets: int
    kernel: Attend
    peers: dict[str, Attend]
    error: Callable[[Any], jax.Array]
    seconds: float
    columns: Callable[[float], dict[str, object]]
    after: Callable[[jax.Array, jax.Array], jax.Array] | None = after


@dataclasses.dataclass(frozen=True)
class Chain:
    """Calls that wait for each other, in one program; and what makes them wait in another, where that takes time.

    The difference of both is the time of the calls. Where waiting is most of it, it says little.
    """

    program: Callable[[Any], jax.Array]
    idle: Callable[[Any], jax.Array] | None
    calls: int

    @staticmethod
    def compile(work: Work, attend: Attend, shapes: Any) -> "Chain":
        """As many calls as take a while."""
        rounds = -(-_CHAINED // work.sets)
        is_whole = rounds * work.sets <= 2 * _CHAINED  # every iteration goes round all sets: no index is to be computed
        calls = rounds * work.sets if is_whole else _CHAINED
        iterations = max(2, int(_SECONDS / work.seconds / calls))

        def chain(x, attend):
            def body(n, q):
                for call in range(calls):
                    output = attend(q, x, call % work.sets if is_whole else lax.rem(n * calls + call, work.sets))
                    q = work.after(q, output) if work.after else output
                return q

            return lax.fori_loop(0, iterations, body, x.q)

        def idle(x):
            of_call = jax.eval_shape(lambda x: attend(x.q, x, 0), x)
            output = lax.optimization_barrier(jnp.zeros(of_call.shape, of_call.dtype))
            return chain(x, lambda q, x, i: lax.optimization_barrier((output, q))[0])

        def compiled(program):
            return jax.jit(program).lower(shapes).compile()

        return Chain(compiled(lambda x: chain(x, attend)), compiled(idle) if work.after else None, iterations * calls)

    def microseconds(self, x: Any) -> tuple[float, float]:
        """Of one call, and of what makes it wait for the one before, which the first does not include."""
        waiting = self._microseconds(self.idle, x) if self.idle else 0.0
        return self._microseconds(self.program, x) - waiting, waiting

    def _microseconds(self, program: Callable[[Any], jax.Array], x: Any) -> float:
        """The median of five runs after three that warm up (the first ones record graphs)."""
        times = []
        for _ in range(8):
            started = time.perf_counter()
            program(x).block_until_ready()
            times.append(time.perf_counter() - started)
        return 1e6 * float(np.median(times[3:])) / self.calls


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
        time_of_kernel, waiting = self.kernel.microseconds(x)
        row |= {"µs": round(time_of_kernel, 1), "waiting µs": round(waiting, 1)} | self.work.columns(time_of_kernel)
        for name, peer in self.peers.items():
            row[f"{name} µs"] = peer if isinstance(peer, str) else round(peer.microseconds(x)[0], 1)
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
