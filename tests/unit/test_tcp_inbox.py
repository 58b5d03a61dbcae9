"""What a worker keeps of the messages of others: no member can fill its memory, and nothing is kept for the dead."""

import pytest

from gossamer.comm.tcp import inbox as module
from gossamer.comm.tcp.frame import FrameHeader, Kind, Verdict
from gossamer.comm.tcp.inbox import Inbox, Key
from gossamer.comm.transport import ChannelId, Purpose
from linked import CHANNEL, PLAN, RUN, a_pair, patient, send, slot, until

__all__ = ["patient"]

SIZE = 10_000  # bytes of a message


@pytest.fixture
def pair():
    zero, one, frames = a_pair()
    yield zero, one, frames
    zero.close()
    one.close()


def message(inbox, sender, round, *, bucket=0, channel=CHANNEL, epoch=1, part=0, done=True):
    """A message arrives; return its slot."""
    arriving = inbox.begin(Key(sender, channel, bucket, part), epoch, round, PLAN, SIZE)
    if done:
        inbox.complete(arriving)
    return arriving


def post(inbox, sender, round, *, bucket=0, channel=CHANNEL, epoch=1, part=0):
    return inbox.post(Key(sender, channel, bucket, part), epoch, round, PLAN, memoryview(bytearray(SIZE)))


def kept(inbox):
    """The bytes of early messages that `inbox` keeps, and of the memory for later ones."""
    early = sum(len(slot.view) for slot in inbox._early.values())
    return early, sum(len(view) for views in inbox._spare.values() for view in views)


def test_the_early_messages_of_a_sender_have_a_limit_together():
    inbox = Inbox(longest=5 * SIZE)
    refused = [
        message(inbox, 1, 5, bucket=bucket, channel=ChannelId(0, purpose), part=part).failed
        for bucket in range(10)
        for part in range(3)
        for purpose in Purpose
    ]
    assert kept(inbox)[0] <= 5 * SIZE
    assert sum(map(bool, refused)) == len(refused) - 4  # each counts a little more than its bytes
    assert "it has sent too early have more than 50000 bytes" in refused[-1]
    assert not message(inbox, 2, 5).failed  # the limit is one for each sender
    assert post(inbox, 1, 5, channel=ChannelId(0, Purpose.CONTROL)).filled  # what was kept is delivered


def test_a_message_that_replaces_an_older_one_does_not_count_twice():
    inbox = Inbox(longest=5 * SIZE)
    assert not any(message(inbox, 1, round).failed for round in range(100))
    assert not any(message(inbox, 1, 99, bucket=bucket).failed for bucket in (1, 2, 3))


def test_too_many_early_messages_are_refused_and_counted_and_the_link_stays(pair):
    zero, one, _ = pair
    zero.inbox._longest = 3000
    link = one.peer(0).link
    for bucket in range(4):
        send(one, 0, 5, bytes(1000), bucket=bucket)
    until(lambda: zero.refusals == {1: 3})
    assert "too early" in zero.last_refusal
    buffer, waiting = slot(zero, 1, 6, 1000)
    send(one, 0, 6, b"\1" * 1000)
    until(lambda: waiting.over)
    assert bytes(buffer) == b"\1" * 1000
    assert one.peer(0).link is link


def test_messages_about_lanes_that_the_job_does_not_have_are_refused(pair):
    zero, one, _ = pair
    lane, link = ChannelId(7, Purpose.PARAMETERS), one.peer(0).link
    link.send(FrameHeader(Kind.DATA, RUN, 4, PLAN, lane, 1, 5), b"four")
    until(lambda: zero.refusals == {1: 1})
    assert "it is about lane 7, and this job has 1" in zero.last_refusal
    link.send(FrameHeader(Kind.SKIPPED, RUN, channel=lane, round=5))
    until(lambda: zero.refusals == {1: 2})
    link.send(FrameHeader(Kind.VERDICT, RUN, 16, channel=lane), Verdict(5, 5).pack())
    until(lambda: zero.refusals == {1: 3})
    assert zero.inbox.verdict(1, 7) == Verdict()
    buffer, waiting = slot(zero, 1, 5, 4)  # the link itself is fine
    send(one, 0, 5, b"fine")
    until(lambda: waiting.over)
    assert bytes(buffer) == b"fine"


