import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rowmesh.run.config import ScheduleConfig
from rowmesh.run.schedule import factor, make_scheduler

NAMES = st.sampled_from(["constant", "linear", "cosine"])


@given(NAMES, st.integers(0, 30), st.floats(0, 1), st.integers(1, 60))
def test_rises_then_falls_to_final(name, warmup, final, total):
    falls = {} if name == "constant" else {"final": final}
    schedule = ScheduleConfig(name=name, warmup_steps=warmup, **falls)
    factors = [factor(schedule, step, total) for step in range(total)]
    rise, fall = factors[:warmup], factors[warmup:]
    assert rise == sorted(rise)
    assert fall == sorted(fall, reverse=True)
    assert all(0 <= value <= 1 for value in factors)
    if fall:
        assert fall[0] == 1
    if name != "constant" and len(fall) > 1:
        assert fall[-1] == pytest.approx(final, abs=1e-12)


def test_moves_the_rates_of_every_group():
    parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(2)]
    optimizer = torch.optim.SGD([{"params": [parameters[0]], "lr": 1.0}, {"params": [parameters[1]], "lr": 0.1}])
    scheduler = make_scheduler(ScheduleConfig(name="linear", warmup_steps=2), optimizer, total_steps=4)
    seen = []
    for _ in range(4):
        seen.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    assert seen == [[0.5, 0.05], [1.0, 0.1], [1.0, 0.1], [0.0, 0.0]]
