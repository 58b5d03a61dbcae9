"""A recipe's DDP run on real workers: its timeline, its waiting in reports, and the groups that leaving keeps."""

import sys

import pytest

from gossamer.comm import process_groups
from gossamer.jobs.configure import build_config
from gossamer.jobs.local import run_worker
from gossamer.jobs.prepare import checked_task, prepare_folder
from gossamer.report.runs import load_run
from gossamer.trace import merge

STEPS = 3


def kept(rank):
    return len(process_groups._left)


@pytest.fixture(scope="module")
def traced(pools, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "ddp"
    flags = {
        "method": "ddp",
        "steps": STEPS,
        "batch": 4,
        "width": 4,
        "evaluate_on": 16,
        "trace": True,
        "ddp_bucket_mb": 0.002,
    }
    config = build_config("vision", None, flags, per_node=(1, 1), virtual=False)
    prepare_folder(config, folder, checked_task(config))
    before = pools(1, 1).run(kept)
    pools(1, 1).run(run_worker, str(folder), False)
    assert [after - b for after, b in zip(pools(1, 1).run(kept), before, strict=True)] == [1, 1]
    return folder


def test_every_step_has_its_spans(traced):
    spans = merge(traced / "trace").spans
    parameters = load_run(traced).content["parameters"]
    for worker in range(2):
        for step in range(STEPS):
            mine = [s for s in spans if s.worker == worker and s.attrs["step"] == step]
            assert [c for s in mine if (c := s.category) != "exchange"] == ["forward", "backward", "wait", "step"]
            exchanges = [s for s in mine if s.category == "exchange"]
            assert sum(s.attrs["bytes"] for s in exchanges) == 4 * parameters
            _, backward, wait, update = (s for s in mine if s.category != "exchange")
            assert backward.end == wait.start == max(s.start for s in exchanges)
            assert wait.end == max(s.end for s in exchanges) <= update.start
        last = [s for s in spans if s.worker == worker and s.attrs["step"] == STEPS - 1 and s.category == "exchange"]
        assert len(last) > 1  # buckets, which overlap the backward pass


def test_the_report_knows_how_long_ddp_waited(traced):
    run = load_run(traced)
    assert run.steps[-1]["waited"] is None
    spans = [s for s in merge(traced / "trace").spans if s.worker == 0 and s.category != "exchange"]
    assert run.waiting == pytest.approx(
        sum(s.seconds for s in spans if s.category == "wait") / sum(s.seconds for s in spans)
    )
    assert 0 < run.waiting < 1


def loaded(rank):
    return sorted({"typer", "gossamer.cli.program"} & set(sys.modules))


def test_workers_do_not_import_the_command_line(traced, pools):
    assert pools(1, 1).run(loaded) == [[], []]
