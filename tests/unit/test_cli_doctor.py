"""`gossamer doctor` reports what there is, tries the lab's network for real, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess

import pytest

from gossamer.cli import doctor, main
from gossamer.lab import namespaces


def _run(capsys: pytest.CaptureFixture[str]) -> tuple[int, dict[str, dict[str, object]], bool]:
    code = main(["doctor", "--json"])
    report = json.loads(capsys.readouterr().out)
    return code, {c["name"]: c for c in report["checks"]}, report["usable"]


def test_this_machine_is_usable(capsys: pytest.CaptureFixture[str]) -> None:
    code, checks, usable = _run(capsys)
    assert (code, usable) == (0, True)
    expected = "python gossamer torch numpy gloo nccl mpi cuda cores memory namespaces"
    assert set(expected.split()) <= set(checks)
    assert checks["torch"]["ok"]
    assert checks["gloo"]["ok"]
    assert all(c["remedy"] for c in checks.values() if not c["ok"] and c["name"] != "cuda")


def test_missing_packages_come_with_a_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in ("matplotlib", "ray") else found(name))
    code, checks, usable = _run(capsys)
    assert (code, usable) == (0, True)  # it is optional
    assert checks["matplotlib"]["remedy"] == "pip install matplotlib"
    assert checks["ray"]["remedy"] == "pip install 'ray[train]'"
    assert {"scikit-learn", "tensorboard", "lightning"} <= set(checks)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor"]) == 0
    assert "pip install matplotlib" in capsys.readouterr().out


def test_an_old_torch_is_not_usable(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    found = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: "2.5.1+cpu" if name == "torch" else found(name))
    code, checks, usable = _run(capsys)
    assert (code, usable) == (1, False)
    assert checks["torch"]["remedy"] == "pip install 'torch>=2.6'"


def test_without_iproute2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(namespaces, "find_tool", lambda tool: None)
    code, checks, _ = _run(capsys)
    assert code == 0
    assert checks["namespaces"]["detail"] == "ip and tc not found"
    assert "iproute2" in str(checks["namespaces"]["remedy"])


@pytest.mark.requires_root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_namespaces_are_removed_again(capsys: pytest.CaptureFixture[str]) -> None:
    _run(capsys)
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True)
    assert f"gossamer-doctor-{os.getpid()}" not in listed.stdout


def test_programs_of_the_system_are_found_without_sbin_in_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    before = namespaces.find_tool("tc")
    monkeypatch.setenv("PATH", "/nowhere")
    assert namespaces.find_tool("tc") == before


def test_every_optional_package_says_what_it_is_for() -> None:
    assert set(doctor.USED_BY) == set(doctor.OPTIONAL)
