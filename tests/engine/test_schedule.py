"""The schedule alone, with a model of labels (toy.py): every stage sees exactly the rows that it must."""

import itertools

import numpy as np
import pytest
from toy import ALPHABET, BAD, Requests, expected_tokens, run, toy_engine, trash_page

from jaxspec.mesh import AXES, MODEL_AXES, MeshShape


def check(sequences):
    for sequence in sequences:
        assert sequence.is_finished
        assert BAD not in sequence.token_ids
        if sequence.params.is_greedy and sequence.finish_reason in ("length", "stop"):
            assert sequence.token_ids == expected_tokens(sequence.prompt, len(sequence.token_ids))
        if sequence.finish_reason == "length":
            assert len(sequence.token_ids) == sequence.params.max_tokens
            assert len(sequence.token_ids) == 1 + sum(sequence.accepted_lengths)


SCHEDULES = [
    # mesh, slots a group, chunk, rounds, tree, tail axes, pages
    ((1, 1, 1), 3, 4, 1, "chain:3", MODEL_AXES, 64),
    ((1, 1, 1), 4, 3, 3, "static:fork2x4", MODEL_AXES, 24),
    ((2, 1, 1), 2, 4, 1, "chain:3", MODEL_AXES, 64),
    ((2, 1, 1), 1, 5, 2, "static:fork2x4", AXES, 20),
    ((3, 1, 1), 2, 4, 1, "chain:2", AXES, 40),
    ((4, 1, 1), 1, 4, 2, "static:fork2x4", MODEL_AXES, 24),
    ((2, 1, 2), 2, 4, 1, "chain:3", AXES, 32),
    ((1, 2, 2), 3, 4, 2, "static:fork2x4", MODEL_AXES, 40),
    ((2, 2, 2), 2, 4, 1, "chain:3", MODEL_AXES, 64),
]


@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda s: f"{s[0]}-{s[1]}x{s[2]}x{s[3]}-{s[4]}-{s[6]}p")
def test_requests_that_come_and_go_get_exactly_their_tokens(schedule):
    """Random arrivals, lengths, ends, cancellations and preemptions; several dispatches and drains."""
    mesh, slots, chunk, rounds, tree, tail_axes, pages = schedule
    engine = toy_engine(
        MeshShape(*mesh),
        tree=tree,
        slots_per_group=slots,
        chunk=chunk,
        rounds=rounds,
        tail_axes=tail_axes,
        pages=pages,
        pages_per_slot=12,
    )
    rng = np.random.default_rng(0)
    requests = Requests(rng)
    cancelled = []
    for wave in range(3):
        for _ in range(int(rng.integers(1, 7))):
            prompt = int(rng.integers(1, 22))
            engine.add(requests.make(prompt, int(rng.integers(1, 26)), temperature=float(rng.choice([0.0, 0.0, 0.7]))))
        # In the last wave everything runs to its end; before, some are left for the next wave to mix with.
        for step in itertools.count():
            if not engine.has_work or (wave < 2 and step > int(rng.integers(4, 20))):
                break
            for _ in engine.step():
                pass
            if rng.random() < 0.05 and (running := [r for r in requests.made if not r.is_finished]):
                cancelled.append(running[int(rng.integers(len(running)))])
                engine.finish(cancelled[-1], "cancelled")
    check(requests.made)
    assert len(requests.made) > len(cancelled) + 3
    assert not trash_page(engine).any()
    assert engine.scheduler.pool.num_free == pages - 1
    accepted = [length for r in requests.made for length in r.accepted_lengths]
    assert np.mean(accepted) > 1.2  # drafts that are never accepted would test nothing


def test_the_batch_shrinks_only_when_nothing_was_left_to_do():
    """Each smaller batch is a program to compile, also where requests end before the next ones are let in."""
    engine = toy_engine(MeshShape(1, 1, 1), slots_per_group=4)
    requests = Requests(np.random.default_rng(1))
    batches = []

    def serve(count):
        for _ in range(count):
            engine.add(requests.make(9, max_tokens=1))
        while engine.has_work:
            for _ in engine.step():
                pass
            batches.append(engine._batch)

    serve(6)
    assert set(batches) == {4}
    batches.clear()
    serve(1)
    assert set(batches) == {1}
    check(requests.made)


