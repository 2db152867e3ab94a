"""The recorder on models of transformers: clean runs raise nothing, planted bugs are found."""

import random
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.contract.operations import Implementation, load_implementation
from pagetwin.recorder import Recorder, RecorderSettings

pytest.importorskip("transformers")

from pagetwin.integrations.transformers import Statistics, decoder_only, generate
from pagetwin.integrations.transformers import paged_batch as paged_batch_module
from small_engine import LeakyBlockManager
from support.tiny_models import VOCABULARY, make_model

pytestmark = pytest.mark.long

REFERENCE = load_implementation("reference")
DRAW = random.Random(0)
PROMPTS = [
    [DRAW.randrange(3, VOCABULARY) for _ in range(count)] for count in (5, 13, 9, 3, 7)
]
CROWDED = {"block_size": 4, "num_blocks": 9, "max_batch_tokens": 8, "max_new_tokens": 9}


def recorded(folder: Path, model: str, **given: Any) -> tuple[Recorder, list[Any]]:
    """Return the recorder of a run that preempts, and the tokens."""
    recorder = Recorder(RecorderSettings(folder, sample_every=1))
    with torch.no_grad():
        tokens = generate(
            make_model(model),
            PROMPTS,
            "reference",
            **CROWDED,
            recorder=recorder,
            **given,
        )
    return recorder, tokens


def laws(recorder: Recorder) -> list[str]:
    return [finding.law for finding in recorder.findings]


@pytest.mark.parametrize("model", ["llama", "mistral", "gemma2", "gpt_oss", "bloom"])
@pytest.mark.parametrize("poison", [False, True])
def test_a_clean_run_raises_nothing_and_gives_the_same_tokens(
    tmp_path: Path, model: str, poison: bool
) -> None:
    statistics = Statistics()
    recorder, tokens = recorded(tmp_path, model, poison=poison, statistics=statistics)
    assert recorder.is_on and laws(recorder) == []
    assert recorder.checked["steps"] == statistics.steps
    assert recorder.checked["rows"] > statistics.steps
    assert statistics.preemptions > 0
    assert tokens == generate(make_model(model), PROMPTS, "reference", **CROWDED)


class Wrong:
    """The reference with one operation replaced."""

    def __init__(self, **operations: Any) -> None:
        self.__dict__.update(operations)

    def __getattr__(self, name: str) -> Any:
        return getattr(REFERENCE, name)


def plant(monkeypatch: pytest.MonkeyPatch, **operations: Any) -> None:
    """Let the flat batches of a model run the reference with operations replaced."""
    real = paged_batch_module.load_named

    def load(name: str) -> Implementation:
        real(name)
        return Wrong(**operations)  # type: ignore[return-value]

    monkeypatch.setattr(paged_batch_module, "load_named", load)
    # which runs the reference too, and would notice some of them
    monkeypatch.setattr(decoder_only, "check_steps", lambda *_: None)


def test_a_window_that_is_one_key_too_wide_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wide(*args: Any, options: Any, **given: Any) -> Any:
        window = options.sliding_window + 1
        changed = replace(options, sliding_window=window)
        return REFERENCE.paged_attention(*args, options=changed, **given)

    plant(monkeypatch, paged_attention=wide)
    recorder, _ = recorded(tmp_path, "mistral")
    assert laws(recorder) == ["attention"]
    finding = recorder.findings[0]
    assert finding.request_id in range(len(PROMPTS))
    # the first step in which a sequence is longer than the window of 8
    assert "attention of position" in finding.found
    assert "-step-2-attention" in sorted(tmp_path.glob("*.pt"))[0].name


def test_a_block_that_is_handed_out_too_early_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Leaky(LeakyBlockManager):
        leaks = True

    monkeypatch.setattr(decoder_only, "BlockManager", Leaky)
    recorder, _ = recorded(tmp_path, "llama")
    assert laws(recorder)[0] == "block ownership"


def test_a_stale_row_after_a_preemption_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: dict[Any, list[int]] = {}
    wrong: list[tuple[int, Any]] = []
    run_step = decoder_only._run_step
    steps = [0]

    def stale(model: Any, batch: Any, scheduled: Any, *rest: Any) -> Any:
        steps[0] += 1
        changed = []
        for scheduled_request in scheduled:
            request, row = scheduled_request.request, scheduled_request.block_ids
            old = before.setdefault(request.request_id, row)[: len(row)]
            if request.num_preemptions and len(old) == len(row) and old != row:
                wrong.append((steps[0], request.request_id))
                row = old
            elif not request.num_preemptions:
                before[request.request_id] = row
            changed.append(replace(scheduled_request, block_ids=row))
        return run_step(model, batch, changed, *rest)

    monkeypatch.setattr(decoder_only, "_run_step", stale)
    recorder = Recorder(RecorderSettings(tmp_path, sample_every=1))
    # the reference rejects two writers of one slot, after the recorder has seen the step
    with suppress(ValueError):
        generate(
            make_model("llama"), PROMPTS, "reference", **CROWDED, recorder=recorder
        )
    assert laws(recorder)[0] == "block table"
    step, request_id = wrong[0]
    assert recorder.findings[0].request_id == request_id
    assert f"-step-{step}-block-table" in sorted(tmp_path.glob("*.pt"))[0].name


def test_keys_written_by_another_layout_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def heads_first(key: Any, value: Any, *rest: Any) -> None:
        *caches, slots = rest
        swapped = [
            cache.as_strided(
                cache.shape,
                (cache.stride(0), cache.shape[3], cache.shape[1] * cache.shape[3], 1),
            )
            for cache in caches
        ]
        REFERENCE.reshape_and_cache(key, value, *swapped, slots)

    plant(monkeypatch, reshape_and_cache=heads_first)
    recorder, _ = recorded(tmp_path, "llama")
    assert laws(recorder)[0] == "cache write"


def test_the_environment_turns_the_recorder_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Recorder] = []
    init = Recorder.__init__

    def note(self: Recorder, *args: Any, **given: Any) -> None:
        made.append(self)
        init(self, *args, **given)

    monkeypatch.setattr(Recorder, "__init__", note)
    generate(make_model("llama"), PROMPTS, "reference", **CROWDED)
    assert made == []
    monkeypatch.setenv("PAGETWIN_RECORD", str(tmp_path))
    generate(make_model("llama"), PROMPTS, "reference", **CROWDED)
    assert len(made) == 1 and made[0].checked["steps"] > 5
