"""Whom a worker lost, and where a directory is found."""

import socket

import pytest
from torch.distributed import PrefixStore, TCPStore

from gossamer.comm import GlooTransport, WorkerGroup
from gossamer.comm.tcp import directory


def test_the_first_to_be_lost_is_named_by_all():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    near, far = (
        GlooTransport(PrefixStore("job", store), WorkerGroup(rank, (0, 1, 2, 3), None), 10.0) for rank in (0, 2)
    )
    assert near.first_lost(1) == 1
    assert far.first_lost(0) == 1
    far.close()
    assert far.first_lost(3) == 3  # without a store, what it knows itself


def test_a_directory_listens_where_it_is_told():
    hosted = directory.host(address="127.0.0.1")
    with socket.create_connection(("127.0.0.1", hosted.port), timeout=5):
        pass
    with pytest.raises(OSError, match=r"refused|unreachable"):
        socket.create_connection(("127.0.0.2", hosted.port), timeout=5)
    with pytest.raises(OSError, match="in use"):
        directory.host(hosted.port, "127.0.0.1")
