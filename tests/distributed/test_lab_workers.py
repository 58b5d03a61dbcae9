"""Worker processes: results by rank, and errors that name the worker for every way to fail."""

import functools
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from gossamer import InputError
from gossamer.lab import WorkerFailed, WorkerPool, WorkerTimeout, run_workers


def environment(rank: int, *names: str) -> list[str]:
    return [os.environ[name] for name in names]


def all_reduce(rank: int, value: float) -> list[float]:
    dist.init_process_group("gloo")
    tensor = torch.full((3,), value + rank)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return tensor.tolist()


def raise_on(rank: int, who: int) -> int:
    if rank == who:
        print("about to fail")
        raise ValueError(f"boom on {who}")
    return rank


def raise_while_others_wait(rank: int, who: int) -> None:
    dist.init_process_group("gloo")
    if rank == who:
        raise ValueError("left the others waiting")
    dist.barrier()


def die_on(rank: int, who: int, number: int) -> None:
    dist.init_process_group("gloo")
    if rank == who:
        os.kill(os.getpid(), number)
    dist.barrier()


def leave_on(rank: int, who: int) -> None:
    if rank == who:
        sys.exit(7)
    time.sleep(60)


def hang_on(rank: int, who: int) -> int:
    if rank == who:
        wait_forever()
    return rank


def wait_forever() -> None:
    time.sleep(600)


def unpicklable(rank: int) -> object:
    return lambda: rank


def threads(rank: int) -> tuple[int, str]:
    return torch.get_num_threads(), os.environ["OMP_NUM_THREADS"]


def reject(rank: int) -> None:
    raise InputError("wheels must be round, got 3 corners; pass corners=0")


def pid(rank: int) -> int:
    return os.getpid()


def parent(rank: int) -> int:
    return os.getppid()


def grandchild(rank: int) -> int:
    return subprocess.Popen(["sleep", "600"]).pid


def shout(rank: int, word: str) -> None:
    print(word, rank)


def remember(rank: int) -> None:
    os.environ["SET_UP"] = f"yes {rank}"


def big(rank: int) -> torch.Tensor:
    return torch.full((1_000_000,), float(rank))


def gone(pid: int) -> bool:
    """True when the process no longer exists (or is a zombie of another process)."""
    for _ in range(6000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def test_results_come_back_by_rank_and_gloo_works():
    assert run_workers(3, all_reduce, 1.0) == [[6.0] * 3] * 3


def test_sixteen_workers():
    assert run_workers(16, all_reduce, 0.0) == [[120.0] * 3] * 16


def test_environment_is_that_of_torchrun():
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    assert run_workers(None, environment, *names, per_node=[2, 1]) == [
        ["0", "3", "0", "2", "0", "127.0.0.1"],
        ["1", "3", "1", "2", "0", "127.0.0.1"],
        ["2", "3", "0", "1", "1", "127.0.0.1"],
    ]


def test_workers_get_the_environment_of_the_caller_and_extra_variables(monkeypatch):
    monkeypatch.setenv("FROM_CALLER", "seen")
    assert run_workers(1, environment, "FROM_CALLER", "EXTRA", env={"EXTRA": "too"}) == [["seen", "too"]]


def test_workers_use_one_thread():
    assert run_workers(1, threads) == [(1, "1")]


def test_large_results():
    results = run_workers(2, big)
    assert [r.sum().item() for r in results] == [0.0, 1e6]


def test_exception_carries_rank_traceback_and_output():
    with pytest.raises(WorkerFailed, match=r"worker 1 of 3 failed in raise_on: ValueError: boom on 1") as caught:
        run_workers(3, raise_on, 1)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)
    assert "raise ValueError(f" in str(caught.value)
    assert "about to fail" in str(caught.value)


def test_exception_while_others_wait_in_a_collective():
    with pytest.raises(WorkerFailed, match=r"worker 2 of 3 .*left the others waiting"):
        run_workers(3, raise_while_others_wait, 2)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_death_by_signal_names_it(number):
    with pytest.raises(WorkerFailed, match=rf"worker 1 of 2 failed in die_on: killed by {number.name}"):
        run_workers(2, die_on, 1, number)


def test_a_death_is_the_cause_although_its_exit_code_comes_late():
    """Exit codes come through the fork server, which stands still for longer than the others may take to end."""
    server = forkserver._forkserver
    with WorkerPool(2, grace=0.1) as pool:
        pool.run(environment)
        stopped = threading.Timer(2.0, os.kill, [server._forkserver_pid, signal.SIGCONT])
        os.kill(server._forkserver_pid, signal.SIGSTOP)
        stopped.start()
        try:
            with pytest.raises(WorkerFailed, match=r"worker 1 of 2 failed in die_on: killed by SIGKILL"):
                pool.run(die_on, 1, signal.SIGKILL)
        finally:
            stopped.join()


def test_exit_code_is_named():
    with pytest.raises(WorkerFailed, match="worker 0 of 2 failed in leave_on: exited with code 7"):
        run_workers(2, leave_on, 0)


def test_a_hang_ends_at_the_timeout_with_the_stack():
    for seconds in (1, 4, 16, 64):  # on a busy machine it may not hang yet, or be too slow to write its stack
        with pytest.raises(WorkerTimeout, match="did not return from hang_on within") as caught:
            run_workers(2, hang_on, 1, timeout=seconds)
        if "wait_forever" in str(caught.value):
            return
    raise AssertionError(str(caught.value))


def test_unpicklable_result_is_a_failure():
    with pytest.raises(WorkerFailed, match="pickle"):
        run_workers(1, unpicklable)


