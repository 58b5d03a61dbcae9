"""Advice: what is ranked, what is charged, when it says keep DDP, and lines that run when they are pasted."""

import json
import re
from dataclasses import replace

import pytest
import torch

import gossamer
from gossamer.cli import main
from gossamer.engine.policies import Settings
from gossamer.predict import changes, choices, evidence, gaps
from gossamer.predict.advise import advise
from gossamer.predict.choices import Choice
from gossamer.predict.cluster import from_dict, load
from gossamer.predict.costs import ClusterCosts
from gossamer.predict.evidence import averages_factor, has_record, quality_factor
from gossamer.predict.gaps import Extra
from gossamer.predict.methods import WIRES, parse
from gossamer.predict.paste import lines
from gossamer.predict.predict import predict
from gossamer.predict.presets import PRESETS
from gossamer.predict.quality import predict_quality
from gossamer.topology import Layout, analyze, build, entries

COSTS = {
    "encode_gb_per_s": {"bf16": 4.0, "fp16": 2.0, "int8": 0.6},
    "merge_gb_per_s": {"fp32": 8.0, "bf16": 1.0, "fp16": 0.8, "int8": 0.4},
    "reduce_gb_per_s": 8.0,
    "mix_gb_per_s": 8.0,
    "update_gb_per_s": {"adam": 2.0, "gossipadam": 1.5},
    "transfer_cpu_gb_per_s": 1.0,
    "bucket_us": 20,
    "step_us": 300,
    "cores": 1.0,
}


def described(gbps=0.5, nodes=2, per_node=2, mb=10, jitter="none", costs=COSTS, **compute):
    data = {
        "nodes": nodes,
        "per_node": per_node,
        "links": {"inter": {"bandwidth_gbps": gbps, "latency_us": 50}, "intra": {"bandwidth_gbps": 20}},
        "compute": {"seconds": 0.1, "jitter": jitter, **compute},
        "model": {"mb": mb},
    }
    return from_dict({**data, "costs": costs} if costs else data)


def one_machine(mb=260):
    """Two workers on one node of two cores, as the README's path measures it; compute is a guess on all cores."""
    allreduce = {"per_node": [2], "seconds": [[1e6, 6e-4], [6.7e7, 0.04]], "cpu_gb_per_s": 1.8, "bf16_slowdown": 1.4}
    data = {
        "nodes": 1,
        "per_node": 2,
        "links": {"intra": {"bandwidth_gbps": 20, "latency_us": 30}},
        "compute": {"seconds": 0.1, "cores": 1.0, "source": "guess"},
        "model": {"mb": mb},
        "costs": {**COSTS, "allreduce": allreduce},
    }
    return from_dict(data)


def test_one_machine_keeps_ddp():
    """The case that advice got wrong: on one machine int8 saves no time, because encoding costs more than sending."""
    found = advise(one_machine(), steps=30)
    assert found.recommendation["verdict"] == "keep DDP"
    assert found.recommendation["method"] == "ddp"
    rows = {r.method: r for r in found.table if r.choice.plan.options == {} and r.choice.every == 1}
    assert rows["gossipadam:complete:int8"].step_time > 1.5 * rows["ddp"].step_time
    assert any("compute is a guess" in note for note in found.notes)
    assert any("one node was measured" in note for note in found.notes)
    asked = {s["if"] for s in found.sensitivity}
    assert not any("node" in what or "bandwidth" in what for what in asked)  # the model may not speak about them
    assert {"twice the compute", "half the compute", "no jitter", "30 % jitter"} <= asked


def test_what_would_change_scales_the_jitter_and_judges_the_quality_anew():
    cluster = described(gbps=1, mb=50, jitter="lognormal:0.2")
    found = advise(cluster, steps=30)
    cases = {s["if"]: s for s in found.sensitivity}
    assert {"no jitter", "twice the jitter", "half the jitter", "twice the nodes"} <= cases.keys()
    assert "30 % jitter" not in cases
    assert cases["half the jitter"]["ddp_step_time"] < cases["twice the jitter"]["ddp_step_time"]
    assert changes.with_jitter(cluster, 2).compute.jitter == "lognormal:0.4"
    sampled = cluster.changed(compute={"samples": (0.9, 1.0, 1.1)})
    assert changes.with_jitter(sampled, 2).compute.samples == pytest.approx((0.8, 1.0, 1.2))
    assert changes.with_jitter(cluster.changed(compute={"jitter": "slow-worker:4"}), 2) is None


