"""A plan's messages carry out exactly the round's matrix, for every layout, and cost what `traffic` says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.topology import Layout, Round
from gossamer.topology.plan import program, traffic


def run_worker(worker, steps, x, out, mail):
    """One worker as a coroutine: posts its messages, yields until what it needs has arrived (FIFO per pair)."""
    mean = {}
    for step in steps:
        value = (x if step.source == "x" else out)[worker].copy()
        for p in step.sends:
            payload = mean[p.start, p.stop] if step.kind == "spread" else value[p.start : p.stop]
            mail.setdefault((worker, p.peer), []).append(payload.copy())
        received = []
        for p in step.recvs:
            while not mail.get((p.peer, worker)):
                yield
            received.append(mail[p.peer, worker].pop(0))
            assert received[-1].shape == (p.stop - p.start,)
        if step.kind == "reduce":
            for o in step.own:
                total, count = o.weight * value[o.start : o.stop], o.weight
                for p, got in zip(step.recvs, received, strict=True):
                    if (p.start, p.stop) == (o.start, o.stop):
                        total, count = total + p.weight * got, count + p.weight
                mean[o.start, o.stop] = total / count
                if not step.wired:
                    out[worker, o.start : o.stop] = total / count
            continue
        if step.kind == "spread":
            for o in step.own:
                out[worker, o.start : o.stop] += mean[o.start, o.stop] - value[o.start : o.stop]
        for p, got in zip(step.recvs, received, strict=True):
            at = slice(p.start, p.stop)
            if step.kind == "swap":
                out[worker, at] += p.weight * (got - value[at])
            elif step.kind == "gather":
                out[worker, at] = got
            else:
                out[worker, at] += got - value[at]


def execute(round: Round, layout: Layout, size: int, hierarchical: bool) -> None:
    """Carry out the programs naively and compare with the matrix."""
    n = layout.n
    x = np.random.default_rng(0).normal(size=(n, size))
    out, mail = x.copy(), {}
    programs = [program(round, layout, w, size, hierarchical=hierarchical) for w in range(n)]
    running = [run_worker(w, programs[w], x, out, mail) for w in range(n)]
    for _ in range(10 * n + 100):
        running = [r for r in running if next(r, "done") != "done"]
    assert not running, "two workers' programs do not fit each other"
    assert not any(mail.values()), "a message nobody receives"
    np.testing.assert_allclose(out, round.matrix() @ x, atol=1e-12)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Round, Layout, int, bool]:
    layout = Layout.of(draw(st.lists(st.integers(1, 4), min_size=1, max_size=4)))
    labels = draw(st.lists(st.integers(0, 3), min_size=layout.n, max_size=layout.n))
    groups = [[w for w in range(layout.n) if labels[w] == g] for g in set(labels)]
    return Round.uniform(layout.n, groups), layout, draw(st.integers(1, 40)), draw(st.booleans())


@given(cases())
@settings(max_examples=150, deadline=None)
def test_uniform_groups(case):
    execute(*case)


def metropolis(n: int, edges: list[tuple[int, int]]) -> Round:
    degree = np.bincount(np.array(edges).ravel(), minlength=n)
    weights = [(i, j, 1 / (1 + max(degree[i], degree[j]))) for a, b in edges for i, j in ((a, b), (b, a))]
    return Round.weighted(n, weights)


@pytest.mark.parametrize("layout", [Layout.flat(6), Layout.of([2, 2, 2]), Layout.of([1, 5])])
def test_weighted_neighbors(layout):
    execute(metropolis(6, [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 0), (0, 3)]), layout, 7, True)


def test_directed_weights():
    n = 5
    shift = np.roll(np.eye(n), 1, axis=1)
    execute(Round.from_matrix(0.5 * np.eye(n) + 0.3 * shift + 0.2 * shift @ shift), Layout.of([2, 3]), 6, True)


@pytest.mark.parametrize("per_node", [[4, 4], [4, 4, 4], [2, 2, 2, 2], [6], [1, 1, 1, 1], [3, 3], [2, 4], [1, 2, 3]])
@pytest.mark.parametrize("hierarchical", [True, False])
def test_traffic_counts_the_messages(per_node, hierarchical):
    layout = Layout.of(per_node)
    n, size = layout.n, 144 * layout.n
    ring = metropolis(n, [(i, (i + 1) % n) for i in range(n)])
    for round in (Round.uniform(n, [range(n)]), Round.uniform(n, layout.members), ring):
        said = traffic(round, layout, hierarchical=hierarchical)
        for w in range(n):
            steps = program(round, layout, w, size, hierarchical=hierarchical)
            sent = {"intra_plain": 0, "intra_wired": 0, "inter_plain": 0, "inter_wired": 0}
            for step in steps:
                for p in step.sends:
                    where = "inter" if layout.node[p.peer] != layout.node[w] else "intra"
                    sent[f"{where}_{'wired' if step.wired else 'plain'}"] += p.stop - p.start
            for name, elements in sent.items():
                assert getattr(said, name)[w] == pytest.approx(elements / size), (name, w)
            assert said.steps[w] == len(steps)


def test_two_nodes_send_their_data_once():
    layout = Layout.of([4, 4])
    said = traffic(Round.uniform(8, [range(8)]), layout)
    assert said.inter_wired[:4].sum() == pytest.approx(1.0)
    flat = traffic(Round.uniform(8, [range(8)]), layout, hierarchical=False)
    assert flat.inter_wired[:4].sum() + flat.inter_plain[:4].sum() > 3.9
