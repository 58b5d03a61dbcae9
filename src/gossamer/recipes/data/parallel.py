"""Parallel text: line i of one file translates line i of the other."""

from dataclasses import dataclass
from pathlib import Path

from gossamer import InputError
from gossamer.recipes.data import files

Pair = tuple[str, str]


@dataclass(frozen=True)
class ParallelText:
    name: str
    train: list[Pair]
    validation: list[Pair]
    test: list[Pair]
    test_name: str


def load(directory: Path, source: str, target: str, *, test: str | None = None) -> ParallelText:
    """`train.SRC`, `val.SRC` and `test*.SRC` beside their `.TGT`, plain or `.gz`; without a test, `val` serves."""
    if not directory.is_dir():
        raise InputError(f"{directory} is not a directory: name the one that holds train.{source} and train.{target}")
    if source == target:
        raise InputError(f"src and tgt are both {source!r}: name two languages")
    names = {path.name.removesuffix(".gz") for path in directory.iterdir()}
    tests = sorted(name.removesuffix(f".{source}") for name in names if _is_test(name, source))
    if test is not None and test not in tests:
        known = f"it has {', '.join(tests)}" if tests else f"it has no test*.{source}"
        raise InputError(f"{directory} has no test set {test!r}: {known}")
    chosen = test or (tests[0] if tests else "val")
    train = [pair for pair in read(directory, "train", source, target) if all(pair)]
    if not train:
        raise InputError(f"{directory} has no training sentences: train.{source} or train.{target} is empty")
    return ParallelText(
        directory.name,
        train,
        _some(directory, "val", source, target),
        _some(directory, chosen, source, target),
        chosen,
    )


def read(directory: Path, part: str, source: str, target: str) -> list[Pair]:
    sides = []
    for language in (source, target):
        path = files.find(directory, f"{part}.{language}")
        if path is None:
            raise InputError(f"{directory} has neither {part}.{language} nor {part}.{language}.gz")
        # Not splitlines(): it also cuts at characters that occur inside a sentence, and the sides would shift.
        text = files.read_text(path).removesuffix("\n")
        lines = text.split("\n") if text else []
        sides.append([line.strip() for line in lines])
    if len(sides[0]) != len(sides[1]):
        raise InputError(
            f"{part}.{source} has {len(sides[0])} lines but {part}.{target} has {len(sides[1])}: "
            "parallel files need one line a sentence on both sides"
        )
    return list(zip(*sides, strict=True))


def _some(directory: Path, part: str, source: str, target: str) -> list[Pair]:
    pairs = read(directory, part, source, target)
    if not any(all(pair) for pair in pairs):
        raise InputError(f"{directory} has no sentences in {part}.{source} and {part}.{target}")
    return pairs


def _is_test(name: str, language: str) -> bool:
    return name.startswith("test") and name.endswith(f".{language}")
