"""The recorder on backends of SGLang, in a stand-in: nothing is found, and planted bugs are."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.recorder import Recorder, RecorderSettings
from pagetwin.recorder.wrappers.sglang import record_backend
from support.fake_sglang import VERSIONS, fake_sglang
from support.sglang_steps import EngineSteps, Pool, make_runner

E4M3 = torch.float8_e4m3fn
LAYERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pools": {"has_windows": True, "sliding_window_size": 9},
    "pages of 1": {"page_size": 1},
    "heads first": {"heads_first": True},
    "e4m3": {"cache_dtype": E4M3},
    "sinks": {"sinks": torch.tensor([1.0, -0.5, 2.0, 0.25])},
}


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The newest interface, and the reference."""
    monkeypatch.setenv("PAGETWIN_SGLANG_IMPLEMENTATION", "reference")
    with fake_sglang(VERSIONS[-1]):
        yield


def recorded_steps(folder: Path, **given: Any) -> tuple[EngineSteps, Recorder]:
    """Return steps whose backend is recorded, each of them sampled."""
    steps = EngineSteps(**given)
    steps.runner.sliding_window_size = given.get("sliding_window_size")
    recorder = Recorder(RecorderSettings(folder, sample_every=1, rows=16), "reference")
    record_backend(steps.backend, steps.runner, recorder)
    return steps, recorder


def run_all(steps: EngineSteps) -> None:
    """Run a prompt, its second chunk, decodes and a verification."""
    assert steps.step("EXTEND", [21, 3, 1]) <= 1
    assert steps.step("MIXED", [17, 1, 1]) <= 1
    assert steps.step("DECODE", [1, 1, 1]) <= 1
    assert steps.step("TARGET_VERIFY", [4, 4, 4]) <= 1
    assert steps.step("DECODE", [1, 1, 1]) <= 1


@pytest.mark.parametrize("name", LAYERS)
def test_nothing_is_found_in_steps_that_are_right(name: str, tmp_path: Path) -> None:
    steps, recorder = recorded_steps(tmp_path, **LAYERS[name])
    run_all(steps)
    recorder.finish()
    assert recorder.is_on
    assert not recorder.findings
    assert recorder.checked["sampled_steps"] == 5
    assert recorder.checked["rows"] > 20 and recorder.checked["writes"] > 20


def test_a_key_in_another_slot_is_found(tmp_path: Path) -> None:
    steps, recorder = recorded_steps(tmp_path)
    plain = steps.pool.set_kv_buffer

    def misplace(layer: Any, loc_info: Any, *args: Any) -> None:
        loc_info.loc = loc_info.loc.roll(1)
        plain(layer, loc_info, *args)

    assert steps.step("EXTEND", [21, 3, 1]) <= 1
    steps.pool.set_kv_buffer = misplace
    steps.step("MIXED", [17, 1, 1])
    recorder.finish()
    assert "cache write" in {finding.law for finding in recorder.findings}


def test_attention_without_the_last_key_is_found(tmp_path: Path) -> None:
    steps = EngineSteps()
    plain = steps.backend.run.paged_attention

    class Wrong:
        """The reference, whose requests lose a key."""

        name = "reference"

        def paged_attention(self, *args: Any, **kwargs: Any) -> Any:
            return plain(*args[:5], (args[5] - 1).clamp(min=1), *args[6:], **kwargs)

    recorder = Recorder(RecorderSettings(tmp_path, sample_every=1, rows=16), "x")
    record_backend(steps.backend, steps.runner, recorder)
    assert steps.step("EXTEND", [21, 3, 1]) <= 1
    steps.backend.run = Wrong()
    steps.step("DECODE", [1, 1, 1])
    recorder.finish()
    assert "attention" in {finding.law for finding in recorder.findings}


def test_two_requests_that_write_one_page_are_found(tmp_path: Path) -> None:
    steps, recorder = recorded_steps(tmp_path)
    table = steps.runner.req_to_token_pool.req_to_token
    table[1] = table[3]
    steps.step("EXTEND", [21, 3, 1])
    recorder.finish()
    assert recorder.findings


def test_steps_without_requests_names_are_dummy_runs(tmp_path: Path) -> None:
    steps, recorder = recorded_steps(tmp_path)
    steps.has_names = False
    run_all(steps)
    assert not recorder.step and not recorder.checked["rows"]


def test_registration_wraps_every_backend_once_if_a_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from pagetwin.integrations.sglang import plugin
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    monkeypatch.setenv("PAGETWIN_RECORD", str(tmp_path))
    made = []
    ATTENTION_BACKENDS["triton"] = made.append
    plugin.register()
    wrapped = dict(ATTENTION_BACKENDS)
    plugin.register()
    assert {*ATTENTION_BACKENDS} == {"triton", "pagetwin"}
    assert all(hasattr(make, "is_recorded") for make in wrapped.values())
    assert ATTENTION_BACKENDS["triton"] is wrapped["triton"]
    pool = Pool(1, 2, 32, 32, torch.float32, 64)
    backend = ATTENTION_BACKENDS["pagetwin"](make_runner(pool, 16, device="cpu"))
    assert backend.recorder.is_attached
    runner = make_runner(pool, 16, is_draft_worker=True)
    assert ATTENTION_BACKENDS["triton"](runner) is None and made == [runner]
