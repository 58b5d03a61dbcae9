"""The network of the lab: shaped, separate, and removed afterwards, however the launcher ended."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from workers import Disturbed, measured, undisturbed

from gossamer import InputError
from gossamer.lab import LabCluster, LabUnavailable, WorkerFailed, clean_up, why_unavailable
from gossamer.lab import cluster as cluster_module
from gossamer.lab.namespaces import NETNS, leftovers
from gossamer.lab.shaping import address

needs_namespaces = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
lab = [pytest.mark.requires_root, needs_namespaces]


def all_reduce(rank: int, numel: int) -> list[float]:
    dist.init_process_group("gloo")
    tensor = torch.full((numel,), float(rank))
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return [tensor.min().item(), tensor.max().item()]


def interfaces(rank: int) -> tuple[set[str], str, str]:
    names = {name for _, name in socket.if_nameindex()}
    return names, os.environ["GLOO_SOCKET_IFNAME"], os.environ["MASTER_ADDR"]


def pace(rank: int) -> str:
    return os.environ["GOSSAMER_PACE"]


def fail(rank: int) -> None:
    raise RuntimeError("no luck")


def names_of(cluster: LabCluster) -> set[str]:
    space = cluster._namespaces
    assert space is not None
    return {space.hub, *space.names}


def existing() -> set[str]:
    return {p.name for p in NETNS.iterdir()} if NETNS.is_dir() else set()


def congestion_control(rank: int) -> str:
    """Connect worker 1 to worker 0, and return the algorithm of the own end of the connection."""
    where = (address(0), 5000)
    if rank == 0:
        with socket.create_server(where) as server:
            server.settimeout(300)
            end = server.accept()[0]
    else:
        end = connected(where)
    with end:
        return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).rstrip(b"\0").decode()


def connected(where: tuple[str, int]) -> socket.socket:
    deadline = time.monotonic() + 300
    while True:
        try:
            return socket.create_connection(where, timeout=300)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def reachable(rank: int) -> set[int]:
    """The other nodes that answer, if only by refusing the connection."""
    found = set()
    for node in {0, 1, 2} - {rank}:
        try:
            socket.create_connection((address(node), 9), timeout=3).close()
        except ConnectionRefusedError:
            found.add(node)
        except TimeoutError:
            pass
    return found


class TestNamespaces:
    pytestmark = lab

    def test_congestion_control_is_that_of_linux_whatever_the_host_uses(self):
        with LabCluster(2, 1, check=False) as cluster, cluster.pool() as pool:
            assert pool.run(congestion_control) == ["cubic", "cubic"]

    def test_bandwidth_is_as_requested_and_no_packet_is_dropped(self):
        asked = {(0, 1): 40e6, (0, 2): 10e6, (1, 2): 80e6}

        def attempt(k):
            try:
                with LabCluster(3, 1, link="40mbit", links={(0, 2): "10mbit", (1, 2): "80mbit"}) as cluster:
                    rates = dict(cluster.measured)
            except LabUnavailable as error:  # a busy machine carries less
                raise Disturbed("the links are too slow") from error
            assert set(rates) == {*asked, *((b, a) for a, b in asked)}
            for (a, b), rate in asked.items():
                measured(rates[a, b] == pytest.approx(rate, rel=0.2), rates)
                measured(rates[b, a] == pytest.approx(rate, rel=0.2), rates)
            assert cluster.dropped == 0
            assert cluster.describe()["network"] == "namespaces"

        undisturbed(attempt)

    def test_gloo_reduces_over_the_links_and_the_kernel_counts_the_bytes(self):
        with LabCluster(2, [2, 1], link="100mbit", check=False) as cluster:
            assert cluster.run(all_reduce, 100_000) == [[3.0, 3.0]] * 3
            traffic = cluster.traffic()
        assert cluster.dropped == 0
        assert all(node["sent"] > 400_000 for node in traffic)  # at least the tensor leaves each node
        assert all(node["sent"] < 2_000_000 for node in traffic)

    def test_workers_see_their_nodes_network_only(self):
        with LabCluster(2, 1, check=False) as cluster:
            assert cluster.run(interfaces) == [({"lo", "lab0"}, "lab0", "10.77.0.1")] * 2

    def test_intra_node_traffic_does_not_touch_the_link(self):
        with LabCluster(2, [2, 1], link="1mbit", check=False) as cluster:
            cluster.run(pairs_inside_node, 1_000_000, timeout=300)
            assert cluster.traffic()[0]["sent"] < 100_000

    def test_a_pair_of_nodes_that_is_cut_reaches_only_the_others(self):
        everybody = [{1, 2}, {0, 2}, {0, 1}]
        with LabCluster(3, 1, check=False) as cluster, cluster.pool() as pool:
            assert pool.run(reachable) == everybody
            cluster.cut_pair(0, 2)
            assert pool.run(reachable) == [{1}, {0, 2}, {1}]
            with pytest.raises(InputError, match=r"nodes \[0, 2\] are cut off from each other already"):
                cluster.cut_pair(0, 1)
            cluster.mend_pair()
            assert pool.run(reachable) == everybody
            with pytest.raises(InputError, match="a pair is two different nodes"):
                cluster.cut_pair(1, 1)

    def test_two_clusters_at_once_leave_no_namespace(self):
        with LabCluster(2, check=False) as first:
            with LabCluster(2, check=False) as second:
                ours = names_of(first) | names_of(second)
                assert len(ours) == 6
                assert ours <= existing()
                assert first.run(interfaces) == second.run(interfaces)
            assert names_of(first) <= existing()
        assert not ours & existing()

    def test_no_namespace_is_left_after_a_failure(self):
        ours = set()
        with pytest.raises(WorkerFailed, match="no luck"), LabCluster(2, check=False) as cluster:  # noqa: PT012
            ours |= names_of(cluster)
            cluster.run(fail)
        assert ours
        assert not ours & existing()

    def test_no_namespace_is_left_when_the_start_fails(self, monkeypatch):
        monkeypatch.setattr(cluster_module, "measure", lambda *_: 1.0)
        before = existing()
        refused = pytest.raises(LabUnavailable, match=r"from node 0 to node 1 carries .* instead of 50mbit")
        with refused, LabCluster(2, link="50mbit"):
            pass
        mine = {n for n in existing() - before if n.startswith(f"gsm-{os.getpid()}-")}
        assert not mine

    @pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
    def test_namespaces_of_a_killed_or_interrupted_launcher_are_removed(self, tmp_path, number):
        script = tmp_path / "script.py"
        script.write_text(
            textwrap.dedent("""
            import signal, time
            from gossamer.lab import LabCluster
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job ignores it
            def sleep(rank):
                time.sleep(600)
            if __name__ == "__main__":
                with LabCluster(2, link="10mbit", check=False) as cluster:
                    print(*cluster._namespaces.names, flush=True)
                    cluster.run(sleep, timeout=600)
            """)
        )
        launcher = subprocess.Popen(
            [sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            names = set(launcher.stdout.readline().split())
            assert len(names) == 2
            assert names <= existing()
            if number == signal.SIGINT:
                time.sleep(0.5)
            launcher.send_signal(number)
            launcher.wait(300)
        finally:
            launcher.kill()
            launcher.stdout.close()
        if number == signal.SIGKILL:
            assert names <= set(leftovers())
            with LabCluster(2, check=False):  # the next start cleans up
                assert not names & existing()
        assert not names & existing()
        assert not names & set(clean_up())


def pairs_inside_node(rank: int, numel: int) -> None:
    """Workers 0 and 1 share a node; worker 2 only joins the rendezvous."""
    dist.init_process_group("gloo")
    group = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(torch.ones(numel), group=group)
    dist.barrier()
    dist.destroy_process_group()


def test_paced_workers_get_the_rates():
    with LabCluster(2, link="8mbit", network="paced") as cluster:
        assert cluster.run(pace) == ['{"nodes": [0, 1], "link": 8000000.0, "links": {}}'] * 2


def test_loopback_cluster_runs_anywhere():
    with LabCluster(2, [1, 2], network="loopback") as cluster:
        assert cluster.run(all_reduce, 10) == [[3.0, 3.0]] * 3
        assert cluster.stats is not None
        assert cluster.describe()["network"] == "loopback"


def test_persistent_workers_end_with_the_cluster():
    with LabCluster(1, 2, network="loopback") as cluster:
        pool = cluster.pool()
        pool.run(all_reduce, 10)
        pids = list(pool.pids)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
