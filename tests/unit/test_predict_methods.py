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
