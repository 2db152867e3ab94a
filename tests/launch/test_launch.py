"""Launch plans, their cache, kernel families and the workspace of split work."""

import ast
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from pagetwin.contract.attention_options import DEFAULT_OPTIONS, AttentionOptions
from pagetwin.optimized import release_workspace
from pagetwin.optimized.dispatch import dispatch
from pagetwin.optimized.dispatch.choice import launch_attention, make_attention_plan
from pagetwin.optimized.kernels.portable.host import make_launches as prepare
from pagetwin.optimized.kernels.portable.host import plan as portable
from pagetwin.optimized.kernels.portable.host.family import (
    FAMILIES as PORTABLE_FAMILIES,
)
from pagetwin.optimized.kernels.portable.host.plans import PortableDecodePlan
from pagetwin.optimized.kernels.sm90.prefill import family as sm90
from pagetwin.optimized.runtime import attention_call, workspace
from pagetwin.optimized.runtime.attention_call import AttentionCall, sign, sizes_fit
from pagetwin.optimized.runtime.family import Estimate, KernelFamily, Role, Task
from pagetwin.optimized.runtime.launcher import INTERPRETED, Launcher
from pagetwin.optimized.runtime.plan_cache import PlanCache
from support import source_tree
from support.compiler_process import run_compiler
from support.forced_choices import no_launch_for_all, these_families
from support.twins import Twin
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.fixture
def optimized() -> Twin:
    return Twin("optimized", enforce=False)


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlanCache[Any]]:
    """Return an empty plan cache, which is used in the interpreter too."""
    cache: PlanCache[Any] = PlanCache(8)
    monkeypatch.setattr(dispatch.PIPELINE, "plans", cache)
    monkeypatch.setattr(attention_call, "INTERPRETED", False)
    yield cache


# ---- the plan cache


def test_the_cache_keeps_the_plans_used_last_and_no_more_than_its_capacity() -> None:
    cache: PlanCache[int] = PlanCache(8)
    for number in range(100):
        cache.put((number,), number)
        assert cache.get((number,)) == number
        assert cache.get((0,)) == 0, "used in every step"
        assert len(cache) <= 8
        recent = range(max(0, number - 2), number + 1)
        assert [cache.get((number,)) for number in recent] == list(recent)
    assert cache.get((50,)) is None
    cache.clear()
    assert len(cache) == 0 and cache.get((0,)) is None


def ragged_call(
    lens: list[int], device: torch.device, **changes: Any
) -> dict[str, Any]:
    """Return the arguments of self-attention over requests of these lengths."""
    generator = torch.Generator().manual_seed(sum(lens))
    query, key, value = torch.randn(3, sum(lens), 2, 16, generator=generator).to(device)
    starts = torch.tensor([0, *lens], device=device).cumsum(0).int()
    return {
        "query": query,
        "key": key,
        "value": value,
        "query_start_loc": starts,
        "key_start_loc": starts,
        "max_query_len": max(lens),
        "max_key_len": max(lens),
    } | changes


@pytest.mark.extended
def test_ragged_calls_with_other_totals_share_a_plan(
    plans: PlanCache[Any], optimized: Twin, reference: Twin, device: torch.device
) -> None:
    for lens in ([5, 40], [3], [7, 7, 7, 60], [90]):
        call = ragged_call(lens, device)
        found = optimized.encoder_attention(**call)
        assert torch.allclose(found, reference.encoder_attention(**call), atol=1e-5)
    assert len(plans) == 1
    optimized.encoder_attention(**call, options=AttentionOptions(sliding_window=3))
    assert len(plans) == 2


@pytest.mark.extended
def test_many_kinds_of_calls_leave_a_bounded_cache(
    plans: PlanCache[Any], optimized: Twin, device: torch.device
) -> None:
    for window in range(1, 30):
        options = AttentionOptions(sliding_window=window)
        optimized.encoder_attention(**ragged_call([5], device), options=options)
        assert len(plans) <= 8


