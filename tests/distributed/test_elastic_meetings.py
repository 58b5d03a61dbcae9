"""Meetings of an elastic job: no worker is waited for in vain, and no worker alone writes a checkpoint."""

import threading
import time

import pytest
import torch

import gossamer
from elastic import LIMIT, PATIENCE, Worker, finish, job, until
from gossamer import Checkpoints, GossamerError, GossamerWarning
from gossamer.checkpoint import files
from gossamer.comm import PeerError
from gossamer.comm.tcp import DirectoryClient, Record, Unreachable
from gossamer.comm.tcp.frame import Kind
from gossamer.comm.tcp.links import LinkTable
from gossamer.engine.elastic.state_transfer import StateTransfer


@pytest.fixture
def cut(monkeypatch):
    """Clients whose directory does not answer."""
    cut = set()
    ask = DirectoryClient.ask

    def perhaps(self, *args, **kwargs):
        if self in cut:
            raise Unreachable("cut off")
        return ask(self, *args, **kwargs)

    monkeypatch.setattr(DirectoryClient, "ask", perhaps)
    return cut


def met(gossip):
    with gossip.averaged():
        return len(gossip.met.came)


def test_a_worker_that_lost_the_directory_is_not_waited_for_and_comes_to_the_next_meeting(monkeypatch, cut):
    together = threading.Barrier(3)

    def end(gossip):
        if gossip.members.rank == 1:
            cut.add(gossip.members.directory)
        first = met(gossip)
        together.wait(300)
        cut.clear()
        return first, met(gossip)

    alone = pytest.warns(
        GossamerWarning, match=r"averaged\(\) used worker 1's parameters only: the directory did not answer"
    )
    with job(monkeypatch, 3, topology="ring", soft_deadline=0.2, hard_deadline=15.0) as made, alone:
        results = finish(made.all(3, end))
    assert results == [(2, 3), (1, 3), (2, 3)]


def test_a_worker_that_lost_the_directory_in_a_meeting_says_so_and_the_others_meet_again(monkeypatch, cut):
    together = threading.Barrier(3)

    def end(gossip):
        if gossip.members.rank == 1:
            run = gossip._run

            def cut_off(steps):
                cut.add(gossip.members.directory)
                return run(steps)

            gossip._run = cut_off
        found = met(gossip), gossip.met.alone
        if gossip.members.rank == 1:
            cut.clear()
        together.wait(300)
        return found

    with job(monkeypatch, 3, topology="ring", soft_deadline=0.2) as made:
        results = finish(made.all(3, end))
    assert results == [(2, False), (3, True), (2, False)]


def test_without_the_directory_no_checkpoint_is_written_and_the_last_one_stays(monkeypatch, cut, tmp_path):
    together = threading.Barrier(3)

    def end(gossip):
        checkpoints = Checkpoints(tmp_path, keep_last=1)
        save = (gossip, gossip.model, gossip.lanes[0].optimizer)
        with gossip.averaged():
            assert checkpoints.save(*save) == 3
        checkpoints.wait()
        together.wait(300)
        gossip._meetings._hard = 1.0  # seconds to wait for the directory; the others are not waited for any more
        cut.add(gossip.members.directory)
        for step in (3, 4):
            with gossip.averaged():
                checkpoints.save(*save)
            with pytest.raises(GossamerError, match=r"\(the directory does not answer\); the one of step 3"):
                checkpoints.wait()
            together.wait(300)
            made.train(gossip.members.rank, step, gossip.model, gossip.lanes[0].optimizer)
        return checkpoints.steps()

    warned = pytest.warns(GossamerWarning)
    with job(monkeypatch, 3, topology="ring", soft_deadline=0.2) as made, warned as told:
        results = finish(made.all(3, end))
    assert results == [[3]] * 3
    manifest = files.read_manifest(tmp_path, 3)
    assert manifest.workers == 3
    assert [files.read_part(tmp_path, manifest, worker)["gossip"]["workers"] for worker in range(3)] == [3, 3, 3]
    assert [str(w.message) for w in told].count("no checkpoint: the directory does not answer") == 3, "once per worker"


def test_a_death_in_a_meeting_is_noticed_without_skipped_frames(monkeypatch):
    send_all = LinkTable.send_all

    def forgetful(self, header, payload=b"", **to):
        if header.kind is not Kind.SKIPPED:
            send_all(self, header, payload, **to)

    monkeypatch.setattr(LinkTable, "send_all", forgetful)

    def end(gossip):
        if gossip.members.rank == 0:
            gossip._run = lambda steps: threading.Thread(target=workers[0].kill).start() or time.sleep(60)
        return met(gossip)

    with job(monkeypatch, 4, 2, topology="ring", soft_deadline=0.5) as made:
        workers = made.all(3, end)
        assert finish(workers[1:]) == [3, 3, 3]


def test_catch_up_sets_the_step_count_of_the_furthest_worker(monkeypatch):
    def end(gossip):
        met(gossip)
        gossip.catch_up()
        return gossip.stats()["steps"]

    with job(monkeypatch, 2, topology="ring") as made:
        assert finish([made.start(0, 4, end), made.start(1, 9, end)]) == [9, 9]