def test_user_error_in_a_worker_is_the_cause():
    with pytest.raises(WorkerFailed) as caught:
        run_workers(1, reject)
    assert isinstance(caught.value.__cause__, InputError)


def test_no_process_is_left_behind():
    children = run_workers(2, grandchild)
    assert all(map(gone, children))
    with WorkerPool(2) as pool:
        pids = pool.run(pid)
        assert pids == pool.pids
    assert all(map(gone, pids))


@pytest.mark.parametrize(
    ("n", "per_node"), [(0, None), (-1, None), (3, [2, 2]), (None, []), (None, [2, 0]), (None, None), (500, None)]
)
def test_refuses_impossible_counts(n, per_node):
    with pytest.raises(InputError):
        run_workers(n, pid, per_node=per_node)


def test_refuses_what_cannot_be_sent():
    with pytest.raises(InputError, match="module level"):
        run_workers(1, lambda rank: rank)
    with pytest.raises(InputError, match="timeout"):
        run_workers(1, pid, timeout=0)


def test_pool_keeps_its_workers_from_call_to_call():
    with WorkerPool(2) as pool:
        first = pool.run(pid)
        assert pool.run(functools.partial(raise_on, who=-1)) == [0, 1]
        assert pool.run(all_reduce, 0.0) == [[1.0] * 3] * 2
        assert pool.run(all_reduce, 1.0) == [[3.0] * 3] * 2  # a second process group in the same workers
        assert pool.run(pid) == first
        assert pool.stats is not None
        assert len(pool.stats.cpu_seconds) == 2


def test_pool_keeps_its_workers_after_an_exception():
    with WorkerPool(2) as pool:
        first = pool.run(pid)
        with pytest.raises(WorkerFailed, match="boom on 0"):
            pool.run(raise_on, 0)
        assert pool.run(pid) == first


def test_pool_starts_again_after_a_death_or_a_hang():
    with WorkerPool(2, setup=remember, grace=0.2) as pool:
        first = pool.run(pid)
        assert pool.run(environment, "SET_UP") == [["yes 0"], ["yes 1"]]
        with pytest.raises(WorkerFailed, match="SIGKILL"):
            pool.run(die_on, 0, signal.SIGKILL)
        second = pool.run(pid)
        with pytest.raises(WorkerTimeout):
            pool.run(hang_on, 0, timeout=1)
        assert pool.run(environment, "SET_UP") == [["yes 0"], ["yes 1"]]
        assert len({*first, *second, *pool.pids}) == 6


def test_pool_whose_setup_fails_runs_nothing():
    with WorkerPool(1, setup=reject) as pool:
        for _ in range(2):
            with pytest.raises(WorkerFailed, match="failed in reject"):
                pool.run(pid)


def test_verbose_prefixes_the_rank(capfd):
    run_workers(2, shout, "hello", verbose=True)
    assert sorted(capfd.readouterr().err.splitlines()) == ["[worker 0] hello 0", "[worker 1] hello 1"]


def kill_parent_and_wait(rank):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def test_a_fork_server_that_dies_in_a_run_is_an_error_and_is_restarted():
    with WorkerPool(1) as pool:
        (child,) = pool.run(pid)
        with pytest.raises(WorkerFailed, match="worker 0 of 1 failed"):
            pool.run(kill_parent_and_wait)
        assert gone(child)  # the kernel ends workers with their server
        assert pool.run(pid) != [child]


def test_workers_that_died_since_the_last_run_are_replaced():
    with WorkerPool(2) as pool:
        first = pool.run(pid)
        server = pool.run(parent)[0]
        os.kill(first[0], signal.SIGKILL)
        assert gone(first[0])
        second = pool.run(pid)
        os.kill(server, signal.SIGKILL)
        assert gone(server)
        third = pool.run(pid)
        assert len({*first, *second, *third}) == 6


def run_script(path: Path, text: str) -> subprocess.CompletedProcess[str]:
    path.write_text(textwrap.dedent(text))
    return subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=300)


def test_a_pool_that_was_not_closed_ends_with_its_process(tmp_path):
    text = """
        import os, signal, subprocess
        from gossamer.lab import WorkerPool
        def pids(rank):
            return [os.getpid(), subprocess.Popen(["sleep", "600"]).pid]
        if __name__ == "__main__":
            pool = WorkerPool(1)
            print(*pool.run(pids)[0])
            pool.stop(0)
    """
    done = run_script(tmp_path / "script.py", text)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.split()) == 2
    assert all(gone(int(pid)) for pid in done.stdout.split())


def test_a_script_without_a_main_guard_is_an_error_that_says_so(tmp_path):
    text = """
        from gossamer.lab import run_workers
        def rank(rank):
            return rank
        run_workers(1, rank)
    """
    done = run_script(tmp_path / "script.py", text)
    assert done.returncode == 1
    assert 'a script must start workers below `if __name__ == "__main__":`' in done.stderr


def test_a_killed_launcher_leaves_no_worker_not_even_a_stopped_one(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
        import os, signal, subprocess, time
        from gossamer.lab import run_workers
        def sleep(rank, folder):
            for pid in os.getpid(), subprocess.Popen(["sleep", "600"]).pid:
                open(os.path.join(folder, str(pid)), "w").close()
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(600)
        if __name__ == "__main__":
            run_workers(2, sleep, os.path.dirname(__file__), timeout=600)
        """)
    )
    launcher = subprocess.Popen([sys.executable, str(script)])
    try:
        while len(pids := [int(p.name) for p in tmp_path.iterdir() if p.name.isdigit()]) < 4:
            assert launcher.poll() is None
            time.sleep(0.05)
    finally:
        launcher.kill()
        launcher.wait()
    assert all(map(gone, pids))
