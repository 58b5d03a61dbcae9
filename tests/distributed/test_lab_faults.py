"""Workers that are started, killed, stopped and replaced one by one, and links that are cut."""

import os
import signal
import socket
import time
from pathlib import Path

import pytest

from gossamer import InputError
from gossamer.lab import LabCluster, LabUnavailable, WorkerPool, why_unavailable

needs_namespaces = pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))


def count(rank: int, path: str, seconds: float = 300.0) -> str:
    """Add a line every 10 ms."""
    deadline = time.monotonic() + seconds
    with Path(path).open("a", buffering=1) as file:
        while time.monotonic() < deadline and not Path(f"{path}.end").exists():
            print(os.environ["RANK"], file=file)
            time.sleep(0.01)
    return f"{rank} returned"


def fail(rank: int) -> None:
    raise ValueError(f"no luck on {rank}")


def listen(rank: int, path: str) -> list[str]:
    """Every line that arrives, until the peer hangs up; also written to a file as they come."""
    with socket.create_server(("", 5000)) as server, Path(path).open("a", buffering=1) as file:
        connection, _ = server.accept()
        with connection.makefile() as lines:
            return [line.strip() for line in lines if file.write(line)]


def talk(rank: int, address: str, path: str) -> str:
    """Send a number every 10 ms until the end file exists; write down how many were sent."""
    for _ in range(6000):
        try:
            connection = socket.create_connection((address, 5000), 5)
            break
        except OSError:
            time.sleep(0.05)
    with connection:
        said = 0
        while not Path(f"{path}.end").exists():
            connection.sendall(f"{said}\n".encode())
            said += 1
            Path(path).write_text(str(said))
            time.sleep(0.01)
    return str(said)


def grows(path: Path, seconds: float = 300.0) -> bool:
    """Whether a file becomes longer within some time."""
    before = path.stat().st_size if path.exists() else 0
    for _ in range(int(seconds / 0.05)):
        if path.exists() and path.stat().st_size > before:
            return True
        time.sleep(0.05)
    return False


def ends(pool: WorkerPool, rank: int):
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline:
        for worker in pool.poll(0.2):
            if worker.rank == rank:
                return worker
    raise AssertionError(f"worker {rank} did not end")


def test_a_killed_worker_does_not_affect_the_others_and_is_replaced(tmp_path):
    files = [tmp_path / str(rank) for rank in range(2)]
    with WorkerPool(2) as pool:
        for rank in range(2):
            pool.start(rank, count, str(files[rank]))
        assert grows(files[0])
        assert grows(files[1])
        with pytest.raises(InputError, match="rank 0 is taken"):
            pool.start(0, count, str(files[0]))
        pool.kill(0)
        dead = ends(pool, 0)
        assert (dead.ending, dead.why, dead.killed, dead.generation) == ("died", "killed by SIGKILL", True, 0)
        assert grows(files[1])
        assert pool.start(0, count, str(files[0])).generation == 1
        assert grows(files[0])
        (tmp_path / "1.end").touch()
        ended = ends(pool, 1)
        assert (ended.ending, ended.value) == ("returned", "1 returned")
        pids = [dead.pid, *pool.pids]
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_replacement_can_be_started_right_after_a_kill(tmp_path):
    with WorkerPool(1) as pool:
        first = pool.start(0, count, str(tmp_path / "0"))
        pool.kill(0)
        assert not Path(f"/proc/{first.pid}").exists()
        second = pool.start(0, fail)
        assert pool.poll(300) == [first]
        assert (first.ending, first.killed) == ("died", True)
        assert ends(pool, 0) is second
        assert pool.poll() == []
        with pytest.raises(InputError, match="rank 7 was never started"):
            pool.kill(7)


def test_run_refuses_a_pool_with_running_workers(tmp_path):
    with WorkerPool(2) as pool:
        pool.start(0, count, str(tmp_path / "0"))
        with pytest.raises(InputError, match="started one by one"):
            pool.run(os.getpgid)
        pool.kill()
        assert len(pool.run(os.getpgid)) == 2


