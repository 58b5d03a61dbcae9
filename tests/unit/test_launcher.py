"""What a process makes of a launcher's variables, and the sentences about missing or wrong ones."""

import sys
from types import SimpleNamespace

import pytest

from gossamer.cli import main
from gossamer.comm.launcher import (
    LAUNCHERS,
    find_launcher,
    inside_ray_train,
    launched,
    launched_rank,
    layout_of,
    node_name,
    torn_node,
)
from gossamer.errors import InputError
from gossamer.jobs import layout

BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_NODEID": "0"}


@pytest.fixture
def launch(monkeypatch):
    """Sets the variables of a launcher, and no others."""

    def set_variables(**variables):
        for launcher in LAUNCHERS:
            monkeypatch.delenv(launcher.rank, raising=False)
            monkeypatch.delenv(launcher.size, raising=False)
        for name in ("GOSSAMER_NODE", "GOSSAMER_DIRECTORY", "GROUP_RANK", "NODE_RANK", "SLURM_NODEID", "MASTER_ADDR"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return set_variables


@pytest.mark.parametrize(
    ("variables", "started"),
    [
        ({}, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, True),  # torchrun with one worker
        ({"RANK": "0"}, False),
        (BATCH_SCRIPT, False),
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}, False),  # an interactive shell
        ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2"}, True),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"PMI_RANK": "0", "PMI_SIZE": "1"}, False),
    ],
)
def test_whether_a_launcher_started_this_process(launch, variables, started):
    launch(**variables)
    assert launched() is started


def test_the_variables_of_mpi_count_before_those_of_slurm(launch):
    launch(**BATCH_SCRIPT, SLURM_STEP_NUM_TASKS="2", OMPI_COMM_WORLD_RANK="5", OMPI_COMM_WORLD_SIZE="8")
    assert find_launcher().name == "Open MPI"
    assert launched_rank() == (5, 8)


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({}, "none of RANK and WORLD_SIZE, or OMPI_COMM_WORLD_RANK and .+, or PMI_RANK and .+, or SLURM_PROCID and .+"),
        ({"RANK": "2"}, "RANK and WORLD_SIZE must be set .+ got '2' and ''"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "got '2' and '2'"),
        ({"RANK": "-1", "WORLD_SIZE": "2"}, "got '-1' and '2'"),
        ({"PMI_RANK": "x", "PMI_SIZE": "2"}, "PMI_RANK and PMI_SIZE must be set .+ got 'x' and '2'"),
        (BATCH_SCRIPT, "SLURM_PROCID and SLURM_STEP_NUM_TASKS must be set .+ got '0' and ''"),
    ],
)
def test_missing_and_wrong_variables_are_named(launch, variables, complaint):
    launch(**variables)
    with pytest.raises(InputError, match=complaint):
        launched_rank()


@pytest.mark.parametrize(
    ("variables", "name"),
    [
        ({}, "host here"),
        ({"SLURM_NODEID": "3"}, "SLURM_NODEID=3 on here"),
        ({"SLURM_NODEID": "3", "NODE_RANK": "0"}, "NODE_RANK=0 on here"),
        ({"SLURM_NODEID": "3", "GROUP_RANK": "1"}, "GROUP_RANK=1 on here"),  # torchrun under srun
        ({"GROUP_RANK": "1", "GOSSAMER_NODE": "rack"}, "GOSSAMER_NODE=rack"),
        ({"OMPI_COMM_WORLD_NODE_RANK": "1"}, "host here"),  # not the number of a node
    ],
)
def test_the_name_of_a_node(launch, monkeypatch, variables, name):
    launch(**variables)
    monkeypatch.setattr("socket.gethostname", lambda: "here")
    assert node_name() == name


def test_nodes_are_numbered_by_their_first_worker():
    assert layout_of(["b", "b", "a", "b"]).node == (0, 0, 1, 0)


@pytest.mark.parametrize(("names", "torn"), [("aabb", None), ("abab", "a"), ("aaba", "a"), ("a", None)])
def test_a_torn_node_is_found(names, torn):
    assert torn_node(list(names)) == torn


def raising(error):
    def get_context():
        raise error

    return get_context


@pytest.mark.parametrize(
    ("get_context", "inside"),
    [
        (lambda: SimpleNamespace(get_world_size=lambda: 2), True),
        (lambda: SimpleNamespace(get_world_size=lambda: None), False),  # the first version of Ray Train, outside
        (raising(RuntimeError("outside of a training function")), False),
        (raising(DeprecationWarning("use ray.tune")), False),
    ],
)
def test_a_worker_of_ray_train_is_recognized(monkeypatch, get_context, inside):
    monkeypatch.setitem(sys.modules, "ray.train", SimpleNamespace(get_context=get_context))
    assert inside_ray_train() is inside


def test_without_ray_nobody_is_inside_ray_train(monkeypatch):
    monkeypatch.delitem(sys.modules, "ray.train", raising=False)
    assert not inside_ray_train()


# -- gossamer doctor --job ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "complaint"),
    [
        ({}, "no launcher has started this process as a worker; run the command under the launcher of your job"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
        ({"RANK": "0", "WORLD_SIZE": "2", "GOSSAMER_DIRECTORY": "nowhere"}, "must be host:port, got 'nowhere'"),
        ({"RANK": "3", "WORLD_SIZE": "2"}, "got '3' and '2'"),
    ],
)
def test_doctor_of_a_job_says_what_is_missing(launch, capsys, variables, complaint):
    launch(**variables)
    assert main(["doctor", "--job"]) == 2
    assert complaint in capsys.readouterr().err


def test_doctor_of_a_job_says_who_is_missing(launch, capsys, monkeypatch):
    launch(RANK="1", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="9")  # nobody listens there
    monkeypatch.setattr(layout, "TIMEOUT", 1.0)
    assert main(["doctor", "--job"]) == 2
    said = capsys.readouterr().err
    assert "worker 1 of 2 could not meet the others at 127.0.0.1:9" in said
    assert "MASTER_ADDR is worker 0's host" in said


def seen(problems):
    nodes = [layout.SeenNode("host a", ["a"], [0, 1, 2]), layout.SeenNode("host [b]", ["[b]"], [3])]
    return layout.SeenJob(0, 4, "torchrun (RANK, WORLD_SIZE)", "a:29500", nodes, problems)


def test_doctor_of_a_job_prints_the_layout(monkeypatch, capsys):
    monkeypatch.setattr(layout, "inspect_job", lambda: seen([]))
    assert main(["doctor", "--job"]) == 0
    said = capsys.readouterr().out
    assert "4 workers on 2 nodes, started by torchrun (RANK, WORLD_SIZE); they met at a:29500" in said
    assert "0-2" in said
    assert "host [b]" in said
    assert "next: gossamer topology list --per-node 3,1" in said


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_problem_is_printed_and_fails(monkeypatch, capsys, flags):
    monkeypatch.setattr(layout, "inspect_job", lambda: seen(["versions differ"]))
    assert main(["doctor", "--job", *flags]) == 1
    assert "versions differ" in capsys.readouterr().out


def test_other_versions_are_a_problem():
    old, new = {"torch": "2.6.0"}, {"torch": "2.13.0"}
    (problem,) = layout._problems([{"node": "a", "versions": v} for v in (new, new, old)])
    assert problem.startswith("worker 2 has other versions than worker 0")
