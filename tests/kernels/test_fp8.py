"""Is every number the one that its eight bits stand for?

    PYTHONPATH=tests python tests/kernels/test_fp8.py 80 90 100

compiles the conversions for those chips, without a GPU.
"""

import os

from quantise import quantise_kernel, scales

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "0"

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from pagetwin.conformance.checks.dense import same_bits
from pagetwin.contract.cache_formats import TENSOR_SCALE_DTYPES
from pagetwin.optimized.kernels.fp8 import (
    LARGEST_QUOTIENT,
    PLAIN_SCALES,
    decode_fp8,
    divide,
    encode_fp8,
    has_fp8_encoding,
    has_native_fp8,
)
from pagetwin.reference.cache.formats.fp8 import quantise
from support.compiler_process import json_lines, run_compiler
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

E5M2 = torch.float8_e5m2
INFINITY = torch.tensor(torch.inf)


@triton.jit
def decode_kernel(
    codes, numbers, IS_E5M2: tl.constexpr, NATIVE: tl.constexpr, SIZE: tl.constexpr
):
    at = tl.arange(0, SIZE)
    tl.store(numbers + at, decode_fp8(tl.load(codes + at), IS_E5M2, NATIVE))


@triton.jit
def encode_kernel(numbers, codes, size, IS_E5M2: tl.constexpr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    loaded = tl.load(numbers + at, mask=at < size, other=0.0)
    tl.store(codes + at, encode_fp8(loaded, IS_E5M2), mask=at < size)


@triton.jit
def divide_kernel(numbers, scales, quotients, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(quotients + at, divide(tl.load(numbers + at), tl.load(scales + at)))


def encode(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what a kernel makes of float32 numbers."""
    codes = torch.empty(numbers.numel(), dtype=torch.uint8, device=numbers.device)
    # the interpreter is paid by the program, whatever its size
    size = 1024 if numbers.is_cuda else triton.next_power_of_2(numbers.numel())
    grid = (triton.cdiv(numbers.numel(), size),)
    encode_kernel[grid](
        numbers, codes, numbers.numel(), IS_E5M2=dtype == E5M2, SIZE=size
    )
    return codes.view(dtype)


def all_codes(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(dtype)


def edges(dtype: torch.dtype) -> Tensor:
    """Return the float32 numbers at which something could go wrong."""
    finite = all_codes(dtype).float()
    finite = finite[finite.isfinite()].unique()
    largest = float(finite.max())
    halfway = (finite[1:] + finite[:-1]) / 2
    points = torch.cat(
        [
            finite,
            halfway,
            # what would round to the next number, were there one
            torch.tensor([1.0, -1.0]) * (largest + (largest - float(finite[-2])) / 2),
            torch.tensor([0.0, -0.0, 1e-45, -1e-45, 1e-38, -1e-38, 3e38, -3e38]),
        ]
    )
    patterns = torch.tensor(
        [0x7F800000, -0x800000, 0x7FC00000, -0x400000, 0x7F800001, -0x7FFFFF, -1],
        dtype=torch.int32,
    )
    every_half = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.float16)
    anything = torch.randint(
        -(2**31), 2**31, (4096,), generator=torch.Generator().manual_seed(0)
    )
    return torch.cat(
        [
            points,
            points.nextafter(INFINITY),
            points.nextafter(-INFINITY),
            patterns.view(torch.float32),
            every_half.float(),
            anything.to(torch.int32).view(torch.float32),
        ]
    )


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", TENSOR_SCALE_DTYPES)
def test_every_code_decodes_to_its_number(
    dtype: torch.dtype, native: bool, device: torch.device
) -> None:
    if native and not has_native_fp8(device):
        pytest.skip("this device has no instruction for it")
    codes = all_codes(dtype)
    numbers = torch.empty(256, dtype=torch.float16, device=device)
    decode_kernel[(1,)](
        codes.view(torch.uint8).to(device),
        numbers,
        IS_E5M2=dtype == E5M2,
        NATIVE=native,
        SIZE=256,
    )
    numbers, expected = numbers.cpu(), codes.to(torch.float16)
    is_nan = expected.isnan()
    assert int(is_nan.sum()) == (6 if dtype == E5M2 else 2)
    assert torch.equal(numbers.isnan(), is_nan)
    assert same_bits(numbers[~is_nan], expected[~is_nan])


@pytest.mark.parametrize("dtype", TENSOR_SCALE_DTYPES)
def test_every_number_is_rounded_as_the_reference_rounds_it(
    dtype: torch.dtype, device: torch.device
) -> None:
    """All float16 numbers, all points halfway, their neighbours, infinities and NaN."""
    numbers = edges(dtype)
    expected = quantise(numbers, 1.0, dtype)
    assert same_bits(encode(numbers.to(device), dtype), expected)
    largest = torch.finfo(dtype).max
    assert float(expected.float().nan_to_num().abs().max()) == largest
    assert expected.view(torch.uint8).unique().numel() == (
        250 if dtype == E5M2 else 256
    )


@pytest.mark.parametrize("dtype", TENSOR_SCALE_DTYPES)
def test_every_code_is_what_its_number_becomes(
    dtype: torch.dtype, device: torch.device
) -> None:
    codes = all_codes(dtype)
    codes = codes[codes.float().isfinite()]
    assert same_bits(encode(codes.float().to(device), dtype), codes)


@pytest.mark.parametrize("dtype", TENSOR_SCALE_DTYPES)
def test_a_half_is_rounded_to_even_and_not_away(
    dtype: torch.dtype, device: torch.device
) -> None:
    """The edges tell the roundings apart: a tie away from zero differs in every second one."""
    codes = all_codes(dtype)[: 124 if dtype == E5M2 else 127].float()
    halfway = (codes[1:] + codes[:-1]) / 2
    rounded = encode(halfway.to(device), dtype).cpu().float()
    assert torch.equal(
        rounded,
        codes[:-1] + (codes[1:] - codes[:-1]) * (torch.arange(len(halfway)) % 2),
    )


def quotients(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return numbers and scales whose quotients are at or beside what is rounded up or down."""
    known = edges(dtype)
    chosen = scales()
    number = len(known)
    at = torch.randint(
        len(chosen), (number,), generator=torch.Generator().manual_seed(2)
    )
    its = chosen[at]
    near = (known.double() * its.double()).float()
    numbers = torch.cat(
        [known, near, near.nextafter(INFINITY), near.bfloat16().float()]
    )
    return numbers, its.repeat(4)


def same_codes(found: Tensor, right: Tensor) -> bool:
    """Return whether FP8 numbers have the same bits, except the signs of NaN."""
    is_nan = right.float().isnan()
    codes = [codes.view(torch.uint8) for codes in (found, right)]
    alike = torch.where(is_nan, codes[0] & 0x7F == 0x7F, codes[0] == codes[1])
    return bool(alike.all())


@pytest.mark.extended
@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", TENSOR_SCALE_DTYPES)
def test_quotients_are_rounded_as_the_reference_rounds_them(
    dtype: torch.dtype, native: bool, device: torch.device
) -> None:
    if native and not has_fp8_encoding(device):
        pytest.skip("this device has no instruction for it")
    numbers, its = quotients(dtype)
    # programs with scales that are plain, and with others
    order = its.argsort(stable=True)
    numbers, its = numbers[order], its[order]
    numbers, its = numbers.to(device), its.to(device)
    expected = quantise(numbers[:, None], its, dtype).flatten()
    codes = torch.empty(len(numbers), dtype=torch.uint8, device=device)
    size = 256 if device.type == "cuda" else 4096
    quantise_kernel[(triton.cdiv(len(numbers), size),)](
        numbers, its, codes, len(numbers),
        IS_E5M2=dtype == E5M2, NATIVE=native, IS_NUMBER=False, SIZE=size,
    )  # fmt: skip
    assert same_codes(codes.view(dtype), expected)
    for scale in (1.0, 0.37, 1e-30, 1e30):
        quantise_kernel[(triton.cdiv(len(numbers), size),)](
            numbers, torch.tensor(scale, device=device), codes, len(numbers),
            IS_E5M2=dtype == E5M2, NATIVE=native, IS_NUMBER=True, SIZE=size,
        )  # fmt: skip
        assert same_codes(codes.view(dtype), quantise(numbers, scale, dtype))


@pytest.mark.compile
def test_codes_are_merged_with_codes_or_with_zero() -> None:
    """With two elements per thread the second code was garbage, which only a GPU had shown."""
    lines = json_lines(Path(__file__).with_name("compile_fp8_encoding.py"))
    assert len(lines) == 8
    for line in lines:
        for source in line["merged with"]:
            assert source == "RZ" or source.startswith("F2FP."), line


def fused(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Return x * y + z of float32, rounded once: the sum in float64 is rounded to odd."""
    with np.errstate(all="ignore"):
        product, z = x.astype(np.float64) * y, z.astype(np.float64)
        total = product + z
        back = total - product
        lost = (product - (total - back)) + (z - back)
        is_even = total.view(np.int64) & 1 == 0
        beside = np.nextafter(total, np.copysign(np.inf, lost))
        is_off = is_even & (lost != 0) & np.isfinite(total)
        return np.where(is_off, beside, total).astype(np.float32)


@pytest.fixture
def exact_fma(monkeypatch: pytest.MonkeyPatch) -> None:
    """Round fused multiply-adds of the interpreter once, as a chip does. It rounds twice.

    Compiled kernels are not affected.
    """
    from triton.runtime import interpreter

    def create_fma(self: object, x: Any, y: Any, z: Any) -> Any:
        dtype = z.dtype.scalar
        return interpreter.TensorHandle(fused(x.data, y.data, z.data), dtype)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", create_fma)


@pytest.mark.usefixtures("exact_fma")
@pytest.mark.parametrize("dtype", TENSOR_SCALE_DTYPES)
def test_the_division_by_plain_scales_is_the_nearest_quotient(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Fused multiply-adds round once. So what the chip computes follows from this on the CPU."""
    least, most = PLAIN_SCALES.value
    numbers, its = quotients(dtype)
    is_plain = (its >= least) & (its <= most)
    numbers, its = numbers[is_plain].abs(), its[is_plain]
    size = 1024 if device.type == "cuda" else triton.next_power_of_2(len(numbers))
    programs = triton.cdiv(len(numbers), size)
    padded = [
        torch.nn.functional.pad(factors, (0, programs * size - len(factors)), value=1.0)
        for factors in (numbers, its)
    ]
    made = torch.empty(programs * size, device=device)
    divide_kernel[(programs,)](
        *(factors.to(device) for factors in padded), made, SIZE=size
    )
    found, right = made.cpu()[: len(numbers)], numbers / its
    counted = (right >= 2.0**-20) & (right <= LARGEST_QUOTIENT.value)
    assert int(counted.sum()) > 100_000
    assert same_bits(found[counted], right[counted])
    assert torch.equal(found.isnan(), right.isnan())
    assert bool((found[right > LARGEST_QUOTIENT.value] == LARGEST_QUOTIENT.value).all())
    assert bool((found[right < 2.0**-20] <= 2.0**-20).all())
    # and the bits of the codes
    codes = quantise(found.nan_to_num(nan=0.0), 1.0, dtype)
    assert same_bits(codes, quantise(right.nan_to_num(nan=0.0), 1.0, dtype))


@pytest.mark.compile
@pytest.mark.parametrize("chip", [80, 89, 90, 100])
def test_the_conversions_compile_for(chip: int) -> None:
    lines = run_compiler(Path(__file__), chip).splitlines()
    assert len(lines) == 4 + 2 * (chip >= 89) + 2 * (chip >= 90)
    for line in lines:
        is_native = "native" in line
        if line.startswith("quantise"):
            dtype = "e5m2x2" if "True" in line else "e4m3x2"
            assert f"cvt.rn.satfinite.{dtype}.f32" in line, line
        else:
            assert ("cvt.rn.f16x2" in line) == is_native, line


def main(chip: int) -> None:
    """Compile each conversion for a chip, and print the instructions that convert."""
    for kernel, least in (
        (decode_kernel, 89), (encode_kernel, None), (quantise_kernel, 90),
    ):  # fmt: skip
        for is_e5m2 in (False, True):
            for native in (False, True):
                if native and (least is None or chip < least):
                    continue
                if kernel is quantise_kernel and not native:
                    continue
                constants = {"IS_E5M2": is_e5m2, "NATIVE": native, "SIZE": 1024}
                constants["IS_NUMBER"] = False
                pointers = {"codes": "*u8", "size": "i32", "scales": "*fp32"}
                pointers["numbers"] = "*fp16" if kernel is decode_kernel else "*fp32"
                source = ASTSource(
                    fn=kernel,
                    signature={
                        name: pointers.get(name, "constexpr")
                        for name in kernel.arg_names
                    },
                    constexprs={
                        name: constants[name]
                        for name in kernel.arg_names
                        if name in constants
                    },
                )
                compiled = triton.compile(source, target=GPUTarget("cuda", chip, 32))
                used = {
                    word for word in compiled.asm["ptx"].split() if "cvt.rn" in word
                }
                print(
                    kernel.__name__, is_e5m2, "native" if native else "", *sorted(used)
                )


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        main(int(argument))
