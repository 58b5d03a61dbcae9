"""Communication threads of blocking transports: an error ends a job, never its thread."""

import pytest
import torch

from gossamer.comm import Job, Purpose
from gossamer.comm import threaded as threads
from gossamer.comm.exchange import Batch
from gossamer.comm.staging import Stage
from gossamer.comm.threaded import ThreadedChannel
from gossamer.comm.transport import ChannelId
from late_device import LateDevice


class EchoChannel(ThreadedChannel):
    """Receives its own messages."""

    def _carry(self, batch, job):
        for (_, sent), (_, received) in zip(batch.sends, batch.recvs, strict=True):
            received.copy_(sent)

    def _cut(self):
        pass


def echo(x, out, scratch):
    yield Batch([(1, x)], [(1, out)])
    return None


def test_a_device_that_has_no_stream_for_a_thread_fails_the_job_and_not_the_thread(monkeypatch):
    device, refused = LateDevice(), []

    def stage(accelerator):
        if not refused:
            refused.append(accelerator)
            raise RuntimeError("out of streams")
        return Stage(accelerator)

    monkeypatch.setattr(threads, "Stage", stage)
    channel = EchoChannel(ChannelId(0, Purpose.PARAMETERS), 1, None, device)
    x, out = torch.ones(4), torch.zeros(4)
    jobs = [Job(k, 0, lambda scratch: echo(x, out, scratch)) for k in range(2)]
    for job in jobs:
        with device.training():
            channel.launch(job)
        assert channel.wait(job, 300), "whoever waits for the job would wait for ever"
    with pytest.raises(RuntimeError, match="out of streams"):
        raise jobs[0].error
    assert jobs[1].error is None
    device.synchronize()
    assert torch.equal(out, x)
    channel.close(5.0)
    device.close()
