"""Whatever lies in a checkpoint's folder, reading it gives the state or one clear sentence."""

import contextlib
import copy
import hashlib
import json
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from gossamer import Checkpoints, GossamerError
from gossamer.checkpoint import consensus, files

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FEW = settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
MANY = settings(FEW, max_examples=1000)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A checkpoint of two workers, its manifest and a file."""
    folder = tmp_path_factory.mktemp("made")
    models = [nn.Linear(3, 2) for _ in range(2)]
    both = [Checkpoints(folder, rank=r, workers=2) for r in range(2)]
    for each, model in zip(both, models, strict=True):
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(3)).sum().backward()
        optimizer.step()
        each.save(None, model, optimizer, step=1, extra={"epoch": 1})
    for each in both:
        each.wait()
    where = folder / "step-00000001"
    return folder, json.loads((where / files.MANIFEST).read_text()), (where / "worker-00001.pt").read_bytes()


def read(folder: Path) -> None:
    """Read everything; the only error allowed is ours, in one sentence with a remedy."""
    try:
        manifest = files.read_manifest(folder, 1)
        for worker in range(manifest.workers):
            files.read_part(folder, manifest, worker)
    except GossamerError as error:
        said = str(error)
        assert "\n" not in said
        assert str(folder) in said
        assert "remove its folder to load an earlier one" in said or "complete ones:" in said
        assert len(said) < 600


def put(folder: Path, manifest: object, part: bytes | None = None) -> None:
    where = folder / "step-00000001"
    where.mkdir(exist_ok=True)
    content = manifest if isinstance(manifest, bytes) else json.dumps(manifest).encode()
    (where / files.MANIFEST).write_bytes(content)
    if part is not None:
        (where / "worker-00001.pt").write_bytes(part)


def paths(value: object, at: tuple = ()) -> list[tuple]:
    """Where something could be different."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at] + [p for key, inner in items for p in paths(inner, (*at, key))]


def changed(manifest: dict, path: tuple, value: object) -> object:
    if not path:
        return value
    copied = copy.deepcopy(manifest)
    inner = copied
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return copied


def fuzz_manifests(made, tmp_path, data):
    folder, manifest, _ = made
    for name in ("worker-00000.pt", "worker-00001.pt"):
        source = folder / "step-00000001" / name
        (tmp_path / "step-00000001").mkdir(exist_ok=True)
        (tmp_path / "step-00000001" / name).write_bytes(source.read_bytes())
    kind = data.draw(st.sampled_from(["value", "bytes", "cut", "deep"]))
    whole = json.dumps(manifest).encode()
    if kind == "value":
        put(tmp_path, changed(manifest, data.draw(st.sampled_from(paths(manifest))), data.draw(JSON)))
    elif kind == "bytes":
        put(tmp_path, data.draw(st.binary(max_size=60)))
    elif kind == "cut":
        put(tmp_path, whole[: data.draw(st.integers(0, len(whole) - 1))])
    else:
        put(tmp_path, b"[" * data.draw(st.integers(1, 100_000)))
    read(tmp_path)


def fuzz_parts(made, tmp_path, data):
    _, manifest, part = made
    manifest = copy.deepcopy(manifest)
    kind = data.draw(st.sampled_from(["cut", "flip", "noise", "longer"]))
    if kind == "cut":
        part = part[: data.draw(st.integers(0, len(part) - 1))]
    elif kind == "noise":
        part = data.draw(st.binary(max_size=200))
    elif kind == "longer":
        part += data.draw(st.binary(min_size=1, max_size=50))
    else:
        at = data.draw(st.integers(0, len(part) - 1))
        part = part[:at] + bytes([part[at] ^ data.draw(st.integers(1, 255))]) + part[at + 1 :]
    forged = data.draw(st.booleans())  # the checksum agrees: torch's reader has to cope
    if forged:
        entry = manifest["files"][1]
        entry["bytes"], entry["sha256"] = len(part), hashlib.sha256(part).hexdigest()
    put(tmp_path, manifest, part)
    read_ours = files.read_manifest(tmp_path, 1)
    if forged:
        with contextlib.suppress(GossamerError):
            files.read_part(tmp_path, read_ours, 1)
    else:
        with pytest.raises(GossamerError, match=r"cannot read checkpoint .*remove its folder to load an earlier one"):
            files.read_part(tmp_path, read_ours, 1)


@FEW
@given(data=st.data())
def test_any_manifest(made, tmp_path, data):
    fuzz_manifests(made, tmp_path, data)


@FEW
@given(data=st.data())
def test_any_file(made, tmp_path, data):
    fuzz_parts(made, tmp_path, data)


@pytest.mark.slow
@MANY
@given(data=st.data())
def test_any_manifest_a_thousand_times(made, tmp_path, data):
    fuzz_manifests(made, tmp_path, data)


@pytest.mark.slow
@MANY
@given(data=st.data())
def test_any_file_a_thousand_times(made, tmp_path, data):
    fuzz_parts(made, tmp_path, data)


class _Evil:
    def __reduce__(self):
        return (print, ("this must not run",))


def test_code_in_a_file_is_not_run(made, tmp_path, capsys):
    _, manifest, _ = made
    manifest = copy.deepcopy(manifest)
    torch.save({"model": _Evil()}, tmp_path / "evil.pt")
    part = (tmp_path / "evil.pt").read_bytes()
    entry = manifest["files"][1]
    entry["bytes"], entry["sha256"] = len(part), hashlib.sha256(part).hexdigest()
    put(tmp_path, manifest, part)
    with pytest.raises(GossamerError, match="cannot read checkpoint"):
        files.read_part(tmp_path, files.read_manifest(tmp_path, 1), 1)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 1}, "it has format 1, this version reads 3"),
        ({"step": 2}, "it says step 2 in the folder of step 1"),
        ({"groups": [[0]]}, "its groups are not those of 2 workers"),
        ({"files": []}, "its groups are not those of 0 workers"),
    ],
)
def test_damage_is_described(made, tmp_path, change, message):
    put(tmp_path, {**made[1], **change})
    with pytest.raises(GossamerError, match=message):
        consensus(tmp_path)


def test_a_path_outside_of_the_folder_is_refused(made, tmp_path):
    entries = [{**made[1]["files"][0], "name": "../../secret.pt"}]
    put(tmp_path, {**made[1], "files": entries})
    with pytest.raises(GossamerError, match=r"file 0 is called '../../secret.pt' and not 'worker-00000.pt'"):
        files.read_manifest(tmp_path, 1)
