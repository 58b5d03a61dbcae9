"""The registry of methods: how methods are written, what they mean, and the errors for mistakes."""

import pytest

from gossamer.errors import InputError
from gossamer.predict.methods import FAMILIES, parse, parse_list


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("ddp", ("ddp", "ddp", "adam", None, "fp32")),
        ("ddp:bf16", ("ddp", "ddp", "adam", None, "bf16")),
        ("dadam", ("dadam", "awc", "adam", "aer", "fp32")),
        ("dadam:exp", ("dadam", "awc", "adam", "one-peer-exponential", "fp32")),
        ("accumadam:aer:bf16", ("accumadam", "awc", "accumadam", "aer", "bf16")),
        ("dsgd:ring:int8", ("dsgd", "awc", "sgd", "ring", "int8")),
        ("a2cid2:base(k=2)", ("a2cid2", "a2cid2", "sgd", "base(k=2)", "fp32")),
        ("AD-PSGD:ring", ("ad-psgd", "ad-psgd", "sgd", "ring", "fp32")),
        ("decent-dp", ("decent-dp", "awc", "adam", "aer", "fp32")),
        ("diloco", ("diloco", "local", "adam", None, "fp32")),
        ("localsgd", ("localsgd", "local", "adam", None, "fp32")),
    ],
)
def test_parse(text, fields):
    m = parse(text)
    assert (m.name, m.algorithm, m.optimizer, m.topology, m.wire) == fields
    assert parse(str(m)) == m


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_parses_by_its_name(name):
    assert parse(name).name == name
    assert parse(name).asynchronous == (name in ("ad-psgd", "a2cid2"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dadm", "did you mean 'dadam'"),
        ("", "unknown method ''"),
        ("ddp:aer", "DDP has no topology"),
        ("ddp:int8", "its wire is one of fp32, bf16, fp16"),
        ("dadam:bf16", "name the topology first, as in dadam:aer:bf16"),
        ("dadam:rign", "did you mean 'ring'"),
        ("dadam:ring:bf61", "did you mean 'bf16'"),
        ("dadam:ring:bf16:x", r"write it as dadam\[:TOPOLOGY"),
        ("dadam:", "empty parts"),
        ("decent-dp:aer:bf16", "sends fp32 only"),
        ("diloco:aer", "has neither topology nor wire; write diloco"),
        ("localsgd:bf16", "has neither topology nor wire; write localsgd"),
    ],
)
def test_mistakes(text, message):
    with pytest.raises(InputError, match=message):
        parse(text)


def test_lists_keep_commas_in_brackets():
    assert [str(m) for m in parse_list("ddp, dadam:base(k=2,seed=1),dadam:ring")] == [
        "ddp",
        "dadam:base(k=2,seed=1)",
        "dadam:ring",
    ]


def test_local_steps_of_each_kind():
    """`every` is a setting of Gossamer's synchronous methods; diloco and localsgd have local steps in any case."""
    steps = {name: (parse(name).local_steps(1), parse(name).local_steps(16)) for name in FAMILIES}
    assert steps["diloco"] == steps["localsgd"] == (8, 16)
    assert steps["dadam"] == (1, 16)
    assert steps["ddp"] == steps["decent-dp"] == steps["ad-psgd"] == (1, 1)
    assert {name for name in FAMILIES if parse(name).exact} == {"ddp", "diloco", "localsgd"}
