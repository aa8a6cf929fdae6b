"""What an exception leaves behind: nothing. The next requests get their tokens."""

import numpy as np
import pytest
from toy import Requests, expected_tokens, run, toy_engine

from jaxspec.engine.engine import Engine
from jaxspec.engine.scheduler import Scheduler
from jaxspec.mesh import MeshShape


@pytest.mark.parametrize("place", ["at the end of the plan", "in the dispatch"])
@pytest.mark.parametrize("pp", [1, 2])
def test_an_interrupt_between_plan_and_dispatch_leaves_no_slot_behind(pp, place, monkeypatch):
    """Releases of that plan never reach the device; without a fresh start its slots would write into others' pages."""
    engine = toy_engine(MeshShape(pp, 1, 1), slots_per_group=4 // pp, pages=40, page_size=4, pages_per_slot=11)
    requests = Requests(np.random.default_rng(9))
    dispatch, plan = Engine._dispatch, Scheduler.plan

    def interrupt_dispatch(self, plan):
        monkeypatch.setattr(Engine, "_dispatch", dispatch)
        raise KeyboardInterrupt

    def interrupt_plan(self):
        monkeypatch.setattr(Scheduler, "plan", plan)
        plan(self)
        raise KeyboardInterrupt

    for _ in range(2):
        first = [requests.make(5, 30) for _ in range(4)]
        for request in first:
            engine.add(request)
        for _ in range(4):
            for _ in engine.step():
                pass
        for request in first[:2]:
            engine.finish(request, "cancelled")
        if place == "in the dispatch":
            monkeypatch.setattr(Engine, "_dispatch", interrupt_dispatch)
        else:
            monkeypatch.setattr(Scheduler, "plan", interrupt_plan)
        with pytest.raises(KeyboardInterrupt):
            while True:
                for _ in engine.step():
                    pass
        assert all(request.is_finished for request in first)
        assert not engine.has_work
        later = [requests.make(20, 20) for _ in range(3)]
        run(engine, later)
        for request in later:
            assert request.token_ids == expected_tokens(request.prompt, 20)
    assert engine.scheduler.pool.num_free == 39
