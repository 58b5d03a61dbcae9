"""The handle on real workers: resume, traces, statistics, and nothing left behind."""

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from workers import QUICK_NAMES, batch, decentralize, loss_of, mlp, process_group, real, seeded, vector

import gossamer
from gossamer.trace import merge


def trained(model, optimizer, rank, steps):
    for step in steps:
        loss_of(model, rank, step).backward()
        optimizer.step()
        optimizer.zero_grad()


# Resume.


def resume(rank, decentralize, folder, settings, after):
    """Save after four steps and go on; then load the files into new objects and take the same steps."""

    def make(seed):
        model = seeded(seed, mlp)
        return model, gossamer.AccumAdamW(model.parameters(), lr=0.02, accumulate=3)

    file = Path(folder) / f"worker-{rank}.pt"
    model, optimizer = make(0)
    with decentralize(model, optimizer, **settings) as gossip:
        trained(model, optimizer, rank, range(4))
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "gossip": gossip.state_dict()}
        torch.save(state, file)
        trained(model, optimizer, rank, range(4, 4 + after))
        expected = vector(model)
    model, optimizer = make(1)
    state = torch.load(file, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    with decentralize(model, optimizer, broadcast=False, **settings) as gossip:
        gossip.load_state_dict(state["gossip"])
        trained(model, optimizer, rank, range(4, 4 + after))
        return expected, vector(model)


@pytest.mark.parametrize(
    ("settings", "after"),
    [
        ({}, 7),
        ({"topology": "ring", "algorithm": "atc", "every": 2, "average_every": 6}, 7),
        ({"wire": "int8", "topology": "ring-static"}, 7),
        ({"guard": gossamer.ConsensusGuard(max_ratio=1e-3, every=4), "topology": "ring"}, 9),
        ({"staleness": 2}, 1),  # what happens later depends on who is late
    ],
    ids=str,
)
def test_resumed_run_equals_the_uninterrupted_one_bit_by_bit(pools, tmp_path, settings, after):
    results = pools(3).run(real, resume, str(tmp_path), settings, after)
    assert all(torch.equal(expected, resumed) for expected, resumed in results)
    assert not torch.equal(results[0][0], results[1][0])


# Traces and statistics.


def traced(rank, decentralize, folder):
    """Worker 1 is later and later, until that is more than what a busy machine does to any worker."""
    model = seeded(0, mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with decentralize(model, optimizer, topology="complete", trace=folder) as gossip:
        for step in range(40):
            loss = loss_of(model, rank, step)
            if rank == 1:
                time.sleep(0.1 * 2 ** (step // 5))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % 5 == 4:
                everybody = [None] * 3
                torch.distributed.all_gather_object(everybody, gossip.stats())
                if all(names_the_straggler(everybody[r], everybody[1]) for r in (0, 2)):
                    break
    return gossip.stats()


def names_the_straggler(mine, straggler):
    waited = mine["seconds_waited_by_peer"]
    others = max(seconds for peer, seconds in waited.items() if peer != 1)
    return waited[1] > 2 * others and mine["seconds_waited"] > 2 * straggler["seconds_waited"]


def test_trace_has_every_kind_of_span_of_every_worker(pools, tmp_path):
    stats = pools(3).run(real, traced, str(tmp_path))
    trace = merge(tmp_path)
    steps = list(range(stats[0]["steps"]))
    assert trace.workers == 3
    for rank in range(3):
        spans = [s for s in trace.spans if s.worker == rank]
        assert all(s.end >= s.start >= 0 for s in spans)
        for category in ("forward", "backward", "step"):
            assert [s.attrs["step"] for s in spans if s.category == category] == steps
        assert {s.attrs["round"] for s in spans if s.category == "exchange"} >= set(steps[:-1])
        assert sum(s.attrs["bytes"] for s in spans if s.category == "exchange") == stats[rank]["bytes_sent"]
    waited = dict.fromkeys(range(3), 0.0)
    for span in trace.spans:
        if span.category == "wait" and span.worker != 1:
            waited[span.attrs["peer"]] += span.seconds
    assert max(waited, key=waited.get) == 1


def test_statistics_name_the_straggler(pools, tmp_path):
    stats = pools(3).run(real, traced, str(tmp_path))
    for rank in (0, 2):
        waited = stats[rank]["seconds_waited_by_peer"]
        assert max(waited, key=waited.get) == 1
        assert stats[rank]["seconds_waited"] > stats[1]["seconds_waited"]
        assert stats[rank]["steps"] == stats[rank]["rounds"] == stats[1]["steps"]


# Nothing is left behind.


def left_over():
    """Threads and sockets of this process."""
    gc.collect()  # tracebacks of errors hold on to frames in circles
    sockets = 0
    for entry in Path("/proc/self/fd").iterdir():
        try:
            sockets += os.readlink(entry).startswith("socket:")
        except OSError:
            continue
    ours = [t.name for t in threading.enumerate() if t.name.startswith("gossamer")]
    return ours, len(list(Path("/proc/self/task").iterdir())), sockets


def settled(threads, sockets):
    """What is left over once none of Gossamer's threads runs and there are no more threads and sockets than given. Both
    sides must have closed, and ending threads need a processor: gives up after 40 seconds."""
    deadline = time.monotonic() + 40
    while True:
        found = left_over()
        if (not found[0] and found[1] <= threads and found[2] <= sockets) or time.monotonic() > deadline:
            return found
        time.sleep(0.05)


class Interrupted(Exception):
    pass


def again_and_again(rank, fail):
    with process_group():
        torch.distributed.barrier()
        _, threads, sockets = left_over()
        for _ in range(4):
            model = seeded(0, mlp)
            optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in (model[0], model[2])]
            try:
                with decentralize(model, optimizers, topology="ring", guard=gossamer.ConsensusGuard(every=2)):
                    for step in range(5):
                        loss_of(model, rank, step).backward()
                        for optimizer in optimizers:
                            optimizer.step()
                        if fail and step == 3:
                            raise Interrupted
            except Interrupted:
                pass
            del model, optimizers, optimizer
        torch.distributed.barrier()
        ours, more_threads, more_sockets = settled(threads + 1, sockets + 1)
        return ours, more_threads - threads, more_sockets - sockets


@pytest.mark.parametrize("fail", [False, True], ids=["close", "exception"])
def test_no_thread_and_no_socket_is_left(pools, fail):
    """After four runs there is at most gloo's one listener per process, with its thread."""
    for ours, threads, sockets in pools(3).run(again_and_again, fail):
        assert ours == []
        assert threads <= 1
        assert sockets <= 1


def parameters_after(rank, decentralize):
    model = seeded(0, mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with decentralize(model, optimizer) as gossip:
        trained(model, optimizer, rank, range(3))
    hooks = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    trained(model, optimizer, rank, [3])  # the user's own again
    gossip.close()  # a second time is fine
    try:
        gossip.consensus_distance()
    except gossamer.GossamerError as error:
        return hooks, len(storages), str(error)


def test_after_close_the_model_is_the_users_own(pools):
    for hooks, storages, said in pools(3).run(real, parameters_after):
        assert (hooks, storages) == (0, 4)
        assert "after close()" in said


FORGETFUL = """
    import os, torch, gossamer
    torch.distributed.init_process_group("gloo")
    rank = torch.distributed.get_rank()
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gossip = gossamer.decentralize(model, optimizer, topology="ring", timeout=20)
    for step in range(5 + {more} * rank):
        model(torch.randn(2, 4)).sum().backward()
        optimizer.step()
    os.write(1, f"done {{rank}}\\n".encode())  # in one piece: two workers share the output
    {last}
"""


@pytest.mark.parametrize("last", ["", "torch.distributed.destroy_process_group()"], ids=["nothing", "destroy"])
def test_a_job_without_close_exits_cleanly(tmp_path, last):
    script = tmp_path / "job.py"
    script.write_text(textwrap.dedent(FORGETFUL).format(last=last, more=0))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, env={**os.environ, **QUICK_NAMES, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(line for line in done.stdout.splitlines() if line.startswith("done")) == ["done 0", "done 1"]
    assert "Traceback" not in done.stderr
    assert "terminate called" not in done.stderr


def staleness(rank, decentralize):
    """One slow worker: the others may step without mixing, at most `staleness` times a round."""
    model = seeded(0, mlp)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(float(rank))
    with decentralize(model, optimizer, topology="complete", staleness=2, broadcast=False) as gossip:
        start = vector(model)
        for step in range(9):
            if rank == 1:
                time.sleep(0.03)
            model(batch(rank, step)[0]).sum().backward()
            optimizer.step()
        with gossip.averaged():
            mean = vector(model)
        return start, mean, gossip.consensus_distance(), gossip.stats()


def test_staleness_keeps_the_mean_and_bounds_the_skips(pools):
    results = pools(3).run(real, staleness)
    mean = torch.stack([start for start, _, _, _ in results]).mean(0)
    for _, ours, distance, stats in results:
        torch.testing.assert_close(ours, mean, rtol=1e-6, atol=1e-6)
        assert distance < 1e-5
        assert stats["skipped_mixes"] <= 2 * stats["rounds"]
    assert results[0][3]["skipped_mixes"] > 0  # it did go on while worker 1 slept