# what has few values in one process: chips, versions, names, kinds of caches, block sizes
FEW_VALUES = {
    *("device", "version", "name", "kind", "block_size", "is_float32", "interpreter"),
    "kernel_arguments",
}
SERVES = ("reference", "optimized", "engine", "recorder", "integrations")


@pytest.mark.extended
def test_a_cache_without_a_bound_is_keyed_by_what_has_few_values() -> None:
    """A server that runs for weeks meets any number of shapes."""
    names = [
        module for module in source_tree.modules() if module.split(".")[0] in SERVES
    ]
    wrong, unbounded = [], 0
    for module in names:
        for node in ast.walk(source_tree.tree_of(module)):
            if not isinstance(node, ast.FunctionDef):
                continue
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if not {"cache", "lru_cache(None)", "lru_cache(maxsize=None)"} & {
                decorator.removeprefix("functools.") for decorator in decorators
            }:
                continue
            unbounded += 1
            keys = {argument.arg for argument in node.args.args}
            if keys - FEW_VALUES or node.args.vararg or node.args.kwarg:
                wrong.append(f"{module}.{node.name}: {sorted(keys)}")
    assert wrong == [] and unbounded


@pytest.mark.extended
def test_many_shapes_leave_bounded_host_caches(
    plans: PlanCache[Any], optimized: Twin, device: torch.device
) -> None:
    """As in a server whose batches, windows and block-table widths never stop changing."""
    cache = torch.randn(2, 12, 4, 1, 16, device=device)
    for number in range(40):
        reqs, width = 1 + number % 3, 1 + number % 4
        lens = torch.full((reqs,), 1 + number % (4 * width), dtype=torch.int32)
        optimized.paged_attention(
            torch.randn(reqs, 2, 16, device=device),
            *cache,
            torch.zeros(reqs, width, dtype=torch.int32, device=device),
            torch.arange(reqs + 1, dtype=torch.int32, device=device),
            lens.to(device),
            1,
            int(lens.max()),
            options=AttentionOptions(sliding_window=1 + number),
        )
        assert 1 <= len(plans) <= 8 and len(plans.repeats) <= 8


def test_ragged_keys_and_values_of_different_totals_are_validated_on_every_call(
    plans: PlanCache[Any], optimized: Twin, device: torch.device
) -> None:
    """The signature leaves out both totals."""
    call = ragged_call([5, 40], device)
    optimized.encoder_attention(**call)
    with pytest.raises(ValueError, match=r"key has shape \[44, 2, 16\] and value \[45"):
        optimized.encoder_attention(**(call | {"key": call["key"][:44]}))


