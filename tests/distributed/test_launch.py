"""Launchers on real processes: what workers make of a launcher's variables, and the job that `doctor --job` sees."""

import contextlib
import json
import os
import random
import re
import socket
import subprocess

import pytest
import torch
from workers import mlp, process_group

import gossamer
from gossamer.comm.launcher import launched_rank
from gossamer.jobs.layout import inspect_job
from launch_files import LAUNCH, ROOT, SLURM_JOB, container_of, elastic_objects, environment, parsed, run

OURS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
SIZE = 4


def slurm(rank):
    """srun with one task per worker, on 2 nodes."""
    return {"SLURM_PROCID": rank, "SLURM_STEP_NUM_TASKS": SIZE, "SLURM_NODEID": rank // 2}


def slurm_steps(rank):
    """One step per node: Slurm counts from 0 in each step, and the job script sets ranks."""
    step = {"SLURM_PROCID": rank % 2, "SLURM_STEP_NUM_TASKS": 2, "SLURM_NODEID": 0}
    return step | {"RANK": rank, "WORLD_SIZE": SIZE}


def open_mpi(rank):
    own = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": SIZE}
    return own | {"OMPI_COMM_WORLD_LOCAL_RANK": rank % 2, "OMPI_COMM_WORLD_NODE_RANK": rank % 2}


def open_mpi_in_slurm(rank):
    """Slurm's variables are those of the daemons that mpirun started, one per node."""
    return open_mpi(rank) | {"SLURM_PROCID": rank // 2, "SLURM_STEP_NUM_TASKS": 2, "SLURM_NODEID": 0}


def mpich(rank):
    return {"PMI_RANK": rank, "PMI_SIZE": SIZE, "MPI_LOCALRANKID": rank % 2}


def ray_train(rank):
    return {"RANK": rank, "WORLD_SIZE": SIZE, "LOCAL_RANK": rank % 2, "NODE_RANK": rank // 2}


def by_hand(rank):
    return {"RANK": rank, "WORLD_SIZE": SIZE, "GOSSAMER_NODE": "left" if rank < 2 else "right"}


@contextlib.contextmanager
def launched_by(variables, host):
    """The environment that a launcher makes, on a host of this name."""
    before, name = dict(os.environ), socket.gethostname
    for variable in OURS:
        os.environ.pop(variable, None)
    os.environ.update({key: str(value) for key, value in variables.items()})
    socket.gethostname = lambda: host
    try:
        yield
    finally:
        socket.gethostname = name
        os.environ.clear()
        os.environ.update(before)


def host_of(rank, launcher):
    return "one-host" if launcher is by_hand else f"host-{rank // 2}"


def look(rank, launcher):
    """Rank and size before anything is made, and what `doctor --job` sees."""
    with launched_by(launcher(rank), host_of(rank, launcher)):
        return launched_rank(), inspect_job().to_dict()


def start(rank, launcher):
    """The layout that `decentralize` finds, in a process group that the user's script has made."""
    with launched_by(launcher(rank) | {"RANK": rank, "WORLD_SIZE": SIZE}, host_of(rank, launcher)), process_group():
        model = mlp()
        with gossamer.decentralize(model, torch.optim.SGD(model.parameters(), lr=0.1)) as gossip:
            return gossip.control.layout.node


@pytest.mark.parametrize(
    ("launcher", "name", "node"),
    [
        (slurm, "Slurm (SLURM_PROCID, SLURM_STEP_NUM_TASKS)", "SLURM_NODEID=1 on host-1"),
        (slurm_steps, "torch (RANK, WORLD_SIZE)", "SLURM_NODEID=0 on host-1"),
        (open_mpi, "Open MPI (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)", "host host-1"),
        (open_mpi_in_slurm, "Open MPI (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE)", "SLURM_NODEID=0 on host-1"),
        (mpich, "MPICH (PMI_RANK, PMI_SIZE)", "host host-1"),
        (ray_train, "torch (RANK, WORLD_SIZE)", "NODE_RANK=1 on host-1"),
        (by_hand, "torch (RANK, WORLD_SIZE)", "GOSSAMER_NODE=right"),
    ],
)
def test_two_nodes_of_two_workers_are_seen_as_such(pools, launcher, name, node):
    assert pools(4).run(start, launcher) == [(0, 0, 1, 1)] * SIZE
    found = pools(4).run(look, launcher)
    assert [numbers for numbers, _ in found] == [(rank, SIZE) for rank in range(SIZE)]
    for _, seen in found:
        assert (seen["workers"], seen["launcher"], seen["problems"]) == (SIZE, name, [])
        assert [n["ranks"] for n in seen["nodes"]] == [[0, 1], [2, 3]]
        assert seen["nodes"][1]["name"] == node


def look_around(rank):
    """Ranks that alternate between two hosts, as `srun --distribution=cyclic` places them."""
    with launched_by({"RANK": rank, "WORLD_SIZE": SIZE}, f"host-{rank % 2}"):
        return inspect_job().to_dict()


def test_ranks_that_are_not_consecutive_on_a_node_are_a_problem(pools):
    for seen in pools(4).run(look_around):
        assert [n["ranks"] for n in seen["nodes"]] == [[0, 2], [1, 3]]
        (problem,) = seen["problems"]
        assert problem.startswith("the ranks of node 'host host-0' are not consecutive")


def look_in_the_directory(rank, address):
    with launched_by({"RANK": rank, "WORLD_SIZE": SIZE, "GOSSAMER_DIRECTORY": address}, f"host-{rank // 2}"):
        del os.environ["MASTER_ADDR"]
        return inspect_job().to_dict()


def test_the_workers_of_an_elastic_job_meet_in_its_directory(pools):
    hosted = gossamer.HostedDirectory(address="127.0.0.1")
    address = f"127.0.0.1:{hosted.port}"
    for seen in pools(4).run(look_in_the_directory, address):
        assert seen["met_at"] == f"the directory {address}"
        assert [n["hosts"] for n in seen["nodes"]] == [["host-0"], ["host-1"]]
    assert not hosted.founded
    hosted.close()


# -- the files of examples/launch, with `gossamer doctor --job` as their program --------------------------------------

DOCTOR = ["-m", "gossamer", "doctor", "--job", "--json"]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def free_job():
    """The id of a Slurm job for which the scripts choose a port that is free."""
    while True:
        job = random.randrange(9000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", 20000 + job)):
            return str(job)


def together(commands, environments):
    """What the commands print that run at the same time, one per node of a job."""
    pairs = zip(commands, environments, strict=True)
    running = [
        subprocess.Popen(c, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment(**env))
        for c, env in pairs
    ]
    done = [process.communicate(timeout=300) for process in running]
    assert [process.returncode for process in running] == [0] * len(running), done[0][1][-3000:]
    return "".join(out for out, _ in done)


def test_one_step_per_node_under_slurm():
    seen = json.loads(run("slurm_steps.sbatch", "python", *DOCTOR, **SLURM_JOB | {"SLURM_JOB_ID": free_job()}))
    assert [(n["name"], n["ranks"]) for n in seen["nodes"]] == [
        ("SLURM_NODEID=0 on 127.0.0.1", [0, 1]),
        ("SLURM_NODEID=0 on localhost", [2, 3]),
    ]


def test_torchrun_on_two_hosts_as_skypilot_starts_it():
    task = parsed("skypilot.yaml")
    program = f"{task['run'].rstrip()} {' '.join(DOCTOR)}"
    shared = {"SKYPILOT_NUM_NODES": str(task["num_nodes"]), "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2"}
    shared |= {"WORKERS_PER_NODE": "1", "MASTER_PORT": free_port()}
    out = together(
        [["bash", "-c", program]] * 2,
        [shared | {"SKYPILOT_NODE_RANK": str(node), "EMULATED_HOST": f"host-{node}"} for node in range(2)],
    )
    seen = json.loads(out)
    assert seen["launcher"] == "torchrun (RANK, WORLD_SIZE)"
    assert [(n["name"], n["ranks"]) for n in seen["nodes"]] == [
        ("GROUP_RANK=0 on host-0", [0]),
        ("GROUP_RANK=1 on host-1", [1]),
    ]


def test_torchrun_in_two_pods_as_kubeflow_starts_it():
    trainer = parsed("kubernetes_trainjob.yaml")["spec"]["trainer"]
    replicas = parsed("kubernetes_pytorchjob.yaml")["spec"]["pytorchReplicaSpecs"]
    assert {r["template"]["spec"]["containers"][0]["command"][0] for r in replicas.values()} == {"torchrun"}
    torchrun, _ = trainer["command"]
    shared = {"PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "127.0.0.1"}
    shared |= {"PET_MASTER_PORT": free_port()}
    out = together(
        [[torchrun, *DOCTOR]] * 2,
        [shared | {"PET_NODE_RANK": str(pod), trainer["env"][0]["name"]: "machine"} for pod in range(2)],
    )
    (node,) = json.loads(out)["nodes"]  # both pods are on one machine
    assert (node["name"], node["ranks"]) == ("GOSSAMER_NODE=machine", [0, 1])


def test_the_pods_of_an_elastic_job_train_with_their_directory(tmp_path):
    objects = elastic_objects()
    python, program, *options = container_of(objects["Job"])["command"]
    options[options.index("--steps") + 1] = "5"
    options[options.index("--folder") + 1] = str(tmp_path)
    hosted = [*container_of(objects["Deployment"])["command"], "--address", "127.0.0.1"]
    hosted[hosted.index("--port") + 1] = "0"
    workers = objects["Job"]["spec"]["completions"]
    with subprocess.Popen(hosted, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment()) as server:
        try:
            address = re.match(r"directory at (\S+);", server.stdout.readline())[1]
            shared = {"WORLD_SIZE": str(workers), "GOSSAMER_DIRECTORY": address}
            shared |= {"GOSSAMER_TOKEN": "x", "GOSSAMER_NODE": "machine"}
            out = together(
                [[python, program, *options]] * workers, [{**shared, "RANK": str(rank)} for rank in range(workers)]
            )
        finally:
            server.terminate()
    assert sorted(out.splitlines()) == [f"worker {rank}: steps 0 to 5, done" for rank in range(workers)]


def test_the_default_program_of_a_launch_file_runs():
    """The example that every file starts by default trains under it, here for one epoch under Slurm's variables."""
    job = SLURM_JOB | {"SLURM_NTASKS_PER_NODE": "1", "SLURM_JOB_ID": free_job()}
    assert "python examples/ddp_to_gossamer.py" in (LAUNCH / "slurm.sbatch").read_text(encoding="utf-8")
    out = run("slurm.sbatch", "python", "examples/ddp_to_gossamer.py", "--epochs", "1", **job)
    assert out.startswith("epoch 0  test loss ")
