"""How far ahead the plan for new members is announced."""

import pytest

from gossamer import ADPSGD, ATC, AWC, A2CiD2
from gossamer.engine.elastic.coordinator import _margin


@pytest.mark.parametrize(
    ("policy", "workers", "step", "margin"),
    [
        pytest.param(AWC(), 8, 0.0, 2, id="step time unknown"),
        pytest.param(AWC(), 8, 30.0, 2, id="long steps"),
        pytest.param(AWC(), 8, 0.25, 2, id="two rounds take as long as the record may travel"),
        pytest.param(ATC(), 8, 0.03, 17, id="short steps"),
        pytest.param(AWC(every=4), 8, 0.03, 5, id="short steps, a round every fourth"),
        pytest.param(ADPSGD(), 8, 1.0, 16, id="events are counted over all workers"),
        pytest.param(A2CiD2(), 64, 0.03, 64 * 17, id="events, short steps"),
    ],
)
def test_a_plan_begins_after_some_rounds_and_some_time(policy, workers, step, margin):
    assert _margin(policy, workers, step) == margin
