"""The files of examples/launch: scripts give workers the right variables, YAML files have the fields they claim."""

import json
import re
import signal
import subprocess
from pathlib import Path

import jsonschema
import pytest
from referencing import Registry, Resource

from launch_files import LAUNCH, ROOT, SLURM_JOB, container_of, elastic_objects, parsed, run

SCHEMAS = Path(__file__).parents[1] / "schemas"
YAML = {
    "kubernetes_trainjob.yaml": "trainjob.json",
    "kubernetes_pytorchjob.yaml": "pytorchjob.json",
    "skypilot.yaml": "skypilot.json",
}
SHOW = ["bash", "-c", 'echo "$RANK $WORLD_SIZE $LOCAL_RANK $MASTER_ADDR $MASTER_PORT"']


def workers(output):
    return sorted(tuple(line.split()) for line in output.splitlines())


@pytest.mark.parametrize("script", ["slurm.sbatch", "slurm_steps.sbatch"])
def test_slurm_scripts_give_every_worker_its_variables(script):
    found = workers(run(script, *SHOW, **SLURM_JOB))
    assert found == [(str(r), "4", str(r % 2), "127.0.0.1", "24711") for r in range(4)]


@pytest.mark.parametrize("mpi", ["Open MPI", "Hydra"])
def test_the_mpi_script_gives_every_worker_its_variables(mpi, tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("a slots=2\nb slots=2\n")
    found = workers(run("mpirun.sh", "4", str(hosts), *SHOW, EMULATED_MPI=mpi, MASTER_ADDR="a", MASTER_PORT="29501"))
    assert found == [(str(r), "4", str(r % 2), "a", "29501") for r in range(4)]


def test_a_failing_step_fails_the_job():
    with pytest.raises(AssertionError):
        run("slurm_steps.sbatch", "bash", "-c", "exit $((RANK == 3))", **SLURM_JOB)


def test_a_worker_without_a_launcher_is_told_so():
    done = subprocess.run(
        ["bash", str(LAUNCH / "worker.sh"), "true"], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"}
    )
    assert done.returncode != 0
    assert "start worker.sh with srun, mpirun or mpiexec" in done.stderr


def validator(name):
    schemas = {file.name: json.loads(file.read_text()) for file in SCHEMAS.glob("*.json")}
    registry = Registry().with_resources((n, Resource.from_contents(s)) for n, s in schemas.items())
    return jsonschema.Draft202012Validator(schemas[name], registry=registry)


@pytest.mark.parametrize(("file", "schema"), YAML.items())
def test_the_yaml_files_fit_their_schema(file, schema):
    validator(schema).validate(parsed(file))


@pytest.mark.parametrize(
    ("file", "schema", "change"),
    [
        ("kubernetes_trainjob.yaml", "trainjob.json", lambda job: job["spec"].pop("runtimeRef")),
        ("kubernetes_trainjob.yaml", "trainjob.json", lambda job: job["spec"]["trainer"].update(numNodes="2")),
        ("kubernetes_pytorchjob.yaml", "pytorchjob.json", lambda job: job["spec"].update(nprocPerNode=4)),
        (
            "kubernetes_pytorchjob.yaml",
            "pytorchjob.json",
            lambda job: job["spec"]["pytorchReplicaSpecs"]["Master"].update(replicas=2),
        ),
        (
            "kubernetes_pytorchjob.yaml",
            "pytorchjob.json",
            lambda job: job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"][0].update(
                name="x"
            ),
        ),
        ("skypilot.yaml", "skypilot.json", lambda task: task.update(nodes=2)),
    ],
)
def test_the_schemas_refuse_mistakes(file, schema, change):
    content = parsed(file)
    change(content)
    with pytest.raises(jsonschema.ValidationError):
        validator(schema).validate(content)


def elastic_spec(job):
    return job["spec"]["template"]["spec"]


def test_the_elastic_job_fits_its_schema():
    objects = elastic_objects()
    assert set(objects) == {"Job", "Service", "Deployment"}
    for each in objects.values():
        validator("elasticjob.json").validate(each)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("Job", lambda job: elastic_spec(job).update(restartPolicy="OnFailure")),  # refused with a podFailurePolicy
        ("Job", lambda job: job["spec"].update(completionMode="NonIndexed")),
        ("Job", lambda job: job["spec"].update(podReplacementPolicy="TerminatingOrFailed")),
        ("Job", lambda job: job["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"].update(values=[0])),
        ("Job", lambda job: container_of(job)["env"][0].update(value="0")),
        ("Service", lambda service: service["spec"].update(ports=[])),
        ("Deployment", lambda deployment: deployment["spec"]["template"].pop("metadata")),
    ],
)
def test_the_schema_of_the_elastic_job_refuses_mistakes(kind, change):
    content = elastic_objects()[kind]
    change(content)
    with pytest.raises(jsonschema.ValidationError):
        validator("elasticjob.json").validate(content)


def test_the_elastic_job_agrees_with_its_directory_and_its_program():
    objects = elastic_objects()
    job, service, deployment = objects["Job"], objects["Service"], objects["Deployment"]
    env = {variable["name"]: variable for variable in container_of(job)["env"]}
    workers = job["spec"]["completions"]
    assert job["spec"]["parallelism"] == workers, "all workers run at the same time"
    assert env["WORLD_SIZE"]["value"] == str(workers)
    (port,) = (each["port"] for each in service["spec"]["ports"])
    assert env["GOSSAMER_DIRECTORY"]["value"] == f"{service['metadata']['name']}:{port}"
    command = container_of(deployment)["command"]
    assert command[command.index("--port") + 1] == str(port)
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels == deployment["spec"]["selector"]["matchLabels"]

    _, program, *_ = container_of(job)["command"]
    text = (ROOT / program).read_text(encoding="utf-8")
    assert f"grace={elastic_spec(job)['terminationGracePeriodSeconds']})" in text
    codes = [rule["onExitCodes"] for rule in job["spec"]["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert codes == [{"operator": "In", "values": [128 + signal.SIGTERM]}]
    assert "sys.exit(128 + signal.SIGTERM" in text


def test_every_file_starts_a_program_that_exists_and_is_in_the_readme():
    readme = (LAUNCH / "README.md").read_text(encoding="utf-8")
    assert [link for link in re.findall(r"\]\(([^)#]+)", readme) if not (LAUNCH / link).exists()] == []
    for file in LAUNCH.iterdir():
        text = file.read_text(encoding="utf-8")
        assert f"({file.name})" in readme or file.name == "README.md", f"{file.name} is not in the README"
        named = re.findall(r"examples/[\w/]+\.\w+", text)
        assert [name for name in named if not (ROOT / name).exists()] == []
        if file.suffix in (".sh", ".sbatch"):
            assert subprocess.run(["bash", "-n", str(file)]).returncode == 0
