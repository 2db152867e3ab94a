"""Fatal errors: crashes, hangs, failed allocations and lost CUDA contexts end only one process.

Each kernel fails for some inputs alone. Its law is reported with such an input, and every other law
is judged as if nothing had happened.
"""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pagetwin.conformance import Status
from pagetwin.conformance.api.check import check_implementation
from pagetwin.conformance.base.results import SEVERITIES, severity_of
from pagetwin.conformance.reports.report import Report
from pagetwin.conformance.running.trial import find_law, make_case
from pagetwin.conformance.running.worker import Job, Worker

SLOTS = "every new token gets the slot of its block table row"
BLOCKS = "blocks needed are the fewest that hold the tokens"
ATTENDS = "every new token attends to its sequence up to itself"
EMPTY = "an empty batch gives rows of zeros"
AROUND = "nothing is written outside of the output"
ROWS = "block table entries past the end of a sequence are never read"
PAST = "nothing past the end of a tensor is read"
Write = Callable[[str], str]


def slots(fault: str, condition: str = "block_size == 3") -> str:
    """Return a module whose slot mapping has a fault under a condition."""
    return f"""
    import os, time
    from pagetwin.reference import blocks_needed
    from pagetwin.reference import compute_slot_mapping_batch as right

    calls = []

    def compute_slot_mapping_batch(query_lens, computed, rows, block_size):
        calls.append(1)
        if {condition}:
            {fault}
        return right(query_lens, computed, rows, block_size)
    """


FAULTS = {
    "exit": ("os._exit(7)", Status.CRASHED, "the process ended with code 7"),
    "read": (
        "__import__('ctypes').string_at(0)",
        Status.CRASHED,
        "Segmentation fault, at line 11 of written_",
    ),
    "abort": ("os.abort()", Status.CRASHED, "Aborted"),
    "sleep": ("time.sleep(1000)", Status.HANGS, "it took more than 2 seconds"),
    "memory": ("raise MemoryError('8 GiB')", Status.OUT_OF_MEMORY, "8 GiB"),
    "killed": ("os.kill(os.getpid(), 9)", Status.OUT_OF_MEMORY, "memory runs out"),
}


@pytest.mark.long
@pytest.mark.parametrize("name", FAULTS)
def test_a_fatal_error_ends_one_law_and_not_the_next(
    write_module: Write, name: str
) -> None:
    fault, status, words = FAULTS[name]
    seconds = 2 if status == Status.HANGS else 60
    worker = Worker(write_module(slots(fault)), "cpu", seconds_of_a_case=seconds)
    try:
        first = worker.try_law(Job(SLOTS, examples=60), "slots")
        other = worker.try_law(Job(BLOCKS, examples=5), "blocks")
    finally:
        worker.stop()
    assert first.status == status and words in first.message, first
    assert make_case(find_law(SLOTS), first.case).block_size == 3
    assert "alone" not in first.message
    assert other.status == Status.HELD, other


ENDS_EVERY_PROCESS = """
import os
from pagetwin.conformance import Support

SUPPORT = Support(operations=["paged_attention"])

def paged_attention(*arguments, **given):
    open("calls", "a").write("call ")
    os.abort()
"""


@pytest.mark.long
def test_an_operation_that_ends_every_process_is_judged_by_three_of_its_laws(
    write_module: Write, tmp_path: Path
) -> None:
    """Each law started two processes: a solution that trapped took longer than ten minutes."""
    module = write_module(ENDS_EVERY_PROCESS)
    report = check_implementation(module, "s of", device="cpu", examples=3)
    ended = Counter(judged.status for judged in report.results)
    assert ended[Status.CRASHED] == 3 and ended[Status.NOT_TRIED] > 3, ended
    # the smallest input is tried before all laws, to find out whether a GPU is needed
    assert (tmp_path / "calls").read_text().count("call") == 4
    title = "laws not tried: 3 laws of paged_attention ended the process at their first call"
    assert report.symptoms()[-1].title.endswith(title)
    assert not report.ok


WRITES_PAST_ITS_OUTPUT = """
from pagetwin.conformance import Support
from pagetwin.contract.attention_options import pack_options
from pagetwin.reference import paged_attention as right

SUPPORT = Support(operations=["paged_attention"])

def paged_attention(*arguments, out=None, **given):
    found = right(*arguments, out=out, **pack_options(**given))
    if out is not None and out.storage_offset():
        out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(1.0)
    return found
"""


@pytest.mark.extended
def test_a_write_before_the_output_is_found_and_is_severe(write_module: Write) -> None:
    worker = Worker(write_module(WRITES_PAST_ITS_OUTPUT), "cpu")
    try:
        result = worker.try_law(Job(AROUND, listed=3), "attention")
    finally:
        worker.stop()
    assert result.status == Status.BROKEN
    assert SEVERITIES[severity_of(result)] == "writes outside of its output"
    assert result.what == "what lies around the output"
    title = Report("mine", "cpu", (result,)).symptoms()[0].title
    assert title.startswith("1 law broken: what lies around the output")


