"""A newcomer with a low rank does not wait until the others happen to read the record of the members."""

from elastic import end_now, job, until
from gossamer.comm.tcp import membership
from gossamer.comm.tcp.frame import Ask


def test_a_newcomer_gives_notice_to_the_workers_that_connect_to_it(monkeypatch):
    """The worker with the higher rank opens a link, and it may not know the newcomer yet."""
    monkeypatch.setattr(membership, "LOOK", 3600.0)  # nobody reads the record without a reason
    noticed = []
    accept = membership.Membership._accept

    def watched(self, connection, hello):
        if hello.ask is Ask.NOTICE:
            noticed.append((self.rank, hello.incarnation))
        accept(self, connection, hello)

    monkeypatch.setattr(membership.Membership, "_accept", watched)
    with job(monkeypatch, 3, topology="complete", soft_deadline=5.0) as made:
        workers = made.all(100000, pause=0.005)
        for worker in workers:
            worker.until(5)
        workers[0].kill()
        until(lambda: all(w.gossip.stats()["members"] == [1, 2] for w in workers[1:]))
        replacement = made.start(0, 100000, pause=0.005)
        until(lambda: all(w.gossip.stats()["members"] == [0, 1, 2] for w in workers[1:]))
        replacement.until(1)
        incarnation = replacement.gossip.members.me.incarnation
        until(lambda: all(w.gossip.members.links.peer(0).link is not None for w in workers[1:]))
        assert any(who == incarnation for _, who in noticed)
        end_now([replacement, *workers[1:]])
