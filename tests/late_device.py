"""A simulated accelerator: every torch operation on it runs later, in the order of its stream, and streams overtake
each other.

    device = LateDevice(seed=0)
    with device.training():  # operations of this thread are queued on the device's default stream
        x.add_(1)            # returns at once; x changes later
    device.synchronize()

Tensors are ordinary CPU tensors, so whoever reads one too early gets old values, as on real hardware. `LateDevice` has
the interface of `gossamer.comm.accelerator.Accelerator`.
"""

import random
import threading
import time
from collections import deque
from contextlib import contextmanager
from functools import partial

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from gossamer.comm import Job, exchange, room_for
from gossamer.topology import Layout, build
from gossamer.topology.schedule import Schedule


class LateEvent:
    def __init__(self):
        self.done = False

    def query(self):
        return self.done


class LateStream:
    """A queue of (ready, run): the first entry runs once `ready()`."""

    def __init__(self, device, name):
        self.device, self.name, self.entries = device, name, deque()

    def put(self, run, ready=lambda: True):
        with self.device.changed:
            if not self.device.stopped:
                self.entries.append((ready, run))
                self.device.changed.notify_all()
                return
        run()


class _Late(TorchDispatchMode):
    """Queues operations on a stream."""

    def __init__(self, stream):
        super().__init__()
        self.stream = stream

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        with _disable_current_modes():  # streams may be entered inside each other
            return self._dispatch(func, args, kwargs or {})

    def _dispatch(self, func, args, kwargs):
        returns = func._schema.returns
        if func.namespace != "aten" or torch.Tag.nondeterministic_seeded in func.tags:  # profiler's marks; data
            return func(*args, **kwargs)
        if any(str(r.type) not in ("Tensor", "List[Tensor]") for r in returns):
            if any(isinstance(a, torch.Tensor) for a in args):  # a number for the host: .item(), torch.equal
                self.stream.device.drain(self.stream)
            return func(*args, **kwargs)
        writes = [a for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        # Autograd counts the writes to a tensor when they are queued; `.data` has a count of its own.
        plain, plain_kwargs = tree_map_only(torch.Tensor, lambda t: t.data, (args, kwargs))
        if writes:  # in place: nothing happens before its turn
            self.stream.put(lambda: func(*plain, **plain_kwargs))
            names = [a.name for a in func._schema.arguments]
            found = [kwargs[w.name] if w.name in kwargs else args[names.index(w.name)] for w in writes]
            return None if not returns else found[0] if len(returns) == 1 else tuple(found)
        result = func(*args, **kwargs)  # of the right shape, and garbage until its turn
        if any(r.alias_info is not None for r in returns):
            return result  # a view

        targets = [t.data for t in _tensors(result)]

        def later():
            for target, value in zip(targets, _tensors(func(*plain, **plain_kwargs)), strict=True):
                target.copy_(value)

        self.stream.put(later)
        return result


def _tensors(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


class LateDevice:
    device = torch.device("cpu")

    def __init__(self, seed=0, slowness=0.0005):
        self.changed = threading.Condition()
        self.held = False  # True: nothing runs
        self._random, self._slowness = random.Random(seed), slowness
        self.stopped, self.failure = False, None
        self._streams, self._local = [], threading.local()
        self._default = self.stream("default")
        self._thread = threading.Thread(target=self._run, name="late-device", daemon=True)
        self._thread.start()

    # -- the interface of Accelerator

    def stream(self, name="side"):
        stream = LateStream(self, name)
        with self.changed:
            self._streams.append(stream)
        return stream

    @contextmanager
    def running_on(self, stream):
        before = self._current()
        self._local.stream = stream
        try:
            with _Late(stream):
                yield
        finally:
            self._local.stream = before

    def mark(self):
        event = LateEvent()
        self._current().put(lambda: setattr(event, "done", True))
        return event

    def wait_for(self, event):
        self._current().put(lambda: None, ready=event.query)

    def host_memory(self, nbytes):
        return torch.empty(nbytes, dtype=torch.uint8)

    def copy(self, target, source):
        self._current().put(lambda: target.copy_(source))

    # -- for tests

    def training(self):
        return self.running_on(self._default)

    def synchronize(self):
        for stream in list(self._streams):
            self.drain(stream)

    def drain(self, stream):
        with self.changed:
            assert self.changed.wait_for(lambda: self.failure or not stream.entries, 300), f"{stream.name} is stuck"
            if self.failure:
                raise self.failure

    @contextmanager
    def holding(self):
        """Run nothing inside the block."""
        with self.changed:
            self.held = True
        try:
            yield
        finally:
            with self.changed:
                self.held = False
                self.changed.notify_all()

    def close(self):
        """Finish what is queued; from now on operations run at once."""
        with self.changed:
            self.stopped = True
            self.changed.notify_all()
        self._thread.join()
        for stream in self._streams:
            while stream.entries:
                stream.entries.popleft()[1]()

    def _current(self):
        return getattr(self._local, "stream", self._default)

    def _run(self):
        with torch._C._AutoDispatchBelowAutograd():
            while not self.stopped:
                with self.changed:
                    able = [] if self.held else [s for s in self._streams if s.entries and s.entries[0][0]()]
                    if not able:
                        self.changed.wait(0.001)
                        continue
                stream = self._random.choice(able)
                if self._random.random() < 0.1:
                    time.sleep(self._random.random() * self._slowness)
                try:
                    stream.entries[0][1]()
                except BaseException as error:
                    self.failure = error
                with self.changed:
                    stream.entries.popleft()
                    self.changed.notify_all()


def rounds_of(topology, per_node, elements, wire, channels, devices):
    """Mix four rounds of `topology` on these channels; return the workers' values."""
    layout = Layout.of(per_node)
    schedule = Schedule(build(topology, layout))
    x = [torch.arange(elements, dtype=torch.float32).mul_(rank + 1).sin_() for rank in range(layout.n)]
    outs = [torch.full((room_for(elements, max(per_node)),), torch.nan) for _ in x]
    for k in range(4):
        jobs = []
        for rank, channel in enumerate(channels):
            program = schedule.program(k, 0, rank, elements)
            with devices[rank].training() if devices else torch.no_grad():
                x[rank].mul_(1.01)  # still under way when the round is launched
                if program:
                    jobs.append(Job(k, 0, partial(exchange, program, x[rank], outs[rank], wire)))
                    channel.launch(jobs[-1])
                else:
                    jobs.append(None)
        for rank, (channel, job) in enumerate(zip(channels, jobs, strict=True)):
            if job is None:
                continue
            while not channel.wait(job, 0.01):
                assert not job.done
            with devices[rank].training() if devices else torch.no_grad():
                if job.result is not None:
                    job.result.write_to(x[rank])
    for device in devices or ():
        device.synchronize()
    return x
