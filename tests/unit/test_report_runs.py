"""Reports from run folders whose contents are known."""

import csv
import json
import math
import re

import pytest

from browser import needs_browser, shown
from gossamer import InputError
from gossamer.cli import main
from gossamer.report.page import write_csv, write_html, write_markdown
from gossamer.report.runs import baseline, find_runs, grouped, load_runs, reached, summary
from gossamer.report.verdict import judged, verdict
from gossamer.trace import Span, Trace, write_chrome

STEPS = 10


def fake_run(
    folder, method, seed, *, loss, accuracy, step_seconds, workers=1, simulated=True, waited=None, done=STEPS, lr=0.1,
    cluster="a40", link=None, **config,
):  # fmt: skip
    """A run that evaluates at half of its steps and at the end, and was stopped after step `done`."""
    folder.mkdir(parents=True)
    clock = {"kind": "measured", "link": link}
    if simulated:
        clock = {
            "kind": "simulated", "cluster": cluster, "layout": "2 nodes x 2 workers", "model_mb": 260.0,
            "step_seconds": step_seconds, "waiting": 0.25,
        }  # fmt: skip
    content = {
        "config": {
            "task": "vision", "method": method, "seed": seed, "steps": STEPS, "per_node": [2, 2], "virtual": True,
            "options": {}, **config,
        },
        "method": method, "lr": lr, "metric": "accuracy", "higher_is_better": True, "unit": "images", "clock": clock,
        "command": "gossamer compare vision",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(content))
    for worker in range(workers):
        rows = []
        for step in range(1, done + 1):
            share = step / STEPS
            row = {"step": step, "seconds": step * step_seconds, "units": 4 * step, "bytes": 1e6 * step}
            rows.append({**row, "waited": waited, "loss": 3 - share + worker, "lr": lr})
            if step in (5, 10) and worker == 0:
                quality = {"loss": 3 - (3 - loss) * share, "accuracy": accuracy * share}
                rows.append(
                    {"step": step, "seconds": step * step_seconds, "averaged": quality, "local": quality}
                    | {"consensus_distance": 0.5 / step, "final": step == STEPS}
                )
        text = "".join(json.dumps(r) + "\n" for r in rows)
        (folder / f"metrics-{worker:05d}.jsonl").write_text(text + '{"step": 11, "lo')  # torn by a kill


@pytest.fixture
def compared(tmp_path):
    for seed, noise in ((0, -0.01), (1, 0.01)):
        made = {"loss": 1.0 + noise, "accuracy": 0.9 + noise, "step_seconds": 0.4}
        fake_run(tmp_path / "ddp" / f"seed-{seed}", "ddp", seed, **made)
        made = {"loss": 0.9 + noise, "accuracy": 0.895 + noise, "step_seconds": 0.2}
        fake_run(tmp_path / "accumadam-aer" / f"seed-{seed}", "accumadam:aer", seed, **made)
        made = {"loss": 1.5 + noise, "accuracy": 0.5 + noise, "step_seconds": 0.1}
        fake_run(tmp_path / "dadam-ring" / f"seed-{seed}", "dadam:ring", seed, **made)
    fake_run(tmp_path / "sweep" / "x", "ddp", 0, loss=9.0, accuracy=0.0, step_seconds=9.0)
    return tmp_path


def test_summary(compared):
    groups = grouped(load_runs(compared))
    assert [g.label for g in groups] == ["ddp", "accumadam:aer", "dadam:ring"]
    assert baseline(groups).label == "ddp"
    ddp, accum, _ = summary(groups)
    assert (accum["seeds"], accum["steps"]) == (2, STEPS)
    assert accum["metric_mean"] == pytest.approx(0.895)
    assert accum["metric_std"] == pytest.approx(2**0.5 * 0.01)
    assert accum["relative_time"] == pytest.approx(0.5)
    assert accum["bytes_per_step"] == 1e6
    assert accum["consensus_distance"] == 0.05
    assert ddp["waiting"] == 0.25
    # loss 3 - 2.1 k / 10 is 1.0 after 9.52 steps of 0.2 s
    assert accum["seconds_to_baseline_loss"] == pytest.approx(2 / 2.1 * 2.0, rel=1e-3)


def test_verdict_names_the_fastest_method_that_is_not_worse(compared):
    said = verdict(grouped(load_runs(compared)))
    assert said.startswith("accumadam:aer is 2.00 times as fast as ddp (simulated on a40, 2 nodes x 2 workers), and af")
    assert "its accuracy is within noise (0.895 ± 0.014 against 0.9 ± 0.014)" in said
    assert "its validation loss is better (0.9 ± 0.014 against 1 ± 0.014) over 2 seeds" in said
    assert "it had ddp's final loss after 48% of ddp's time" in said
    assert said.count(".\n") == 0