def test_a_stopped_worker_does_nothing_until_it_is_resumed(tmp_path):
    path = tmp_path / "0"
    with WorkerPool(1) as pool:
        worker = pool.start(0, count, str(path))
        assert grows(path)
        pool.stop(0)
        for _ in range(6000):
            if Path(f"/proc/{worker.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T":
                break
            time.sleep(0.05)
        assert not grows(path, 0.5)
        pool.resume(0)
        assert grows(path)


def test_exceptions_and_deaths_are_reported_differently():
    with WorkerPool(2) as pool:
        pool.start(0, fail)
        raised = ends(pool, 0)
        assert raised.ending == "raised"
        assert "ValueError: no luck on 0" in raised.why
        worker = pool.start(1, time.sleep)
        os.kill(worker.pid, signal.SIGTERM)
        assert not worker.killed
        with pytest.raises(InputError, match="ranks are 0 to 1, got 2"):
            pool.start(2, fail)


def test_file_descriptors_do_not_accumulate():
    with WorkerPool(1) as pool:
        pool.start(0, fail)
        ends(pool, 0)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with WorkerPool(1) as pool:
            pool.start(0, fail)
            pool.kill(0)
            ends(pool, 0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_workers_of_a_pool_share_a_secret_token(monkeypatch):
    monkeypatch.delenv("GOSSAMER_TOKEN", raising=False)
    pools = [WorkerPool(2), WorkerPool(2)]
    tokens = [{spec.env["GOSSAMER_TOKEN"] for spec in pool.specs} for pool in pools]
    assert [len(token) for token in tokens] == [1, 1]  # the same for all, also for replacements
    assert tokens[0] != tokens[1]
    assert WorkerPool(1, env={"GOSSAMER_TOKEN": "given"}).specs[0].env["GOSSAMER_TOKEN"] == "given"
    monkeypatch.setenv("GOSSAMER_TOKEN", "ours")
    assert "GOSSAMER_TOKEN" not in WorkerPool(1).specs[0].env  # inherited


def test_the_directory_of_loopback_workers_listens_on_loopback_only():
    with LabCluster(nodes=1, per_node=1, network="loopback") as cluster, cluster.directory() as address:
        name, port = address.split(":")
        tables = [Path(f"/proc/net/{table}").read_text().splitlines()[1:] for table in ("tcp", "tcp6")]
        places = [line.split()[1] for lines in tables for line in lines if line.split()[3] == "0A"]  # listening
    assert name == "127.0.0.1"
    assert [p for p in places if p.endswith(f":{int(port):04X}")] == [f"0100007F:{int(port):04X}"]


def test_links_on_loopback_cannot_be_cut():
    with LabCluster(2, 1, network="loopback") as cluster, pytest.raises(LabUnavailable, match="use namespaces"):
        cluster.cut(1)


@pytest.mark.requires_root
@needs_namespaces
@pytest.mark.parametrize("silently", [False, True])
def test_a_cut_link_delays_all_bytes_and_loses_none(tmp_path, silently):
    path, heard = tmp_path / "said", tmp_path / "heard"
    with LabCluster(2, 1, link="50mbit", check=False) as cluster, cluster.pool() as pool:
        with pytest.raises(InputError, match="nodes are 0 to 1, got 2"):
            cluster.cut(2)
        pool.start(0, listen, str(heard))
        pool.start(1, talk, "10.77.0.1", str(path))
        assert grows(heard)
        cluster.cut(1, silently=silently)
        assert any(not grows(heard, 0.7) for _ in range(100))  # what had passed may still be on its way into the file
        cluster.mend(1)
        assert grows(heard)
        cluster.slow(1, "1mbit")
        cluster.slow(1, None)
        (tmp_path / "said.end").touch()
        listener = ends(pool, 0)
        assert listener.ending == "returned"
        assert listener.value == [str(k) for k in range(int(path.read_text()))]
