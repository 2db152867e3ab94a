"""Laws of repeated calls: each result comes from the inputs of its own call.

A kernel may keep plans, workspaces and compiled code, but no result. Calls are repeated with the
same lengths and queries, while one element of a key or of a value is another one, or two keys are
exchanged: in other tensors, at the same addresses, after the first contents were restored, in
another thread or stream, with an output that holds the result of an earlier call, and after many
equal calls. Lengths, block ids and the scale change too. Each result is compared with the exact one
for the contents of its own call.
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ..base.support import Support
from ..candidates.calls.calling import Result, declared, expect_right, run_call
from ..candidates.candidate import OutsideSupport
from ..candidates.fitting import fit_case
from ..candidates.setting import Setting
from ..cases.batches import BatchPlan
from ..cases.options import Call, paged_call, ragged_call
from ..checks.canaries import copy_of
from ..checks.expect import Disagreement, expect_same
from .law import law

STEP = 64.0
"""What is added to an element. The largest e4m3 number is 448, and other elements are about 1."""
MANY, MOST = 9, 256
"""Equal calls before the contents change, at least, and at most if they take less than SECONDS."""
SECONDS = 0.5
CYCLES = 20_000_000
"""Clock cycles, about 10 ms, after which a GPU begins to write what a call reads."""
LENS = (
    ((1, 1), (5, 18)),
    ((1,), (33,)),
    ((1, 1, 1), (2, 17, 9)),
    ((1, 1), (70, 100)),
    ((5, 1), (21, 6)),
)
"""New tokens and keys of requests. The first four are decodes, which most kernels support."""
OPERATIONS = ("paged_attention", "encoder_attention")


@dataclass(frozen=True)
class Repeat:
    """A call, and the element that changes between its repetitions.

    Args:
        operation: One of OPERATIONS.
        plan: The batch. Its needle, if there is one, is the first or the last key of each request.
        changed: "key", "value", or "keys" if two keys are exchanged, which keeps every sum.
        req: Number of the request that changes, modulo their number.
        element: Number of the element that changes, modulo their number.
        position: Position that changes, modulo the length, if the plan has no needle.
        is_silent: Whether torch does not count the change as a new version of the tensor, as it
            does not count what a kernel writes.
    """

    operation: str
    plan: BatchPlan
    changed: str
    req: int
    element: int
    position: int = 0
    is_silent: bool = False

    def within(self, support: Support) -> "Repeat":
        """Return the case with a batch inside of the support."""
        return replace(self, plan=fit_case(self.plan, support))

    def call(self, setting: Setting) -> Call:
        """Return the call with newly allocated tensors."""
        found = paged_call(setting.fit(self.plan), setting.device)
        if self.operation == "encoder_attention":
            found = ragged_call(found.changed(causal=None))
        return declared(setting, found)

    def add(self, call: Call, amount: float) -> None:
        """Add a number to one element of a key or value, or exchange two keys, in place."""
        req = self.req % len(call.key_lens)
        length = call.key_lens[req]
        if self.changed == "keys":
            one, other = (self._row(call, "key", req, at) for at in (0, length - 1))
            before = one.clone()
            one.copy_(other)
            other.copy_(before)
            return
        position = {"first": 0, "last": length - 1}.get(
            self.plan.needle, self.position % length
        )
        row = self._row(call, self.changed, req, position)
        head, element = divmod(self.element % row.numel(), row.shape[1])
        row[head, element] = (row[head, element].float() + amount).to(row.dtype)

    def _row(self, call: Call, name: str, req: int, position: int) -> Tensor:
        """Return [kv_heads, head_size] the key or value at a position of a request."""
        if not call.rows:
            tensor = self.written(call.arguments[name])
            return tensor[sum(call.key_lens[:req]) + position]
        cache = self.written(call.arguments[f"{name}_cache"])
        block_id = call.rows[req][position // cache.shape[1]]
        return cache[block_id, position % cache.shape[1]]

    def written(self, tensor: Tensor) -> Tensor:
        """Return a tensor through which another one is changed."""
        if not self.is_silent:
            return tensor
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(
            tensor.untyped_storage(),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
        )


@st.composite
def repeats(draw: st.DrawFn, operation: str) -> Repeat:
    query_lens, kv_lens = draw(st.sampled_from(LENS))
    changed = draw(st.sampled_from(("value", "key", "keys")))
    needles = ("last", "first") if changed == "keys" else ("last", "first", "none")
    plan = BatchPlan(
        query_lens,
        kv_lens,
        kv_heads=draw(st.sampled_from((1, 2))),
        fused=False,
        needle=draw(st.sampled_from(needles)),
        seed=draw(st.integers(0, 2**20)),
    )
    return Repeat(
        operation,
        plan,
        changed,
        req=draw(st.integers(0, 3)),
        element=draw(st.integers(0, 99)),
        position=draw(st.integers(0, 99)),
        is_silent=draw(st.booleans()),
    )


def large(operation: str) -> list[Repeat]:
    """Return cases with many requests, many pages, and a change in the middle of a sequence."""

    def plan(count: int, keys: int, needle: str) -> BatchPlan:
        lens = (1,) * count, (keys,) * count
        return BatchPlan(*lens, kv_heads=1, fused=False, needle=needle)

    return [
        Repeat(operation, plan(40, 2, "last"), "value", req=39, element=3),
        Repeat(operation, plan(1, 300, "last"), "key", 0, 3, is_silent=True),
        Repeat(operation, plan(1, 300, "none"), "value", 0, 3, position=150),
    ]


def expect_own_result(
    setting: Setting, call: Call, when: str, out: Tensor | None = None
) -> Tensor:
    """Call the candidate, raise if the result is not that of these contents, and return it."""
    found = run_call(setting, call, out)
    _compare(setting, call, found, when)
    return found[0]


def _compare(setting: Setting, call: Call, found: Result, when: str) -> None:
    try:
        expect_right(setting, call, found)
    except Disagreement as error:
        raise Disagreement(
            f"{error.what} {when}",
            error.where,
            error.found,
            error.right,
            error.failure,
        ) from error


@law(
    "paged_attention",
    cases=repeats("paged_attention"),
    edges=large("paged_attention"),
)
def attention_depends_on_keys_and_values_in_other_tensors(
    setting: Setting, case: Repeat
) -> None:
    first, second = case.call(setting), case.call(setting)
    case.add(second, STEP)
    expect_own_result(setting, first, "of the first call")
    when = (
        f"of a call that differs from the one before in one element of a {case.changed}"
    )
    expect_own_result(setting, second, when)


@law(
    "paged_attention",
    cases=repeats("paged_attention"),
    edges=large("paged_attention"),
)
def attention_depends_on_contents_that_change_at_their_addresses(
    setting: Setting, case: Repeat
) -> None:
    call = case.call(setting)
    expect_own_result(setting, call, "of the first call")
    for amount in (STEP, -2 * STEP):
        case.add(call, amount)
        when = f"after one element of a {case.changed} changed in place"
        expect_own_result(setting, call, when)


@law("paged_attention", cases=repeats("paged_attention"))
def attention_is_that_of_restored_inputs(setting: Setting, case: Repeat) -> None:
    call = case.call(setting)
    name = next(
        name for name in call.arguments if name.startswith(case.changed.rstrip("s"))
    )
    before = copy_of(call.arguments[name])
    expect_own_result(setting, call, "of the first call")
    case.add(call, STEP)
    expect_own_result(setting, call, "after one element changed in place")
    call.arguments[name].copy_(before)
    expect_own_result(setting, call, "after the first contents were restored")


@law("paged_attention", cases=repeats("paged_attention"))
def attention_is_that_of_its_own_contents_in_another_thread(
    setting: Setting, case: Repeat
) -> None:
    """On a GPU it has a stream of its own, too."""
    call = case.call(setting)
    expect_own_result(setting, call, "of the first call")
    case.add(call, STEP)
    on_gpu = setting.device.type == "cuda"
    if on_gpu:
        torch.cuda.synchronize(setting.device)

    def run() -> Result:
        stream: Any = nullcontext()
        if on_gpu:
            own: Any = torch.cuda.Stream
            stream = torch.cuda.stream(own(setting.device))
        with stream:
            found = run_call(setting, call)
        if on_gpu:
            torch.cuda.synchronize(setting.device)
        return found

    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(run).result()
    _compare(setting, call, found, "in another thread, after one element changed")


@law("paged_attention", cases=repeats("paged_attention"))
def attention_keeps_the_order_of_the_current_stream(
    setting: Setting, case: Repeat
) -> None:
    """It reads what was written before the call, and is read after it, without waiting."""
    call = case.call(setting)
    expect_own_result(setting, call, "of the first call")
    own = replace(setting, candidate=setting.candidate.without_waiting())
    on_gpu = setting.device.type == "cuda"
    if on_gpu:
        cuda: Any = torch.cuda
        cuda._sleep(CYCLES)
    case.add(call, STEP)
    # what compares its arguments would wait for the call
    out, lse = run_call(own, call, is_guarded=True)
    found = out.clone(), None if lse is None else lse.clone()
    if on_gpu:
        torch.cuda.synchronize(setting.device)
    _compare(setting, call, found, "of what was written just before, read just after")


@law("paged_attention", cases=repeats("paged_attention"))
def attention_overwrites_an_earlier_result_in_its_output(
    setting: Setting, case: Repeat
) -> None:
    call = case.call(setting)
    if call.out_dtype is None:
        raise OutsideSupport("no output is passed")
    out = expect_own_result(setting, call, "of the first call")
    case.add(call, STEP)
    when = "into an output that holds the result of other contents"
    right = expect_own_result(setting, call, when, out).clone()
    when = "into an output that holds the right result already"
    expect_own_result(setting, call, when, right)


@law("paged_attention", cases=repeats("paged_attention"))
def attention_does_not_depend_on_the_number_of_calls(
    setting: Setting, case: Repeat
) -> None:
    call = case.call(setting)
    began, count = perf_counter(), 0
    while count < MANY or (count < MOST and perf_counter() - began < SECONDS):
        found = run_call(setting, call)
        count += 1
        if count < MANY or count & (count - 1) == 0:
            _compare(setting, call, found, f"of call {count} of equal ones")
    expect_own_result(setting, call, f"of call {count + 1} of equal ones")
    case.add(call, STEP)
    when = f"of other contents after {count + 1} equal calls"
    expect_own_result(setting, call, when)


@law("paged_attention", cases=repeats("paged_attention"))
def an_earlier_result_of_attention_is_kept(setting: Setting, case: Repeat) -> None:
    """Neither call gets an output, so each result has memory of its own."""
    first, second = (
        replace(case.call(setting), out_dtype=None, wants_lse=False) for _ in range(2)
    )
    case.add(second, STEP)
    out = expect_own_result(setting, first, "of the first call")
    before = out.cpu().clone()
    expect_own_result(setting, second, "of the second call")
    expect_same("result of the first call after a second one", out, before)


@st.composite
def other_lengths(draw: st.DrawFn) -> Repeat:
    """Return a case of two decodes of several blocks, whose last key is the needle."""
    plan = BatchPlan(
        (1, 1),
        draw(st.sampled_from(((34, 50), (70, 33)))),
        fused=False,
        needle=draw(st.sampled_from(("last", "none"))),
        spare_max=draw(st.sampled_from((0, 3))),
        seed=draw(st.integers(0, 2**20)),
    )
    return Repeat(
        "paged_attention",
        plan,
        "value",
        req=draw(st.integers(0, 1)),
        element=0,
        is_silent=draw(st.booleans()),
    )


@law("paged_attention", cases=other_lengths())
def attention_depends_on_lengths_blocks_and_scale_that_change_between_calls(
    setting: Setting, case: Repeat
) -> None:
    """A sequence is one key shorter, then two of its blocks are exchanged, in place."""
    call = case.call(setting)
    if not call.rows:
        raise OutsideSupport("the keys are not in blocks")
    req = case.req % len(call.rows)
    expect_own_result(setting, call, "of the first call")
    if call.key_lens[req] > call.query_lens[req]:
        lens = list(call.key_lens)
        lens[req] -= 1
        case.written(call.arguments["seq_lens"])[req] = lens[req]
        call = replace(call, key_lens=tuple(lens))
        when = "after a sequence became one key shorter in place"
        expect_own_result(setting, call, when)
    row, block_size = call.rows[req], call.arguments["key_cache"].shape[1]
    if call.key_lens[req] >= 2 * block_size:
        rows = [list(row) for row in call.rows]
        rows[req][:2] = row[1], row[0]
        table = case.written(call.arguments["block_table"])
        table[req, 0], table[req, 1] = row[1], row[0]
        call = replace(call, rows=rows)
        expect_own_result(setting, call, "after two blocks were exchanged in place")
    scale = call.arguments.get("scale")
    if scale is not None or "scale" in (
        setting.candidate.support.options or ("scale",)
    ):
        other = 0.5 * (call.query.shape[2] ** -0.5 if scale is None else scale)
        when = "with another scale of the same tensors"
        expect_own_result(setting, call.changed(scale=other), when)


@law("encoder_attention", cases=repeats("encoder_attention"))
def ragged_attention_depends_on_contents_that_change_at_their_addresses(
    setting: Setting, case: Repeat
) -> None:
    attention_depends_on_contents_that_change_at_their_addresses(setting, case)


@law("encoder_attention", cases=repeats("encoder_attention"))
def ragged_attention_does_not_depend_on_the_number_of_calls(
    setting: Setting, case: Repeat
) -> None:
    attention_does_not_depend_on_the_number_of_calls(setting, case)
