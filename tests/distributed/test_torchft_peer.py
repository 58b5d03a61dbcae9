"""torchft's own LocalSGD and DiLoCo on gloo equal our exact-average form on virtual workers."""

import pytest
import torch
from workers import loss_of, mlp, process_group, seeded, vector

import gossamer
from gossamer.comm.torchft_peer import TorchftPeer
from gossamer.lab.bench.time_to_loss import LearningRun, learn
from gossamer.predict.methods import parse

pytest.importorskip("torchft")

STEPS, EVERY = 9, 3
OUTER = {"diloco": gossamer.Nesterov(lr=0.7, momentum=0.9), "localsgd": None}


def worker(seed):
    model = seeded(seed, mlp)
    return model, torch.optim.Adam(model.parameters(), lr=0.02)


def by_torchft(rank, name):
    seen = []
    with process_group():
        model, optimizer = worker(rank)  # all start from worker 0's
        peer = TorchftPeer(name, model, optimizer, every=EVERY)
        for step in range(STEPS + 1):
            loss_of(model, rank, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(vector(model))
        with peer.averaged():
            mean = vector(model)
        assert torch.equal(vector(model), seen[-1])
        peer.close()
    return seen, mean, peer.bytes_sent


@pytest.mark.parametrize("name", list(OUTER))
def test_torchft_on_processes_equals_our_exact_average(pools, name):
    results = pools(2, 2).run(by_torchft, name)
    parts = [worker(0) for _ in range(4)]
    policy = gossamer.ATC(every=EVERY, outer=OUTER[name])
    with gossamer.VirtualCluster(4) as cluster:
        cluster.decentralize([m for m, _ in parts], [o for _, o in parts], topology="complete", algorithm=policy)
        for step in range(STEPS + 1):
            for rank, (model, optimizer) in enumerate(parts):
                loss_of(model, rank, step).backward()
                optimizer.step()
                optimizer.zero_grad()
            for rank, (model, _) in enumerate(parts):
                torch.testing.assert_close(results[rank][0][step], vector(model), rtol=2e-5, atol=2e-6)
    mean = torch.stack([seen[-1] for seen, *_ in results]).mean(0)
    elements = sum(p.numel() for p in parts[0][0].parameters())
    for _, held, sent in results:
        torch.testing.assert_close(held, mean, rtol=1e-6, atol=1e-6)
        assert sent == pytest.approx(STEPS // EVERY * 2 * 3 / 4 * 4 * elements)


def learned(rank, name, options):
    run = LearningRun(parse(name), lr=0.01, seconds_of=((0.0,) * 12,) * 2, width=16, batch=8, options=options)
    return learn(rank, run)


@pytest.mark.parametrize(
    ("name", "options"),
    [("diloco", {"every": 4}), ("dadam:ring", {"every": 4, "outer": gossamer.Nesterov(), "combine": "atc"})],
)
def test_time_to_loss_by_local_steps(pools, name, options):
    """The final loss is that of the mean, so all workers find the same one."""
    answers = pools(1, 1).run(learned, name, options)
    assert answers[0]["final"] == pytest.approx(answers[1]["final"], rel=1e-5)
    assert all(len(a["losses"]) == 12 for a in answers)
    assert 0 < answers[0]["final"] < 3
