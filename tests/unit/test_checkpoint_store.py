"""`Checkpoints` on virtual workers and in one process: exact, atomic, and harmless when a disk is full."""

import errno
import random
import threading
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import gossamer
from gossamer import Checkpoints, GossamerError, GossamerWarning, InputError
from gossamer.checkpoint import files
from policies import policies


class Counter:
    """A data loader's position."""

    def __init__(self):
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


class Run:
    """n virtual workers with dropout on torch's global generator, and a loader each."""

    def __init__(self, n=4, **settings):
        torch.manual_seed(3)
        self.models = [nn.Sequential(nn.Linear(5, 6), nn.Dropout(0.3), nn.Linear(6, 2)) for _ in range(n)]
        self.optimizers = [gossamer.AccumAdamW(m.parameters(), lr=0.05, accumulate=3) for m in self.models]
        self.cluster = gossamer.VirtualCluster(n)
        self.cluster.decentralize(self.models, self.optimizers, **policies(**{"topology": "ring", **settings}))
        self.loaders = [Counter() for _ in range(n)]

    def train(self, steps):
        for _ in range(steps):
            for i, (m, o, c) in enumerate(zip(self.models, self.optimizers, self.loaders, strict=True)):
                m.zero_grad()
                x = torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * c.at + i))
                (m(x) - i).square().mean().backward()
                o.step()
                c.at += 1
        return self

    @property
    def extra(self):
        return [{"loader": c, "epoch": 7} for c in self.loaders]

    def save(self, checkpoints, **how):
        return checkpoints.save(self.cluster, self.models, self.optimizers, extra=self.extra, **how)

    def load(self, checkpoints, **how):
        return checkpoints.load(self.cluster, self.models, self.optimizers, extra=self.extra, **how)

    def values(self):
        return [p.detach().clone() for m in self.models for p in m.parameters()]


def equal(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


SETTINGS = {
    "awc": {},
    "atc": {"algorithm": "atc"},
    "staleness": {"staleness": 1, "average_every": 4},
    "int4": {"wire": "int4", "average_every": 4, "fragments": 2},
    "a2cid2": {"algorithm": "a2cid2"},
    "ad-psgd": {"algorithm": "ad-psgd"},
}


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=list(SETTINGS))
def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(tmp_path, settings):
    checkpoints = Checkpoints(tmp_path / "c")
    first = Run(**settings).train(5)
    assert first.save(checkpoints) == 5
    checkpoints.wait()
    whole = first.train(4).values()
    again = Run(**settings)
    torch.manual_seed(99)
    loaded = again.load(Checkpoints(tmp_path / "c"))
    assert (loaded.step, loaded.workers, loaded.resized, loaded.extra["epoch"]) == (5, 4, False, 7)
    assert [c.at for c in again.loaders] == [5] * 4
    assert equal(again.train(4).values(), whole)


def test_saving_changes_nothing_and_copies_the_state_at_once(tmp_path):
    quiet = Run().train(6).values()
    checkpoints = Checkpoints(tmp_path)
    run = Run().train(3)
    before = run.values()
    run.save(checkpoints)
    assert equal(run.train(3).values(), quiet)
    checkpoints.wait()
    other = Run()
    other.load(checkpoints)
    assert equal(other.values(), before)


