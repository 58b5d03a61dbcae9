"""Reports from run folders whose contents are known."""

import csv
import json
import re

import pytest

from browser import needs_browser, shown
from gossamer import InputError
from gossamer.report.page import write_csv, write_html, write_markdown
from gossamer.report.runs import baseline, grouped, load_runs, reached, summary
from gossamer.report.verdict import judged, verdict

STEPS = 10


def fake_run(folder, method, seed, *, loss, accuracy, step_seconds, workers=1, simulated=True, waited=None, **config):
    folder.mkdir(parents=True)
    clock = {"kind": "measured", "link": None}
    if simulated:
        clock = {
            "kind": "simulated", "cluster": "a40", "layout": "2 nodes x 2 workers", "model_mb": 260.0,
            "step_seconds": step_seconds, "waiting": 0.25,
        }  # fmt: skip
    content = {
        "config": {
            "task": "vision", "method": method, "seed": seed, "steps": STEPS, "per_node": [2, 2], "virtual": True,
            "options": {}, **config,
        },
        "method": method, "lr": 0.1, "metric": "accuracy", "higher_is_better": True, "unit": "images", "clock": clock,
        "command": "gossamer compare vision",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(content))
    for worker in range(workers):
        rows = []
        for step in range(1, STEPS + 1):
            share = step / STEPS
            row = {"step": step, "seconds": step * step_seconds, "units": 4 * step, "bytes": 1e6 * step}
            rows.append({**row, "waited": waited, "loss": 3 - share + worker, "lr": 0.1})
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
    assert accum["bytes_a_step"] == 1e6
    assert accum["consensus_distance"] == 0.05
    assert ddp["waiting"] == 0.25
    # loss 3 - 2.1 k / 10 is 1.0 after 9.52 steps of 0.2 s
    assert accum["seconds_to_baseline_loss"] == pytest.approx(2 / 2.1 * 2.0, rel=1e-3)


def test_the_verdict_prefers_speed_among_the_good_ones(compared):
    said = verdict(grouped(load_runs(compared)))
    assert said.startswith("accumadam:aer is 2.00 times as fast as ddp (simulated on a40, 2 nodes x 2 workers), and af")
    assert "its accuracy is within noise (0.895 ± 0.014 against 0.9 ± 0.014)" in said
    assert "its validation loss is better (0.9 ± 0.014 against 1 ± 0.014) over 2 seeds" in said
    assert "it had ddp's final loss after 48% of ddp's time" in said
    assert said.count(".\n") == 0


def test_the_verdict_on_a_worse_one_and_on_one_alone(tmp_path):
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
    plain = re.sub(r"<script[^>]*>.*?</script>", lambda m: m.group()[: m.group().index(">")], page, flags=re.DOTALL)
    assert not re.search(r"""(?:src|href)=|<link|@import|url\(http""", plain)  # nothing is fetched
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
    # steps and time for loss and accuracy, training loss, consensus: each a chart with a line a method
    assert drawn.count('class="scatterlayer') == 6
    assert drawn.count('class="legendtext"') == 6 * 3
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
