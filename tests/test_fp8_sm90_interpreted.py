"""The FP8 kernels for Hopper, run on the CPU (gluon_interpreter).

As test_sm90_interpreted.py: a fault is reported where a GPU may compute the right numbers by luck.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from compile_fp8_decode_sm90 import E4M3, E5M2
from conftest import TWINS, Twin
from fp8_faults import FAULTS
from gluon_interpreter import InterpreterError
from gluon_interpreter.kernels import change_module
from gluon_interpreter.operations import multiple_of
from gluon_interpreter.packed import run_packed
from gluon_interpreter.values import Memory, Pointer, Value
from hopper_fp8 import (
    CASES,
    check,
    launch,
    make_call,
    pretend_fp8_hopper,
    spread,
)
from pagetwin.conformance.oracles.dense import same_bits
from pagetwin.optimized.kernels.sm90.fp8_decode.operands import (
    DECODE_E4M3,
    DECODE_E5M2,
    k_code,
    v_code,
)
from pagetwin.optimized.kernels.sm90.fp8_prefill import family as fp8_prefill
from test_fp8_prefill_sm90 import to_call
from triton.experimental.gluon import language as gl

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="it is the run without a GPU that is tried"
)
KERNELS = Path(__file__).parents[1] / "optimized/kernels"
AXES = ("block", "slot", "head")
FAR = [
    *((axis, "two requests") for axis in ("block", "slot", "table entry")),
    *((axis, "prefill, three KV heads") for axis in (*AXES, "table entry")),
]
"""Axes with long strides, of a cache or of the block table, and calls that they are tried in."""


@pytest.mark.parametrize("name", CASES)
def test_every_row_is_within_its_error_budget(
    name: str, reference: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretend_fp8_hopper(monkeypatch) as launches:
        check(CASES[name], reference)
    prefill = ["upcast_kernel", "prefill_kernel"] if CASES[name].is_prefill else []
    assert launches.made == ["fp8_decode_kernel", *prefill]


def test_queries_without_keys_get_0_and_lse_minus_infinity(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, options = make_call(CASES["four requests"])
    batch.seq_lens.zero_()
    with pretend_fp8_hopper(monkeypatch):
        out, lse = launch(batch, replace(options, causal=False))
    assert not bool(out.any()) and bool((lse == -torch.inf).all())


def test_a_call_without_a_log_sum_exp_has_the_same_output(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, options = make_call(CASES["four requests"])
    with pretend_fp8_hopper(monkeypatch):
        out, _ = launch(batch, options)
        alone, lse = launch(batch, options, has_lse=False)
    assert same_bits(out, alone) and bool(lse.isnan().all())


def test_the_order_of_programs_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, options = make_call(CASES["a request in many segments"])
    results = []
    for seed in range(3):
        with pretend_fp8_hopper(monkeypatch, seed):
            results.append(launch(batch, options))
    for other in results[1:]:
        assert same_bits(results[0][0], other[0])
        assert same_bits(results[0][1], other[1])


@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_an_fp8_output_is_the_float32_output_rounded_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, options = make_call(CASES["four requests"])
    largest = torch.finfo(dtype).max
    with pretend_fp8_hopper(monkeypatch):
        exact, exact_lse = launch(batch, options, out_dtype=torch.float32)
        # the largest numbers are outside
        scale = exact.abs().max() / (2 * largest)
        out, lse = launch(batch, replace(options, out_scale=scale), out_dtype=dtype)
    assert same_bits(out, (exact / scale).clamp(-largest, largest).to(dtype))
    assert same_bits(lse, exact_lse)


def test_a_block_table_with_a_stride_of_columns_changes_no_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Offsets then have 64 bits."""
    batch, options = make_call(CASES["blocks of 48, needle block edge"])
    wide = batch.block_table.repeat_interleave(2, 1)
    wide[:, 1::2] = 2**31 - 1
    with pretend_fp8_hopper(monkeypatch):
        expected, expected_lse = launch(batch, options)
        out, lse = launch(replace(batch, block_table=wide[:, ::2]), options)
    assert same_bits(out, expected) and same_bits(lse, expected_lse)


