"""Histories of an engine with the vLLM plugin: preemptions, new weights, caches and groups.

The engine is `plugin_engine.py`. Every output of every layer and step is compared, with the
reference where the version matters, and with the kernels once.
"""

import pkgutil
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any

import pytest
from pagetwin.contract.scheduler_classes import Request
from pagetwin.recorder import Recorder, RecorderSettings
from support.fake_vllm import VERSIONS, fake_vllm
from support.plugin_engine import PluginEngine, draw_requests
from support.twins import WITHOUT_GPU

pytestmark = pytest.mark.long

OLDEST, NEWEST = VERSIONS[0], VERSIONS[-1]


def recorded_engine(
    folder: Path,
    version: str,
    kv_cache_dtype: str = "auto",
    windows: Sequence[int | None] = (None, 6, None, 6),
    **given: Any,
) -> PluginEngine:
    """Return an engine whose recorder samples every step."""
    recorder = Recorder(RecorderSettings(folder, sample_every=1))
    return PluginEngine(version, windows, kv_cache_dtype, recorder=recorder, **given)


def alarms(engine: PluginEngine) -> list[str]:
    """Return the laws that the recorder of an engine found violated, or that it is off."""
    recorder = engine.recorder
    assert recorder is not None
    recorder.finish()
    found = [finding.law for finding in recorder.findings]
    return found if recorder.is_on else [*found, "the recorder is off"]


@pytest.fixture(params=["reference", pytest.param("optimized", marks=WITHOUT_GPU)])
def implementation(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> str:
    """The implementation that the plugin runs."""
    monkeypatch.setenv("PAGETWIN_VLLM_IMPLEMENTATION", request.param)
    return str(request.param)


@pytest.fixture
def newest() -> Iterator[str]:
    with fake_vllm(NEWEST):
        yield NEWEST


@pytest.mark.parametrize("resumes_as_new", [False, True])
@pytest.mark.parametrize(
    "kv_cache_dtype",
    ["auto", "fp8", "int8_per_token_head", "int4_per_token_head", "nvfp4"],
)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_preemptions_groups_and_windows_change_no_output_and_raise_no_alarm(
    version: str,
    kv_cache_dtype: str,
    resumes_as_new: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PAGETWIN_VLLM_IMPLEMENTATION", "reference")
    with fake_vllm(version):
        engine = recorded_engine(
            tmp_path, version, kv_cache_dtype, resumes_as_new=resumes_as_new
        )
        engine.run(draw_requests(9, seed=1))
    assert engine.worst <= 1 and engine.preemptions > 2
    assert alarms(engine) == []


def test_blocks_of_another_group_are_found_where_metadata_are_built_once(
    newest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last group gets the blocks of the first one."""
    monkeypatch.setenv("PAGETWIN_VLLM_IMPLEMENTATION", "reference")
    engine = recorded_engine(tmp_path, newest, windows=(None, 6, None))
    of_group = engine.common
    monkeypatch.setattr(
        engine, "common", lambda requests, index: of_group(requests, index % 2)
    )
    engine.run([Request(0, [0] * 18, 2)])
    assert alarms(engine)[0] == "block table"


def test_layers_whose_metadata_are_copies_are_compared_like_others(
    newest: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM gives layers a copy of a group's metadata where it changes a field of it."""
    monkeypatch.setenv("PAGETWIN_VLLM_IMPLEMENTATION", "reference")

    def checked(change: Callable[[Any], Any]) -> dict[str, int]:
        engine = recorded_engine(tmp_path, newest)
        attend = engine.attend
        monkeypatch.setattr(
            engine,
            "attend",
            lambda index, requests, built: attend(index, requests, change(built)),
        )
        engine.run(draw_requests(3, seed=1))
        assert engine.worst <= 1 and alarms(engine) == []
        assert engine.recorder is not None
        return engine.recorder.checked

    found = checked(copy)
    assert found == checked(lambda built: built) and found["rows"] > 30


@WITHOUT_GPU
def test_the_kernels_compute_what_the_reference_computes(newest: str) -> None:
    engine = PluginEngine(newest, (None, 6, None), "fp8", num_blocks=6)
    engine.run(draw_requests(3, seed=2))
    assert engine.worst <= 1 and engine.preemptions > 0


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("scales", [(0.09, 0.02), (0.09, None), (None, 0.02)])
def test_a_step_has_the_scales_of_the_weights_that_were_loaded_last(
    newest: str,
    implementation: str,
    scales: tuple[float | None, float | None],
    in_place: bool,
    tmp_path: Path,
) -> None:
    engine = recorded_engine(tmp_path, newest, "fp8", (None, 6))
    for number, given in enumerate([(None, None), scales, (0.05, 0.04)]):
        engine.load_scales(*given, in_place)
        engine.run([Request(number, [number] * 18, 2)])
    assert engine.worst <= 1
    assert alarms(engine) == []


def test_a_step_reads_the_caches_that_were_allocated_last(
    newest: str, implementation: str, tmp_path: Path
) -> None:
    """vLLM allocates caches again when it wakes up, and after it has measured graphs."""
    engine = recorded_engine(tmp_path, newest, "fp8", (None, 6))
    for number in range(2):
        engine.allocate()
        engine.run([Request(number, [number] * 18, 2)])
    assert engine.worst <= 1
    assert alarms(engine) == []


# planted mistakes


def keep_first(method: Any) -> Any:
    """Return a method that gives its first result of each object again."""
    found: dict[int, Any] = {}

    def wrong(self: Any, *given: Any) -> Any:
        if id(self) not in found:
            found[id(self)] = method(self, *given)
        return found[id(self)]

    return wrong


MISTAKES: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "scales of the weights before": (
        "integrations.vllm.impl.PagetwinImpl._options_of",
        keep_first,
    ),
    "caches that were allocated before": (
        "integrations.vllm.impl.PagetwinImpl._split",
        keep_first,
    ),
    "blocks of another group": (
        "integrations.vllm.builder.PagetwinMetadataBuilder.update_block_table",
        lambda _: lambda self, metadata, *blocks: metadata,
    ),
    "preempted requests that hold their blocks": (
        "recorder.laws.schedule.Ledger.free",
        lambda _: lambda self, request_ids: None,
    ),
}


@pytest.mark.parametrize("mistake", [None, *MISTAKES])
def test_a_history_shows_each_planted_mistake(
    newest: str, mistake: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGETWIN_VLLM_IMPLEMENTATION", "reference")
    if mistake is not None:
        path, change = MISTAKES[mistake]
        owner_name, _, name = path.rpartition(".")
        owner = pkgutil.resolve_name(f"pagetwin.{owner_name}")
        monkeypatch.setattr(owner, name, change(getattr(owner, name)))
    engine = recorded_engine(tmp_path, newest, "fp8", (None, 6, None), num_blocks=6)
    engine.run(draw_requests(4, seed=1))
    engine.load_scales(0.09, 0.02)
    engine.allocate()
    engine.run(draw_requests(1, seed=2))
    assert engine.preemptions > 0
    is_right = engine.worst <= 1 and not alarms(engine)
    assert is_right == (mistake is None)
