"""When an elastic job on Ray replaces a worker, continues without it, or ends; and bad input. No cluster is started."""

import pytest

import gossamer
from gossamer.integrations import _frameworks
from gossamer.integrations import ray as on_ray


class ActorDied(Exception):
    pass


def raised(cause):
    """How Ray reports an exception of `train`."""
    error = Exception("remote traceback")
    error.cause = cause
    return error


class Script:
    """Stands for the actors: their calls end as the script says, in order. `None` as the error: the call returns."""

    def __init__(self, ends, workers):
        self.ends, self.running = list(ends), dict.fromkeys(range(workers))
        self.started, self.gave_up = [], 0

    def start(self, rank):
        self.started.append(rank)
        self.running[rank] = None

    def next_end(self):
        rank, error = self.ends.pop(0)
        del self.running[rank]
        return rank, None if error else f"value {rank}", error

    def give_up_waiting(self):
        self.gave_up += 1


class Met:
    def __init__(self, founded=True):
        self.founded = founded


def watch(ends, workers=2, max_replacements=1, founded=True):
    job, told = Script(ends, workers), []
    return on_ray._watch_over(job, Met(founded), max_replacements, told.append), job, told


def test_a_death_is_replaced():
    done, job, told = watch([(1, ActorDied("killed\nby a signal")), (0, None), (1, None)])
    assert done.values == {0: "value 0", 1: "value 1"}
    assert done.deaths == [on_ray.Death(1, "killed")]
    assert job.started == [1]
    assert told == ["worker 1 is gone (killed); replaced (1 of at most 1)"]


def test_a_worker_that_raises_is_replaced():
    done, job, _ = watch([(0, raised(OSError("disk"))), (0, None), (1, None)])
    assert done.deaths == [on_ray.Death(0, "OSError: disk")]
    assert job.started == [0]


def test_without_replacements_left_the_others_continue():
    done, job, told = watch([(1, ActorDied("a")), (1, ActorDied("b")), (0, None)])
    assert (list(done.values), job.started) == ([0], [1])
    assert told[1] == (
        "worker 1 is gone (b); the others continue without it: 1 were replaced already (max_replacements)"
    )


def test_nobody_is_replaced_after_a_worker_has_returned():
    done, job, told = watch([(0, None), (1, ActorDied("late"))])
    assert (list(done.values), job.started, job.gave_up) == ([0], [], 1)
    assert told == ["worker 1 is gone (late); the job ends without it"]


@pytest.mark.parametrize(
    ("ends", "founded", "why"),
    [
        ([(1, ActorDied("a"))], False, "the workers had not met yet"),
        ([(1, ActorDied("a")), (0, ActorDied("b"))], True, "no worker is left"),
    ],
)
def test_the_job_ends_with_the_error_that_it_cannot_survive(ends, founded, why):
    with pytest.raises(gossamer.GossamerError, match=f"not replaced after 0 replacements; {why}, so the job ends"):
        watch(ends, max_replacements=0, founded=founded)


def test_bad_input_of_a_worker_ends_the_job():
    with pytest.raises(gossamer.InputError, match=r"^worker 1: no such topology$"):
        watch([(1, raised(gossamer.InputError("worker 1: no such topology")))])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"workers": 0}, "workers must be a whole number of at least 1, got 0"),
        ({"workers": True}, "workers must be a whole number of at least 1, got True"),
        ({"workers": "2"}, "workers must be a whole number of at least 1, got '2'"),
        ({"workers": 2, "max_replacements": -1}, "max_replacements must be a whole number of at least 0, got -1"),
        ({"workers": 2, "train": 3}, "train must be a function to call on every worker, got int"),
        ({"workers": 2, "actor_options": {"max_restarts": 2}}, "actor_options cannot have max_restarts: .+"),
    ],
)
def test_bad_input(arguments, message):
    train = arguments.pop("train", print)
    with pytest.raises(gossamer.InputError, match=f"^{message}"):
        on_ray.run_elastic(train, **arguments)


def test_without_ray_the_error_names_the_extra(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(_frameworks, "import_module", missing)
    with pytest.raises(gossamer.InputError, match=r"pip install 'ray\[train\]>=2\.40', or '\.\[ray\]' in a clone"):
        on_ray.run_elastic(print, workers=2)


def test_ray_client_is_refused(monkeypatch):
    client = pytest.importorskip("ray.util.client")
    monkeypatch.setattr(client.ray, "is_connected", lambda: True)
    with pytest.raises(gossamer.InputError, match="Ray Client"):
        on_ray.run_elastic(print, workers=2)