def test_every_cost_is_charged():
    """Each rate of the description changes the step time of the methods that it concerns."""
    # compute on all cores: communication takes its time from it
    cluster = described(gbps=100, mb=50, cores=1.0)

    def time(method, **changed):
        where = cluster.changed(costs=changed) if changed else cluster
        return predict(method, where, steps=20).step_time

    slow = {"int8": 0.01, "bf16": 0.01}
    assert time("dadam:aer:int8", encode_gb_per_s=slow) > 2 * time("dadam:aer:int8")
    assert time("dadam:aer:int8", merge_gb_per_s=slow) > 2 * time("dadam:aer:int8")
    assert time("dadam:aer", encode_gb_per_s=slow) == time("dadam:aer")
    assert time("dadam:aer", reduce_gb_per_s=0.01) > 2 * time("dadam:aer")
    assert time("dadam:aer", mix_gb_per_s=0.5) == pytest.approx(time("dadam:aer") + 0.05 / 0.5 - 0.05 / 8, rel=1e-3)
    assert time("dadam:aer", step_us=50_300) == pytest.approx(time("dadam:aer") + 0.05, rel=1e-3)
    assert time("dadam:aer", bucket_us=10_020) == pytest.approx(time("dadam:aer") + 0.01 * 4, rel=1e-3)
    assert time("dadam:aer", transfer_cpu_gb_per_s=0.1) > 1.5 * time("dadam:aer")
    assert time("ddp:bf16", encode_gb_per_s=slow) > 2 * time("ddp:bf16")
    assert time("ddp", ddp_us=50_000) == pytest.approx(time("ddp") + 0.05, rel=1e-3)
    cheap = {"adam": 0.5, "sgd": 50.0}  # another optimizer than the baseline's is no merit of gossip
    assert time("dsgd:aer", update_gb_per_s=cheap) == time("dadam:aer", update_gb_per_s=cheap)
    slower = {"adam": 0.5, "gossipadam": 0.25}
    assert time("ddp", update_gb_per_s=slower) == pytest.approx(time("ddp") + 0.1 - 0.025, rel=1e-3)
    assert time("gossipadam:aer", update_gb_per_s=slower) > time("dadam:aer", update_gb_per_s=slower) + 0.09
    few = {"fp32": 8.0, "bf16": 0.01}  # a wire that was not measured costs as much as the slowest one
    assert time("dadam:aer:int8", merge_gb_per_s=few) > 2 * time("dadam:aer:int8")
    measured = {"per_node": (2, 2), "seconds": ((1e3, 1.0), (1e9, 2.0))}
    spec = from_dict({**described().model_dump(), "costs": {**COSTS, "allreduce": measured}}).costs.allreduce
    assert time("ddp", allreduce=spec) > 1
    idle = cluster.changed(compute={"cores": 0.0})
    assert predict("dadam:complete", idle, steps=20).step_time < time("dadam:complete")  # nothing competes


def test_exact_inside_charges_the_average_and_the_gather():
    cluster = described(per_node=4)
    inside = predict("dadam:aer", cluster, steps=40, exact_inside=True).step_time
    slow = cluster.changed(links={"intra": cluster.links.intra.model_copy(update={"bandwidth_gbps": 0.05})})
    assert predict("dadam:aer", slow, steps=40, exact_inside=True).step_time > 2 * inside
    few = cluster.changed(links={"inter": cluster.links.inter.model_copy(update={"bandwidth_gbps": 0.05})})
    assert predict("dadam:aer", few, steps=40, exact_inside=True).step_time > 2 * inside


@pytest.fixture
def run(capsys):
    def call(line, code=0):
        assert main(line.split()) == code
        out, err = capsys.readouterr()
        if code:
            assert re.fullmatch(r"gossamer: error: [^\n]+\n", err)
            return err
        return json.loads(out) if "--json" in line else out

    return call


