"""Which worker was lost first, and where a directory listens."""

import socket

import pytest
from torch.distributed import PrefixStore, TCPStore

from gossamer.comm import GlooTransport, WorkerGroup
from gossamer.comm.tcp import HostedDirectory


def test_all_workers_name_the_worker_that_was_lost_first():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    near, far = (
        GlooTransport(PrefixStore("job", store), WorkerGroup(rank, (0, 1, 2, 3), None), 10.0) for rank in (0, 2)
    )
    assert near.first_lost(1) == 1
    assert far.first_lost(0) == 1
    far.close()
    assert far.first_lost(3) == 3  # without a store, what it knows itself


def test_a_worker_that_failed_is_not_waited_for():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    waits, fails = (GlooTransport(PrefixStore("job", store), WorkerGroup(r, (0, 1), None), 600.0) for r in (0, 1))
    fails.fail()
    fails.close()
    assert waits.lost() == 1
    with pytest.raises(ConnectionError, match="it did not connect; worker 1 has failed"):
        waits.edge(1).group  # noqa: B018
    waits.close()


def test_a_directory_listens_on_the_given_address_only():
    hosted = HostedDirectory(address="127.0.0.1")
    with socket.create_connection(("127.0.0.1", hosted.port), timeout=5):
        pass
    with pytest.raises(OSError, match=r"refused|unreachable"):
        socket.create_connection(("127.0.0.2", hosted.port), timeout=5)
    with pytest.raises(OSError, match="in use"):
        HostedDirectory(hosted.port, "127.0.0.1")