def test_accepted_lengths_do_not_depend_on_the_schedule():
    def lengths(mesh, **options):
        requests = Requests(np.random.default_rng(1))
        run(toy_engine(mesh, **options), [requests.make(p, 30) for p in (3, 9, 1, 14, 6)])
        return [r.accepted_lengths for r in requests.made]

    alone = lengths(MeshShape(1, 1, 1), slots_per_group=1)
    assert lengths(MeshShape(1, 1, 1), slots_per_group=4) == alone
    assert lengths(MeshShape(1, 1, 1), slots_per_group=4, rounds=3, chunk=5) == alone
    assert lengths(MeshShape(2, 1, 1), slots_per_group=1) == alone
    assert lengths(MeshShape(2, 1, 2), slots_per_group=2, rounds=2, chunk=16) == alone


@pytest.mark.parametrize("pp", [2, 4])
def test_more_groups_than_requests_and_fewer(pp):
    engine = toy_engine(MeshShape(pp, 1, 1), slots_per_group=1)
    requests = Requests(np.random.default_rng(2))
    for count in (1, pp, 2 * pp + 1, 1):
        run(engine, [requests.make(5, 9) for _ in range(count)])
    check(requests.made)


@pytest.mark.parametrize("mesh", [(1, 1, 1), (1, 1, 2), (2, 1, 1)], ids=str)
def test_prompt_lengths_around_every_page_chunk_and_shard_boundary(mesh):
    engine = toy_engine(MeshShape(*mesh), slots_per_group=4, page_size=4, chunk=4)
    requests = Requests(np.random.default_rng(3))
    run(engine, [requests.make(length, 7) for length in range(1, 14)])
    check(requests.made)


def test_a_stop_token_inside_an_accepted_run_ends_it_there():
    requests = Requests(np.random.default_rng(4))
    engine = toy_engine(MeshShape(1, 1, 1), slots_per_group=4)
    run(engine, [requests.make(8, 40)])
    plain = requests.made[0]
    for stop_symbol in range(ALPHABET):
        again = Requests(np.random.default_rng(4))
        stopped = again.make(8, 40, stop_ids=[stop_symbol])  # tag 0: the token is its symbol
        run(engine, [stopped])
        if stop_symbol in plain.token_ids:
            first = plain.token_ids.index(stop_symbol)
            assert stopped.token_ids == plain.token_ids[: first + 1]
            assert stopped.finish_reason == "stop"
            assert len(stopped.token_ids) == 1 + sum(stopped.accepted_lengths)


def test_max_tokens_inside_an_accepted_run_ends_it_there():
    engine = toy_engine(MeshShape(1, 1, 1), slots_per_group=4)
    lengths = range(1, 20)
    requests = [Requests(np.random.default_rng(5)).make(8, count) for count in lengths]
    run(engine, requests)
    check(requests)
    longest = requests[-1]
    assert max(longest.accepted_lengths) > 2
    for request in requests:
        assert request.finish_reason == "length"
        whole_rounds = request.accepted_lengths[:-1]
        assert whole_rounds == longest.accepted_lengths[: len(whole_rounds)]


def test_a_request_that_ends_with_its_first_token_frees_its_slot():
    engine = toy_engine(MeshShape(2, 1, 1), slots_per_group=1)
    requests = Requests(np.random.default_rng(6))
    run(engine, [requests.make(3, 1) for _ in range(7)])
    check(requests.made)
    assert all(r.accepted_lengths == [] for r in requests.made)


def test_a_preempted_request_loses_nothing(monkeypatch):
    requests = Requests(np.random.default_rng(7))
    engine = toy_engine(MeshShape(1, 1, 1), slots_per_group=3, pages=12, page_size=4, pages_per_slot=11)
    preempted = []
    preempt = engine.scheduler._preempt
    monkeypatch.setattr(engine.scheduler, "_preempt", lambda s: (preempted.append(s), preempt(s)))
    run(engine, [requests.make(10, 24) for _ in range(4)])
    check(requests.made)
    assert preempted, "the pool is meant to be too small"


def test_pages_of_a_cancelled_request_serve_another_while_its_rows_are_in_flight():
    requests = Requests(np.random.default_rng(8))
    engine = toy_engine(MeshShape(3, 1, 1), slots_per_group=1, pages=13, page_size=4, pages_per_slot=11)
    for _ in range(6):
        first = requests.make(9, 30)
        engine.add(first)
        while not first.token_ids:
            for _ in engine.step():
                pass
        assert first.entries_in_flight
        engine.finish(first, "cancelled")  # its pages go to the next request at once
        run(engine, [requests.make(20, 16)])
    check(requests.made)