@pytest.mark.parametrize(("axis", "name"), FAR)
def test_offsets_of_more_than_32_bits_change_no_bit(
    axis: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, options = make_call(CASES[name])
    if axis == "table entry":
        far = replace(batch, block_table=spread(batch.block_table, 1, 2**31))
    else:
        # an offset of 2**31 words of 4 numbers
        key, value = (
            spread(cache, AXES.index(axis), 2**33)
            for cache in (batch.key_cache, batch.value_cache)
        )
        far = replace(batch, key_cache=key, value_cache=value)
    with pretend_fp8_hopper(monkeypatch):
        expected, found = (
            launch(each, options, CASES[name].is_prefill) for each in (batch, far)
        )
    for one, other in zip(expected, found, strict=True):
        assert not bool(one.isnan().any()) and same_bits(one, other)


def test_a_cache_with_a_stride_of_elements_is_converted_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch, options = make_call(CASES["prefill, blocks of 48, window"])
    wide = batch.key_cache.view(torch.uint8).repeat_interleave(2, -1)
    wide[..., 1::2] = 0x7F
    results = []
    with pretend_fp8_hopper(monkeypatch) as launches:
        for key in (batch.key_cache, wide.view(E4M3)[..., ::2]):
            out, lse = batch.fresh()
            call = to_call(replace(batch, key_cache=key), options, out, lse)
            fp8_prefill.plan(call).launch_prefill(call, 0)
            results.append((out, lse))
    assert launches.made == ["upcast_kernel", "prefill_kernel"] * 2
    for one, other in zip(*results, strict=True):
        assert not bool(one.isnan().any()) and same_bits(one, other)


def test_a_call_of_the_twin_is_computed_by_the_fp8_kernels_for_hopper(
    reference: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, options = make_call(CASES["prefill"])
    with pretend_fp8_hopper(monkeypatch) as launches:
        out = TWINS["optimized"].raw.paged_attention(
            **batch.arguments(), options=options
        )
    assert launches.made == ["fp8_decode_kernel", "upcast_kernel", "prefill_kernel"]
    right = reference.paged_attention(
        **batch.arguments(), options=options, compute_dtype=torch.float64
    )
    torch.testing.assert_close(out.double(), right.double(), atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_reported(
    name: str, reference: Twin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = FAULTS[name]
    text = (KERNELS / fault.file).read_text(encoding="utf-8")
    assert text.count(fault.old) == 1
    path = tmp_path / Path(fault.file).name
    path.write_text(text.replace(fault.old, fault.new), encoding="utf-8")
    module = fault.file.removesuffix(".py").replace("/", ".")
    with (
        pytest.raises(AssertionError) as raised,
        change_module(f"pagetwin.optimized.kernels.{module}", path),
        pretend_fp8_hopper(monkeypatch),
    ):
        check(CASES[fault.case], reference)
    found = str(raised.value)
    assert any(each in found for each in fault.report.split("|")), found


@pytest.mark.parametrize(
    ("dtype", "instruction"), [(E4M3, DECODE_E4M3.value), (E5M2, DECODE_E5M2.value)]
)
def test_the_assembly_decodes_every_code_to_its_number(
    dtype: torch.dtype, instruction: str
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
    of_key = run_packed(k_code.fn(instruction), "=h,=h,=h,=h,r", [first], kinds[:4])
    for i, found in enumerate(of_key):
        assert same_bits(found.tensor, numbers[:, i])
    pairs = run_packed(
        v_code.fn(instruction), "=h,=h,=h,=h,=h,=h,=h,=h,r,r", [first, second], kinds
    )
    for i, found in enumerate(pairs):
        assert same_bits(found.tensor, numbers[:, i // 2 + i % 2 * 4])


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
