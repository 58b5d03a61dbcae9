"""Analysis of timelines: step time, stragglers, predicted against measured."""

import pytest

from gossamer.errors import InputError
from gossamer.predict.cluster import from_dict
from gossamer.predict.predict import predict, predicted_trace
from gossamer.trace import Span, Trace, diff, read_chrome, stragglers, summarize, write_chrome


def two_workers(slow=3.0, steps=4, link=0.0):
    """Worker 1 is slow; worker 0 waits for it, then `link` seconds for the network."""
    spans, now = [], 0.0
    for k in range(steps):
        end = now + slow + link
        spans += [
            Span("compute", 0, now, now + 1.0, {"step": k}),
            Span("exchange", 0, now + 1.0, end, {"round": k, "bucket": 0}),
            Span("wait", 0, now + 1.0, end, {"step": k, "round": k, "bucket": 0, "peer": 1}),
            Span("compute", 1, now, now + slow, {"step": k}),
            Span("exchange", 1, now + slow, end, {"round": k, "bucket": 0}),
        ]
        if link:
            spans.append(Span("wait", 1, now + slow, end, {"step": k, "round": k, "bucket": 0, "peer": 0}))
        now = end
    return Trace(tuple(spans), (0, 1))


def test_summary():
    got = summarize(two_workers(3.0, link=1.0))
    assert got.steps == 4
    assert got.step_time == pytest.approx(4.0)
    assert got.seconds == pytest.approx({"compute": 2.0, "communication": 2.0, "waiting": 2.0})
    with pytest.raises(InputError, match="empty"):
        summarize(Trace((), (0,)))
    with pytest.raises(InputError, match="no 'step'"):
        summarize(Trace((Span("compute", 0, 0, 1),), (0,)))


def test_stragglers_distinguish_workers_and_links():
    found = {b.cause: b for b in stragglers(two_workers(3.0, link=0.5))}
    assert found["worker 1"].seconds == pytest.approx(4 * 2.0)
    assert found["worker 1"].mostly == "worker 0"
    assert found["worker 1"].waits == 4
    assert found["worker 1"].share == pytest.approx(8 / (2 * 4 * 3.5))
    assert found["link 0-1"].seconds == pytest.approx(4 * 2 * 0.5)
    assert "worker 0" not in found
    together = two_workers(3.0, link=0.5)
    assert "inside node 0" in {b.cause for b in stragglers(Trace(together.spans, (0, 0)))}
    assert stragglers(Trace((Span("compute", 0, 0, 1, {"step": 0}),), (0,))) == []


def cluster(jitter="none", gbps=0.8):
    return from_dict(
        {
            "nodes": 2,
            "per_node": 2,
            "links": {"inter": {"bandwidth_gbps": gbps}, "intra": {"bandwidth_gbps": 80}},
            "compute": {"seconds": 0.1, "jitter": jitter},
            "model": {"mb": 4},
        }
    )


def traced(setting, method="dadam:aer"):
    return predicted_trace(method, setting, predict(method, setting, steps=40, trace_steps=20))


def test_simulated_slow_worker_is_found():
    found = stragglers(traced(cluster("slow-worker:3@2")))
    assert found[0].cause == "worker 2"
    assert found[0].share > 0.3


def test_simulated_slow_link_is_found():
    found = stragglers(traced(cluster(gbps=0.08)))
    assert found[0].cause == "link 0-1"
    assert stragglers(traced(cluster(gbps=80)))[:1] == [] or stragglers(traced(cluster(gbps=80)))[0].share < 0.02


def test_trace_and_result_agree_on_the_step_time():
    setting = cluster(gbps=0.08)
    for method in ("dadam:aer", "ddp"):
        result = predict(method, setting, steps=40, trace_steps=40)
        assert summarize(predicted_trace(method, setting, result)).step_time == pytest.approx(
            result.step_time, rel=0.03
        )


def test_diff_through_files(tmp_path):
    setting, slower = cluster(gbps=0.08), cluster(gbps=0.04)
    a = read_chrome(write_chrome(traced(setting), tmp_path / "a.json"))
    b = read_chrome(write_chrome(traced(slower), tmp_path / "b.json"))
    rows = {r.what: r for r in diff(a, b)}
    assert list(rows) == ["step time", "compute", "communication", "waiting"]
    assert rows["compute"].error == pytest.approx(0, abs=1e-3)
    assert rows["step time"].error < -0.2
    assert rows["waiting"].predicted < rows["waiting"].measured
    assert all(r.error == 0 for r in diff(a, a))
    with pytest.raises(InputError, match="has 2 workers, the measured one 4"):
        diff(two_workers(), b)