def test_verdict_when_all_methods_are_worse_and_with_one_method(tmp_path):
    fake_run(tmp_path / "a", "ddp", 0, loss=1.0, accuracy=0.9, step_seconds=0.2)
    assert verdict(grouped(load_runs(tmp_path))).startswith("ddp reached accuracy 0.9 after 10 steps, 200 ms each")
    fake_run(tmp_path / "b", "dadam:ring", 0, loss=1.5, accuracy=0.5, step_seconds=0.4)
    said = verdict(grouped(load_runs(tmp_path)))
    assert "dadam:ring is slower than (0.50 times the speed of) ddp" in said
    assert "its accuracy is worse (0.5 against 0.9), its validation loss is worse (1.5 against 1) with one seed" in said
    assert "final loss after" not in said


@pytest.mark.parametrize(
    ("mean", "deviation", "seeds", "sign", "word"),
    [
        (0.95, 0.01, 3, 1, "better"),
        (0.93, 0.04, 3, 1, "within noise"),
        (0.875, 0.01, 3, 1, "within noise"),  # the baseline's deviation is the larger one
        (0.85, 0.01, 3, 1, "worse"),
        (0.85, 0.01, 3, -1, "better"),
        (0.9001, 0.0, 1, 1, "better"),
        (0.9, 0.0, 1, 1, "equal"),
    ],
)
def test_quality_is_judged_against_the_noise_of_seeds(mean, deviation, seeds, sign, word):
    base = {"x_mean": 0.9, "x_std": 0.03, "seeds": 3}
    assert judged({"x_mean": mean, "x_std": deviation, "seeds": seeds}, base, "x", sign) == word


def test_measured_runs_average_over_workers_and_differ_by_configuration(tmp_path):
    made = {"loss": 1.0, "accuracy": 0.9, "step_seconds": 0.3, "simulated": False, "workers": 2, "waited": 0.6}
    fake_run(tmp_path / "a", "dadam:ring", 0, exact_inside=False, **made)
    fake_run(tmp_path / "b", "dadam:ring", 0, exact_inside=True, **made)
    groups = grouped(load_runs(tmp_path))
    assert [g.label for g in groups] == ["dadam:ring", "dadam:ring exact-inside"]
    run = groups[0].runs[0]
    assert run.steps[-1]["loss"] == pytest.approx(2.5)  # of 2 and 3
    assert run.steps[-1]["units"] == 80
    assert run.step_time == pytest.approx(0.3)
    assert run.waiting == pytest.approx(0.2)
    assert reached(run, 0.5) is None


def test_files(compared, tmp_path):
    page = write_html(compared, tmp_path / "out" / "report.html").read_text()
    assert "accumadam:aer is 2.00 times as fast" in page
    body = page.index("<body>")
    assert page.index('class="verdict"') - body < 200  # the verdict comes first
    assert not re.search(r"""(?:src|href)=["'](?!#)|<link|@import|url\((?!#)""", page)  # nothing is fetched
    assert page.count("validation loss against") == 2
    assert "against simulated time" in page
    table = write_markdown(compared, tmp_path / "r.md").read_text()
    assert "| ddp | 0.1 | 0.9 ± 0.014 |" in table
    with write_csv(compared, tmp_path / "r.csv").open() as file:
        assert [r["method"] for r in csv.DictReader(file)] == ["ddp", "accumadam:aer", "dadam:ring"]


@needs_browser
def test_the_page_draws_in_a_browser(compared, tmp_path):
    page = shown(write_html(compared, tmp_path / "report.html"), tmp_path / "profile")
    drawn = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    assert "accumadam:aer is 2.00 times as fast" in drawn
    # steps and time for loss and accuracy, training loss, consensus: each a chart with one line per method, one legend
    assert drawn.count('<figure class="live">') == drawn.count('class="tip"') == 6
    charts = drawn.split('<figure class="live">')[1:]
    assert [len(re.findall('id="line-', chart)) for chart in charts] == [3] * 6
    assert re.findall(r"</svg>([\w:-]+)</li>", drawn) == ["ddp", "accumadam:aer", "dadam:ring"]
    for title in ("validation loss against steps", "accuracy against simulated time", "consensus distance"):
        assert title in drawn


