"""The probe of a kernel that is compiled for each new call: few calls, and an end in time.

No kernel runs here, and no time passes: each new call adds seconds to a clock.
"""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from pagetwin.conformance import Status, Support
from pagetwin.conformance.api import probe
from pagetwin.conformance.api.probe import probe_support
from pagetwin.conformance.api.probe_calls import SIZES
from pagetwin.conformance.base.results import Result
from pagetwin.conformance.cases.views import Views
from pagetwin.conformance.running import worker
from pagetwin.conformance.running.worker import Job, Worker
from pagetwin.tools.cli import app
from pagetwin.tools.command_line import USER_ERROR
from typer.testing import CliRunner

SECONDS = 20.0
"""Seconds that each new call takes."""
Choice = dict[str, str]


class Kernel:
    """A kernel that is compiled for each new call.

    Args:
        rejects: Whether a call raises.
        interrupted_at: Number of the call in which the user interrupts the command.
        is_wrong: Whether a call returns a wrong result.
    """

    def __init__(
        self,
        rejects: Callable[[Choice], bool] = lambda choice: False,
        interrupted_at: int = 0,
        is_wrong: Callable[[Choice], bool] = lambda choice: False,
    ) -> None:
        self.rejects, self.interrupted_at = rejects, interrupted_at
        self.is_wrong = is_wrong
        self.seconds = 0.0
        self.calls: list[Choice] = []

    def try_case(self, job: Job, area: str) -> Result:
        assert job.case is not None and job.probe is not None
        Support(**job.probe)  # as the process does
        choice, _, *views = eval(job.case, {"Views": Views})
        for view_of_tensors in views:
            choice |= {
                f"{name} strides": form for name, form in view_of_tensors.given.items()
            }
        if choice not in self.calls:
            self.seconds += SECONDS
        self.calls.append(choice)
        if len(self.calls) == self.interrupted_at:
            raise KeyboardInterrupt
        if self.rejects(choice):
            return Result(job.law, area, Status.BROKEN, message="ValueError: not this")
        if self.is_wrong(choice):
            wrong = {"what": "output", "found": "nan", "right": "0.5"}
            return Result(job.law, area, Status.BROKEN, **wrong)
        return Result(job.law, area, Status.HELD)


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Return a function that probes a `Kernel` and returns what is printed."""

    def go(kernel: Kernel, minutes: float = 1e6) -> str:
        clock = SimpleNamespace(monotonic=lambda: kernel.seconds)
        for module in (probe, worker):
            monkeypatch.setattr(module, "time", clock)
        monkeypatch.setattr(Worker, "start", lambda self: None)
        monkeypatch.setattr(
            Worker, "_try", lambda self, job, area: kernel.try_case(job, area)
        )
        return probe_support("mine", "cpu", minutes=minutes)

    return go


def support_in(printed: str) -> Support:
    names: dict[str, Any] = {}
    exec(printed, names)
    found = names["SUPPORT"]
    assert isinstance(found, Support)
    return found


def options_of(support: Support) -> Mapping[str, Any]:
    assert isinstance(support.options, Mapping)
    return support.options


def test_a_kernel_that_takes_everything_is_known_after_thirty_calls(
    probed: Callable[..., str],
) -> None:
    """One call per value and per pair of options were 100 calls."""
    kernel = Kernel()
    found = support_in(printed := probed(kernel))
    assert len(kernel.calls) <= 30
    assert "#" not in printed
    assert found.head_sizes is found.block_sizes is found.query_lens is None
    assert {"sinks", "alibi_slopes", "k_scale"} <= set(found.options or ())
    assert found.never_together == ()


def test_what_a_call_of_many_changes_cannot_do_is_found(
    probed: Callable[..., str],
) -> None:
    def rejects(choice: Choice) -> bool:
        return (
            int(choice["head_size"]) % 64 > 0
            or choice["layout"] == "hnd"
            or choice["causal"] == "each request"
            or (choice["causal"] == "no" and choice["sliding_window"] != "none")
        )

    found = support_in(probed(Kernel(rejects)))
    assert found.head_sizes == [64, 128, 192, 256, 512]
    assert found.kv_layouts == ["NHD"] and found.group_sizes is None
    assert options_of(found)["causal"] == ["bool"]
    assert [set(pair) for pair in found.never_together] == [
        {"causal", "sliding_window"}
    ]


def test_the_strides_that_a_kernel_takes_are_found(
    probed: Callable[..., str],
) -> None:
    def rejects(choice: Choice) -> bool:
        return (
            choice.get("query strides", "fused") != "fused"
            or choice.get("out strides") == "every other element"
            or "block_table strides" in choice
        )

    found = support_in(probed(Kernel(rejects)))
    assert found.strides == {
        "query": "packed heads",
        "out": "rows",
        "block_table": "packed",
    }
    assert found.alignment is None


def test_a_probe_ends_when_its_minutes_are_over_and_says_what_it_did_not_try(
    probed: Callable[..., str],
) -> None:
    kernel = Kernel(lambda choice: choice["head_size"] == "64")
    found = support_in(printed := probed(kernel, minutes=4))
    assert len(kernel.calls) == 4 * 60 / SECONDS
    assert "# The time was over. What was not tried is not declared." in printed
    tried = {int(choice["head_size"]) for choice in kernel.calls}
    assert 64 in tried and set(found.head_sizes or ()) == tried - {64}
    (line,) = (text for text in printed.splitlines() if "not tried: head_size" in text)
    untried = {int(size) for size in line.partition("size ")[2].split(", ")}
    assert untried | tried == set(SIZES["head_size"])
    # an option may have been tried in calls that had other new values too
    assert "sinks" not in (found.options or ())
    assert "# not tried: sinks sinks\n" in printed


def test_an_interrupted_probe_prints_what_it_found(probed: Callable[..., str]) -> None:
    kernel = Kernel(interrupted_at=3)
    found = support_in(printed := probed(kernel))
    assert len(kernel.calls) == 3
    assert set(found.options or ()) == {"out", "lse"} and found.head_sizes == [128]
    assert "# not tried: head_size 64, 256" in printed


def test_calls_that_are_wrong_alike_share_a_comment(
    probed: Callable[..., str],
) -> None:
    """A kernel with one bug had 40 comments, one per call."""
    printed = probed(Kernel(is_wrong=lambda choice: int(choice["head_size"]) % 96 == 0))
    comments = [line for line in printed.splitlines() if line.startswith("#")]
    wrong = "# wrong, output is nan instead of a number: head_size 96, 192"
    assert comments == [wrong]
    printed = probed(Kernel(is_wrong=lambda choice: True))
    comments = [line for line in printed.splitlines() if line.startswith("#")]
    assert comments[0].startswith("# Even the first call gave a wrong result")
    assert comments[1].startswith("# wrong, output is nan instead of a number: batch ")
    assert all(line.startswith("#   ") for line in comments[2:])
    assert support_in(printed).operations == ["paged_attention"]


def test_a_probe_that_found_no_call_in_time_is_one_sentence(
    probed: Callable[..., str],
) -> None:
    with pytest.raises(ValueError, match="not this; the time was over after call 6"):
        probed(Kernel(lambda choice: True), minutes=2)


@pytest.mark.extended
def test_a_probe_without_minutes_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe of a Triton kernel on a GPU was still running after ten minutes."""
    limits: list[float] = []

    def probe_support(*given: Any) -> str:
        limits.append(given[-1])
        raise ValueError("no call of paged_attention succeeded")

    monkeypatch.setattr(probe, "probe_support", probe_support)
    words = ["check", "reference", "--probe", "--device", "cpu"]
    for more in ([], ["--minutes", "2"]):
        assert CliRunner().invoke(app, words + more).exit_code == USER_ERROR
    assert limits == [probe.MINUTES, 2]
