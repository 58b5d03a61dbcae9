"""The record of an elastic job's members: agreement in the directory, restoring it, and reading it."""

import json
import threading
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import TCPStore

from gossamer.comm.tcp import HostedDirectory, Member, Record, Refused, Unreachable, look
from gossamer.comm.tcp.frame import Ask, Hello
from gossamer.comm.tcp.record import Agreement, Foundation
from linked import LIMIT, PatientClient

FOUNDATION = Foundation(bytes(range(8)), "a description", {"node/0": "a", "node/1": "b"})


def member(name):
    return Member(name, "127.0.0.1", 1, "node")


def record(epoch, *ranks):
    return Record(epoch, {rank: member(f"process-{rank}") for rank in ranks}, [3 * epoch])


@pytest.fixture(scope="module")
def hosted():
    made = HostedDirectory(address="127.0.0.1")
    yield made
    made.close()


@pytest.fixture
def directory(hosted):
    """A client of an empty directory."""
    client = PatientClient(
        lambda wait: TCPStore("127.0.0.1", hosted.port, is_master=False, wait_for_workers=False), first_wait=LIMIT
    )
    client.ask_at_start(lambda store: store.check(["record"]))
    yield client
    client.close()
    for key in hosted._store.list_keys():
        hosted._store.delete_key(key)


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


FINE = '{"incarnation": "a", "host": "127.0.0.1", "port": 1, "node": "node"}'
NONSENSE = [
    "not JSON",
    "[]",
    "[" * 3000,
    '{"epoch": 1}',
    '{"epoch": 1, "members": []}',
    '{"epoch": 1, "members": {"0": {}}, "starts": []}',
    f'{{"epoch": Infinity, "members": {{"0": {FINE}}}, "starts": [0]}}',
    f'{{"epoch": NaN, "members": {{"0": {FINE}}}, "starts": [0]}}',
    f'{{"epoch": 4294967296, "members": {{"0": {FINE}}}, "starts": [0]}}',
    f'{{"epoch": 9, "members": {{"0": {FINE}}}, "starts": [Infinity]}}',
    f'{{"epoch": 9, "members": {{"0": {FINE}}}, "starts": [-1]}}',
    f'{{"epoch": 9, "members": {{"0": {FINE}}}, "starts": 3}}',
    f'{{"epoch": 9, "members": {{"zero": {FINE}}}, "starts": [0]}}',
    '{"epoch": 9, "members": {"0": {"incarnation": "a", "host": 7, "port": 1, "node": "n"}}, "starts": [0]}',
    '{"epoch": 9, "members": {"0": {"incarnation": "a", "host": "h", "port": "1", "node": "n"}}, "starts": [0]}',
    '{"epoch": 9, "members": {"0": {"incarnation": "a", "host": "h", "port": 65536, "node": "n"}}, "starts": [0]}',
    '{"epoch": 9, "members": {"0": {"incarnation": "a", "host": "h", "port": 1, "node": null}}, "starts": [0]}',
]
MISFITS = [
    '{"epoch": 99, "members": {}, "starts": []}',
    '{"epoch": 99, "members": {}, "starts": [0]}',
    f'{{"epoch": 99, "members": {{"0": {FINE}}}, "starts": []}}',
    f'{{"epoch": 99, "members": {{"0": {FINE}}}, "starts": [0, 0]}}',
    f'{{"epoch": 99, "members": {{"0": {FINE}, "3": {FINE}}}, "starts": [0]}}',
    f'{{"epoch": 99, "members": {{"-1": {FINE}}}, "starts": [0]}}',
]


@pytest.mark.parametrize("text", NONSENSE)
def test_a_record_that_cannot_be_read_is_reported_and_counted(directory, text):
    directory.ask(lambda store: store.set("record", text))
    with pytest.raises(Unreachable, match=r"cannot be read .*; keep other programs from its port"):
        Agreement(directory, FOUNDATION, lambda: None).read()
    assert directory.refusals == 1
    assert "cannot be read" in directory.last_refusal


@pytest.mark.parametrize("text", [*NONSENSE, *MISFITS])
def test_a_member_replaces_nonsense_by_its_record(directory, text):
    directory.ask(lambda store: store.set("record", text))
    own = record(6, 0, 1)
    agreement = Agreement(directory, FOUNDATION, lambda: own, lambda found: found.check(3, 1))
    assert agreement.read() == own
    assert directory.refusals == 1
    assert held(directory) == own.text()
    assert agreement.change(lambda now: Record(now.epoch + 1, now.members, now.starts)).epoch == 7


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40) | st.recursive(st.none() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["epoch", "members", "starts", "0"]), inner, max_size=4
    ), max_leaves=8).map(json.dumps))  # fmt: skip
def test_any_text_is_a_record_or_refused(text):
    with suppress(ValueError):
        Record.parse(text).check(3, 1)


def test_nonsense_in_an_answer_is_counted_and_the_connection_stays(directory):
    directory.ask(lambda store: store.set("unit/0", b"\xff\xfe"))
    with pytest.raises(Unreachable, match="answers nonsense"):
        directory.ask(lambda store: look(store, "unit/0"))
    assert directory.refusals == 1
    assert held(directory) == ""


def test_looking_at_a_key_that_is_not_there_leaves_it_so(directory):
    assert held(directory, "nowhere") == ""
    assert not directory.ask(lambda store: store.check(["nowhere"]))
    directory.ask(lambda store: store.add("counter", 3))
    assert held(directory, "counter") == "3"
    assert directory.ask(lambda store: store.add("counter", 1)) == 4


def test_a_directory_that_hangs_is_asked_again_on_a_new_connection(directory):
    release = threading.Event()
    with pytest.raises(Unreachable, match=r"did not answer within 0\.1 s"):
        directory.ask(lambda store: release.wait(LIMIT), timeout=0.1)
    assert held(directory) == ""  # the thread that hangs is not asked any more
    release.set()


def test_a_start_waits_for_a_directory_that_stands_still_and_a_running_job_does_not(directory, monkeypatch):
    """Both ask while the directory answers nothing; the start gets its answer as soon as there is one."""
    ask, hang, waits = PatientClient.ask, threading.Event(), []

    def impatient(self, request, timeout=0.05):
        waits.append(timeout)
        if timeout > 1:
            threading.Timer(0.2, hang.set).start()
        return ask(self, lambda store: hang.wait(LIMIT) and request(store), timeout)

    directory.ask(lambda store: store.set("name/0", "from 0"))
    monkeypatch.setattr(PatientClient, "ask", impatient)
    monkeypatch.setattr(directory, "ask_at_start", lambda request: ask(directory, request, LIMIT))
    with pytest.raises(Unreachable, match="did not answer"):
        directory.share("name", 1, 2, "from 1", LIMIT)
    monkeypatch.undo()
    monkeypatch.setattr(PatientClient, "ask", impatient)
    assert directory.share("name", 1, 2, "from 1", LIMIT, at_start=True) == ["from 0", "from 1"]
    assert min(waits[1:]) > 1


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