def test_everything_is_ranked_by_its_score(run):
    got = run("advise a40 --steps 30 --json")
    table = got["table"]
    kinds = {(r["algorithm"], r["gradients"]) for r in table}
    assert kinds == {
        ("ddp", "worker"), ("awc", "worker"), ("atc", "worker"), ("awc", "node"), ("atc", "node"),
        ("ad-psgd", "worker"), ("a2cid2", "worker"), ("local", "worker"),
    }  # fmt: skip
    names = {r["method"].split(":")[1] for r in table if r["algorithm"] == "awc"}
    assert names == {e.name for e in entries() if build(e.name, Layout.of([4] * 4)).connected}
    assert {parse(r["method"]).wire for r in table if r["algorithm"] == "awc"} == set(WIRES)
    assert {r["every"] for r in table} >= {1, 2, 4, 8, 16, 32}
    assert {r["staleness"] for r in table} == {0, 1, 2}
    assert {r["fragments"] for r in table} == {1, 2, 4, 8}
    assert not any(r["outer"] for r in table)  # no record says what outer steps cost
    assert {r["options"].get("bucket_mb") for r in table if r["algorithm"] == "ddp"} == {None, 10, 100}
    for r in table:
        if r["algorithm"] in ("ddp", "awc", "atc"):
            assert r["score"] == pytest.approx(r["step_time"] * r["quality"]["value"])
        assert r["quality"]["low"] <= r["quality"]["value"] <= r["quality"]["high"]
        assert r["quality"]["evidence"]
    ddp = min((r for r in table if r["algorithm"] == "ddp"), key=lambda r: r["step_time"])
    assert ddp["method"] == "ddp:bf16"
    assert ddp["saving"] == 0
    assert ddp["saving_fp32"] > 0.3
    chosen = got["recommendation"]
    assert (chosen["verdict"], chosen["best_allreduce"]) == ("gossip", "ddp:bf16")
    assert chosen["options"]["gradients"] == "node"
    assert chosen["gain_range"][0] < chosen["gain"] < chosen["gain_range"][1]
    assert any("half of the GPU's memory bandwidth" in note for note in got["notes"])
    text = run("advise a40 --steps 30")
    assert "assumed, not measured" in text
    assert "What would change the answer" in text


def test_exact_averages_of_anchored_wires_are_charged_where_they_happen():
    cluster = described(gbps=0.05, mb=50)
    choice = Choice(parse("gossipadam:aer:int8"), "awc")
    without = replace(choice, refresh=0)
    assert choice.options["average_every"] == 64
    assert "average_every" not in without.options
    assert choice.predict(cluster, 40, 0).step_time > without.predict(cluster, 40, 0).step_time + 0.01


def test_exact_averages_that_are_asked_for_are_charged_on_any_wire():
    cluster = described(gbps=0.1, nodes=4, mb=20)

    def time(algorithm, **given):
        return Choice(parse("gossipadam:aer"), algorithm, **given).predict(cluster, 40, 0).step_time

    reduce = ClusterCosts(cluster).allreduce(1.0)
    late = reduce - Choice(parse("gossipadam:aer"), "awc").predict(cluster, 40, 0).compute_time
    assert late > 0
    assert time("awc", averages=8) - time("awc") == pytest.approx(late / 8)
    assert time("atc", averages=8) - time("atc") == pytest.approx(reduce / 8)  # nothing overlaps


def test_the_threshold_is_the_users(run, tmp_path):
    (tmp_path / "c.toml").write_text(gossamer_toml(described(gbps=1.0)))
    got = run(f"advise {tmp_path / 'c.toml'} --steps 30 --json")
    gain = got["recommendation"]["best_gossip_gain"]
    assert 0.02 < gain < 0.9
    scores = {ddp: min(r["score"] for r in got["table"] if (r["algorithm"] == "ddp") == ddp) for ddp in (True, False)}
    most = 1 - scores[False] / scores[True]  # the recommended choice may be another one, which loses less at worst
    for worth, verdict in ((gain - 0.01, "gossip"), (most + 0.01, "keep DDP")):
        got = run(f"advise {tmp_path / 'c.toml'} --steps 30 --worth {worth} --json")["recommendation"]
        assert got["verdict"] == verdict