@pytest.mark.skipif(
    not INTERPRETED, reason="on a GPU the law on 64-bit offsets does it"
)
def test_a_large_tensor_after_a_small_one_of_the_same_kind_gets_64_bit_offsets(
    plans: PlanCache[Any],
    optimized: Twin,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal strides, and more keys than 32-bit offsets reach."""
    # the interpreter would use 64 bits always
    monkeypatch.setattr(prepare, "INTERPRETED", False)
    step, few, many = 2**26, 20, 40
    # only the rows that are used are touched, so this costs addresses and no memory
    memory = torch.empty(step * many, dtype=torch.float16)
    keys = memory.as_strided((many, 2, 16), (step, 16, 1))
    keys[:] = torch.randn(many, 2, 16, generator=torch.Generator().manual_seed(0))
    for total in (few, many):
        starts = torch.tensor([0, total]).int()
        query = keys[:3].contiguous()
        call = (query, keys[:total], keys[:total], torch.tensor([0, 3]).int(), starts)
        packed = (query, *[keys[:total].contiguous()] * 2, *call[3:])
        found = optimized.encoder_attention(*call, 3, total)
        assert torch.equal(found, optimized.encoder_attention(*packed, 3, total))
    # the large tensor has a plan of its own; packed keys of both totals share one
    assert len(plans) == 3


def plain_call(device: str = "cpu", **changes: Any) -> AttentionCall:
    query = torch.zeros(4, 4, 64, dtype=torch.float16, device=device)
    cache = torch.zeros(9, 16, 2, 64, dtype=torch.float16, device=device)
    fields = {
        "query": query,
        "key": cache,
        "value": cache,
        "block_table": torch.zeros(2, 3, dtype=torch.int32, device=device),
        "query_start_loc": torch.tensor([0, 2, 4], device=device).int(),
        "lengths": torch.tensor([20, 30], device=device).int(),
        "max_query_len": 2,
        "max_key_len": 30,
        "scale": 0.125,
        "out": torch.zeros_like(query),
        "lse": None,
        "options": dispatch.PLAIN[True],
    }
    return AttentionCall(**(fields | changes))


def test_a_signature_leaves_out_what_changes_from_step_to_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_call, "INTERPRETED", False)
    call = plain_call()
    longer = {
        "query": torch.zeros(9, 4, 64, dtype=torch.float16),
        "out": torch.zeros(9, 4, 64, dtype=torch.float16),
        "query_start_loc": torch.tensor([0, 2, 4, 9]).int(),
        "lengths": torch.tensor([20, 30, 40]).int(),
        "block_table": torch.zeros(3, 7, dtype=torch.int32),
        "max_query_len": 5,
        "max_key_len": 100,
        "scale": 2.0,
    }
    other = call._replace(**longer)
    assert sign(other) == sign(call) and sizes_fit(other) and sizes_fit(call)
    for name in ("query", "out", "query_start_loc", "lengths", "block_table"):
        mixed = call._replace(**{name: longer[name]})
        assert name in ("query_start_loc",) or sign(mixed) == sign(call)
        assert not sizes_fit(mixed), name
    assert not sizes_fit(call._replace(max_key_len=49))
    assert not sizes_fit(call._replace(max_query_len=-1))


def test_a_signature_holds_what_a_plan_is_made_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_call, "INTERPRETED", False)
    call = plain_call()
    wide = torch.zeros(9, 16, 2, 96, dtype=torch.float16)
    slopes = AttentionOptions(causal=True, alibi_slopes=torch.ones(4))
    changes: list[dict[str, Any]] = [
        {"query": call.query.float()},
        {"query": call.query[:, ::2]},
        {"key": call.key[:5]},
        {"key": wide[..., :64]},
        {"value": wide},
        {"block_table": torch.zeros(2, 6).int()[:, ::2]},
        {"query_start_loc": torch.zeros(6).int()[::2]},
        {"lengths": torch.zeros(4).int()[::2]},
        {"out": call.out.float()},
        {"out": torch.zeros(4, 64, 4, dtype=torch.float16).transpose(1, 2)},
        {"lse": torch.zeros(4, 4)},
        {"lse": torch.zeros(4, 4).double()},
        {"options": dispatch.PLAIN[False]},
        {"options": AttentionOptions(causal=True, sliding_window=3)},
        {"options": AttentionOptions(causal=True, k_scale=2.0)},
        {"options": slopes},
        {
            "options": AttentionOptions(
                causal=True, alibi_slopes=torch.ones(8).double()[::2]
            )
        },
    ]
    signatures = [sign(call), *(sign(call._replace(**change)) for change in changes)]
    assert None not in signatures
    assert len(set(signatures)) == len(signatures)
    again = AttentionOptions(causal=True, alibi_slopes=torch.zeros(4))
    assert sign(call._replace(options=again)) == sign(call._replace(options=slopes))
    for of_batch in (
        {"causal": torch.ones(2, dtype=torch.bool)},
        {"tree_mask": torch.ones(2, 3, 3, dtype=torch.bool)},
        {"query_ranges": torch.zeros(4, 2, dtype=torch.int32)},
    ):
        assert sign(call._replace(options=AttentionOptions(**of_batch))) is None


def test_options_that_are_passed_again_are_resolved_once() -> None:
    options = AttentionOptions(sliding_window=3)
    chosen = dispatch.choose_options(options, causal=False)
    assert chosen == AttentionOptions(sliding_window=3, causal=False)
    assert dispatch.choose_options(options, causal=False) is chosen
    assert dispatch.choose_options(options, causal=True).causal is True
    assert dispatch.choose_options(DEFAULT_OPTIONS, True) is dispatch.PLAIN[True]
    # what is kept is not an option
    assert chosen.numbers == ("causal", False, "sliding_window", 3)
    assert options == AttentionOptions(sliding_window=3)
    assert chosen.given == ["causal", "sliding_window"]


# ---- kernel families


class Family:
    """A kernel family that notes what it is given."""

    def __init__(
        self, is_supported: bool, takes: bool, clears_padding: bool = False
    ) -> None:
        self.is_supported = is_supported
        self.is_taken = takes
        self.clears_padding = clears_padding
        self.is_repeatable = False
        self.launched: list[int] = []

    @property
    def family(self) -> KernelFamily:
        return KernelFamily(
            "some prefill", Role.PREFILL, lambda _: self.is_supported, lambda _: self
        )

    def estimate(self, layer: Any, batch: Any) -> Estimate:
        return Estimate(0.0)

    def takes(self, call: AttentionCall) -> bool:
        return self.is_taken

    def launch(self, call: AttentionCall, task: Task) -> None:
        self.launched.append(task.short_rows)
        call.out.fill_(7.0)


@pytest.mark.parametrize("query_len", [1, 50])
def test_the_first_family_that_takes_a_call_computes_its_long_requests(
    query_len: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    optimized = Twin("optimized", enforce=False)
    monkeypatch.setattr(dispatch.PIPELINE, "plans", PlanCache(8))
    plans = [Family(False, True), Family(True, False), Family(True, True)]
    prefills = [plan.family for plan in (*plans, Family(True, True))]
    call = ragged_call([query_len], device)
    with these_families(*prefills, *PORTABLE_FAMILIES):
        out = optimized.encoder_attention(**call)
    assert [len(plan.launched) for plan in plans] == [
        0,
        0,
        int(query_len > 16),
    ]
    assert bool((out == 7).all()) == (query_len > 16)
    assert all(rows >= 16 for rows in plans[2].launched)


@pytest.mark.parametrize("clears_padding", [False, True])
@pytest.mark.parametrize(
    ("tokens", "reqs", "max_query_len", "max_key_len", "is_long"),
    [
        (50, 1, 50, 100, True),
        # a loose bound; and rows of no request
        (50, 1, 90, 100, True),
        (60, 1, 50, 100, True),
        (100, 2, 50, 100, True),
        # with padding, which there may be or is, a request may be short: over few keys alone
        (99, 2, 50, 100, False),
        (150, 2, 50, 100, False),
        (99, 2, 50, 50, True),
        (150, 2, 50, 50, True),
        # a request of 9 tokens is long, and one of 8 is not
        (59, 2, 50, 50, True),
        (58, 2, 50, 50, False),
        # one of 1,024 tokens may be short
        (1024, 2, 1016, 1016, True),
        (1024, 2, 1016, 1017, False),
        (1023, 2, 1015, 1015, False),
        # all requests are short
        (3, 1, 50, 100, False),
    ],
)
def test_a_batch_without_short_requests_needs_no_decode_launch(
    tokens: int,
    reqs: int,
    max_query_len: int,
    max_key_len: int,
    is_long: bool,
    clears_padding: bool,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
) -> None:
    """If the prefill launch clears the rows of no request, which the decode launch does else."""
    decodes: list[AttentionCall] = []
    monkeypatch.setattr(
        PortableDecodePlan,
        "launch",
        lambda plan, call, task: decodes.append(call),
    )
    family = Family(True, True, clears_padding)
    query = torch.zeros(tokens, 4, 64, dtype=torch.float16, device=device)
    integers = partial(torch.zeros, dtype=torch.int32, device=device)
    call = plain_call(
        str(device),
        query=query,
        out=torch.zeros_like(query),
        block_table=integers(reqs, 70),
        query_start_loc=integers(reqs + 1),
        lengths=integers(reqs),
        max_query_len=max_query_len,
        max_key_len=max_key_len,
    )
    with these_families(family.family, *PORTABLE_FAMILIES):
        plan = make_attention_plan(call)
    assert plan.short_rows == 16 and plan.layer.group_size == 2
    with no_launch_for_all():
        launch_attention(plan, call)
    is_alone = is_long and clears_padding
    assert family.launched == [0 if is_alone else plan.short_rows]
    assert len(decodes) == (not is_alone)


def test_pointers_have_the_order_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, optimized: Twin
) -> None:
    """The launch without Triton passes the addresses of what the launch through Triton passes."""
    found: list[tuple[list[int], list[Any]]] = []

    def note(
        self: Launcher,
        grid: Any,
        pointers: Any,
        options: Any,
        numbers: Any,
        tensors: Any,
    ) -> None:
        lowered = self._lower(*tensors)
        found.append(
            (list(pointers), [0 if t is None else t.data_ptr() for t in lowered])
        )

    monkeypatch.setattr(Launcher, "__call__", note)
    monkeypatch.setattr(dispatch.PIPELINE, "plans", PlanCache(8))
    lse = torch.zeros(2, 45, device=device)
    for options in (DEFAULT_OPTIONS, AttentionOptions(batch_invariant=True)):
        optimized.encoder_attention(
            **ragged_call([5, 40], device), lse=lse, options=options
        )
    assert len(found) == 3
    for pointers, expected in found:
        assert pointers == expected


def test_tensor_maps_follow_the_number_of_ragged_keys() -> None:
    """One plan of the Hopper kernel serves calls of any total."""
    few, many = (torch.zeros(n, 2, 64, dtype=torch.float16) for n in (30, 500))
    starts = torch.tensor([0, 30], dtype=torch.int32)
    call = AttentionCall(
        few, few, few, None, starts, starts, 30, 30, 0.1, few, None,
        AttentionOptions(causal=True),
    )  # fmt: skip
    plan = sm90.plan(call)
    assert plan is not None
    for keys in (few, many):
        query, key, value, out = plan.lower(few, keys, keys, few)[:4]
        assert query.shape[0] == out.shape[0] == 30
        assert key.shape[0] == value.shape[0] == len(keys)


# ---- the workspace


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Return the state of a pretended GPU: its current stream, and whether that is captured."""
    state: dict[str, Any] = {"stream": 1, "capture": None, "allocated": []}

    def allocate(
        device: torch.device, counters: int, numbers: int
    ) -> tuple[Tensor, Tensor]:
        state["allocated"].append((counters, numbers))
        return torch.zeros(counters, dtype=torch.int32), torch.empty(numbers)

    monkeypatch.setattr(workspace, "_allocate", allocate)
    monkeypatch.setattr(workspace, "current_stream", lambda index: state["stream"])
    monkeypatch.setattr(workspace, "is_capturing", lambda: state["capture"] is not None)
    monkeypatch.setattr(workspace, "make_kept", lambda make, device: make())
    monkeypatch.setattr(workspace, "find_capture_id", lambda stream: state["capture"])
    for name in ("_streams", "_arenas", "_captures"):
        monkeypatch.setattr(workspace, name, {})
    yield state


GPU = torch.device("cuda", 0)


def test_a_stream_keeps_its_workspace_and_shares_it_with_no_other(
    gpu: dict[str, Any],
) -> None:
    first = workspace.find_workspace(GPU, 264, 1000)
    assert workspace.find_workspace(GPU, 300, 2000) == first
    gpu["stream"] = 2
    other = workspace.find_workspace(GPU, 264, 1000)
    for one, another in zip(first, other, strict=True):
        assert one.data_ptr() != another.data_ptr()


def test_a_stream_keeps_a_bounded_workspace(gpu: dict[str, Any]) -> None:
    kept = workspace.MAX_KEPT_NUMBERS
    counters, numbers = workspace.find_workspace(GPU, 10, kept - 5)
    assert len(numbers) >= kept - 5
    most = workspace.MAX_LARGE_NUMBERS
    large = workspace.find_workspace(GPU, 10, most + 1)
    assert large[0] is counters and len(large[1]) == most + 1
    again = workspace.find_workspace(GPU, 10, kept)
    assert again[1] is numbers and len(numbers) == kept
    many = workspace.find_workspace(GPU, 10**5, 10)
    assert (
        len(many[0]) == 10**5 and workspace.find_workspace(GPU, 10, 10)[0] is counters
    )


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("capture", [None, 5])
@pytest.mark.parametrize("counters", [0, 10, 10**5])
@pytest.mark.parametrize(
    "numbers",
    [10, 3 << 20, workspace.MAX_KEPT_NUMBERS + 1, workspace.MAX_LARGE_NUMBERS + 1],
)
def test_a_repeated_call_finds_the_workspace_of_a_planned_one(
    numbers: int,
    counters: int,
    capture: int | None,
    is_first: bool,
    gpu: dict[str, Any],
) -> None:
    """Only what is too large to be kept, or belongs to a graph, is allocated at each call."""
    if not is_first:
        workspace.find_workspace(GPU, 1, 1)
    gpu["capture"] = capture
    kept, addresses = workspace.find_addresses(GPU, 0, 1, counters, numbers)
    assert addresses == tuple(tensor.data_ptr() for tensor in kept)
    assert kept[0].dtype == torch.int32 and kept[1].dtype == torch.float32
    assert len(kept[0]) >= counters and len(kept[1]) >= numbers
    assert not kept[0].any()
    again = workspace.find_addresses(GPU, 0, 1, counters, numbers)[0]
    planned = workspace.find_workspace(GPU, counters, numbers)
    is_own = capture is not None or numbers > workspace.MAX_LARGE_NUMBERS
    assert (again[1] is kept[1]) == (planned[1] is kept[1]) == (not is_own)
    assert (again[0] is kept[0]) == (planned[0] is kept[0])


@pytest.mark.parametrize("numbers", [1, workspace.MAX_LARGE_NUMBERS])
def test_one_stream_of_a_device_keeps_a_large_workspace(
    numbers: int, gpu: dict[str, Any]
) -> None:
    """Only the first stream that needs one, so streams that alternate do not replace each other."""
    numbers = max(numbers, workspace.MAX_KEPT_NUMBERS + 1)
    gpu["stream"] = 1
    first = workspace.find_workspace(GPU, 10, numbers)[1]
    gpu["stream"] = 2
    small = workspace.find_workspace(GPU, 10, 10)[1]
    for find in (
        lambda: workspace.find_workspace(GPU, 10, numbers),
        lambda: workspace.find_addresses(GPU, 0, 2, 10, numbers)[0],
    ):
        assert len(find()[1]) == numbers
        assert workspace.find_workspace(GPU, 10, 10)[1] is small
    gpu["stream"] = 1
    gpu["allocated"].clear()
    assert workspace.find_workspace(GPU, 10, numbers)[1] is first
    assert workspace.find_addresses(GPU, 0, 1, 10, numbers)[0][1] is first
    assert not gpu["allocated"]
    kept = [len(stream.numbers) for stream in workspace._streams.values()]
    assert sum(count > workspace.MAX_KEPT_NUMBERS for count in kept) == 1
    other = torch.device("cuda", 1)
    workspace.find_workspace(other, 10, numbers)
    assert (
        numbers <= workspace._streams[1, 1].num_numbers <= workspace.MAX_LARGE_NUMBERS
    )


def test_workspaces_of_a_few_streams_are_kept(gpu: dict[str, Any]) -> None:
    for stream in range(50):
        gpu["stream"] = stream
        workspace.find_workspace(GPU, 10, 10)
        assert len(workspace._streams) <= workspace.MAX_STREAMS
    assert (0, 49) in workspace._streams


def test_released_workspace_is_freed_and_allocated_anew(gpu: dict[str, Any]) -> None:
    workspace.find_workspace(GPU, 10, 10)
    release_workspace()
    assert not workspace._streams
    gpu["allocated"].clear()
    workspace.find_workspace(GPU, 10, 10)
    # counters of graphs stay: a graph may still be replayed
    assert gpu["allocated"] == [(workspace.NUM_COUNTERS, workspace.MIN_KEPT_NUMBERS)]


def test_the_launches_of_one_stream_in_one_capture_share_counters(
    gpu: dict[str, Any],
) -> None:
    workspace.find_workspace(GPU, 264, 1000)
    arena = workspace._arenas[0]
    before = arena.free_counters
    gpu["capture"] = 1
    one = workspace.find_workspace(GPU, 264, 1000)[0]
    assert workspace.find_workspace(GPU, 200, 10)[0] is one
    gpu["capture"] = 2
    two = workspace.find_workspace(GPU, 264, 1000)[0]
    gpu["stream"] = 2
    three = workspace.find_workspace(GPU, 264, 1000)[0]
    assert len({counters.data_ptr() for counters in (one, two, three)}) == 3
    assert arena.free_counters == before - 3 * 288


def test_captures_that_find_no_counters_zero_their_own(gpu: dict[str, Any]) -> None:
    gpu["capture"] = 1
    workspace.find_workspace(GPU, 264, 1000)
    assert gpu["allocated"] == [(0, 1000), (264, 0)]


def test_a_call_with_fake_tensors_leaves_none_in_the_workspace() -> None:
    with FakeTensorMode():
        found = workspace.find_workspace(torch.device("cpu"), 3, 5)
    assert [type(tensor) for tensor in found] == [Tensor, Tensor]
    assert found[0].tolist() == [0, 0, 0]


def test_an_arena_hands_out_ranges_that_do_not_overlap() -> None:
    arena = workspace.Arena(torch.zeros(100, dtype=torch.int32))
    taken = [arena.take(32) for _ in range(3)]
    for number, counters in enumerate(taken):
        assert counters is not None
        counters.fill_(number + 1)
    assert [int(counters[0]) for counters in taken if counters is not None] == [1, 2, 3]
    assert arena.take(32) is None and arena.free_counters == 4


@pytest.mark.cuda
@pytest.mark.skipif(INTERPRETED, reason="needs a CUDA device")
def test_the_launches_of_a_graph_share_counters() -> None:
    twin = Twin("optimized", enforce=False)
    device = torch.device("cuda")
    query = torch.randn(2, 8, 128, device=device, dtype=torch.float16)
    cache = torch.randn(2, 600, 16, 2, 128, device=device, dtype=torch.float16)
    table = torch.arange(600, device=device).int().view(2, 300)
    starts = torch.tensor([0, 1, 2], device=device).int()
    lens = torch.tensor([4800, 37], device=device).int()
    call = (query, cache[0], cache[1], table, starts, lens, 1, 4800)
    expected = twin.paged_attention(*call)
    release_workspace()
    arena = workspace._arenas[torch.cuda.current_device()]
    before = arena.free_counters
    used = []
    for _ in range(3):
        graph = torch.cuda.CUDAGraph()
        outs = []
        with torch.cuda.graph(graph):
            for _ in range(4):
                outs.append(twin.paged_attention(*call))
        used.append(before - arena.free_counters)
        before = arena.free_counters
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert all(torch.equal(out, expected) for out in outs)
    assert 0 < used[0] == used[1] == used[2] <= 1024


# ---- imports


@pytest.mark.extended
def test_importing_the_package_changes_nothing_else() -> None:
    """No environment variable, no log level; and the first launch says what to do."""
    program = (
        "import logging, os, torch\n"
        "before = dict(os.environ)\n"
        "import pagetwin.optimized as optimized\n"
        "import pagetwin.optimized.backends.xformers_split_k as split_k\n"
        "import pagetwin.optimized.backends.backend\n"
        "assert dict(os.environ) == before, set(os.environ) ^ set(before)\n"
        "assert logging.getLogger('xformers').level == logging.NOTSET\n"
        "split_k.why_no_xformers()\n"
        "assert logging.getLogger('xformers').level == logging.NOTSET\n"
        "assert not logging.getLogger('xformers').filters\n"
        "x = torch.zeros(1, 1, 16)\n"
        "starts = torch.tensor([0, 1]).int()\n"
        "try:\n"
        "    optimized.encoder_attention(x, x, x, starts, starts, 1, 1)\n"
        "except ValueError as error:\n"
        "    assert 'set TRITON_INTERPRET=1 before' in str(error), error\n"
        "    print('raised')\n"
    )
    assert run_compiler("-c", program).strip() == "raised"


@pytest.mark.extended
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_more_queries_than_announced_leave_other_memory_and_other_requests_as_they_are(
    batch_invariant: bool,
    monkeypatch: pytest.MonkeyPatch,
    unchecked_values: None,
    device: torch.device,
    optimized: Twin,
) -> None:
    """Rows without room in the workspace were stored past its end and in other partial results.

    Announced is one query per request; the first and the last request have four. Every request is
    split over several programs.
    """
    canary = 7.0
    kept: list[Tensor] = []

    def find(
        device: torch.device, counters: int, numbers: int
    ) -> tuple[Tensor, Tensor]:
        given = torch.full((numbers + 4096,), canary, device=device)
        kept.append(given[numbers:])
        zeros = torch.zeros(counters, dtype=torch.int32, device=device)
        return zeros, given[:numbers]

    monkeypatch.setattr(portable, "find_workspace", find)
    # decodes: four segments of 512 keys, so each request is in two of them
    monkeypatch.setattr(prepare, "count_processors", lambda device: 4)
    monkeypatch.setattr(dispatch.PIPELINE, "plans", PlanCache(8))
    kv_heads = 2
    key_lens = [640, 640, 704]
    if batch_invariant:
        # one program per split, while the tiles do not fill the chip
        kv_heads = 1
        key_lens = [3 * prepare.SPLIT_SIZE + 1] * 3
    generator = torch.Generator().manual_seed(0)
    starts = torch.tensor([0, 4, 5, 9], dtype=torch.int32, device=device)
    query = torch.randn(9, kv_heads, 16, generator=generator).to(device)
    key = torch.randn(sum(key_lens), kv_heads, 16, generator=generator).to(device)
    key_starts = torch.tensor([0, *key_lens], device=device).cumsum(0).int()
    options = AttentionOptions(batch_invariant=batch_invariant)

    def attend(max_query_len: int) -> Tensor:
        found: Tensor = optimized.encoder_attention(
            query, key, key.flip(0), starts, key_starts, max_query_len, max(key_lens),
            options=options,
        )  # fmt: skip
        return found

    expected = attend(4)
    found = attend(1)
    assert len(kept) == 2
    for past_the_end in kept:
        assert bool((past_the_end == canary).all())
    # the first row of each request has room
    for row in (0, 4, 5):
        torch.testing.assert_close(found[row], expected[row])
