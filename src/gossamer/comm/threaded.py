"""Communication threads for transports whose operations block."""

from __future__ import annotations

import queue
import threading
from abc import abstractmethod
from contextlib import nullcontext

from gossamer.comm.accelerator import Accelerator
from gossamer.comm.exchange import Batch, Scratch
from gossamer.comm.pace import Pace
from gossamer.comm.staging import Stage
from gossamer.comm.transport import Channel, ChannelId, Job, clock

GRACE = 2.0  # seconds that operations have to end after they were cut
AGAIN = 0.05  # seconds between attempts to cut
_done = threading.Condition()  # one for all channels: collective calls wait for jobs of any channel


def wait_for_job(job: Job, timeout: float) -> bool:
    """Wait at most `timeout` seconds for a job of any threaded channel. Return whether it is done."""
    with _done:
        return _done.wait_for(lambda: job.done, timeout)


class ThreadedChannel(Channel):
    """Threads that carry out exchanges in launch order. On every worker, a bucket always runs on the same thread: its
    turn modulo the number of threads. So all workers perform a thread's exchanges in the same order and cannot wait in
    a circle.

    With an `accelerator`, messages on it are copied through the host (`staging.py`)."""

    def __init__(self, channel: ChannelId, threads: int, pace: Pace | None, accelerator: Accelerator | None = None):
        self._channel, self._pace, self._accelerator = channel, pace, accelerator
        self._pending = 0
        self._queues: list[queue.SimpleQueue[Job | None]] = [queue.SimpleQueue() for _ in range(threads)]
        self._threads = [
            threading.Thread(
                target=self._work,
                args=(q,),
                name=f"gossamer-{channel.purpose.name.lower()}-{channel.lane}-{t}",
                daemon=True,
            )
            for t, q in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    @abstractmethod
    def _carry(self, batch: Batch, job: Job) -> None:
        """Send and receive the messages of `batch`."""

    @abstractmethod
    def _cut(self) -> None:
        """End all operations under way: this worker no longer takes part."""

    def launch(self, job: Job) -> None:
        if self._accelerator is not None:
            job.ready = self._accelerator.mark()
        with _done:
            self._pending += 1
        turn = job.bucket if job.turn is None else job.turn
        self._queues[turn % len(self._queues)].put(job)

    def wait(self, job: Job, timeout: float) -> bool:
        return wait_for_job(job, timeout)

    def close(self, drain: float) -> None:
        try:
            with _done:
                _done.wait_for(lambda: self._pending == 0, drain)
        finally:
            for q in self._queues:
                q.put(None)
            deadline = clock() + GRACE
            while self._pending and clock() < deadline:  # gloo may miss the cut while it is busy, so retry
                self._cut()
                with _done:
                    _done.wait_for(lambda: self._pending == 0, AGAIN)
        for thread in self._threads:
            thread.join(timeout=1.0)

    def _work(self, jobs: queue.SimpleQueue[Job | None]) -> None:
        scratch, stage = Scratch(), None
        while (job := jobs.get()) is not None:
            job.started = clock()
            try:
                if stage is None and self._accelerator is not None:
                    stage = Stage(self._accelerator)
                self._perform(job, scratch, stage)
            except BaseException as error:  # the training thread raises it
                job.error = error
            with _done:
                job.finished = clock()
                self._pending -= 1
                _done.notify_all()

    def _perform(self, job: Job, scratch: Scratch, stage: Stage | None) -> None:
        steps = job.make(scratch) if stage is None else stage.steps(job, scratch)
        try:
            while True:
                batch = next(steps)
                with self._pace(batch.sends) if self._pace is not None else nullcontext():
                    self._carry(batch, job)
        except StopIteration as stop:
            job.result = stop.value
