"""The options of `train` and `compare`: generated from the configuration models, complete, and passed on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import typer

from gossamer.cli import main
from gossamer.cli.program import app
from gossamer.cli.run_options import BY_HAND, PANELS
from gossamer.jobs import configure
from gossamer.recipes.config import RunConfig
from gossamer.recipes.options import TASK_OPTIONS

OPTIONS = sorted({name for kind in TASK_OPTIONS.values() for name in kind.model_fields})
GENERATED = [name for names in PANELS.values() for name in names]
# a value other than the default; what is not here is a Literal, a bool, an int or a float
VALUES: dict[str, Any] = {
    "method": "dadam:ring",
    "betas": "0.5,0.6",
    "data": "some/where",
    "partition": "dirichlet:1",
    "src": "fr",
    "tgt": "it",
    "test": "test_b",
    "model": {"vision": "resnet14", "translate": "small", "lm": "mini"},
    "norm": {"vision": "group", "translate": "post"},
    "average_every": 6,
    "fragments": 2,
    "discount": 2.0,
}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _params(command: str) -> dict[str, Any]:
    return {p.name: p for p in typer.main.get_command(app).get_command(None, command).params}  # type: ignore[attr-defined]


def _value(name: str, annotation: Any, default: Any, task: str) -> Any:
    if name in VALUES:
        return VALUES[name][task] if isinstance(VALUES[name], dict) else VALUES[name]
    for kind in (annotation, *get_args(annotation)):
        if get_origin(kind) is Literal:
            return next(v for v in get_args(kind) if v != default)
    text = str(annotation)
    if "bool" in text:
        return not default
    return 0.25 if "float" in text else 9


def test_every_field_has_one_panel() -> None:
    assert sorted([*GENERATED, *BY_HAND]) == sorted(RunConfig.model_fields)


def test_no_option_of_a_task_has_the_name_of_a_field_of_the_run() -> None:
    assert not set(OPTIONS) & set(RunConfig.model_fields)


@pytest.mark.parametrize("command", ["train", "compare"])
def test_every_field_of_every_configuration_is_an_option_with_a_help_text(command: str) -> None:
    params = _params(command)
    expected = {*RunConfig.model_fields, *OPTIONS} - {"options"}
    if command == "compare":
        expected = expected - {"method"} | {"methods"}
    for name in expected - {"task"}:
        assert params[name].opts == [_flag(name)]
        assert params[name].help
        assert not params[name].hidden
    assert params["task"].metavar == "TASK"


def test_the_help_shows_flags_defaults_and_the_tasks_that_take_them(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["train", "--help"]) == 0
    text = re.sub(r"[│╭╮╰╯─\s]+", " ", capsys.readouterr().out)
    for name in (*GENERATED, *OPTIONS):
        assert re.search(rf"{_flag(name)} ", text), name
    for panel in (*PANELS, "Options of every task", "Options of vision", "Options of translate and lm"):
        assert f" {panel} " in text
    assert "after the warm-up. Default: cosine." in text
    assert "Default: 512 for vision, 128 for translate, 128 for lm." in text
    assert "Resume this run; --workers N changes the number of workers." in text


@pytest.mark.parametrize("task", TASK_OPTIONS)
def test_a_value_set_by_flag_arrives_in_the_configuration(
    task: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[RunConfig] = []

    class Seen(Exception):
        pass

    def see(config: RunConfig) -> None:
        seen.append(config)
        raise Seen

    monkeypatch.setattr(configure, "check_method", see)
    expected: dict[str, Any] = {}
    arguments = ["train", task, "--virtual", "2"]
    options = TASK_OPTIONS[task].model_fields
    unset = ("on_failure",)  # "continue" and virtual workers exclude each other
    for name, info in {**{n: RunConfig.model_fields[n] for n in GENERATED if n not in unset}, **options}.items():
        value = _value(name, info.annotation, info.default, task)
        expected[name] = value
        flag = _flag(name)
        arguments += [f"--no-{flag[2:]}"] if value is False else [flag] if value is True else [flag, str(value)]
    with pytest.raises(Seen):
        main(arguments)
    (config,) = seen
    made = {**config.model_dump(), **TASK_OPTIONS[task](**config.options).model_dump()}
    expected |= {"betas": (0.5, 0.6), "data": Path("some/where")}
    assert {name: made[name] for name in expected} == expected
    for name, value in expected.items():
        default = {**RunConfig.model_fields, **options}[name].default
        assert value != default, f"{name} must be tested with a value other than its default"


def test_a_flag_overrides_the_configuration_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[RunConfig] = []
    file = tmp_path / "run.toml"
    file.write_text('task = "vision"\nsteps = 7\namp = true\n[options]\nflip = true\nbatch = 3\n')

    class Seen(Exception):
        pass

    def see(config: RunConfig) -> None:
        seen.append(config)
        raise Seen

    monkeypatch.setattr(configure, "check_method", see)
    with pytest.raises(Seen):
        main(["train", "--config", str(file), "--no-amp", "--no-flip", "--soft-deadline", "0.25"])
    assert (seen[0].steps, seen[0].amp, seen[0].soft_deadline) == (7, False, 0.25)
    assert seen[0].options == {"flip": False, "batch": 3}
