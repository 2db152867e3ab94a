"""Waits of a parallel step: none is without a limit while a collective may still run."""

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.conformance.candidates.calls.ranks import _LocalRanks, run_ranks
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.operations import load_implementation
from pagetwin.contract.parallel import KeySplits
from pagetwin.engine import rank_waits
from pagetwin.engine.rank_group import RankError, RankGroup
from pagetwin.optimized.batch import step_buffers
from pagetwin.optimized.parallel.rank_buffers import RankBuffers
from pagetwin.optimized.parallel.rank_splits import RankSplits
from pagetwin.optimized.runtime import launcher, workspace
from support.twins import WITHOUT_GPU
from torch import Tensor
from torch.overrides import TorchFunctionMode
from triton.runtime.interpreter import GridExecutor

READS = {
    Tensor.tolist, Tensor.item, Tensor.cpu, Tensor.numpy, Tensor.nonzero, Tensor.__bool__,
    Tensor.__int__, Tensor.__float__, Tensor.__index__, Tensor.unique, torch.nonzero,
    torch.tensor, torch.as_tensor, torch.unique, torch.equal,
}  # fmt: skip
"""What waits for the device if a tensor is there."""


class State(threading.local):
    """Whether a collective of this thread's rank may still run, and whether a kernel runs now."""

    is_running = False
    is_in_kernel = False


STATE = State()


class NoWaits(TorchFunctionMode):
    """Fail at whatever waits for the device while a collective may still run."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if STATE.is_running and not STATE.is_in_kernel:
            is_copied = func is Tensor.to and not isinstance(args[1], torch.dtype)
            is_counted = func is Tensor.__getitem__ and any(
                isinstance(index, Tensor) and index.dtype == torch.bool
                for index in (args[1] if isinstance(args[1], tuple) else args[1:])
            )
            assert func not in READS and not is_copied and not is_counted, func
        return func(*args, **(kwargs or {}))


@pytest.fixture
def device_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the ranks of this process be on pretended GPUs, whose collectives end when waited for."""
    run, start = _LocalRanks._run, _LocalRanks._start_shift
    launch = GridExecutor.__call__

    def issue(self: Any, *given: Any) -> Any:
        found = run(self, *given)
        self._note(given[0])
        STATE.is_running = True
        return found

    def start_shift(self: Any, *given: Any) -> Any:
        finish = start(self, *given)

        def issue_wait() -> Tensor:
            # until then it runs on a stream of its own
            STATE.is_running = True
            return finish()

        return issue_wait

    def wait(self: Any, before: str) -> None:
        STATE.is_running = False

    def run_kernel(self: Any, *given: Any, **named: Any) -> None:
        STATE.is_in_kernel = True
        launch(self, *given, **named)
        STATE.is_in_kernel = False

    monkeypatch.setattr(_LocalRanks, "_run", issue)
    monkeypatch.setattr(_LocalRanks, "_start_shift", start_shift)
    monkeypatch.setattr(_LocalRanks, "_wait", wait)
    monkeypatch.setattr(RankGroup, "_record", lambda self: None)
    monkeypatch.setattr(
        RankGroup, "is_on_device", property(lambda self: self.world_size > 1)
    )
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(GridExecutor, "__call__", run_kernel)


def decode(twin: Any, ranks: RankGroup, sizes: tuple[int, ...], **given: Any) -> None:
    """Make decode steps of growing batches: written, attended to by two layers."""
    causal = given.pop("causal", True)
    step = twin.DecodeContextParallel(ranks, 2, 16, 64, 4, **given)
    for reqs in sizes:
        cache = torch.zeros(2, 4 * reqs, 16, 1, 16)
        table = torch.arange(4 * reqs, dtype=torch.int32).view(reqs, 4)
        starts = torch.arange(reqs + 1, dtype=torch.int32)
        lens = torch.full((reqs,), 40, dtype=torch.int32)
        query = torch.ones(reqs, 2, 16)
        with NoWaits():
            batch = step.prepare(cache[0], table, starts, lens, reqs, 40, causal)
            for _ in range(2):
                if causal:
                    step.write(query[:, :1], query[:, :1], *cache, batch)
                lse = torch.empty(2, reqs)
                step.attend(
                    query,
                    *cache,
                    batch,
                    lse=lse,
                    options=AttentionOptions(sinks=torch.ones(2)),
                )


def prefill(twin: Any, ranks: RankGroup, sizes: tuple[int, ...], name: str) -> None:
    """Make prefills of growing prompts, of two layers."""
    made = getattr(twin, name)(ranks, block_size=4)
    for length in sizes:
        with NoWaits():
            share = made.prepare([length, 3])
            for _ in range(2):
                rows = torch.ones(len(share.tokens), 1, 16)
                made.attend(rows, rows, rows, share)


STEPS: dict[str, Callable[..., None]] = {
    "ring": lambda *given: prefill(*given, "RingContextParallel"),
    "all to all": decode,
    "reduce-scatter": lambda *given: decode(*given, exchange="reduce_scatter"),
    "fixed splits": lambda *given: decode(*given, splits=KeySplits(8, 1)),
    "not causal": lambda *given: decode(*given, causal=False),
    "prefill": lambda *given: prefill(*given, "PrefillContextParallel"),
}