def test_bad_folders(tmp_path):
    with pytest.raises(InputError, match="is not a folder"):
        load_runs(tmp_path / "none")
    with pytest.raises(InputError, match="holds no run"):
        load_runs(tmp_path)
    fake_run(tmp_path / "a", "ddp", 0, loss=1.0, accuracy=0.9, step_seconds=0.2)
    (tmp_path / "a" / "metrics-00000.jsonl").write_text("")
    with pytest.raises(InputError, match="first evaluation"):
        load_runs(tmp_path)
    fake_run(tmp_path / "b", "ddp", 0, loss=1.0, accuracy=0.9, step_seconds=0.2)
    with pytest.raises(InputError, match="cannot write"):
        write_csv(tmp_path, "/proc/nowhere/x.csv")


MADE = {"loss": 1.0, "accuracy": 0.9, "step_seconds": 0.4}


def labels(folder):
    return [(r["method"], r["seeds"]) for r in summary(grouped(find_runs(folder).runs))]


def said_of(folder, capsys, *more):
    """What `gossamer report` prints, on one line."""
    assert main(["report", str(folder), *map(str, more)]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_unfinished_runs_are_left_out_if_any_run_is_finished(tmp_path, capsys):
    runs = tmp_path / "runs"
    fake_run(runs / "a", "ddp", 0, **MADE)
    fake_run(runs / "b", "dadam:ring", 0, **MADE | {"step_seconds": 0.2})
    fake_run(runs / "c", "dadam:ring", 1, **MADE | {"step_seconds": 0.1}, done=STEPS // 2)
    fake_run(runs / "d", "accumadam:aer", 0, **MADE | {"step_seconds": 0.1}, done=STEPS // 2)
    far = "(dadam:ring seed 1 at step 5 of 10, accumadam:aer seed 0 at step 5 of 10)"
    expected = f"Left out: 2 runs that are not finished {far}."
    page, table = tmp_path / "r.html", tmp_path / "r.md"
    said = said_of(runs, capsys, "--html", page, "--markdown", table)
    assert "dadam:ring is 2.00 times as fast as ddp" in said
    assert labels(runs) == [("ddp", 1), ("dadam:ring", 1)]
    assert expected in said
    assert expected in page.read_text()
    assert expected in table.read_text()
    assert main(["report", str(runs), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == expected


def test_a_run_without_its_last_evaluation_is_unfinished(tmp_path):
    fake_run(tmp_path / "a", "ddp", 0, **MADE)
    fake_run(tmp_path / "b", "dadam:ring", 0, **MADE)
    metrics = tmp_path / "b" / "metrics-00000.jsonl"
    metrics.write_text("".join(line for line in metrics.open() if '"final": true' not in line))
    found = find_runs(tmp_path)
    assert [r.method for r in found.runs] == ["ddp"]
    assert found.left_out == "Left out: 1 run that is not finished (dadam:ring seed 0 at step 10 of 10)."


def test_no_verdict_without_a_finished_run(tmp_path, capsys):
    runs = tmp_path / "runs"
    fake_run(runs / "a", "ddp", 0, **MADE, done=9)
    fake_run(runs / "b", "dadam:ring", 0, **MADE, done=5)
    fake_run(runs / "c", "dadam:ring", 1, **MADE, done=2)
    expected = (
        "No verdict yet, because no run is finished: ddp seed 0 at step 9 of 10, dadam:ring seed 0 at step 5 of 10."
    )
    page = tmp_path / "r.html"
    said = said_of(runs, capsys, "--html", page)
    assert expected in said
    assert "Left out: 1 run that is not finished (dadam:ring seed 1 at step 2 of 10)." in said
    assert expected in page.read_text()
    assert {r["relative_time"] for r in summary(grouped(find_runs(runs).runs))} == {None}
    with pytest.raises(InputError, match=r"is finished \(ddp seed 0 at step 9 of 10, "):
        load_runs(runs)


def test_speed_compares_steps_not_runs(tmp_path):
    fake_run(tmp_path / "a", "ddp", 0, **MADE)
    fake_run(tmp_path / "b", "dadam:ring", 0, **MADE | {"step_seconds": 0.2}, done=5, steps=5)
    said = verdict(grouped(load_runs(tmp_path)))
    assert "dadam:ring steps=5 is 2.00 times as fast as ddp steps=10" in said
    assert "and after 5 steps (against 10) its accuracy is worse" in said


def test_learning_rates_of_one_method_are_separate_rows(tmp_path):
    for seed in (0, 1):
        fake_run(tmp_path / f"a{seed}", "ddp", seed, **MADE, lr=0.001)
        fake_run(tmp_path / f"b{seed}", "dadam:ring", seed, **MADE, lr=0.002)  # as a sweep keeps one rate a method
    assert labels(tmp_path) == [("ddp", 2), ("dadam:ring", 2)]
    fake_run(tmp_path / "c", "dadam:ring", 0, **MADE, lr=0.2)
    assert labels(tmp_path) == [("ddp", 2), ("dadam:ring lr=0.002", 2), ("dadam:ring lr=0.2", 1)]


def test_a_repeated_seed_counts_once(tmp_path):
    fake_run(tmp_path / "a", "ddp", 3, **MADE)
    fake_run(tmp_path / "b", "ddp", 3, **MADE)
    assert labels(tmp_path) == [("ddp", 1)]


def test_clusters_are_compared_each_with_its_own_baseline(tmp_path):
    for cluster, slower in (("a40", 1), ("t4", 10)):
        fake_run(tmp_path / cluster / "a", "ddp", 0, **MADE | {"step_seconds": 0.4 * slower}, cluster=cluster)
        fake_run(tmp_path / cluster / "b", "dadam:ring", 0, **MADE | {"step_seconds": 0.2 * slower}, cluster=cluster)
    groups = grouped(load_runs(tmp_path))
    assert [g.label for g in groups] == [f"{m} cluster={c}" for m in ("ddp", "dadam:ring") for c in ("a40", "t4")]
    assert [r["relative_time"] for r in summary(groups)] == pytest.approx([1.0, 1.0, 0.5, 0.5])
    said = verdict(groups)
    for cluster in ("a40", "t4"):
        assert (
            f"dadam:ring cluster={cluster} is 2.00 times as fast as ddp cluster={cluster} (simulated on {cluster},"
            in said
        )
    assert said.count("times as fast") == 2


def test_groups_differ_by_link_and_kind_of_time(tmp_path):
    fake_run(tmp_path / "a", "ddp", 0, **MADE, simulated=False)
    fake_run(tmp_path / "b", "ddp", 1, **MADE, simulated=False, link="20mbit")
    assert labels(tmp_path) == [("ddp", 1), ("ddp link=20mbit", 1)]
    fake_run(tmp_path / "c", "ddp", 2, **MADE)
    assert [label for label, _ in labels(tmp_path)] == [
        "ddp cluster=a40 simulated",
        "ddp measured",
        "ddp measured link=20mbit",
    ]


def test_all_reduce_is_the_baseline_with_any_wire(tmp_path):
    fake_run(tmp_path / "a", "accumadam:aer", 0, **MADE)
    fake_run(tmp_path / "b", "ddp:bf16", 0, **MADE)
    assert baseline(grouped(load_runs(tmp_path))).label == "ddp:bf16"


def test_diverged_runs_are_left_out(tmp_path, capsys):
    fake_run(tmp_path / "ddp" / "seed-0", "ddp", 0, **MADE)
    fake_run(tmp_path / "ddp" / "seed-1", "ddp", 1, **MADE | {"loss": math.nan})
    fake_run(tmp_path / "dsgd" / "seed-0", "dsgd", 0, **MADE, done=1)
    compared = {"folder": "runs/x", "failed": {"runs/x/dsgd/seed-0": "the loss is nan after step 2"}}
    (tmp_path / "compare.json").write_text(json.dumps(compared))
    said = said_of(tmp_path, capsys)
    assert "ddp reached accuracy 0.9 after 10 steps" in said
    assert "Left out: 2 runs that diverged (ddp seed 1, dsgd seed 0)." in said
    assert "nan" not in said


def test_page_of_a_run_with_losses_that_are_not_numbers(tmp_path):
    fake_run(tmp_path / "a", "ddp", 0, **MADE)
    metrics = tmp_path / "a" / "metrics-00000.jsonl"
    rows = [json.loads(line) for line in metrics.read_text().splitlines()[:-1]]
    rows[2]["loss"] = None  # a NaN in strict JSON
    rows[5]["averaged"]["loss"] = None  # the first evaluation
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))
    page = write_html(tmp_path, tmp_path / "r.html").read_text()
    charts = re.findall(r'<script type="application/json">(.*?)</script>', page)
    first, *_, training, _ = [json.loads(chart)["lines"][0]["points"] for chart in charts]
    assert first == [[10.0, 1.0]]
    assert [x for x, _ in training] == [1, 2, 4, 5, 6, 7, 8, 9, 10]


def test_error_if_every_run_diverged(tmp_path, capsys):
    fake_run(tmp_path / "a", "ddp", 0, **MADE | {"loss": math.inf})
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "every run in" in said.err
    assert "diverged (ddp seed 0); lower --lr" in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("{", "is damaged (Expecting"),
        ("[]", "no JSON object"),
        ('{"config": {}}', "lacks higher_is_better, lr, method"),
    ],
)
def test_error_for_a_damaged_configuration(tmp_path, capsys, content, why):
    fake_run(tmp_path / "a", "ddp", 0, **MADE)
    (tmp_path / "a" / "config.json").write_text(content)
    assert main(["report", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'a' / 'config.json'} is damaged" in said
    assert why in said
    assert said.count("\n") == 1


def test_page_leaves_out_damaged_timelines_and_says_so(tmp_path):
    for name, method in (("a", "ddp"), ("b", "dadam:ring"), ("c", "dsgd:ring")):
        fake_run(tmp_path / name, method, 0, **MADE, simulated=False)
    (tmp_path / "a" / "trace").mkdir()
    (tmp_path / "a" / "trace" / "trace-00000.jsonl").write_text("torn")  # DDP's waiting would be read from it
    (tmp_path / "b" / "trace").mkdir()
    (tmp_path / "c" / "predicted.json").write_text("{")
    (tmp_path / "compare.json").write_text("{")
    page = write_html(tmp_path, tmp_path / "r.html").read_text()
    timelines = page[page.index("<h2>Timelines</h2>") : page.index("<h2>Configuration</h2>")]
    assert re.search("ddp has no timeline: .*trace-00000.jsonl does not begin with", timelines)
    assert re.search("dadam:ring has no timeline: .* holds no trace-", timelines)
    assert re.search("dsgd:ring has no timeline: .*predicted.json is not JSON", timelines)
    assert re.search("A learning-rate sweep, if there was one, is not shown: .*compare.json is damaged", page)


def test_page_shows_timelines_beside_a_damaged_one(tmp_path):
    fake_run(tmp_path / "a", "ddp", 0, **MADE)
    fake_run(tmp_path / "b", "dadam:ring", 0, **MADE)
    (tmp_path / "a" / "predicted.json").write_text("{")
    spans = tuple(Span("compute", worker, 0.0, 0.1, {"step": 0}) for worker in range(2))
    write_chrome(Trace(spans, (0, 0)), tmp_path / "b" / "predicted.json")
    page = write_html(tmp_path, tmp_path / "r.html").read_text()
    timelines = page[page.index("<h2>Timelines</h2>") : page.index("<h2>Configuration</h2>")]
    assert "<svg" in timelines
    assert "ddp has no timeline" in timelines


def test_a_distance_that_was_not_measured_is_no_number(tmp_path, capsys):
    fake_run(tmp_path / "run", "dadam:ring", 0, loss=1.0, accuracy=0.5, step_seconds=0.1)
    path = tmp_path / "run" / "metrics-00000.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()[:-1]]
    path.write_text("".join(json.dumps({**r, "consensus_distance": None}) + "\n" for r in rows))
    (row,) = summary(grouped(load_runs(tmp_path)))
    assert row["consensus_distance"] is None
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "r.html")]) == 0
    assert "nan" not in capsys.readouterr().out


