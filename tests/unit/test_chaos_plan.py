"""The plan of faults: drawn from its seed, with rank 0 among the victims, and never of all workers at once."""

from __future__ import annotations

from itertools import pairwise

import pytest

from gossamer import InputError
from gossamer.lab.chaos.plan import KINDS, make_plan


def test_a_seed_gives_one_plan_and_another_seed_another():
    assert make_plan([2] * 4, 600, 20, 1) == make_plan([2] * 4, 600, 20, 1)
    assert make_plan([2] * 4, 600, 20, 1) != make_plan([2] * 4, 600, 20, 2)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize(("per_node", "seconds", "faults"), [((2, 2, 2, 2), 600, 20), ((1, 3), 120, 8), ((4,), 120, 8)])
def test_rules_of_a_plan(per_node, seconds, faults, seed):
    plan = make_plan(per_node, seconds, faults, seed)
    n = sum(per_node)
    assert len(plan) == faults
    assert plan[0].kind == "kill"
    assert any(0 in f.victims and f.kind == "kill" for f in plan)
    impossible = {1: {"cut", "pair"}, 2: {"pair"}}
    assert {f.kind for f in plan} == set(KINDS) - impossible.get(len(per_node), set())
    for fault in plan:
        assert 0 < len(set(fault.victims)) < n
        assert all(0 <= rank < n for rank in fault.victims)
        assert 3 <= fault.at < fault.until <= seconds - 5
    assert all(a.until < b.at for a, b in pairwise(plan)), "one fault at a time"


def test_a_whole_node_is_killed_and_another_cut_off():
    plan = make_plan([2, 2, 2, 2], 600, 20, 3)
    nodes = {0: (0, 1), 1: (2, 3), 2: (4, 5), 3: (6, 7)}
    assert any(f.kind == "kill" and f.victims == nodes.get(f.node) for f in plan)
    assert all(f.victims == nodes[f.node] for f in plan if f.kind == "cut")


def test_a_pair_is_cut_between_two_nodes():
    for seed in range(10):
        pairs = [f for f in make_plan([2, 1, 1], 600, 20, seed) if f.kind == "pair"]
        assert pairs
        for fault in pairs:
            workers = {0: (0, 1), 1: (2,), 2: (3,)}
            assert fault.node != fault.other_node
            assert set(fault.victims) == {*workers[fault.node], *workers[fault.other_node]}
            assert str(fault) == f"pair node {fault.node} and node {fault.other_node} (packets lost)"
            assert (fault.describe()["node"], fault.describe()["other_node"]) == (fault.node, fault.other_node)


def test_without_links_no_fault_affects_the_network():
    for seed in range(10):
        plan = make_plan([2, 2], 600, 20, seed, links=False)
        assert not any(f.kind in ("cut", "pair") or f.how == "link" for f in plan)


def test_no_faults_need_no_second_worker_and_bad_input_is_refused():
    assert make_plan([1], 900, 0, 0) == ()
    with pytest.raises(InputError, match="at least 2 workers"):
        make_plan([1], 60, 1, 0)
    with pytest.raises(InputError, match=r"20 faults do not fit into 60 seconds; pass --seconds (\d+)") as error:
        make_plan([2, 2], 60, 20, 0)
    need = int(str(error.value).split("--seconds ")[1].split()[0])
    assert len(make_plan([2, 2], need, 20, 0)) == 20
    with pytest.raises(InputError, match="at least 0"):
        make_plan([2, 2], 60, -1, 0)