def gossamer_toml(cluster):
    from gossamer.predict.cluster import to_toml

    return to_toml(cluster)


def test_without_costs_only_fp32_is_recommended():
    found = advise(described(costs=None), steps=30)
    assert parse(found.recommendation["method"]).wire == "fp32"
    assert any("no [costs]" in note for note in found.notes)


def test_a_description_by_hand_needs_no_model(run, tmp_path):
    data = {k: v for k, v in described(costs=None).model_dump(exclude_none=True).items() if k in ("nodes", "per_node")}
    links = {"inter": {"bandwidth_gbps": 0.1, "latency_us": 50}, "intra": {"bandwidth_gbps": 20}}
    (tmp_path / "mine.json").write_text(json.dumps({**data, "links": links, "compute": {"seconds": 0.5}}))
    assert "lacks 'model'" in run(f"advise {tmp_path / 'mine.json'}", code=2)
    got = run(f"advise {tmp_path / 'mine.json'} --model-mb 500 --steps 20 --json")
    assert got["recommendation"]["verdict"] == "gossip"
    assert "--model-mb must be a positive" in run(f"advise {tmp_path / 'mine.json'} --model-mb -1", code=2)


def test_without_costs_a_thin_link_is_offered_a_coarser_wire():
    """500 MB at 100 Mbit/s take 40 s, and rounding them takes a second at worst."""
    found = advise(described(gbps=0.1, nodes=4, mb=500, costs=None), steps=20)
    chosen = found.recommendation
    assert parse(chosen["method"]).wire != "fp32"
    assert any("1 GB/s of encoding" in note for note in found.notes)


def test_a_gain_from_jitter_is_called_that():
    cluster = described(gbps=100, nodes=4, per_node=1, jitter="gaussian:0.5", mb=1)
    found = advise(cluster, steps=60).recommendation
    assert found["verdict"] == "gain is jitter only"
    assert found["method"].startswith("ddp")  # the jitter is only described
    assert "without the described, not measured jitter" in found["why"]
    assert advise(cluster.changed(compute={"jitter": "none"}), steps=60).recommendation["verdict"] == "keep DDP"
    seen = cluster.changed(compute={"source": "measured"})
    assert not advise(seen, steps=60).recommendation["method"].startswith("ddp")


def test_fast_links_keep_ddp():
    found = advise(described(gbps=400), steps=30).recommendation
    assert found["verdict"] == "keep DDP"
    assert "compute hides the all-reduce" in found["why"]
    assert "DistributedDataParallel" in found["lines"][0]


def test_starved_asynchronous_methods_are_not_recommended():
    """On a starved network asynchronous workers race ahead without averaging: fast, but not recommended."""
    found = advise(described(gbps=0.01, nodes=4), steps=40)
    starved = next(r for r in found.table if r.method == "ad-psgd:ring")
    assert starved.exchanges_per_step < 0.2
    assert starved.step_time <= 1.01 * min(r.step_time for r in found.table if r.choice.every == 1)
    assert not found.recommendation["method"].startswith(("ad-psgd", "a2cid2"))


def test_a_slow_network_is_offered_fewer_bytes():
    found = advise(described(gbps=0.01, nodes=4), steps=40)
    assert found.recommendation["verdict"] == "gossip"
    options, wire = found.recommendation["options"], found.recommendation["method"].rpartition(":")[2]
    assert options.get("every", 1) * options.get("fragments", 1) > 1 or wire in ("int8", "int4")
    assert all(r.choice.options["average_every"] >= 64 for r in found.table if r.method.endswith("aer:int4"))


def test_very_thin_links_are_offered_fragments_and_local_steps_together():
    advice = advise(described(gbps=0.001, nodes=4, mb=100), steps=20)
    both = [r for r in advice.table if r.choice.fragments > 1 and r.choice.every > 1]
    assert both, "no row has fragments and local steps"
    for r in advice.table:
        if not r.choice.local and (r.choice.every > 1 or r.choice.fragments > 1):
            assert "thin-quality-*" in r.quality.evidence
            assert r.quality.basis in ("between", "beyond", "assumed")
    alone = {(str(r.choice.method), r.choice.fragments): r for r in advice.table if r.choice.every == 1}
    for r in both:
        assert r.bytes_between < alone[str(r.choice.method), r.choice.fragments].bytes_between


