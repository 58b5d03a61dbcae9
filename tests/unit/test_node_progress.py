"""Workers of a node that have begun different numbers of backward passes find out about each other."""

import gc
import time
import warnings
import weakref
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore

import gossamer
from gossamer.engine import node_progress
from gossamer.engine.node_progress import NodeProgress


@pytest.fixture
def node(monkeypatch):
    """Makes the counters of a node's workers, whose threads look often."""
    monkeypatch.setattr(node_progress, "LOOK", 0.01)
    monkeypatch.setattr(node_progress, "STILL", 0.05)
    made, store = [], HashStore()

    def make(*passes, **settings):
        ranks = range(len(passes))
        for rank, counts in enumerate(passes):
            inside = [SimpleNamespace(passes=n) for n in counts]
            made.append(NodeProgress(store, rank, [r for r in ranks if r != rank], inside, **settings))
        return made

    yield make
    for progress in made:
        progress.close()


def until(condition):
    for _ in range(30000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("the condition has not come true")


def error_in(progress):
    for _ in range(30000):
        try:
            progress.verify("averaged()")
        except gossamer.GossamerError as error:
            return str(error)
        time.sleep(0.01)
    raise AssertionError("nothing was raised")


def test_a_worker_in_a_call_hears_of_another_in_a_later_backward_pass(node):
    late, ahead, other = node([3], [4], [3])
    said = error_in(late)
    assert "worker 0 is in averaged() after 3 backward passes, and worker 1 of the same node waits for it" in said
    assert "in backward pass 4" in said
    assert said.endswith("use gradients='worker'")
    assert "and worker 1 of" in error_in(other)
    until(lambda: all(p._posted for p in (late, ahead, other)))
    ahead.verify("averaged()")


def test_every_optimizer_counts(node):
    late, _ = node([3, 2], [2, 3])
    assert "worker 1 of the same node" in error_in(late)


def test_workers_that_are_equally_far_wait_in_peace(node):
    first, second = node([3], [3], warn_after=0.0)
    until(lambda: first._posted and second._posted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for progress in (first, second):
            progress.look()
            progress.verify("close()")


def test_a_count_that_grows_is_not_posted(node, monkeypatch):
    monkeypatch.setattr(node_progress, "STILL", 60.0)
    progress, other = node([1], [0])
    until(lambda: progress._counts == [1])
    progress._inside[0].passes = 2
    until(lambda: progress._counts == [2])
    assert progress._posted == []
    other.verify("close()")


def test_waiting_for_a_worker_that_is_behind_is_said_once(node):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        behind, ahead = node([3], [4], warn_after=0.2)
        until(lambda: caught)
        ahead.look()
    (said,) = [str(w.message) for w in caught if issubclass(w.category, gossamer.GossamerWarning)]
    assert "worker 1 has waited 0.2 s in backward pass 4 for worker 0 of the same node, which is at 3" in said
    assert said.endswith("use gradients='worker'")
    assert not behind._warned


def test_the_thread_ends_with_the_counter_and_does_not_keep_it(monkeypatch):
    monkeypatch.setattr(node_progress, "LOOK", 0.01)
    progress = NodeProgress(HashStore(), 0, [1], [])
    thread, kept = progress._thread, weakref.ref(progress)
    del progress
    for _ in range(30000):
        gc.collect()
        if kept() is None:
            break
        time.sleep(0.01)
    assert kept() is None
    thread.join(300)
    assert not thread.is_alive()
