"""A directory that is restarted from its file, and one that forgets a job whose workers are all gone."""

import time

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from elastic import job, until
from gossamer import GossamerWarning, HostedDirectory, InputError
from gossamer.comm.tcp import keeper as module
from gossamer.comm.tcp import look
from gossamer.comm.tcp.keeper import Keeper


def client(hosted):
    return PrefixStore("gossamer", TCPStore("127.0.0.1", hosted.port, is_master=False, wait_for_workers=False))


def test_a_directory_starts_from_its_file(tmp_path):
    file = tmp_path / "directory.json"
    first = HostedDirectory(address="127.0.0.1", file=file)
    client(first).set("record", "the members")
    client(first).set("present/0", "a sign")
    first.close()
    second = HostedDirectory(address="127.0.0.1", file=file)
    try:
        assert look(client(second), "record") == "the members"
        assert second.founded
        assert look(client(second), "present/0") == ""  # signs of life are not kept
    finally:
        second.close()


def test_a_running_job_is_joined_through_a_directory_restarted_from_its_file(monkeypatch, tmp_path):
    file = tmp_path / "directory.json"
    with job(monkeypatch, 2, topology="ring", soft_deadline=5.0, hard_deadline=20.0) as made:
        port = made.directory.port
        made.directory.close()
        made.directory = HostedDirectory(port, file=file)
        workers = made.all(100000, pause=0.01)
        workers[0].until(5)
        until(lambda: file.exists() and "record" in file.read_text())
        made.directory.close()
        made.directory = HostedDirectory(port, file=file)
        workers[1].kill()
        replacement = made.start(1, 100000, pause=0.01)
        replacement.until(10)
        assert replacement.gossip.joined
        for worker in (workers[0], replacement):
            worker.steps = 0
            worker.join(300)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1}', '{"a": "not base64!"}'])
def test_a_file_of_something_else_is_refused(tmp_path, text):
    file = tmp_path / "directory.json"
    file.write_text(text)
    with pytest.raises(InputError, match="is not the file of a directory"):
        HostedDirectory(address="127.0.0.1", file=file)


def test_a_job_without_a_sign_of_life_is_forgotten():
    store = HashStore()
    keeper = Keeper(store, None, 60.0)
    keeper.close()  # the test looks, at its own times
    store.set("gossamer/record", "the members")
    keeper.look(0.0)
    keeper.look(1000.0)
    assert store.check(["gossamer/record"])  # the workers have not begun to give signs
    store.set("gossamer/present/0", "1")
    keeper.look(1001.0)
    store.set("gossamer/present/0", "2")
    keeper.look(1050.0)
    keeper.look(1105.0)
    assert store.check(["gossamer/record"])
    keeper.look(1111.0)
    assert not store.check(["gossamer/record"])
    assert store.list_keys() == []


def restored(tmp_path):
    """A store with the job of an earlier directory, its keeper, which looks only when it is told to, and the time."""
    begun, file, before, store = time.monotonic(), tmp_path / "directory.json", HashStore(), HashStore()
    before.set("gossamer/record", "the members")
    Keeper(before, file, 60.0).close()
    keeper = Keeper(store, file, 60.0)
    keeper.close()
    return store, keeper, begun


def test_a_restored_job_whose_workers_do_not_come_back_is_forgotten(tmp_path):
    store, keeper, begun = restored(tmp_path)
    keeper.look(begun + 50)
    assert store.check(["gossamer/record"])
    keeper.look(begun + 100)
    assert store.list_keys() == []
    store.set("gossamer/record", "another job")  # it begins, and gives no signs yet
    keeper.look(begun + 1000)
    keeper.look(begun + 2000)
    assert store.check(["gossamer/record"])


def test_a_restored_job_that_goes_on_is_kept(tmp_path):
    store, keeper, begun = restored(tmp_path)
    for sign in range(10):
        store.set("gossamer/present/0", str(sign))
        keeper.look(begun + 50 * sign)
    assert store.check(["gossamer/record"])


def test_a_failure_to_write_is_told_once_and_tried_again(monkeypatch, tmp_path):
    monkeypatch.setattr(module, "EVERY", 0.01)
    file, looks, look_at = tmp_path / "later" / "directory.json", [], Keeper.look

    def counted(self, now):
        looks.append(now)
        look_at(self, now)

    def fail_and_recover():
        keeper = Keeper(store, file, None)
        store.set("gossamer/record", "the members")
        until(lambda: keeper._failing)
        seen = len(looks)
        until(lambda: len(looks) > seen + 5)
        file.parent.mkdir()  # there is room on the disk again
        until(file.exists)
        keeper.close()

    monkeypatch.setattr(Keeper, "look", counted)
    store = HashStore()
    with pytest.warns(GossamerWarning, match=r"is not kept in .* at present") as told:
        fail_and_recover()
    assert len([w for w in told if "is not kept" in str(w.message)]) == 1
    again = HashStore()
    Keeper(again, file, None).close()
    assert look(again, "gossamer/record") == "the members"


def test_a_key_that_is_deleted_while_the_keeper_looks_is_left_out(tmp_path):
    """`get` would wait for it."""

    class Fleeting:
        def __init__(self):
            self._store = HashStore()

        def list_keys(self):
            return [*self._store.list_keys(), "gossamer/meeting/0"]

        def __getattr__(self, name):
            return getattr(self._store, name)

    store, file = Fleeting(), tmp_path / "directory.json"
    store.set("gossamer/record", "the members")
    keeper = Keeper(store, file, None)
    keeper.close()
    assert "record" in file.read_text()
    assert "meeting" not in file.read_text()
    assert not store.check(["gossamer/meeting/0"])