def test_local_steps_of_other_packages_are_ranked_but_not_recommended():
    cluster = described(gbps=0.01, nodes=4, mb=100)
    advice = advise(cluster, steps=20)
    rows = {(r.choice.method.name, r.choice.every): r for r in advice.table if r.choice.local}
    assert rows.keys() == {(name, h) for name in ("localsgd", "diloco") for h in (8, 32)}
    averaged = next(r for r in advice.table if r.method == "ddp" and not r.choice.options).bytes_between
    for (_, every), row in rows.items():
        assert row.bytes_between == pytest.approx(averaged / every)
    ddp = next(r for r in advice.table if r.method == "ddp")
    for name in ("localsgd", "diloco"):
        assert cluster.compute.seconds < rows[name, 32].step_time < rows[name, 8].step_time < ddp.step_time
    assert not advice.recommendation["method"].startswith(("localsgd", "diloco"))


def test_a_better_score_of_another_package_is_said(run, tmp_path, monkeypatch):
    cluster = described(gbps=0.01, nodes=4, mb=100)
    found = advise(cluster, steps=20)
    best = min((r for r in found.table if r.choice.local), key=lambda r: r.score)
    assert best.score > found.recommendation["score"]
    assert not any("torchft" in note for note in found.notes)
    good = (Extra("diloco", 32, 0.0, "a-record"),)
    monkeypatch.setattr(evidence, "EXTRAS", good)
    monkeypatch.setattr(choices, "coarser", lambda choice: [])
    monkeypatch.setattr("gossamer.predict.advise.coarser", lambda choice: [])
    monkeypatch.setattr("gossamer.predict.advise.refined", lambda cluster, choice: [])
    found = advise(cluster, steps=20)
    (note,) = [note for note in found.notes if "torchft" in note]
    assert note.startswith("diloco (every=32) of torchft, which is not recommended here")
    assert "records a-record" in note
    assert not found.recommendation["method"].startswith("diloco")


