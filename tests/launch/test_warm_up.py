"""Warm-up: every kernel of an engine is compiled before its first request."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.cache_formats import FORMATS
from pagetwin.optimized import WarmUpSpec, warm_up
from pagetwin.optimized.warm_up.warm_up_calls import make_call
from support.compiler_process import json_lines

pytestmark = pytest.mark.long

SCRIPT = Path(__file__).parents[1] / "support/warmed_launches.py"
CASES = (
    "plain", "sinks, window", "batch-invariant", "FP8", "latent", "groups of five", "ranks"
)  # fmt: skip


@pytest.mark.parametrize("arguments", [("80",), ("90",), ("90", "tuned")])
def test_calls_within_a_spec_need_no_other_kernel(arguments: tuple[str, ...]) -> None:
    """Launches are recorded; a kernel is compiled once per set of types and constants."""
    (found,) = json_lines(SCRIPT, *arguments)
    assert found["warmed"] > 50 and found["calls"] == 500
    assert found["missing"] == []


def test_a_warmed_layer_whose_keys_ranks_share_needs_no_other_kernel() -> None:
    """Decodes, drafts, prompts and chunks of them, in four cache formats."""
    script = Path(__file__).with_name("warmed_ranks.py")
    (found,) = json_lines(script, "90")
    assert found["warmed"] > 100 and found["steps"] == 300
    assert found["missing"] == []


@pytest.mark.parametrize("chip", ["80", "90"])
def test_a_warmed_sparse_layer_needs_no_other_kernel(chip: str) -> None:
    """Steps of 1 to 2,111 tokens, with elements, FP8 and records. Records had too few kernels."""
    script = Path(__file__).with_name("warmed_sparse.py")
    (found,) = json_lines(script, chip)
    assert min(found["warmed"].values()) >= 5 and found["missing"] == []


@pytest.fixture(scope="module")
def ahead() -> dict[str, dict[str, Any]]:
    """What the script on compilation in threads prints, by case."""
    lines = json_lines(Path(__file__).with_name("compiled_ahead.py"))
    return {line["case"]: line for line in lines}


@pytest.mark.parametrize("case", CASES)
def test_threads_compile_every_kernel_once_before_the_first_launch(
    case: str, ahead: dict[str, dict[str, Any]]
) -> None:
    """With one thread each launch compiles; with four, only threads on the caller's device do."""
    found = ahead[case]
    assert found["alone"] == [[True, None]] and found["ahead"] == [[False, 1]]
    assert found["kernels"] >= 3 and found["compiles_alike"]
    assert found["at_once"] <= 4 and ahead["plain"]["at_once"] > 1
    assert found["compiled_again"] == 0


@pytest.mark.parametrize("case", CASES)
def test_what_is_launched_does_not_depend_on_threads(
    case: str, ahead: dict[str, dict[str, Any]]
) -> None:
    assert ahead[case]["launches_alike"] and ahead[case]["tells_alike"]


@pytest.mark.parametrize("case", CASES)
def test_a_compiled_kernel_is_launched_once_by_another_warm_up(
    case: str, ahead: dict[str, dict[str, Any]]
) -> None:
    """The call that compiles must not launch a kernel whose driver launch is known.

    It may be the second kernel of a call whose first one was left out.
    """
    assert ahead[case]["launches_again_alike"]


def test_a_kernel_that_cannot_be_compiled_raises_each_time_until_it_can(
    ahead: dict[str, dict[str, Any]],
) -> None:
    found = ahead["errors"]
    assert found["errors"] == ["append_kernel cannot be compiled"] * 2
    assert found["compiled_in_vain"] == ["append_kernel"]
    assert found["repaired"] == ["", True, "", 0]


def test_a_rejected_option_ends_the_threads_and_the_warm_up_can_be_repeated(
    ahead: dict[str, dict[str, Any]],
) -> None:
    found = ahead["errors"]
    assert found["rejected"] == "sliding_window = 0: expected at least 1"
    assert found["threads"] == 1
    assert found["after_rejection"] == ["", 0]


def make_spec(device: torch.device, **changes: Any) -> WarmUpSpec:
    cache = torch.full((2, 6, 16, 2, 16), 3.0, device=device)
    spec = {
        "key_cache": cache[0],
        "value_cache": cache[1],
        "num_query_heads": 4,
        "max_num_reqs": 2,
        "max_query_len": 10,
        "max_seq_len": 40,
        "dtype": torch.float32,
    }
    return WarmUpSpec(**(spec | changes))  # type: ignore[arg-type]


def test_warm_up_tells_what_it_compiled_and_leaves_the_cache_as_it_is(
    device: torch.device,
) -> None:
    tree = torch.ones(1, 3, 3, dtype=torch.bool, device=device)
    options = (AttentionOptions(), AttentionOptions(tree_mask=tree))
    spec = make_spec(device, options=options, lse=(True,), cascades=True)
    found = warm_up(spec)
    assert {warmed.kernel.partition(",")[0] for warmed in found} == {
        "reshape_and_cache",
        "short_decode_kernel",
        # on a chip with so many multiprocessors two requests are few
        *(["decode_kernel"] if device.type != "cuda" else []),
        "append_kernel",
        "prefill_kernel",
        "cascade_prefix_kernel",
        "cascade_rest_kernel",
    }
    assert {(warmed.options, warmed.lse) for warmed in found[1:]} == {
        (0, True),
        (1, True),
    }
    assert all(warmed.num_reqs <= 2 and warmed.max_query_len <= 10 for warmed in found)
    assert all(warmed.max_seq_len <= 40 for warmed in found)
    assert len(found) == len(set(found))
    assert bool((spec.key_cache == 3).all()) and bool((spec.value_cache == 3).all())


