"""Images that attend in both directions, and prompts that no window hides, in the vLLM plugin."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pagetwin.contract.operations import load_implementation
from support.fake_vllm import VERSIONS, fake_vllm
from support.vllm_steps import DEVICE, EngineSteps
from torch import Tensor

IMAGES = {"is_mm_prefix_lm": True}
PROMPTS = {"rswa_window": 5}


@pytest.fixture(params=[VERSIONS[0], VERSIONS[-1]])
def version(request: pytest.FixtureRequest) -> Iterator[str]:
    """The oldest and the newest interface."""
    with fake_vllm(request.param):
        yield request.param


def ranges_of_images(
    steps: EngineSteps,
    lens: Sequence[int],
    images: dict[int, list[tuple[int, int]]],
    window: int | None,
) -> Tensor:
    """Return the range of each new token of the next step, token by token.

    Args:
        steps: the sequences before the step.
        lens: new tokens of each.
        images: first and last position of the images of each.
        window: Optional. The window within which images attend. If None, any key of it is visible.
    """
    rows = []
    for req, count in enumerate(lens):
        computed = len(steps.keys[req])
        for position in range(computed, computed + count):
            own = [
                span for span in images.get(req, []) if span[0] <= position <= span[1]
            ]
            first, last = own[0] if own else (-1, -1)
            if own and window is not None:
                first = max(first, position - window + 1)
            rows.append((first, last))
    return torch.tensor(rows, dtype=torch.int32)


def run(
    steps: EngineSteps,
    lens: Sequence[int],
    images: dict[int, list[tuple[int, int]]] | None,
    clamped: int | None = None,
) -> float:
    """Run a step with images, and return the error of its output divided by the budget."""
    ranges = ranges_of_images(steps, lens, images or {}, clamped)
    steps.of_step = {"mm_req_doc_ranges": images}
    return steps.step(lens, query_ranges=ranges)


@pytest.mark.parametrize("name", ["auto", "fp8"])
@pytest.mark.parametrize("clamp", [False, True])
@pytest.mark.parametrize("window", [None, 6])
def test_images_attend_in_both_directions_in_both_meanings(
    version: str, name: str, clamp: bool, window: int | None
) -> None:
    """Several images per prompt, chunks that begin among cached tokens of an image, and decodes.

    FLASH_ATTN of vLLM does not take FP8 caches with images.
    """
    options: dict[str, Any] = {} if window is None else {"sliding_window": window}
    steps = EngineSteps(
        version, model=IMAGES, clamp=clamp, kv_cache_dtype=name, **options
    )
    images = {0: [(2, 10), (12, 13), (20, 29)], 2: [(1, 4)]}
    clamped = window if clamp else None
    # the second step begins inside of an image whose first tokens are cached
    for lens in ((7, 3, 2), (9, 1, 3), (14, 1, 1), (1, 1, 1)):
        assert run(steps, lens, images, clamped) <= 1


def test_the_two_meanings_differ(version: str) -> None:
    """Otherwise the test above would not tell them apart."""
    steps = EngineSteps(version, model=IMAGES, clamp=True, sliding_window=3)
    images = {0: [(2, 10)]}
    assert run(steps, (12, 1, 1), images, None) > 1


def test_an_image_that_is_partly_computed_ends_with_the_sequence(version: str) -> None:
    steps = EngineSteps(version, model=IMAGES, sliding_window=3)
    assert run(steps, (6, 2, 2), {0: [(3, 20)]}) <= 1


@pytest.mark.parametrize("images", [None, {}, {0: [], 1: [(0, 3)]}], ids=str)
def test_a_step_whose_new_tokens_are_in_no_image_has_no_ranges(
    version: str, images: Any
) -> None:
    """So its decodes read as few keys as those of another model."""
    steps = EngineSteps(version, model=IMAGES)
    assert run(steps, (9, 18, 2), {0: [(2, 3)]}) <= 1
    steps.of_step = {"mm_req_doc_ranges": images}
    metadata = steps.builder.build(0, steps.common((1, 1, 1), True, 0))
    assert metadata.query_ranges == {}
    assert metadata.ranges_of(steps.layer) is None


def test_a_model_may_clear_the_ranges_of_its_other_layers(version: str) -> None:
    """Gemma 4 sets `mm_prefix_range` of layers without a window to None before it runs."""
    steps = EngineSteps(version, model=IMAGES)
    steps.of_step = {"mm_req_doc_ranges": {0: [(0, 3)]}}
    metadata = steps.builder.build(0, steps.common((0, 0, 0), True, 4))
    assert metadata.mm_prefix_range is None, "no new token is in the image"
    assert run(steps, (5, 1, 1), {0: [(0, 3)]}) <= 1
    common = steps.common((5, 1, 1), True, 0)
    metadata = steps.builder.build(0, common)
    assert metadata.ranges_of(steps.layer) is not None
    metadata.mm_prefix_range = None
    assert metadata.ranges_of(steps.layer) is None


@pytest.mark.parametrize("name", ["auto", "fp8"])
def test_a_prompt_stays_visible_and_generated_tokens_have_a_window(
    version: str, name: str
) -> None:
    """Chunks of prompts, several new tokens after them, and decodes; the own window is not used."""
    steps = EngineSteps(version, model=PROMPTS, kv_cache_dtype=name, sliding_window=2)
    prompts = torch.tensor([14, 3, 1], dtype=torch.int32)
    for place, lens in (("cpu", (9, 3, 1)), (DEVICE, (5, 1, 4)), (DEVICE, (1, 9, 9))):
        rows = []
        for req, count in enumerate(lens):
            computed = len(steps.keys[req])
            for position in range(computed, computed + count):
                rows.append((0, min(int(prompts[req]) - 1, position)))
        # the older model runner has the lengths on the host
        steps.of_step = {"rswa_prefix_lens": prompts.to(place)}
        ranges = torch.tensor(rows, dtype=torch.int32)
        assert steps.step(lens, query_ranges=ranges, sliding_window=5) <= 1


def test_captured_steps_read_the_ranges_of_prompts_from_one_buffer(
    version: str,
) -> None:
    steps = EngineSteps(version, model=PROMPTS)
    first = steps.builder.build(0, steps.common((0, 0, 0), True, 4)).query_ranges[None]
    assert bool((first == -1).all()), "a dummy step has no prompts"
    steps.step((20, 3, 1))
    steps.of_step = {"rswa_prefix_lens": torch.tensor([4, 9, 1], dtype=torch.int32)}
    again = steps.builder.build(0, steps.common((1, 1, 1), True, 1)).query_ranges[None]
    assert again.data_ptr() == first.data_ptr()
    assert again.tolist() == [[0, 3], [0, 2], [0, 0], [-1, -1]]


def test_what_cannot_be_combined_is_rejected(version: str) -> None:
    with pytest.raises(NotImplementedError, match="rswa_window with is_mm_prefix_lm"):
        EngineSteps(version, model=IMAGES | PROMPTS)
    config = EngineSteps(version, model=IMAGES).config
    config.speculative_config = SimpleNamespace(enable_adaptive_verification=True)
    from pagetwin.integrations.vllm.ranges import StepRanges

    with pytest.raises(NotImplementedError, match="enable_adaptive_verification"):
        StepRanges(load_implementation("reference"), config, (), "cpu")


def test_a_shared_prefix_is_not_read_once_if_tokens_have_ranges(version: str) -> None:
    shared = (512, [1] * 16, 8, 2, False, False, False, 4, 1)
    for model in (IMAGES, PROMPTS):
        steps = EngineSteps(version, model=model)
        assert not steps.builder.use_cascade_attention(*shared)


def test_graphs_of_several_tokens_are_not_captured_for_models_with_images(
    version: str,
) -> None:
    """Such a step may be the last tokens of images; one token per request attends as a decode."""
    builder = EngineSteps(version).builder
    config = EngineSteps(version, model=IMAGES).config
    found = builder.get_cudagraph_support(config, None)
    assert found.name == "UNIFORM_SINGLE_TOKEN_DECODE"


@pytest.mark.parametrize("model", [{}, IMAGES, PROMPTS], ids=str)
def test_the_kernels_of_ranges_are_compiled_in_the_warm_up(
    version: str, model: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    import pagetwin.optimized

    specs: list[Any] = []
    monkeypatch.setattr(
        pagetwin.optimized, "warm_up", lambda spec: (specs.append(spec), ("kernel",))[1]
    )
    steps = EngineSteps(version, model=model, sliding_window=9)
    type(steps.builder)(None, ["layer"], steps.config, torch.device(DEVICE))
    query = steps._rows(steps.heads, 2)
    out = torch.empty_like(query)
    steps.impl.forward(steps.layer, query, None, None, steps.cache, None, out)
    found = [
        (option.sliding_window, option.query_ranges is not None)
        for option in specs[0].options
    ]
    expected = [(9, False), (9, True)] if model == IMAGES else [(9, False)]
    assert found == ([(5, True)] if model == PROMPTS else expected)