def test_the_deadlines_of_an_elastic_run_stand_beside_its_waits(tmp_path, capsys):
    runs = tmp_path / "runs"
    fake_run(runs / "a", "dadam:ring", 0, loss=1.0, accuracy=0.9, step_seconds=0.2, simulated=False, waited=0.1)
    fake_run(runs / "b", "ddp", 0, loss=1.0, accuracy=0.9, step_seconds=0.2, simulated=False, waited=0.1)
    assert "deadline" not in said_of(runs, capsys)
    for worker, (peer, deadline) in enumerate([(1, 0.25), (0, 0.61)]):
        row = {"worker": worker, "per_node": [2, 2], "seconds": 2.0, "waited": 0.1, "by_peer": {str(peer): 0.1}}
        (runs / "a" / f"waits-{worker:05d}.json").write_text(json.dumps({**row, "deadlines": {str(peer): deadline}}))
    ddp, ring = summary(grouped(load_runs(runs)))
    assert (ddp["deadline_seconds"], ring["deadline_seconds"]) == (None, 0.61)
    assert "0.61 s" in said_of(runs, capsys)
    text = write_html(runs, tmp_path / "page.html").read_text()
    assert "<h2>Waits and deadlines</h2>" in text
    assert "<td>1</td><td>0</td><td>0.1 s</td><td>5.0%</td><td>0.61 s</td>" in text
    assert "| longest deadline |" in write_markdown(runs, tmp_path / "page.md").read_text()
