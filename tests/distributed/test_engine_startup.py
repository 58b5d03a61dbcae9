"""What is checked before training starts, and bad input: one clear sentence, the same on every worker, no hang."""

import os
import time
import traceback
import warnings
from multiprocessing.connection import Pipe
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from workers import QUICK_NAMES, decentralize, error_of, loss_of, mlp, process_group, real, seeded, vector

import gossamer
from gossamer.lab import WorkerPool


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


class Named(nn.Module):
    def __init__(self, name="body", buffer=3, frozen=2):
        super().__init__()
        setattr(self, name, nn.Linear(6, 3))
        self.register_buffer("seen", torch.zeros(buffer))
        self.fixed = nn.Parameter(torch.zeros(frozen), requires_grad=False)

    def forward(self, x):
        return self.body(x)


def fussy(name, parameter):
    raise KeyError("no such layer")


def start(rank, decentralize, kind):
    """Worker 1 differs from the others in `kind`."""
    odd = rank == 1
    model, settings = seeded(0, mlp), {}
    if kind == "shape":
        model = seeded(0, lambda: mlp(9 if odd else 8))
    elif kind == "name":
        model = Named("head" if odd else "body")
    elif kind == "buffer":
        model = Named(buffer=4 if odd else 3)
    elif kind == "frozen":
        model = Named(frozen=5 if odd else 2)
    elif kind == "dtype":
        model = model.double() if odd else model
    elif kind == "extra":
        model = nn.Sequential(*model, nn.Linear(3, 3)) if odd else model
    elif kind == "topology":
        settings["topology"] = "ring" if odd else "complete"
    elif kind == "wire":
        settings["wire"] = "bf16" if odd else "fp32"
    elif kind == "filter":
        settings["parameters"] = (lambda name, _: name != "0.bias") if odd else None
    elif kind == "bad setting":
        settings["wire"] = "fp8" if odd else "fp32"
    elif kind == "no text":
        settings["wire"] = ["bf16"] if odd else "fp32"
    elif kind == "broadcast":
        settings["broadcast"] = not odd
    elif kind == "group":
        everyone = dist.new_group(range(3))
        settings["process_group"] = everyone if odd else None
    elif kind == "crash":
        settings["parameters"] = fussy if odd else None
    optimizer = sgd(model)
    if kind == "lbfgs":
        optimizer = torch.optim.LBFGS(model.parameters()) if odd else optimizer
    elif kind == "foreign":
        optimizer = torch.optim.SGD([*model.parameters(), *(mlp().parameters() if odd else ())], lr=0.1)
    elif kind == "two lanes":
        optimizer = [sgd(model[0]), sgd(model[2])] if odd else optimizer
    elif kind == "no optimizer":
        optimizer = None if odd else optimizer
    elif kind == "swapped":
        model, optimizer = (optimizer, model) if odd else (model, optimizer)
    decentralize(model, optimizer, **settings)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("shape", "worker 0 has 8, worker 1 has 9"),
        ("name", 'worker 0 has "body.weight", worker 1 has "head.weight"'),
        ("buffer", "worker 0 has 3, worker 1 has 4"),
        ("frozen", "worker 0 has 2, worker 1 has 5"),
        ("dtype", 'worker 0 has "torch.float32", worker 1 has "torch.float64"'),
        ("extra", '"3.weight"'),
        ("topology", 'topology.name: worker 0 has "complete", worker 1 has "ring"'),
        ("wire", 'settings.wire: worker 0 has "fp32", worker 1 has "bf16"'),
        ("filter", '"0.bias"'),
        ("bad setting", "worker 1: unknown wire 'fp8'; choose one of fp32, bf16, fp16, int8"),
        ("no text", "worker 1: unknown wire ['bf16']; choose one of fp32, bf16, fp16, int8"),
        ("broadcast", "workers disagree on broadcast: worker 0 has true, worker 1 has false"),
        ("group", "workers disagree on process_group"),
        ("no optimizer", "worker 1: decentralize() takes a torch optimizer or a list of them, got NoneType"),
        ("swapped", "worker 1: decentralize() takes a model and its optimizer, got SGD as the model"),
        ("crash", "worker 1: KeyError: 'no such layer'"),
        ("lbfgs", "worker 1: LBFGS"),
        ("foreign", "worker 1: optimizer 0 (SGD) holds a parameter of shape (8, 6) that is not the model's"),
        ("two lanes", "parameters"),
    ],
)
def test_the_same_error_on_every_worker(pools, kind, said):
    errors = pools(3).run(error_of, start, kind)
    assert errors[0] is not None
    assert len(set(errors)) == 1
    assert errors[0][0] == "InputError"
    assert said in errors[0][1]


def misfit(rank, decentralize, topology):
    model = seeded(0, mlp)
    decentralize(model, sgd(model), topology=topology)


