"""Wire formats: how far Q(x) is from x, at every size and scale, and that NaN is never hidden."""

import pytest
import torch

from gossamer.comm import wire_named
from gossamer.comm.wire import WIRES
from gossamer.errors import InputError

LOSSY = [name for name in WIRES if name != "fp32"]
SIZES = [1, 2, 255, 256, 257, 511, 512, 513, 1000]


def rounded(name, x):
    wire = wire_named(name)
    payload = torch.empty(wire.payload_bytes(x.numel()), dtype=torch.uint8)
    wire.encode(x, payload)
    out = torch.full_like(x, 99.0)
    wire.decode(payload, out, 0, x.numel())
    return out


def bound(name, x):
    """The largest error the format allows, for each element."""
    if name == "bf16":
        return x.abs() * 2**-8
    if name == "fp16":
        return torch.maximum(x.abs() * 2**-11, torch.tensor(2.0**-25))
    blocks = x.abs().split(256)
    return torch.cat([b.max().expand(b.numel()) / 127 * 0.5 * (1 + 1e-4) for b in blocks])


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_error_is_bounded(name, size, dtype):
    x = torch.randn(size, generator=torch.Generator().manual_seed(size), dtype=dtype)
    assert ((rounded(name, x) - x).abs() <= bound(name, x)).all()


@pytest.mark.parametrize("name", LOSSY)
def test_any_run_of_blocks_decodes_by_itself(name):
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    wire, whole = wire_named(name), rounded(name, x)
    payload = torch.empty(wire.payload_bytes(1000), dtype=torch.uint8)
    wire.encode(x, payload)
    for start, stop in [(0, 256), (256, 768), (512, 1000), (768, 1000)]:
        part = torch.empty(stop - start)
        wire.decode(payload, part, start, 1000)
        assert torch.equal(part, whole[start:stop])


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("size", SIZES)
def test_zeros_stay_zero(name, size):
    assert torch.equal(rounded(name, torch.zeros(size)), torch.zeros(size))


@pytest.mark.parametrize("name", ["bf16", "int8"])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e37])
def test_any_scale(name, scale):
    x = torch.randn(300, generator=torch.Generator().manual_seed(0)).clamp(-3, 3) * scale
    assert ((rounded(name, x) - x).abs() <= bound(name, x)).all()


@pytest.mark.parametrize("largest", [1e-45, 1e-40, 1e-38, 1e-37])
def test_int8_of_the_smallest_numbers_is_finite_and_near(largest):
    x = torch.tensor([largest, -largest / 3, 0.0])
    got = rounded("int8", x)
    assert torch.isfinite(got).all()
    assert (got - x).abs().max() <= 1e-36


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 255, 256, 299])
def test_values_that_are_not_finite_stay_so(name, bad, at):
    x = torch.randn(300, generator=torch.Generator().manual_seed(0))
    x[at] = bad
    assert not torch.isfinite(rounded(name, x)[at])


def test_int8_keeps_a_bad_value_to_its_block():
    x = torch.ones(600)
    x[300] = float("nan")
    got = rounded("int8", x)
    assert torch.isfinite(got[:256]).all()
    assert torch.isfinite(got[512:]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_int8_of_other_dtypes(dtype):
    x = torch.randn(300, generator=torch.Generator().manual_seed(0)).to(dtype)
    error = (rounded("int8", x).double() - x.double()).abs()
    # only the result is rounded to the parameters' own precision
    own = x.double().abs().max() * torch.finfo(dtype).eps / 2
    assert (error <= bound("int8", x.double()) + own).all()


@pytest.mark.parametrize("scale", [1e-3, 1e-4, 1e-6, 1e4])
def test_int8_of_half_precision_parameters_at_any_scale(scale):
    """127 / max|block| overflows in fp16 below 2e-3, and max|block| / 127 loses its digits there."""
    x = (torch.randn(300, generator=torch.Generator().manual_seed(0)) * scale).half()
    error = (rounded("int8", x).double() - x.double()).abs()
    own = torch.maximum(x.double().abs() * 2**-10, torch.tensor(2.0**-24, dtype=torch.float64))
    assert (error <= bound("int8", x.double()) + own).all()


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_a_format_is_lossless_for_its_own_dtype_only(name):
    own = {"bf16": torch.bfloat16, "fp16": torch.float16}
    wire = wire_named(name)
    assert wire.lossless(own[name])
    assert not any(wire.lossless(d) for d in (torch.float32, torch.float64, *(set(own.values()) - {own[name]})))


@pytest.mark.parametrize(("name", "size", "length"), [("bf16", 3, 6), ("fp16", 257, 514)])
def test_payload_of_half_formats(name, size, length):
    assert wire_named(name).payload_bytes(size) == length


@pytest.mark.parametrize(("size", "length"), [(1, 5), (255, 259), (256, 260), (257, 265), (512, 520)])
def test_payload_of_int8_has_a_scale_per_block(size, length):
    assert wire_named("int8").payload_bytes(size) == length


def test_unknown_wire():
    with pytest.raises(InputError, match=r"unknown wire 'fp8'; choose one of fp32, bf16, fp16, int8"):
        wire_named("fp8")


def test_fp16_saturates_instead_of_overflowing():
    wire = wire_named("fp16")
    value = torch.tensor([1e6, -1e6, 1.0, float("inf")])
    payload = torch.empty(wire.payload_bytes(4), dtype=torch.uint8)
    out = torch.empty(4)
    wire.encode(value, payload)
    wire.decode(payload, out, 0, 4)
    assert out.tolist() == [65504.0, -65504.0, 1.0, float("inf")]