READS_TOO_FAR = """
import torch
import triton
import triton.language as tl
from pagetwin.conformance import Support
from pagetwin.contract.attention_options import pack_options
from pagetwin.reference import paged_attention as right

SUPPORT = Support(operations=["paged_attention"])

@triton.jit
def read(tensor, index, found):
    tl.store(found, tl.load(tensor + index))

def paged_attention(query, key_cache, block_table, seq_lens, **given):
    used = -(-int(seq_lens[0]) // key_cache.shape[1])
    found = torch.zeros(1, dtype=torch.int32, device=query.device)
    read[(1,)](TENSOR, INDEX, found)
    given |= dict(query=query, key_cache=key_cache)
    given |= dict(block_table=block_table, seq_lens=seq_lens)
    return right(**pack_options(**given))
"""
ONE_TOO_FAR = {
    "an entry past a sequence": (ROWS, PAST, "block_table", "used"),
    "a length past the requests": (PAST, ROWS, "seq_lens", "len(seq_lens)"),
}


def try_reading_too_far(write_module: Write, name: str, device: str) -> None:
    """Assert that the law of this memory is reported as crashed, and that the other holds."""
    law, other, tensor, index = ONE_TOO_FAR[name]
    source = READS_TOO_FAR.replace("TENSOR", tensor).replace("INDEX", index)
    worker = Worker(write_module(source), device, seconds_of_a_case=60)
    try:
        found = worker.try_law(Job(law, listed=3), "guarded memory")
        held = worker.try_law(Job(other, listed=3), "guarded memory")
    finally:
        worker.stop()
    words = "CUDA error" if device == "cuda" else "Segmentation fault"
    assert found.status == Status.CRASHED and words in found.message, found
    assert "alone" not in found.message and found.cases == 1
    assert held.status == Status.HELD, held


@pytest.mark.long
@pytest.mark.parametrize("name", ONE_TOO_FAR)
def test_a_read_of_one_element_too_many_ends_the_process(
    write_module: Write, name: str
) -> None:
    try_reading_too_far(write_module, name, "cpu")


# ---- on a GPU

ON_CUDA = """
import torch
import triton
import triton.language as tl
from pagetwin.conformance import Support
from pagetwin.contract.attention_options import pack_options
from pagetwin.optimized import paged_attention as right

SUPPORT = Support(operations=["paged_attention"])

@triton.jit
def trap(x):
    value = tl.load(x + tl.arange(0, 32))
    asm: tl.constexpr = "trap; mov.b32 $0, $1;"
    value = tl.inline_asm_elementwise(asm, "=r,r", [value], tl.int32, False, 1)
    tl.store(x + tl.arange(0, 32), value)

@triton.jit
def hang(x):
    value = tl.load(x, volatile=True)
    while value == 0:
        value = tl.load(x, volatile=True)
    tl.store(x, value)

@triton.jit
def write_far(x):
    tl.store(x + tl.full((), 1 << 40, tl.int64), 1)

def paged_attention(query, *arguments, **given):
    if query.dtype == torch.float16:
        FAULT[(1,)](torch.zeros(32, dtype=torch.int32, device=query.device))
    return right(query, *arguments, **pack_options(**given))
"""
ON_DEVICE = {
    "trap": (Status.CRASHED, "CUDA error"),
    "hang": (Status.HANGS, "it took more than 20 seconds"),
    "write_far": (Status.CRASHED, "CUDA error"),
}


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ON_DEVICE)
def test_a_cuda_error_belongs_to_its_call_and_ends_only_its_process(
    write_module: Write, name: str
) -> None:
    """The context stays unusable, so that every later law of the process was broken too."""
    status, words = ON_DEVICE[name]
    module = write_module(ON_CUDA.replace("FAULT", name))
    worker = Worker(module, "cuda", seconds_of_a_case=20)
    try:
        first = worker.try_law(Job(ATTENDS, examples=12), "attention")
        other = worker.try_law(Job(EMPTY), "attention")
        again = worker.try_law(Job(ATTENDS, case=first.case), "attention")
    finally:
        worker.stop()
    assert first.status == again.status == status, (first, again)
    assert words in first.message and "alone" not in first.message
    assert make_case(find_law(ATTENDS), first.case).dtype == torch.float16
    assert other.status == Status.HELD, other
    assert SEVERITIES[severity_of(first)] == "ends the process"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_device_memory_that_runs_out_is_reported_as_such(write_module: Write) -> None:
    fault = "query.new_empty(1 << 45)"
    call = "FAULT[(1,)](torch.zeros(32, dtype=torch.int32, device=query.device))"
    worker = Worker(write_module(ON_CUDA.replace(call, fault)), "cuda")
    try:
        first = worker.try_law(Job(ATTENDS, examples=12), "attention")
        other = worker.try_law(Job(EMPTY), "attention")
    finally:
        worker.stop()
    assert first.status == Status.OUT_OF_MEMORY, first
    assert other.status == Status.HELD, other


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ONE_TOO_FAR)
def test_a_read_of_one_element_too_many_is_a_cuda_error(
    write_module: Write, name: str
) -> None:
    try_reading_too_far(write_module, name, "cuda")