@pytest.mark.extended
@pytest.mark.parametrize("checks_values", [False, True])
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    "name", ["reference", pytest.param("optimized", marks=WITHOUT_GPU)]
)
def test_the_host_waits_for_no_device_whose_collective_may_still_run(
    name: str,
    step: str,
    checks_values: bool,
    device_ranks: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A rank waited for ever, if another one had left out a collective."""
    monkeypatch.setenv("PAGETWIN_CHECK_VALUES", str(int(checks_values)))
    twin = load_implementation(name)
    run_ranks(2, lambda ranks: STEPS[step](twin, ranks, (1, 3, 20, 2)))


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[RankGroup]:
    """Return rank 1 of 4 on a pretended GPU that never finishes, in its first step."""
    ranks = RankGroup(timeout=0.05, device="cuda")
    ranks.rank, ranks.world_size, ranks.backend = 1, 4, "nccl"
    event = SimpleNamespace(query=lambda: False)
    monkeypatch.setattr(RankGroup, "_record", lambda self: event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    ranks.begin_step()
    ranks._note("all-gather")
    yield ranks
    rank_waits._LATEST.group = None


def fill_a_pinned_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = object.__new__(step_buffers._PinnedBuffer)
    buffer._copied = SimpleNamespace(query=lambda: False, synchronize=pytest.fail)
    buffer.wait()


def grow_a_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_allocate", pytest.fail)
    workspace._grow(torch.device("cuda", 0), 0, 0, 8, 8)


def enlarge_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    RankBuffers().get(
        "held", (4,), SimpleNamespace(new_zeros=pytest.fail, dtype=None, device=None)
    )  # type: ignore[arg-type]


def copy_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    splits = RankSplits((2, 0, 1), KeySplits(4), torch.device("cpu"))
    monkeypatch.setattr(RankSplits, "_find_runs", pytest.fail)
    splits.tables(torch.zeros(1, 2, dtype=torch.int32), torch.zeros(2, 16, 1, 16))


def load_a_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher.RUNTIME.kernel_load_start_hook(None, None, "a kernel", None, "")


WAITS = {
    "a pinned buffer is filled again": fill_a_pinned_buffer,
    "a workspace is allocated": grow_a_workspace,
    "a buffer is allocated": enlarge_a_buffer,
    "indices are copied to the device": copy_the_runs,
    "a kernel is loaded": load_a_kernel,
}
"""What the host does that waits for the whole device."""


@pytest.mark.parametrize("what", WAITS)
def test_a_wait_for_a_collective_that_does_not_end_raises_and_names_the_step(
    what: str, stuck: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher.bound_kernel_loads()
    begin = time.monotonic()
    with pytest.raises(RankError) as raised:
        WAITS[what](monkeypatch)
    assert time.monotonic() - begin < 5
    for words in (
        "rank 1 of 4, step 1",
        f"before {what}",
        "the latest collective is all-gather",
    ):
        assert words in str(raised.value)


@pytest.mark.parametrize("where", ["this stream", "another stream", "NCCL's stream"])
def test_collectives_of_each_stream_are_waited_for(
    where: str, stuck: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    running, ended = (
        SimpleNamespace(query=lambda found=found: found) for found in (False, True)
    )
    latest = running if where == "this stream" else ended
    monkeypatch.setattr(RankGroup, "_record", lambda self: latest)
    stuck._issued = running if where == "another stream" else ended
    stuck._works = [SimpleNamespace(is_completed=lambda: where != "NCCL's stream")]
    with pytest.raises(RankError, match="the device has not finished"):
        stuck.wait()


@pytest.mark.parametrize(
    "operation",
    [
        "DecodeContextParallel",
        pytest.param("PrefillContextParallel", marks=WITHOUT_GPU),
        pytest.param("RingContextParallel", marks=WITHOUT_GPU),
    ],
)
def test_an_operation_of_several_ranks_bounds_the_loads_of_its_kernels(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook = launcher.RUNTIME.kernel_load_start_hook
    monkeypatch.setattr(hook, "calls", [])
    twin = load_implementation("optimized")
    sizes = (2, 16, 64) if operation == "DecodeContextParallel" else ()
    made = getattr(twin, operation)(RankGroup(), *sizes)
    if not sizes:
        rows = torch.ones(3, 1, 16)
        made.attend(rows, rows, rows, made.prepare([3]))
    assert hook.calls == [launcher._wait_before_load]


def test_the_first_collective_of_each_kind_is_waited_for(
    stuck: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows it may load a kernel of torch, and no hook comes before that."""
    waited: list[str] = []
    monkeypatch.setattr(RankGroup, "_wait", lambda self, before: waited.append(before))
    monkeypatch.setattr(
        RankGroup, "_run", lambda self, name, collective, out, tensor: out
    )
    for sizes, right in (([4], 1), ([4, 5, 7], 0), ([8], 1), ([4, 8], 0)):
        for size in sizes:
            stuck.all_gather(torch.zeros(size), waits=False)
        assert len(waited) == right
        waited.clear()
    stuck.all_gather(torch.zeros(4, dtype=torch.bfloat16), waits=False)
    stuck.all_to_all(torch.zeros(4), waits=False)
    assert len(waited) == 2