def test_a_spec_of_decodes_compiles_no_prefill(device: torch.device) -> None:
    spec = make_spec(device, max_query_len=1, max_num_reqs=9)
    found = {warmed.kernel for warmed in warm_up(spec)}
    decodes = {"short_decode_kernel", "decode_kernel"}
    if device.type == "cuda":
        # with so many multiprocessors nine requests are few
        decodes.remove("decode_kernel")
    assert found == {"reshape_and_cache", *decodes}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_query_heads": 3}, "num_query_heads = 3 is not a multiple of .* 2 kv"),
        ({"max_num_reqs": 0}, "max_num_reqs = 0: expected an integer of at least 1"),
        ({"max_query_len": 2.0}, "max_query_len = 2.0: expected an integer"),
        (
            {"max_query_len": 41},
            "max_query_len = 41: expected at most max_seq_len = 40",
        ),
        ({"scale": float("nan")}, "scale = nan: expected 0 or a number of size"),
        ({"num_threads": 0}, "num_threads = 0: expected an integer of at least 1"),
        ({"options": ()}, "options is empty: expected an entry per kind of call"),
        ({"lse": ()}, "lse is empty"),
        ({"key_cache": torch.zeros(6, 16, 32)}, r"key_cache has shape \[6, 16, 32\]"),
        ({"value_cache": torch.zeros(0, 16, 2, 16)}, "value_cache has shape"),
        (
            {"dtype": torch.bfloat16},
            "^dtype = torch.bfloat16 and key_cache is torch.float32: expected the same",
        ),
        (
            {"dtype": None, "value_cache": torch.zeros(6, 16, 2, 16).half()},
            r"^dtype \(that of key_cache\) = torch.float32 and value_cache is torch.float16",
        ),
    ],
)
def test_a_spec_that_no_call_fits_is_rejected(
    changes: dict[str, Any], words: str, device: torch.device
) -> None:
    with pytest.raises(ValueError, match=words):
        warm_up(make_spec(device, **changes))


@pytest.mark.parametrize(
    ("cached", "dtype"),
    [
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
        (torch.float8_e4m3fn, torch.bfloat16),
    ],
)
def test_without_a_dtype_queries_have_that_of_the_cache(
    cached: torch.dtype, dtype: torch.dtype, device: torch.device
) -> None:
    """The example of the page gives none."""
    cache = torch.zeros(6, 16, 2, 16, device=device).to(cached)
    scale = 1.0 if cached == torch.float8_e4m3fn else None
    options = AttentionOptions(k_scale=scale, v_scale=scale)
    spec = make_spec(
        device, key_cache=cache, value_cache=cache, dtype=None, options=(options,),
        max_query_len=1, max_num_reqs=1,
    )  # fmt: skip
    assert spec.query_dtype == dtype
    assert warm_up(spec)


def test_an_option_that_the_operation_rejects_is_rejected(device: torch.device) -> None:
    options = (AttentionOptions(sliding_window=0),)
    with pytest.raises(ValueError, match="sliding_window"):
        warm_up(make_spec(device, options=options))


@pytest.mark.parametrize(
    "name",
    [
        "int8_per_token_head",
        "fp8_per_token_head",
        "int4_per_token_head",
        "int4_per_token_head_vllm",
        "nvfp4_4over6",
    ],
)
def test_a_cache_whose_scales_are_measured_is_warmed_up(
    name: str, device: torch.device
) -> None:
    """Queries of a packed cache had half of their elements, so every warm-up was an error."""
    form = FORMATS[name]
    shape = (6, 16, 2, form.elements(16))
    codes = torch.full(shape, 3, dtype=torch.uint8, device=device).view(form.dtype)
    k_scale, v_scale = form.empty_scales(codes), form.empty_scales(codes)
    for scale in (k_scale, v_scale):
        scale.fill_(1)
    factor = 0.5 if form.has_global_scale else None
    options = (
        AttentionOptions(
            k_scale=k_scale,
            v_scale=v_scale,
            k_global_scale=factor,
            v_global_scale=factor,
        ),
    )
    spec = make_spec(
        device, key_cache=codes, value_cache=codes.clone(), options=options,
        max_query_len=1, max_num_reqs=1, kv_cache_dtype=name,
    )  # fmt: skip
    found = {warmed.kernel for warmed in warm_up(spec)}
    assert found == {"reshape_and_cache", "short_decode_kernel"}
    assert bool((codes.view(torch.uint8) == 3).all()) and bool(
        (k_scale.float() == 1).all()
    )


def test_the_launches_have_the_scale_of_the_calls(device: torch.device) -> None:
    """From a large scale on, prefills of codes run another kernel."""
    spec = make_spec(device, scale=1.0)
    assert make_call(spec, 0, False, 1).scale == 1.0
    assert make_call(make_spec(device), 0, False, 1).scale == 0.25