def test_different_collective_calls_raise_on_every_worker(monkeypatch):
    def end(gossip):
        call = gossip.consensus_distance if gossip.members.rank == 1 else lambda: met(gossip)
        with pytest.raises(PeerError, match="different collective calls met") as caught:
            call()
        return str(caught.value), met(gossip)  # the next call is one meeting again

    with job(monkeypatch, 3, topology="ring") as made:
        results = finish(made.all(3, end))
    assert [count for _, count in results] == [3, 3, 3]
    assert "worker 0 is in averaged(), worker 1 is in consensus_distance()" in results[0][0]
    assert "worker 1 is in consensus_distance(), worker 0 is in averaged()" in results[1][0]


def test_a_worker_that_waits_in_vain_in_a_meeting_names_the_missing_ones(monkeypatch):
    done = threading.Event()

    def end(gossip):
        if gossip.members.rank == 1:
            done.wait(300)
            return None
        gossip._meetings._timeout = 1.0
        try:
            with pytest.raises(PeerError, match=r"waited \d+ s for worker\(s\) 1 in averaged\(\) and gives up"):
                met(gossip)
        finally:
            done.set()

    with job(monkeypatch, 2, topology="ring") as made:
        finish(made.all(3, end))


def test_a_worker_that_is_dropped_while_it_waits_in_a_meeting_joins_again_and_takes_part(monkeypatch):
    with job(monkeypatch, 3, topology="ring", soft_deadline=0.5) as made:
        workers = [made.start(rank, 10 if rank == 1 else 100_000, met, 0.02) for rank in range(3)]
        workers[0].until(20)
        members = workers[0].gossip.members
        until(lambda: workers[1].gossip.coordinator.meetings.parked)
        before, k = members.record, workers[0].gossip.lanes[0].k
        dropped = Record(before.epoch + 1, {r: m for r, m in before.members.items() if r != 1}, [k + 2])
        members.directory.ask(lambda store: store.set("record", dropped.text()))
        until(lambda: members.record.epoch > dropped.epoch)  # it has joined again
        assert members.record.members[1] != before.members[1]
        for rank in (0, 2):
            workers[rank].steps = 0  # come to the meeting now
        assert finish(workers) == [3, 3, 3]


class Meeting(Worker):
    """Meets after every tenth step, also if it joins there, and ends after it has met a replacement twice."""

    def run(self):
        try:
            self.meetings = []
            self.job.local.rank = self.rank
            with self.job.lock:
                model, optimizer = self.job.make(self.rank)
            gossip = self.gossip = self.job.decentralize(model, optimizer)
            self.started_at = gossip.stats()["steps"]
            if gossip.newcomer and self.started_at % 10 == 0:
                gossip.skip_meeting()
            with_replacement = 0
            while with_replacement < 2:
                step = gossip.stats()["steps"]
                if self.stopped.is_set():
                    return
                self.job.train(self.rank, step, model, optimizer)
                time.sleep(0.02)
                if (step + 1) % 10 == 0:
                    with gossip.averaged():
                        self.meetings.append((step + 1, gossip.met.steps, len(gossip.met.came)))
                        self.job.founders = self.job.founders or set(gossip.met.came)
                        with_replacement += not set(gossip.met.came) <= self.job.founders
            gossip.close()
        except BaseException as error:
            if not self.stopped.is_set():
                self.error = error


def test_a_worker_that_joins_at_a_step_at_which_all_meet_is_not_behind(monkeypatch):
    load, between = StateTransfer._load, StateTransfer.between_steps

    def slowly(self, data, *, optimizers):
        if optimizers:
            time.sleep(0.2)  # the others have met when it is here
        return load(self, data, optimizers=optimizers)

    with job(monkeypatch, 3, topology="ring") as made:
        made.founders = set()  # the processes
        patient = gossamer.Continue(hard_deadline=PATIENCE)
        made.decentralize = lambda model, optimizer: gossamer.decentralize(
            model, optimizer, on_failure=patient, topology="ring", timeout=LIMIT
        )
        workers = [Meeting(made, rank, 0, None, 0) for rank in range(3)]
        for worker in workers:
            worker.start()
        until(lambda: made.founders)
        workers[1].kill()
        monkeypatch.setattr(StateTransfer, "_load", slowly)
        monkeypatch.setattr(StateTransfer, "between_steps", lambda self, p: p().steps[0] % 10 or between(self, p))
        replacement = Meeting(made, 1, 0, None, 0)
        replacement.start()
        finish([workers[0], workers[2], replacement])
    assert replacement.started_at % 10 == 0
    assert replacement.meetings, "it came to the next one"
    assert all(step == steps for step, steps, _ in [*workers[0].meetings, *replacement.meetings])
    assert workers[0].meetings[-1] == replacement.meetings[-1]
    assert replacement.meetings[-1][2] == 3


def test_a_worker_that_leaves_at_once_waits_until_slower_founders_have_their_initial_state(monkeypatch):
    leaving, broadcast = threading.Semaphore(0), StateTransfer.broadcast

    def late(self, members, record):
        if members.rank == 2:
            assert leaving.acquire(timeout=300)  # a worker is about to leave
            assert leaving.acquire(timeout=300)  # a worker is about to leave
        return broadcast(self, members, record)

    monkeypatch.setattr(StateTransfer, "broadcast", late)
    with job(monkeypatch, 3, topology="ring") as made:
        workers = made.all(0, lambda gossip: leaving.release())
        finish(workers)
    expected, *others = [torch.cat([p.flatten() for p in worker.model.parameters()]) for worker in workers]
    for values in others:
        torch.testing.assert_close(values, expected, rtol=0, atol=0)