def test_skipped_rounds_are_remembered_for_a_limited_number_of_buckets(monkeypatch):
    monkeypatch.setattr(module, "MOST_SKIPS", 100, raising=False)
    inbox = Inbox()
    refused = [inbox.skip(1, CHANNEL, bucket, 5) for bucket in range(1000)]
    assert sum(map(bool, refused)) == 900
    assert len(inbox._skipped) == 100
    assert not inbox.skip(1, CHANNEL, 3, 6)
    assert post(inbox, 1, 6, bucket=3).failed


def test_early_messages_of_rounds_that_are_over_are_forgotten_whoever_sent_them():
    inbox = Inbox()
    for bucket in range(4):
        message(inbox, 1, 5, bucket=bucket)  # of a neighbor in the old plan, or of one that has died since
    post(inbox, 2, 6)
    assert kept(inbox)[0] == 4 * SIZE  # the round before may still be under way
    post(inbox, 2, 7)
    assert kept(inbox)[0] == 0


def test_a_worker_that_returns_to_an_earlier_round_receives_what_was_early_for_it():
    inbox = Inbox()
    post(inbox, 1, 1000)
    message(inbox, 2, 500)
    assert post(inbox, 2, 500).filled


def test_new_members_make_it_forget_what_others_have_sent():
    inbox = Inbox()
    message(inbox, 1, 20)
    message(inbox, 2, 20)
    inbox.skip(1, CHANNEL, 3, 30)
    inbox.judge(1, 0, Verdict(7, 7))
    inbox.cancel([post(inbox, 1, 19, bucket=2)])
    inbox.replan(2, [21], {0, 2})
    assert {key.sender for key in inbox._early} == {2}
    assert inbox.verdict(1, 0) == Verdict()
    assert not inbox._missed
    assert not inbox._skipped
    assert not post(inbox, 1, 20).over
    assert post(inbox, 2, 20).filled


def test_a_new_plan_makes_it_forget_early_messages_of_the_old_one():
    inbox = Inbox()
    message(inbox, 1, 9)
    message(inbox, 1, 12, bucket=1)
    message(inbox, 1, 12, bucket=2, epoch=2)
    message(inbox, 1, 12, channel=ChannelId(3, Purpose.PARAMETERS))  # a lane that the record does not name
    inbox.replan(2, [10], {0, 1})
    assert post(inbox, 1, 9).filled  # this round still follows the old plan
    assert not post(inbox, 1, 12, bucket=1).over
    assert post(inbox, 1, 12, bucket=2, epoch=2).filled


def test_the_memory_for_later_messages_has_a_limit():
    inbox = Inbox(longest=3 * SIZE)
    for sender in range(1, 9):
        message(inbox, sender, 5)
    for sender in range(1, 9):
        assert post(inbox, sender, 5).filled
    assert kept(inbox) == (0, 3 * SIZE)


def test_the_rest_of_an_early_message_is_not_awaited_after_its_connection_has_broken():
    inbox = Inbox()
    begun = message(inbox, 1, 5, done=False)
    whole = message(inbox, 1, 5, bucket=1)
    inbox.lose(1, "it closed the connection")
    inbox.skip(1, CHANNEL, 0, 5)  # as a peer does whose exchange has failed
    assert "skipped the round" in post(inbox, 1, 5).failed
    assert post(inbox, 1, 5, bucket=1).filled
    inbox.complete(begun)  # its reader had the last bytes already
    assert whole.filled
    assert not post(inbox, 1, 6).over


def test_buffers_that_were_withdrawn_are_released():
    inbox = Inbox()
    waiting = post(inbox, 1, 5)
    inbox.cancel([waiting])
    assert len(waiting.view) == 0


def test_a_link_in_place_of_an_older_one_ends_waits_for_what_was_lost_with_it(pair):
    zero, one, _ = pair
    _, waiting = slot(zero, 1, 5, 4)
    first, one.peer(0).link = one.peer(0).link, None  # worker 1 has lost it, which worker 0 does not see
    assert one.connect(one.peer(0))
    until(lambda: waiting.over)
    assert "it connected again" in waiting.failed
    buffer, following = slot(zero, 1, 6, 4)
    send(one, 0, 6, b"news")
    until(lambda: following.over)
    assert bytes(buffer) == b"news"
    first.close("for this test")
