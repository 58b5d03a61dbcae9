"""The record of an elastic job's members: agreement in the directory, restoring it, and reading it."""

import threading

import pytest
from torch.distributed import TCPStore

from gossamer.comm.tcp import DirectoryClient, HostedDirectory, Member, Record, Refused, Unreachable, look
from gossamer.comm.tcp.frame import Ask, Hello
from gossamer.comm.tcp.record import Agreement, Foundation

FOUNDATION = Foundation(bytes(range(8)), "a description", {"node/0": "a", "node/1": "b"})


def member(name):
    return Member(name, "127.0.0.1", 1, "node")


def record(epoch, *ranks):
    return Record(epoch, {rank: member(f"process-{rank}") for rank in ranks}, [3 * epoch])


@pytest.fixture
def directory():
    hosted = HostedDirectory(address="127.0.0.1")
    client = DirectoryClient(
        lambda wait: TCPStore("127.0.0.1", hosted.port, is_master=False, wait_for_workers=False), first_wait=5.0
    )
    yield client
    client.close()
    hosted.close()


def held(directory, key="record"):
    return directory.ask(lambda store: look(store, key))


def test_a_record_is_parsed_as_it_was_written():
    made = record(7, 2, 0, 5)
    assert Record.parse(made.text()) == made
    assert made.ranks == (0, 2, 5)
    assert made.plan(b"one") != made.plan(b"two")
    assert made.plan(b"one") != record(8, 2, 0, 5).plan(b"one")


def test_a_proposal_is_made_again_when_another_worker_was_faster(directory):
    directory.ask(lambda store: store.set("record", record(1, 0, 1, 2).text()))
    slow, fast = (Agreement(directory, FOUNDATION, lambda: None) for _ in range(2))
    seen = []

    def without_two(current):
        seen.append(current.epoch)
        if len(seen) == 1:
            fast.change(lambda now: Record(now.epoch + 1, {0: now.members[0], 2: now.members[2]}, now.starts))
        return Record(current.epoch + 1, {r: m for r, m in current.members.items() if r != 2}, current.starts)

    agreed = slow.change(without_two)
    assert seen == [1, 2]
    assert (agreed.epoch, agreed.ranks) == (3, (0,))  # both deaths are in the record
    assert held(directory) == agreed.text()


def test_a_change_that_is_not_needed_changes_nothing(directory):
    directory.ask(lambda store: store.set("record", record(4, 0, 1).text()))
    assert Agreement(directory, FOUNDATION, lambda: None).change(lambda current: None) == record(4, 0, 1)
    assert held(directory) == record(4, 0, 1).text()


def test_a_member_restores_an_empty_directory(directory):
    directory.ask(lambda store: store.set("node/1", "newer"))  # of a worker that is joining
    own = record(6, 0, 1)
    assert Agreement(directory, FOUNDATION, lambda: own).read() == own
    assert held(directory) == own.text()
    assert held(directory, "run") == FOUNDATION.run.hex()
    assert held(directory, "founded") == "a description"
    assert (held(directory, "node/0"), held(directory, "node/1")) == ("a", "newer")


def test_a_worker_that_is_not_a_member_restores_nothing(directory):
    with pytest.raises(Unreachable, match="has lost its record of the members, and this worker is not a member"):
        Agreement(directory, FOUNDATION, lambda: None).read()
    assert held(directory) == ""


def test_an_older_record_is_replaced_and_a_newer_one_is_followed(directory):
    directory.ask(lambda store: store.set("record", record(2, 0, 1, 2).text()))
    assert Agreement(directory, FOUNDATION, lambda: record(5, 0, 1)).read() == record(5, 0, 1)
    assert Agreement(directory, FOUNDATION, lambda: record(3, 0, 2)).read() == record(5, 0, 1)


@pytest.mark.parametrize(
    "text",
    [
        "not JSON",
        "[]",
        '{"epoch": 1}',
        '{"epoch": 1, "members": []}',
        '{"epoch": 1, "members": {"0": {}}, "starts": []}',
    ],
)
def test_a_record_that_cannot_be_read_is_reported(directory, text):
    directory.ask(lambda store: store.set("record", text))
    with pytest.raises(Unreachable, match=r"cannot be read .*; keep other programs from its port"):
        Agreement(directory, FOUNDATION, lambda: None).read()


def test_a_directory_that_hangs_is_asked_again_on_a_new_connection(directory):
    release = threading.Event()
    with pytest.raises(Unreachable, match=r"did not answer within 0\.1 s"):
        directory.ask(lambda store: release.wait(20), timeout=0.1)
    assert held(directory) == ""  # the thread that hangs is not asked any more
    release.set()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"run": "a", "rank": "one", "incarnation": "b", "rounds": [], "ask": 1},
        {"run": "a", "rank": 1, "incarnation": "b", "rounds": 3, "ask": 1},
        {"run": "a", "rank": 1, "incarnation": "b", "rounds": [0], "ask": 99},
    ],
)
def test_a_hello_that_cannot_be_read_is_refused(fields):
    with pytest.raises(Refused, match="a hello cannot be read"):
        Hello.parse(fields)


def test_a_hello_is_parsed():
    fields = {"run": "a", "rank": 1, "incarnation": "b", "rounds": [0, 7], "ask": 2}
    assert Hello.parse(fields) == Hello("a", 1, "b", [0, 7], Ask.STATE)
