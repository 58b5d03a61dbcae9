"""Wire formats: how far Q(x) is from x, at every size and scale, and that NaN is never hidden."""

import pytest
import torch

from gossamer.comm import _native, wire_named
from gossamer.comm.wires import WIRES
from gossamer.errors import InputError

LOSSY = [name for name in WIRES if name != "fp32"]
QUANTIZED = ["int8", "int4"]
SIZES = [1, 2, 127, 128, 129, 255, 256, 257, 513, 1000]


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
    levels = {"int8": 127, "int4": 7}[name]
    largest = torch.cat([b.max().expand(b.numel()) for b in x.abs().split(128)])
    return largest / levels * 0.5 * (1 + 2**-7)  # the scale is rounded up to bfloat16


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


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12, 1e37])
def test_any_scale(name, scale):
    x = torch.randn(300, generator=torch.Generator().manual_seed(0)).clamp(-3, 3) * scale
    assert ((rounded(name, x) - x).abs() <= bound(name, x)).all()


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("largest", [1e-45, 1e-40, 1e-38, 1e-37])
def test_the_smallest_numbers_are_finite_and_near(name, largest):
    x = torch.tensor([largest, -largest / 3, 0.0])
    got = rounded(name, x)
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
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_formats_of_other_dtypes(dtype, name):
    x = torch.randn(300, generator=torch.Generator().manual_seed(0)).to(dtype)
    error = (rounded(name, x).double() - x.double()).abs()
    # only the result is rounded to the parameters' own precision
    own = x.double().abs().max() * torch.finfo(dtype).eps / 2
    assert (error <= bound(name, x.double()) + own).all()


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


@pytest.mark.parametrize(("size", "int8", "int4"), [(1, 11, 11), (127, 137, 74), (128, 138, 74), (129, 141, 77)])
def test_payload_of_quantized_formats(size, int8, int4):
    """The id of the anchor, a scale of two bytes per block of 128, and the values."""
    assert wire_named("int8").payload_bytes(size) == int8
    assert wire_named("int4").payload_bytes(size) == int4


def test_unknown_wire():
    with pytest.raises(InputError, match=r"unknown wire 'fp8'; choose one of fp32, bf16, fp16, int8, int4"):
        wire_named("fp8")


def test_fp16_saturates_instead_of_overflowing():
    wire = wire_named("fp16")
    value = torch.tensor([1e6, -1e6, 1.0, float("inf")])
    payload = torch.empty(wire.payload_bytes(4), dtype=torch.uint8)
    out = torch.empty(4)
    wire.encode(value, payload)
    wire.decode(payload, out, 0, 4)
    assert out.tolist() == [65504.0, -65504.0, 1.0, float("inf")]


@pytest.fixture
def torch_only(monkeypatch):
    """A function that computes by torch operations, as where no compiler is."""

    def run(function):
        with monkeypatch.context() as patched:
            patched.setattr(_native, "kernels", lambda: None)
            return function()

    return run


CASES = {
    "normal": lambda x: x,
    "nan": lambda x: x.index_fill(0, torch.tensor([x.numel() // 2]), float("nan")),
    "infinite": lambda x: x.index_fill(0, torch.tensor([0]), float("inf")),
    "tiny": lambda x: x * 1e-38,
    "huge": lambda x: x * 1e38,
    "ties": lambda x: (x * 4).round() / 2,
}


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("anchored", [False, True])
def test_native_kernels_and_torch_operations_give_the_same_bits(torch_only, name, case, anchored):
    if _native.kernels() is None:
        pytest.skip("no C compiler")
    wire = wire_named(name)
    for size in (*SIZES, 40_000):
        generator = torch.Generator().manual_seed(size)
        x = CASES[case](torch.randn(size, generator=generator))
        anchor = torch.randn(size, generator=generator) if anchored else None

        def both(x=x, anchor=anchor, size=size):
            payload = torch.zeros(wire.payload_bytes(size), dtype=torch.uint8)
            wire.encode(x, payload, anchor)
            out = torch.empty(size)
            wire.decode(payload, out, 0, size)
            return payload, out.view(torch.int32)

        native, plain = both(), torch_only(both)
        assert torch.equal(native[0], plain[0]), size
        decoded = [torch.where(v.view(torch.float32).isnan(), 0, v) for v in (native[1], plain[1])]
        assert torch.equal(*decoded), size


@pytest.mark.parametrize("name", QUANTIZED)
def test_values_are_rounded_relative_to_the_anchor(name):
    generator = torch.Generator().manual_seed(0)
    anchor = torch.randn(1000, generator=generator)
    x = anchor + 1e-3 * torch.randn(1000, generator=generator)
    wire = wire_named(name)
    payload = torch.empty(wire.payload_bytes(1000), dtype=torch.uint8)
    wire.encode(x, payload, anchor)
    out = torch.empty(1000)
    wire.decode(payload, out, 0, 1000)
    assert ((out - (x - anchor)).abs() <= bound(name, x - anchor)).all()
    wire.mark(payload, 2**40 + 5)
    assert wire.marked(payload) == 2**40 + 5
    again = torch.empty(1000)
    wire.decode(payload, again, 0, 1000)
    assert torch.equal(out, again)  # the id is not in the values


@pytest.mark.parametrize("name", QUANTIZED)
def test_all_levels_are_used(name):
    levels = {"int8": 255, "int4": 15}[name]
    assert len(rounded(name, torch.linspace(-1, 1, 128)).unique()) == min(128, levels)


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("weight", [0.5, 0.25, 1 / 3])
def test_a_correction_adds_the_difference_of_what_was_sent(torch_only, name, weight):
    wire = wire_named(name)
    for size in (*SIZES, 40_000):
        generator = torch.Generator().manual_seed(size)
        theirs, mine, target, anchor = torch.randn(4, size, generator=generator)

        def corrected(theirs=theirs, mine=mine, target=target, anchor=anchor, size=size):
            payloads, values = [], []
            for x in (theirs, mine):
                payloads.append(torch.zeros(wire.payload_bytes(size), dtype=torch.uint8))
                values.append(torch.empty(size))
                wire.encode(x, payloads[-1], anchor)
                wire.decode(payloads[-1], values[-1], 0, size)
            out, back = target.clone(), target.clone()
            wire.correct(out, *payloads, weight, torch.empty)
            wire.correct(back, *reversed(payloads), weight, torch.empty)
            return out, back, target.double() + weight * (values[0].double() - values[1].double())

        native, plain = corrected(), torch_only(corrected)
        for out, back, wanted in (native, plain):
            assert torch.allclose(out.double(), wanted, rtol=3e-7, atol=3e-7), size
            assert torch.allclose(out.double() + back, 2 * target.double(), rtol=3e-7, atol=6e-7)  # conserves the sum
        if weight in (0.5, 0.25):  # nothing is rounded but the sum
            assert torch.equal(native[0], plain[0]), size


@pytest.mark.parametrize("case", CASES)
def test_native_fp16_and_torch_operations_give_the_same_bits(torch_only, case):
    wire = wire_named("fp16")
    for size in (*SIZES, 40_000):
        x = CASES[case](torch.randn(size, generator=torch.Generator().manual_seed(size)))

        def encoded(x=x, size=size):
            payload = torch.zeros(wire.payload_bytes(size), dtype=torch.uint8)
            wire.encode(x, payload)
            half = payload.view(torch.float16)
            return torch.where(half.isnan(), 0.0, half).view(torch.int16)

        assert torch.equal(encoded(), torch_only(encoded)), size
