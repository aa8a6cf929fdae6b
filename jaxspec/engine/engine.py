"""The loop between host and device: queue a dispatch, read the one before it."""

import dataclasses
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxspec.engine.scheduler import Plan, Scheduler
from jaxspec.engine.sequence import Sequence, Update
from jaxspec.errors import UserError
from jaxspec.peers import Peers
from jaxspec.speculate.program import Results, Step, Variant, build_step, initial_state
from jaxspec.speculate.state import Ring, StepSpec

# Dispatches queued before the oldest is read: the host works while the device runs the next.
_AHEAD = 1


class Engine:
    """A target and a drafter (`spec.drafter`) on a mesh, serving sequences.

    Args:
      graph, weights: the target, as `restore_decoder` returns it.
      draft_weights: the drafter's, as its `restore` returns them; `()` for none.
      peers: of the mesh, where its devices talk by peer stores.
      on_compile: called with (variant, None) when a program is about to be compiled, (variant, seconds) after.
    """

    def __init__(
        self,
        spec: StepSpec,
        mesh: Mesh,
        graph: Any,
        weights: Any,
        draft_weights: Any = (),
        peers: Peers | None = None,
        on_compile: Callable[[Variant, float | None], None] | None = None,
    ):
        self.spec, self.mesh = spec, mesh
        self.scheduler = Scheduler(spec)
        self.graph, self.weights, self._draft_weights = graph, weights, draft_weights
        self._peers, self._tables = peers, peers.tables if peers else {}
        self._on_compile = on_compile or (lambda variant, seconds: None)
        self.programs: dict[Variant, Step] = {}
        self._last_commands: dict[Variant, tuple[bytes, jax.Array]] = {}
        self._batch = 1
        self._state = initial_state(spec, self._batch, mesh)
        self._in_flight: deque[tuple[Plan, Results]] = deque()
        # XLA aborts the process where it exits while a program runs, and one always runs ahead. It does not know that
        # the peers are in use, so they are kept as long.
        weakref.finalize(self, _await_results, self._in_flight, peers)

    def add(self, sequence: Sequence) -> None:
        self.scheduler.add(sequence)

    def finish(self, sequence: Sequence, reason: str) -> None:
        self.scheduler.finish(sequence, reason)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work or bool(self._in_flight)

    def step(self) -> Iterator[Update]:
        """Queues the next dispatch if there is one, then reads the oldest unless the device would fall idle.

        Raises:
          UserError: a device did not answer another; all requests are cancelled.
        """
        try:
            plan = self.scheduler.plan() if self.scheduler.has_work else None
            if plan is not None:
                self._in_flight.append((plan, self._dispatch(plan)))
        except BaseException:  # an interrupt while a program compiles, say
            self._start_afresh()
            raise
        if self._in_flight and (plan is None or len(self._in_flight) > _AHEAD):
            done, results = self._in_flight.popleft()
            self._check(results)
            yield from self.scheduler.collect(done, np.asarray(results.rows))
        else:
            assert plan is not None or not self.scheduler.has_work, "requests wait, but nothing can change"

    def warm_up(self, num_sequences: int, is_greedy: bool) -> None:
        """Compiles what so many sequences that come at once need; other variants are compiled when first met."""
        has_stages, batch = self.spec.pp > 1, self.scheduler.batch_for(num_sequences)
        variants = [
            Variant(not has_stages, has_lane=True, is_greedy=is_greedy, batch=batch),
            Variant(is_solo=True, has_lane=False, is_greedy=is_greedy, batch=batch),
        ]
        if has_stages and num_sequences > self.spec.slots_per_group:
            variants.append(Variant(is_solo=False, has_lane=False, is_greedy=is_greedy, batch=batch))
        self._compile([variant for variant in variants if variant not in self.programs])

    def seconds_per_dispatch(
        self, batch: int = 1, repeats: int = 3, *, has_lane: bool = False, is_greedy: bool = True
    ) -> float:
        """Time of an empty dispatch, which costs what a busy one does but for keys that a kernel does not read."""
        variant = Variant(not has_lane or self.spec.pp == 1, has_lane, is_greedy, batch)
        plan = Plan(variant, variant.blank_commands(self.spec), [])
        jax.block_until_ready(self._dispatch(plan))
        started = time.perf_counter()
        for _ in range(repeats):
            result = self._dispatch(plan)
        jax.block_until_ready(result)
        return (time.perf_counter() - started) / repeats

    def _dispatch(self, plan: Plan) -> Results:
        if plan.variant.batch != self._batch:
            self._resize(plan.variant.batch)
        program = self.program(plan.variant)
        self._state, results = program(self.weights, self._draft_weights, self._state, self._send(plan), self._tables)
        jax.copy_to_host_async(results)
        return results

    def _check(self, results: Results) -> None:
        if self._peers is None:
            return
        try:
            self._peers.check(np.asarray(results.failures))
        except UserError:
            self._start_afresh()  # nothing of the state is worth anything either
            raise

    def _start_afresh(self) -> None:
        """Where the device is not in the state that the scheduler believes: a plan has not reached it, for instance."""
        self.scheduler.cancel_all()
        self.scheduler = Scheduler(self.spec)
        _await_results(self._in_flight, self._peers)
        self._in_flight.clear()
        self._batch = 1
        del self._state  # before the new one: a device may have no room for two caches
        self._state = initial_state(self.spec, self._batch, self.mesh)

    def _send(self, plan: Plan) -> jax.Array:
        """The packed commands on every device; most dispatches say the same as the one before them."""
        packed = plan.commands.pack()
        content = packed.tobytes()
        sent = self._last_commands.get(plan.variant)
        if sent is None or sent[0] != content:
            sent = (content, jax.device_put(packed, NamedSharding(self.mesh, P())))
            self._last_commands[plan.variant] = sent
        return sent[1]

    def _resize(self, batch: int) -> None:
        """Another number of slots a group; the ring is empty then, and only it has that size."""
        self._batch = batch
        shardings = jax.tree.map(lambda x: x.sharding, self._state.ring)
        ring = jax.jit(lambda: Ring.empty(self.spec, batch), out_shardings=shardings)()
        self._state = dataclasses.replace(self._state, ring=ring)

    def _abstract_ring(self, batch: int) -> Ring:
        return jax.tree.map(
            lambda shape, old: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=old.sharding),
            jax.eval_shape(lambda: Ring.empty(self.spec, batch)),
            self._state.ring,
        )

    def program(self, variant: Variant) -> Step:
        """The compiled program of a variant; compiled when it is first asked for."""
        if variant not in self.programs:
            self._compile([variant])
        return self.programs[variant]

    def _compile(self, variants: list[Variant]) -> None:
        """All at once: each keeps a core busy, and users wait for it."""

        def lower(variant: Variant) -> jax.stages.Lowered:
            specs = [nnx.get_partition_spec(weights) for weights in (self.weights, self._draft_weights)]
            commands = variant.blank_commands(self.spec).pack()
            return build_step(self.spec, variant, self.mesh, self.graph, *specs).lower(
                self.weights,
                self._draft_weights,
                dataclasses.replace(self._state, ring=self._abstract_ring(variant.batch)),
                jax.ShapeDtypeStruct(commands.shape, commands.dtype, sharding=NamedSharding(self.mesh, P())),
                self._tables,
            )

        started = time.perf_counter()
        with ThreadPoolExecutor() as pool:
            compiling: dict[Future[Any], Variant] = {}
            for variant in variants:
                self._on_compile(variant, None)
                compiling[pool.submit(lower(variant).compile)] = variant
            for done in as_completed(compiling):
                self.programs[compiling[done]] = done.result()
                self._on_compile(compiling[done], time.perf_counter() - started)


def _await_results(in_flight: deque[tuple[Plan, Results]], peers: Peers | None) -> None:
    for _, results in in_flight:
        jax.block_until_ready(results)
