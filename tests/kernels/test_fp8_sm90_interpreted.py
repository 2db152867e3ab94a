"""The FP8 kernels for Hopper, run on the CPU (gluon_interpreter).

As test_sm90_interpreted.py: a fault is reported where a GPU may compute the right numbers by luck.
"""

from pathlib import Path

import pytest
import torch
from fp8_faults import FAULTS
from kernel_faults import changed_kernels
from pagetwin.conformance.checks.dense import same_bits
from pagetwin.gluon_interpreter import InterpreterError
from pagetwin.gluon_interpreter.operations import multiple_of
from pagetwin.gluon_interpreter.packed import run_packed
from pagetwin.gluon_interpreter.values import Memory, Pointer, Value
from pagetwin.optimized.kernels.sm90.code_decode.codes import k_code, v_code
from support.compile_fp8_decode_sm90 import E4M3, E5M2
from support.hopper_fp8 import (
    CASES,
    check,
    launch,
    make_call,
    pretend_fp8_hopper,
)
from support.hopper_fp8_checks import CHECKS
from support.twins import TWINS, Twin
from triton.experimental.gluon import language as gl

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        torch.cuda.is_available(), reason="it is the run without a GPU that is tried"
    ),
]


@pytest.mark.parametrize("name", CASES)
def test_every_row_is_within_its_error_budget(
    name: str, reference: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretend_fp8_hopper(monkeypatch) as launches:
        check(CASES[name], reference)
    prefill = ["upcast_kernel", "prefill_kernel"] if CASES[name].is_prefill else []
    assert launches.made == ["code_decode_kernel", *prefill]


@pytest.mark.parametrize("name", CHECKS)
def test_calls_that_differ_in_nothing_that_counts_have_the_same_rows(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    CHECKS[name](monkeypatch)


def test_the_order_of_programs_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, options = make_call(CASES["a request in many segments"])
    results = []
    for seed in range(3):
        with pretend_fp8_hopper(monkeypatch, seed):
            results.append(launch(batch, options))
    for other in results[1:]:
        assert same_bits(results[0][0], other[0])
        assert same_bits(results[0][1], other[1])


def test_a_call_of_the_twin_is_computed_by_the_fp8_kernels_for_hopper(
    reference: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, options = make_call(CASES["prefill"])
    with pretend_fp8_hopper(monkeypatch) as launches:
        out = TWINS["optimized"].raw.paged_attention(
            **batch.arguments(), options=options
        )
    assert launches.made == ["code_decode_kernel", "upcast_kernel", "prefill_kernel"]
    right = reference.paged_attention(
        **batch.arguments(), options=options, compute_dtype=torch.float64
    )
    torch.testing.assert_close(out.double(), right.double(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported(
    name: str, reference: Twin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    with (
        pytest.raises(AssertionError) as raised,
        changed_kernels(tmp_path, fault.old, fault.new, fault.file),
        pretend_fp8_hopper(monkeypatch),
    ):
        check(CASES[fault.case], reference)
    found = str(raised.value)
    assert any(report in found for report in fault.report.split("|")), found


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (E4M3, "fp8_e4m3"), (E5M2, "fp8_e5m2"), (E4M3, "fp8_per_token_head"),
        (torch.int8, "int8_per_token_head"),
    ],
)  # fmt: skip
def test_the_assembly_decodes_every_code_to_its_number(
    dtype: torch.dtype, name: str
) -> None:
    """Word i has the codes i, i + 1, i + 2, i + 3; the second key's those that follow."""
    codes = torch.arange(256)[:, None] + torch.arange(8)
    codes = (codes % 256).to(torch.uint8)
    numbers = codes.view(dtype).to(torch.float16)
    words = Value(codes.view(torch.int32), gl.int32)
    first, second = (
        Value(words.tensor[:, 0], gl.int32),
        Value(words.tensor[:, 1], gl.int32),
    )
    kinds = (gl.float16,) * 8
    of_key = run_packed(k_code.fn(name), "=h,=h,=h,=h,r", [first], kinds[:4])
    for i, found in enumerate(of_key):
        if dtype == torch.int8:
            # a level is the number plus 128, in the bits of a subnormal number
            level = found.tensor.view(torch.int16)
            assert torch.equal(level, numbers[:, i % 2 * 2 + i // 2].short() + 128)
        else:
            assert same_bits(found.tensor, numbers[:, i])
    pairs = run_packed(
        v_code.fn(name), "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [first, second], kinds
    )
    for i, found in enumerate(pairs):
        assert same_bits(found.tensor, numbers[:, i // 2 + i % 2 * 4])


def test_the_assembly_decodes_every_level_less_every_zero_point() -> None:
    """Key i has eight levels from i on, and the zero point i; the other key's follow by 3."""
    levels = (torch.arange(16)[:, None] + torch.arange(8)) % 16
    others = (levels + 3) % 16
    first, second = (
        Value((rows << (4 * torch.arange(8))).sum(1).to(torch.int32), gl.int32)
        for rows in (levels, others)
    )
    zeros = torch.arange(16)
    of_key = run_packed(
        k_code.fn("int4_per_token_head"), "=h,=h,=h,=h,=h,=h,=h,=h,r", [first],
        (gl.float16,) * 8,
    )  # fmt: skip
    for i, found in enumerate(of_key):
        code = i // 2 + i % 2 * 4
        right = levels[:, code] * (16 if code % 2 else 1)
        assert torch.equal(found.tensor.view(torch.int16), right.short())
    pair = Value((zeros | (zeros.flip(0) << 16)).to(torch.int32), gl.int32)
    of_values = run_packed(
        v_code.fn("int4_per_token_head"), ",".join(["=h"] * 16 + ["r"] * 3),
        [first, second, pair], (gl.float16,) * 16,
    )  # fmt: skip
    for i, found in enumerate(of_values):
        rows, zero = (others, zeros.flip(0)) if i % 2 else (levels, zeros)
        assert torch.equal(found.tensor, (rows[:, i // 2] - zero).half())


def test_assembly_that_is_not_known_is_not_guessed() -> None:
    word = Value(torch.zeros(2, dtype=torch.int32), gl.int32)
    for instruction in ("prmt.b32 p, $1, $1, 0x8000;", "shf.l.b32 p, $1, $1, 8;"):
        asm = f"{{ .reg .b32 p; {instruction} mov.b32 {{$0, $0}}, p; }}"
        with pytest.raises(NotImplementedError, match="does not know"):
            run_packed(asm, "=h,r", [word], (gl.float16,))


def test_a_pointer_to_words_must_be_a_multiple_of_their_size() -> None:
    memory = Memory(torch.arange(18, dtype=torch.uint8)[1:])
    words = (Pointer(memory, 0) + 7).to(gl.pointer_type(gl.int32), bitcast=True)
    assert words.data == 1 and len(words.memory.flat) == 3
    assert words.memory.flat[1] == 8 + (9 << 8) + (10 << 16) + (11 << 24)
    with pytest.raises(InterpreterError, match="a multiple of 4 bytes"):
        (Pointer(memory, 0) + 6).to(gl.pointer_type(gl.int32), bitcast=True)


def test_a_promise_of_multiples_is_checked() -> None:
    numbers = Value(torch.tensor([[4, 8], [0, -12]]), gl.int64)
    assert multiple_of(numbers, [4, 4]) is numbers
    with pytest.raises(InterpreterError, match="not the multiples"):
        multiple_of(numbers + 2, [4, 4])
