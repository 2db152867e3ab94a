"""Drawing and judging of batches on a device: no operation mixes devices, and nothing waits.

The device is a second one without hardware, which computes on the host (`second_device.py`).
"""

from collections.abc import Iterator

import pytest
import torch
from pagetwin.conformance.cases import drawn_numbers
from pagetwin.conformance.cases.signatures import (
    LARGE,
    SMALL,
    Limits,
    Signature,
    draw_batch,
    draw_signature,
)
from pagetwin.conformance.cases.signed_calls import SignedCall, build_signed
from pagetwin.conformance.checks.group_verdicts import judge_group
from pagetwin.conformance.checks.groups import make_group
from support.second_device import DEVICE, HOST, OnDevice, SecondDevice
from torch import Tensor

pytestmark = pytest.mark.long

OPERATIONS = ("paged_attention", "encoder_attention")
SIGNATURES = 40
BATCHES = 3


@pytest.fixture
def second() -> Iterator[SecondDevice]:
    """Provide a second device. Normal numbers that it has cached are forgotten."""
    drawn_numbers.normal_numbers.cache_clear()
    with SecondDevice() as mode:
        yield mode
    drawn_numbers.normal_numbers.cache_clear()


def signatures(operation: str, limits: Limits) -> list[Signature]:
    return [draw_signature(seed, limits, operation) for seed in range(SIGNATURES)]


def on_host(tensor: Tensor) -> Tensor:
    return tensor.numbers if isinstance(tensor, OnDevice) else tensor


def same_bits(one: Tensor, other: Tensor) -> bool:
    first, second = (
        torch.stack([batch.double().nan_to_num(1e300)]) for batch in (one, other)
    )
    return one.dtype == other.dtype and torch.equal(first, second)


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("limits", [SMALL, LARGE], ids=["small", "large"])
def test_a_batch_is_built_on_its_device_without_waiting_and_with_the_same_numbers(
    operation: str, limits: Limits, second: SecondDevice
) -> None:
    for signature in signatures(operation, limits):
        batch = draw_batch(signature, 0)
        there = build_signed(batch, DEVICE)
        assert not second.reads, (batch, second.reads)
        here = build_signed(batch, HOST)
        assert there.call.arguments.keys() == here.call.arguments.keys()
        for name, right in here.call.arguments.items():
            found = there.call.arguments[name]
            if isinstance(right, Tensor):
                assert isinstance(found, OnDevice), (name, batch)
                assert found.stride() == right.stride()
                assert same_bits(found.numbers, right), (name, batch)
            else:
                assert found == right
        for name in ("query", "keys", "values"):
            found = getattr(there, name)
            assert isinstance(found, OnDevice)
            assert same_bits(found.numbers, getattr(here, name)), (name, batch)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_what_the_host_draws_of_a_batch_is_copied_to_its_device_at_once(
    operation: str, second: SecondDevice
) -> None:
    for signature in signatures(operation, LARGE):
        build_signed(draw_batch(signature, 0), DEVICE)  # normal numbers of its dtypes
        second.copies = 0
        build_signed(draw_batch(signature, 1), DEVICE)
        assert second.copies == 1, signature


def test_tensors_that_are_copied_together_keep_their_numbers_and_end_with_garbage(
    second: SecondDevice,
) -> None:
    tensors = {
        "ids": torch.arange(128, dtype=torch.int32).view(8, 16),  # 512 bytes
        "flags": torch.tensor([True, False, True]),
        "none": torch.zeros(0, 3, dtype=torch.int64),
        "number": torch.tensor(3.0, dtype=torch.bfloat16),
        "row": torch.arange(5.0),
    }
    found = drawn_numbers.moved_together(tensors, DEVICE)
    assert second.copies == 1 and list(found) == list(tensors)
    for name, right in tensors.items():
        assert same_bits(on_host(found[name]), right), name
        begin = found[name].storage_offset() * right.dtype.itemsize
        assert begin % drawn_numbers.ALIGNMENT == 0
        memory = on_host(found[name]).untyped_storage()
        assert memory[begin + right.nbytes] == drawn_numbers.GARBAGE_BYTE, name


def outputs(
    calls: list[SignedCall], device: torch.device
) -> list[tuple[Tensor, Tensor | None]]:
    """Return an output and a log-sum-exp per call, full of one number."""
    found = []
    for signed in calls:
        call = signed.call
        values = call.arguments.get("value_cache", call.arguments.get("value"))
        assert isinstance(values, Tensor)
        tokens, heads, _ = call.query.shape
        dtype = call.out_dtype or call.dtype
        out = torch.full((tokens, heads, values.shape[-1]), 0.5, device=device)
        lse = torch.full((heads, tokens), 0.25, device=device)
        found.append((out.to(dtype), lse if call.wants_lse else None))
    return found


@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_group_of_calls_is_judged_on_its_device_with_one_read(
    operation: str, second: SecondDevice
) -> None:
    """The read is that of the verdicts. They are the same as on the host."""
    for signature in signatures(operation, SMALL):
        batches = [draw_batch(signature, index) for index in range(BATCHES)]
        verdicts = []
        for device in (DEVICE, HOST):
            calls = [build_signed(batch, device) for batch in batches]
            group = make_group(calls, device)
            verdicts.append(judge_group(group, outputs(calls, device)))
            expected = {"aten._to_copy": 1} if device == DEVICE else {}
            assert second.reads == expected, signature
            second.reads.clear()
        # exponentials differ by a rounding of float64 between loops of other strides
        assert verdicts[0] == [pytest.approx(share, rel=1e-9) for share in verdicts[1]]


def test_the_second_device_notices_mixed_devices_and_reads(
    second: SecondDevice,
) -> None:
    there, here = torch.ones(3, device=DEVICE), torch.ones(3)
    with pytest.raises(RuntimeError, match="mixes devices"):
        there + here
    assert on_host(there * here.sum()).tolist() == [3, 3, 3]
    assert not second.reads
    assert float(there.sum()) == 3 and there.to(HOST).tolist() == [1, 1, 1]
    assert second.reads == {"aten._local_scalar_dense": 1, "aten._to_copy": 1}