def test_every_generator_continues(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(None, model, optimizer, step=1)
    checkpoints.wait()
    drawn = (torch.rand(2).tolist(), random.random(), np.random.rand())
    Checkpoints(tmp_path).load(None, model, optimizer)
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == drawn


def test_keep_last_and_the_choice_of_a_step(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    run = Run()
    values = {}
    for _ in range(4):
        step = run.train(1).save(checkpoints)
        values[step] = run.values()
    checkpoints.wait()
    assert checkpoints.steps() == [3, 4]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000003", "step-00000004"]
    assert run.load(checkpoints, step=3).step == 3
    assert equal(run.values(), values[3])
    with pytest.raises(GossamerError, match=r"no checkpoint of step 1 .* complete ones: 3, 4"):
        run.load(checkpoints, step=1)


def test_saving_a_step_again_replaces_it(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    run = Run().train(1)
    run.save(checkpoints, step=5)
    run.train(1).save(checkpoints, step=5)
    checkpoints.wait()
    after = run.values()
    other = Run()
    other.load(checkpoints)
    assert equal(other.values(), after)
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]


def test_checkpoints_that_were_not_loaded_are_not_overwritten(tmp_path):
    run = Run().train(3)
    checkpoints = Checkpoints(tmp_path)
    run.save(checkpoints)
    checkpoints.wait()
    with pytest.raises(InputError, match=r"holds a checkpoint of step 3 that this run did not load; load it, choose"):
        Run().train(1).save(Checkpoints(tmp_path))
    with pytest.raises(InputError, match="holds no complete checkpoint"):
        run.load(Checkpoints(tmp_path / "empty"))


@pytest.mark.parametrize("where", ["write", "fsync", "mkdir", "rename"])
def test_a_full_disk_costs_one_checkpoint_and_nothing_else(tmp_path, monkeypatch, where):
    checkpoints = Checkpoints(tmp_path)
    run = Run().train(1)
    run.save(checkpoints)
    checkpoints.wait()

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as broken:
        if where == "write":
            broken.setattr(files._Sink, "write", _full_after(3))
        elif where == "mkdir":
            broken.setattr(files.Path, "mkdir", full)
        else:
            broken.setattr(files.os, where, full)
        run.train(1).save(checkpoints)
        message = r"step 2 .* could not be written \(worker 0: No space left on device\); the one of step 1 is complete"
        with pytest.raises(GossamerError, match=message):
            checkpoints.wait()
        run.train(1).save(checkpoints)
        with pytest.warns(GossamerWarning, match="step 3 .* training continues"):
            run.train(1).save(checkpoints)
        with pytest.raises(GossamerError):
            checkpoints.wait()
    assert checkpoints.steps() == [1]
    run.train(1).save(checkpoints)
    checkpoints.wait()
    assert checkpoints.steps() == [1, 5]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000005"]
    Run().load(Checkpoints(tmp_path))


def _full_after(writes):
    """A file system that takes a few writes more."""
    plain = files._Sink.write

    def write(self, data):
        self.taken = getattr(self, "taken", 0) + 1
        if self.taken > writes and self.error is None:
            self.error = OSError(errno.ENOSPC, "No space left on device")
        return plain(self, data)

    return write


def test_an_unwritable_folder_is_an_error_at_the_first_save(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match=r"cannot write checkpoints to .*file.inside: Not a directory; choose another"):
        Run(2).save(Checkpoints(tmp_path / "file" / "inside"))


def test_leftovers_of_a_killed_run_are_invisible_and_swept(tmp_path):
    for name in (".step-00000004", ".step-00000002.removed", "step-00000009"):  # the last one without a manifest
        (tmp_path / name).mkdir()
        (tmp_path / name / "worker-00000.pt").write_bytes(b"half")
    (tmp_path / ".step-00000004" / "worker-00000.json").write_text('{"bytes": 4, "sha256": "", "steps": 4}')
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.latest() is None
    Run(2).train(4).save(checkpoints)
    checkpoints.wait()
    assert checkpoints.steps() == [4]
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_missing_worker_is_not_waited_for_forever(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = Checkpoints(tmp_path, rank=0, workers=2, timeout=0.2)
    first.save(None, model, optimizer, step=1)
    with pytest.raises(GossamerError, match="a worker did not write its part; do all workers see this folder"):
        first.wait(timeout=300)
    second = Checkpoints(tmp_path, rank=1, workers=2, timeout=0.2)
    second.save(None, model, optimizer, step=1)  # late: the others have given it up
    with pytest.raises(GossamerError, match="a worker did not write its part"):
        second.wait()
    assert first.steps() == []


def test_two_workers_make_one_checkpoint_in_any_order(tmp_path):
    models = [nn.Linear(2, 2) for _ in range(2)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in models]
    both = [Checkpoints(tmp_path, rank=r, workers=2) for r in range(2)]
    for step, order in enumerate([(0, 1), (1, 0)], start=1):
        for rank in order:
            both[rank].save(None, models[rank], optimizers[rank], step=step)
        for each in both:
            each.wait()
    assert both[0].steps() == [1, 2]
    assert files.read_manifest(tmp_path, 2).groups == ((0, 1),)
    assert not [t for t in threading.enumerate() if t.name == "gossamer-checkpoint"]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"keep_last": 0}, "keep_last must be 1 or more, got 0; pass None to keep all"),
        ({"rank": 2, "workers": 2}, "pass both rank and workers, with 0 <= rank < workers; got 2 and 2"),
        ({"rank": 0}, "pass both rank and workers"),
    ],
)
def test_bad_arguments(tmp_path, wrong, message):
    with pytest.raises(InputError, match=message):
        Checkpoints(tmp_path, **wrong)


def test_another_model_or_number_of_optimizers_is_one_sentence(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    model = nn.Linear(2, 2)
    checkpoints.save(None, model, torch.optim.SGD(model.parameters(), lr=0.1), step=1)
    checkpoints.wait()
    other = nn.Linear(3, 2)
    with pytest.raises(GossamerError, match=r"not of this model and optimizer: .*size mismatch .*; build the same"):
        checkpoints.load(None, other, torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(GossamerError, match=r"holds 1 optimizer\(s\) and this run has 2; build the same optimizers"):
        checkpoints.load(None, model, [torch.optim.SGD([p], lr=0.1) for p in model.parameters()])
    run = Run()
    with pytest.raises(InputError, match="4 virtual workers need as many models, optimizers and extras, got 1, 4"):
        checkpoints.save(run.cluster, run.models[:1], run.optimizers)


def test_values_that_could_not_be_read_are_refused_when_saving(tmp_path):
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    checkpoints = Checkpoints(tmp_path)
    with pytest.raises(InputError, match=r"cannot hold a builtins.set, which would need code .* pass its state_dict"):
        checkpoints.save(None, model, optimizer, step=1, extra={"seen": {1, 2}})
    checkpoints.save(None, model, optimizer, step=1, extra={"at": np.int64(3), "order": np.arange(2)})
    checkpoints.wait()
    assert checkpoints.load(None, model, optimizer).extra == {"at": 3, "order": [0, 1]}


def test_nothing_warns_in_an_ordinary_run(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoints = Checkpoints(tmp_path)
        run = Run(2)
        for _ in range(3):
            run.train(1).save(checkpoints)
        checkpoints.close()
    assert checkpoints.steps() == [1, 2, 3]
