"""A directory that is restarted from its file, and one that forgets a job whose workers are all gone."""

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from elastic import job, until
from gossamer import HostedDirectory, InputError
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
            worker.join(60.0)


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