def test_every_row_shows_what_its_quality_is_based_on(run, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")  # narrower tables fold the words
    text = run("advise a40 --nodes 4 --per-node 4 --steps 20")
    assert "by: a record that measured it" in text.replace("\n", " ")
    for method, basis in (("ddp", "measured"), ("ddp:bf16", "assumed"), ("ad-psgd:ring", "assumed")):
        (row,) = [line for line in text.splitlines() if line.startswith(f" {method}  ")]
        assert basis in row.split()


# -- the quality ------------------------------------------------------------------------------------------------------


def factor(**given):
    return quality_factor(**{"replicas": 4, "rounds": 2, "topology": "one-peer-exponential", **given})


NODES = {"replicas": 4, "rounds": 4, "topology": "aer"}
WORKERS = {"replicas": 16, "rounds": 4, "topology": "aer"}


def test_quality_factor():
    assert quality_factor(replicas=1, rounds=1).value == 1
    complete = factor(rounds=1, topology="complete").value
    assert 1 < complete < factor().value < factor(**NODES).value < factor(**WORKERS).value < 1.6
    assert factor(rounds=200).value > factor(rounds=20).value
    assert factor(replicas=64).value > factor(replicas=16).value
    assert factor(replicas=2, rounds=1).value > 1
    assert factor(rounds=None).high <= 4
    for replicas in (2, 3, 4, 7, 16, 100):
        values = [factor(replicas=replicas, rounds=r, topology="ring").value for r in (1, 1.5, 2, 3, 4, 5, 8, 64)]
        assert values == sorted(values)
        assert values[0] >= 1


@pytest.mark.parametrize(
    ("given", "basis", "words"),
    [
        ({}, "measured", "records quality-signal-*"),
        (NODES, "measured", "records quality-signal-*"),
        (WORKERS, "measured", "records quality-signal-*"),
        ({"rounds": 1, "topology": "complete"}, "measured", "records quality-signal-*"),
        ({**WORKERS, "algorithm": "atc"}, "measured", "records quality-signal-*"),
        ({**NODES, "algorithm": "atc"}, "between", "interpolated from records quality-signal-*"),
        ({"topology": "ring"}, "between", "interpolated from records quality-signal-*"),
        ({"replicas": 64}, "beyond", "extrapolated from records quality-signal-*"),
        ({"rounds": 200}, "beyond", "extrapolated from records quality-signal-*"),
        ({"wire": "bf16"}, "measured", "records quality-signal-* and thin-quality-*"),
        ({"wire": "int4"}, "measured", "records quality-signal-* and thin-quality-*"),
        ({"wire": "fp16"}, "assumed", "records quality-signal-*; fp16 is assumed to cost 0%"),
        (
            {"algorithm": "a2cid2"},
            "assumed",
            "interpolated from records quality-signal-*; a2cid2 is assumed to cost 10%",
        ),
        (
            {"settings": [("every", 8), ("fragments", 2)], "apart": 16.0},
            "between",
            "interpolated from records quality-signal-* and thin-quality-*",
        ),
        (
            {"settings": [("fragments", 2), ("staleness", 1)], "apart": 2.0},
            "beyond",
            "extrapolated from records quality-signal-*, none of which has staleness",
        ),
    ],
)  # fmt: skip
def test_a_factor_says_what_it_is_based_on(given, basis, words):
    found = factor(**given)
    assert (found.basis, found.evidence) == (basis, words)


def test_mixing_after_the_step_has_the_share_that_was_measured():
    ratio = (factor(**WORKERS, algorithm="atc").value - 1) / (factor(**WORKERS).value - 1)
    assert 0.25 < ratio < 0.6
    slow = [factor(replicas=16, rounds=76, topology="ring", algorithm=a).value - 1 for a in ("atc", "awc")]
    assert slow[0] / slow[1] > ratio  # what slow averages cost stays


def test_rarer_exchanges_follow_the_rule_until_a_record_has_them(monkeypatch):
    monkeypatch.setattr(evidence, "EXTRAS", ())
    ruled = factor(settings=[("every", 16)], apart=16.0)
    assert ruled.value > factor().value
    assert ruled.basis == "beyond"
    assert not has_record("outer")
    made = (
        Extra("every", 4, 0.02, "thin-quality-*"),
        Extra("every", 16, 0.06, "thin-quality-*"),
        Extra("outer", 16, -0.01, "thin-quality-*"),
        Extra("diloco", 8, 0.2, "thin-quality-*"),
    )
    monkeypatch.setattr(evidence, "EXTRAS", made)

    def extra(every, *more):
        found = factor(replicas=16, settings=[("every", every), *more], apart=float(every))
        assert "thin-quality-*" in found.evidence
        return found.value - factor(replicas=16).value

    assert has_record("outer")
    assert [extra(k) for k in (2, 4, 8, 16, 32)] == pytest.approx([0.01, 0.02, 0.04, 0.06, 0.08])
    assert extra(16, ("outer", 16)) == pytest.approx(0.05)
    assert factor(settings=[("every", 4)], apart=4.0).basis == "between"
    lost = factor(settings=[("every", 16)], apart=16.0).value - factor().value
    assert 0.02 < lost < 0.06  # the record has 16 replicas, and here are four
    partly = factor(settings=[("every", 4), ("fragments", 2)], apart=8.0)
    assert "none of which has fragments" in partly.evidence
    assert partly.value == factor(settings=[("fragments", 8)], apart=8.0).value
    assert averages_factor("diloco", 8, 16).value == pytest.approx(1.2)
    assert [averages_factor("diloco", k, 16).basis for k in (4, 8, 32)] == ["between", "measured", "beyond"]
    assert averages_factor("localsgd", 16, 16).value > averages_factor("localsgd", 8, 16).value > 1


@pytest.mark.parametrize("given", [{}, NODES, WORKERS, {**WORKERS, "algorithm": "atc"}], ids=str)
@pytest.mark.parametrize("scale", [0.5, 20.0, 300.0, 1e5])
@pytest.mark.parametrize("inside", [False, True])
def test_the_noise_of_a_run_only_widens_what_the_records_say(scale, inside, given):
    """An older record knows other noise scales: a single seed of it must not make gossip as good as all-reduce."""
    own = predict_quality(scale, 32 if inside else 8, 128, exact_inside=inside)
    told, known = factor(**given, noise=own), factor(**given)
    assert told.value == known.value > 1
    assert told.low <= known.low
    assert told.high >= known.high
    assert own.regime.name in told.evidence
    assert (told.basis == known.basis) == (own.regime.name == "noise in every replica")


def test_settings_without_records_are_named_with_a_noise_scale_too():
    own = predict_quality(300.0, 32, 128)
    found = factor(noise=own, settings=[("every", 32), ("staleness", 2)], apart=32.0)
    assert "none of which has staleness" in found.evidence
    assert found.basis == "beyond"


def test_the_costs_of_settings_are_those_of_the_records(request):
    """Mean losses in the tables of thin-quality-translate and -lm, relative to plain gossip or to all-reduce."""
    records = request.config.rootpath / "benchmarks" / "records"
    losses = {}
    for record, task in (("translate", "translation"), ("lm", "language model")):
        text = (records / f"thin-quality-{record}" / "README.md").read_text(encoding="utf-8")
        rows = re.findall(r"^\| ([^|]+) \| [\d.]+ \| [\d.]+ \| ([\d.]+)[^|]*\|", text, re.M)
        losses[task] = {name: float(loss) for name, loss in rows}
    names = {"bf16": "gossip bf16", "int8": "gossip int8", "int4": "gossip int4"}
    checked = 0
    for extra in (e for e in gaps.EXTRAS if e.record):
        name = {
            "fragments": f"gossip fp32, {extra.value} fragments",
            "every": f"gossip fp32, local steps, H = {extra.value}",
            "localsgd": f"LocalSGD, H = {extra.value}",
            "diloco": f"DiLoCo, momentum 0.5, H = {extra.value}",
        }.get(extra.setting) or names[extra.value]
        base = "all-reduce" if extra.setting in ("localsgd", "diloco") else "gossip fp32"
        behind = {task: round(found[name] - found[base], 3) for task, found in losses.items() if name in found}
        assert max(0.0, gaps.worth(behind)) == pytest.approx(extra.excess, rel=0.02), name
        checked += 1
    assert checked >= 10


def test_the_gaps_are_those_of_the_records(request):
    """Each row of the table is a line of a record's README, and each line about GossipAdam is a row."""
    records = request.config.rootpath / "benchmarks" / "records"
    names = {"translate": "translation", "lm": "language model", "vision": "images", "german": "German"}
    setting = r"gossipadam:(aer|exp|complete)( inside)?(, atc)? \(\d seeds\)"
    found = set()
    for record, task in names.items():
        text = (records / f"quality-signal-{record}" / "README.md").read_text(encoding="utf-8")
        for topology, inside, atc, *gap in re.findall(rf"^\| {setting} .*\| (\S+) \[(\S+), (\S+)\] \|$", text, re.M):
            name = {"exp": "one-peer-exponential"}.get(topology, topology)
            found.add((task, 4 if inside else 16, name, *map(float, gap), "atc" if atc else "awc"))
    assert found == {(g.task, g.replicas, g.topology, g.mean, g.low, g.high, g.algorithm) for g in gaps.GAPS}
    for topology, rounds in gaps.ROUNDS.items():
        assert analyze(build(topology, Layout.of([1] * 4))).mixing.rounds_to_1e3 == rounds
    steps = json.loads((records / "quality-steps" / "record.json").read_text(encoding="utf-8"))["results"]
    assert {task: round(steps[record]["slope"], 2) for record, task in names.items()} == gaps.SLOPES


def test_bandwidth_scales_pairs_and_measured_times():
    data = described().model_dump()
    data["links"]["pairs"] = [{"nodes": [0, 1], "bandwidth_gbps": 0.1, "by_size": [[1e6, 0.09]]}]
    data["costs"]["allreduce"] = {"per_node": [2, 2], "seconds": [[1e6, 0.2], [1e7, 2.0]]}
    cluster = from_dict(data)
    now, fast = (predict("ddp", c, steps=20).step_time for c in (cluster, changes.with_bandwidth(cluster, 2)))
    assert fast < 0.6 * now
    scaled = changes.with_bandwidth(cluster, 2).links.pairs[0]
    assert scaled.bandwidth_gbps == 0.2
    assert scaled.by_size[0][1] == pytest.approx(0.09 - 0.04)


@pytest.mark.parametrize(("nodes", "link"), [("--nodes 2", ""), ("", "--link 1gbit --nodes 2")])
def test_questions_about_nodes_that_were_not_measured(run, tmp_path, nodes, link):
    (tmp_path / "one.toml").write_text(gossamer_toml(one_machine(8)))
    if not link:
        assert "pass --link RATE" in run(f"advise {tmp_path / 'one.toml'} {nodes}", code=2)
        return
    got = run(f"advise {tmp_path / 'one.toml'} {link} --steps 20 --json")
    assert "twice the nodes" in {s["if"] for s in got["sensitivity"]}


# -- the lines to paste -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("buckets", [None, 9])
def test_every_line_says_what_was_predicted(buckets):
    """Each row's lines name real arguments with values that the engine takes."""
    layout = Layout.of([2] * 4)
    cluster = described(gbps=2, nodes=4, mb=260).changed(model={"buckets": buckets})
    far = cluster.links.inter.model_copy(update={"latency_us": 20_000.0})
    options_seen = set()
    for row in advise(cluster.changed(links={"inter": far}), steps=20).table:
        choice, calls = row.choice, []
        if not choice.gossips:
            continue
        *_, line = lines(choice)
        spy = type("Spy", (), {"__getattr__": lambda _, name: getattr(gossamer, name)})()
        spy.decentralize = lambda model, optimizer, calls=calls, **given: calls.append(given)
        exec(line, {"model": None, "optimizer": None, "gossamer": spy})
        (given,) = calls
        topology = build(given.pop("topology"), layout)
        settings = Settings.of(**given)
        assert topology.name == build(choice.method.topology, layout).name
        assert (settings.algorithm.name, settings.wire) == (choice.algorithm, choice.method.wire)
        if choice.synchronous:
            assert (settings.algorithm.every, settings.gradients) == (choice.every, choice.gradients)
            assert getattr(settings.algorithm, "staleness", 0) == choice.staleness
            assert settings.algorithm.fragments == choice.fragments
            assert (settings.algorithm.outer is not None) == choice.outer
        plan = choice.plan.options
        assert {k: getattr(settings.exchange, {"bucket_mb": "bucket_mib"}.get(k, k)) for k in plan} == plan
        options_seen |= set(choice.options)
        if buckets and choice.synchronous and choice.fragments == 1:
            assert -(-260_000_000 // round(settings.exchange.bucket_mib * 2**20)) == buckets
    assert {"every", "staleness", "gradients", "algorithm"} <= options_seen


CHOICES = [
    Choice(parse("gossipadam:one-peer-exponential:bf16"), "awc", "node"),
    Choice(parse("gossipadam:aer"), "atc", every=2),
    Choice(parse("gossipadam:ring:int8"), "awc", staleness=1),
    Choice(parse("gossipadam:ring"), "awc", fragments=2),
    Choice(parse("gossipadam:complete"), "awc", every=4, outer=True),
    Choice(parse("ad-psgd:complete"), "ad-psgd"),
    Choice(parse("a2cid2:ring"), "a2cid2"),
    Choice(parse("ddp:bf16"), "ddp"),
    Choice(parse("ddp"), "ddp"),
]


@pytest.mark.parametrize("choice", CHOICES, ids=lambda c: f"{c.method} {c.options}")
def test_pasted_lines_train(choice, tmp_path):
    """The lines run as they are, in a job of one worker, and the model takes a step."""
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    names = {"model": torch.nn.Linear(4, 4), "lr": 0.1, "torch": torch, "gossamer": gossamer}
    try:
        exec("\n".join(lines(choice)), names)
        model = names["model"]
        optimizer = names.get("optimizer") or torch.optim.SGD(model.parameters(), lr=0.1)
        before = [p.detach().clone() for p in model.parameters()]
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
        if "gossip" in names:
            names["gossip"].close()
        # DDP's reducer must not be the last owner of the group: it would join gloo's threads with Python's lock held.
        model = optimizer = names = None
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_say_what_they_assume(name):
    assert "memory bandwidth" in load(name).costs.assumed