@pytest.mark.parametrize(
    ("topology", "said"),
    [("no-such", "unknown topology"), ("base(k=0)", "k"), ([[0.5, 0.5], [0.5, 0.5]], "3")],
    ids=["unknown", "option", "matrix"],
)
def test_a_topology_that_does_not_fit(pools, topology, said):
    if isinstance(topology, list):
        topology = torch.tensor(topology).numpy()
    errors = pools(3).run(error_of, misfit, topology)
    assert len(set(errors)) == 1
    assert errors[0][0] == "InputError"
    assert said in errors[0][1]


def test_no_process_group():
    model = mlp()
    with pytest.raises(gossamer.InputError, match=r"none is initialized; call torch.distributed.init_process_group"):
        gossamer.decentralize(model, sgd(model))


# Start values.


def start_values(rank, decentralize, broadcast):
    model = seeded(rank, lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)))
    model[1].running_mean.fill_(float(rank))
    model[1].weight.requires_grad_(False).fill_(float(rank))
    with decentralize(model, sgd(model), broadcast=broadcast):
        return vector(model), model[1].running_mean.clone()


def test_all_workers_start_from_worker_0(pools):
    expected = vector(seeded(0, lambda: nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3))))
    expected[-6:-3] = 0.0  # the frozen weight, as worker 0 set it
    for parameters, mean in pools(3).run(real, start_values, broadcast=True):
        assert torch.equal(parameters, expected)
        assert mean.tolist() == [0.0] * 3


def test_every_worker_keeps_its_own_values_without_broadcast(pools):
    results = pools(3).run(real, start_values, broadcast=False)
    assert [mean.tolist() for _, mean in results] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]
    assert len({tuple(parameters.tolist()) for parameters, _ in results}) == 3


def first_batches(rank, decentralize, same):
    model = seeded(0, mlp)
    optimizer = sgd(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with decentralize(model, optimizer):
            for step in range(10):
                loss_of(model, 0 if same else rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
    return [str(w.message) for w in caught if issubclass(w.category, gossamer.GossamerWarning)]


def test_the_same_first_batch_everywhere_is_noticed_by_worker_0(pools):
    said = pools(3).run(real, first_batches, same=True)
    assert len(said[0]) == 1
    assert "all 3 workers got the same first batch" in said[0][0]
    assert "DistributedSampler" in said[0][0]
    assert said[1:] == [[], []]
    assert pools(3).run(real, first_batches, same=False) == [[], [], []]


# A collective call that only one worker makes.


def averaged_alone(rank, decentralize, flag):
    model = seeded(0, mlp)
    optimizer = sgd(model)
    with decentralize(model, optimizer):
        pass
    gossip = decentralize(model, optimizer)
    gossip.coordinator._barrier._timeout = 2.0  # not that of exchanges, in which a busy worker may be late
    try:
        for step in range(3):
            loss_of(model, rank, step).backward()
            optimizer.step()
        if rank == 0:
            try:
                with gossip.averaged():
                    pass
            finally:
                Path(flag).touch()
        while not Path(flag).exists():  # alive, and not in any call, until worker 0 is done
            time.sleep(0.05)
    finally:
        gossip.__exit__(RuntimeError, None, None)


def test_averaged_on_one_worker_only(pools, tmp_path):
    errors = pools(3).run(error_of, averaged_alone, str(tmp_path / "done"))
    assert errors[1:] == [None, None]
    kind, said = errors[0]
    assert kind == "PeerError"
    assert "worker 0 is in averaged() but worker(s) 1, 2 did not call it within 2 s" in said
    assert "make it on every worker" in said


# A peer that dies: every worker forks a child that trains, so that its death ends no pool. The workers themselves
# never start gloo: its threads do not survive a fork.


@pytest.fixture(scope="module")
def parents():
    with WorkerPool(3, env=QUICK_NAMES) as pool:
        yield pool


def in_child(rank, scenario, *args):
    """What the scenario raised in a forked child of this worker, or the child's exit code."""
    mine, theirs = Pipe(duplex=False)
    pid = os.fork()
    if pid == 0:
        try:
            with process_group():
                theirs.send(("returned", scenario(rank, decentralize, *args)))
        except BaseException as error:
            theirs.send((type(error).__name__, str(error), traceback.format_exc()))
        os._exit(0)
    theirs.close()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        return mine.recv()
    except EOFError:
        return ("exit", code)


def death(rank, decentralize, who, topology, transport):
    model = seeded(0, mlp)
    optimizer = sgd(model)
    with decentralize(model, optimizer, topology=topology, transport=transport):
        for step in range(6):
            loss_of(model, rank, step).backward()
            if rank == who and step == 3:
                os._exit(7)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("who", [2, 0])
@pytest.mark.parametrize(("topology", "transport"), [("complete", "gloo"), ("ring", "gloo"), ("ring", "tcp")])
def test_a_peer_that_dies_is_named(parents, who, topology, transport):
    results = parents.run(in_child, death, who, topology, transport, timeout=300)
    assert results[who] == ("exit", 7)
    others = [r for rank, r in enumerate(results) if rank != who]
    assert [kind for kind, *_ in others] == ["PeerError"] * 2, others
    assert any(f"worker {who}" in said for _, said, *_ in others)
    assert all("alive" in said or "died" in said for _, said, *_ in others), others  # in a step, or in close()
