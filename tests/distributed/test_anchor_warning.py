"""A quantized wire whose anchor stays at the start of training says so: one sentence, by worker 0."""

import math
import warnings

import pytest
import torch
from workers import decentralize, mlp, process_group, seeded

from elastic import finish, job
from gossamer import ConsensusGuard, GossamerWarning

SAYS = r"wire='{wire}' sends parameters relative to the last exact average, and these settings make none"
CASES = [
    ({"wire": "int8"}, "AWC(average_every=64)"),
    ({"wire": "int4", "algorithm": "atc", "every": 3, "fragments": 2}, "ATC(average_every=66)"),
    ({"wire": "int4", "guard": ConsensusGuard(max_ratio=math.inf)}, "AWC(average_every=64)"),  # it only measures
    ({"wire": "int4", "average_every": 8}, None),
    ({"wire": "int4", "guard": ConsensusGuard()}, None),
    ({"wire": "int8", "algorithm": "ad-psgd"}, None),  # has no anchor
    ({"wire": "bf16"}, None),
]


def said(rank, cases):
    """The texts of the GossamerWarnings of each case."""
    found = []
    with process_group():
        for settings in cases:
            model = seeded(0, mlp)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with decentralize(model, optimizer, topology="ring", gradients="worker", **settings):
                    pass
            found.append([str(w.message) for w in caught if issubclass(w.category, GossamerWarning)])
    return found


def test_worker_0_says_that_the_anchor_stays(pools):
    first, second = pools(2).run(said, [settings for settings, _ in CASES])
    assert second == [[]] * len(CASES)
    for (settings, remedy), texts in zip(CASES, first, strict=True):
        assert len(texts) == (remedy is not None), settings
        for text in texts:
            assert text.startswith(SAYS.format(wire=settings["wire"]))
            assert text.endswith(f"pass average_every, for example {remedy}")


def test_one_worker_has_nothing_to_say(pools):
    assert pools(1).run(said, [{"wire": "int4"}]) == [[[]]]


@pytest.mark.parametrize("average_every", [0, 4])
def test_elastic_jobs(monkeypatch, average_every):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with job(monkeypatch, 2, topology="ring", wire="int4", average_every=average_every) as made:
            finish(made.all(3, lambda gossip: None))
    texts = [str(w.message) for w in caught if issubclass(w.category, GossamerWarning)]
    assert [t.startswith(SAYS.format(wire="int4")) for t in texts] == [True] * (average_every == 0)
