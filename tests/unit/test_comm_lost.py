"""Whoever loses a neighbor that only followed a dead worker names the dead one."""

from torch.distributed import PrefixStore, TCPStore

from gossamer.comm import GlooTransport


def test_the_first_to_be_lost_is_named_by_all():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    near, far = (GlooTransport(PrefixStore("job", store), rank, 4, 10.0) for rank in (0, 2))
    assert near.first_lost(1) == 1
    assert far.first_lost(0) == 1
    far.close()
    assert far.first_lost(3) == 3  # without a store, what it knows itself
