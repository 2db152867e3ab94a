"""Declared support, field by field: what is a contradiction, and which calls are outside."""

from typing import Any

import pytest
import torch
from pagetwin.conformance import Support
from pagetwin.conformance.base.support import kind_of
from support_layouts import CACHE, QUERY, strided

FP8 = torch.float8_e4m3fn
CALL = {"query": QUERY, "key_cache": CACHE, "value_cache": CACHE}

# fields


@pytest.mark.parametrize(
    "fields",
    [
        {"options": []},
        {"rejects": []},
        {"strides": {}},
        {"same_strides": []},
        {"never_together": []},
        {"reads_past": []},
        {"tensor_dtypes": {}},
        {"devices": ["cpu", "cuda", "sm_90"]},
        {"kv_layouts": ["NHD", "HND"]},
        {"rejects": ["shapes", "contents", "undeclared"]},
        {"head_sizes": [1], "group_sizes": [1], "block_sizes": [1]},
        {"query_lens": [0], "seq_lens": range(2)},
        {"query_lens": range(4, 9), "seq_lens": range(1, 5)},
        {"alignment": 1},
        {"alignment": 16},
        {"options": {"causal": None, "scale": "float", "value_head_size": [128]}},
        {"options": ["sinks"], "tensor_dtypes": {"sinks": ["bfloat16"]}},
        {"options": ["k_scale"], "cache_dtypes": ["float8_e5m2"]},
        {"options": [], "cache_dtypes": ["float8_e5m2", "float16"]},
        {"batch_invariant": True},
        {"batch_invariant": print},
    ],
)
def test_a_support_without_a_contradiction_is_taken(fields: dict[str, Any]) -> None:
    assert Support(**fields) == Support(**fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"operations": []}, r"operations = \[\]: expected at least one"),
        ({"dtypes": ()}, r"dtypes = \(\): expected at least one"),
        ({"query_lens": range(0)}, "query_lens = .*: expected at least one"),
        ({"rejects": ["sizes"]}, "rejects has 'sizes': expected shapes or"),
        ({"kv_layouts": ["hnd"]}, "kv_layouts has 'hnd': expected NHD or HND"),
        ({"kv_layouts": ["sm_90"]}, "kv_layouts has 'sm_90'"),
        ({"devices": ["gpu"]}, "devices has 'gpu': expected cpu or cuda"),
        ({"head_sizes": [0]}, "head_sizes has 0: expected at least 1"),
        ({"group_sizes": [2, 0]}, "group_sizes has 0: expected at least 1"),
        ({"block_sizes": range(4)}, "block_sizes has 0: expected at least 1"),
        ({"query_lens": [-1]}, "query_lens has -1: expected at least 0"),
        ({"seq_lens": range(-2, 4)}, "seq_lens has -2: expected at least 0"),
        ({"head_sizes": [1.5]}, "head_sizes has 1.5: expected whole numbers"),
        ({"strides": {"query": "dense"}}, r"strides\['query'\] = 'dense'"),
        ({"strides": ["packed"]}, "strides = .*: expected a mapping by argument"),
        ({"tensor_dtypes": ["sinks"]}, "tensor_dtypes = .*: expected a mapping"),
        (
            {"same_strides": ["key_cache"]},
            "same_strides has 'key_cache': expected pairs",
        ),
        ({"alignment": 0}, "alignment = 0: expected a power of two"),
        ({"alignment": 24}, "alignment = 24: expected a power of two"),
        ({"alignment": "16"}, "alignment = '16': expected a number of bytes"),
        ({"alignment": [16]}, r"alignment = \[16\]: expected a number of bytes"),
        ({"head_sizes": "64"}, "head_sizes = '64': expected a list"),
        ({"head_sizes": 64}, "head_sizes = 64: expected a list"),
        ({"query_lens": [5], "seq_lens": [4]}, "query_lens begins at 5"),
        ({"query_lens": [0], "seq_lens": [0]}, "query_lens begins at 0"),
        ({"options": {"scale": 3}}, r"options\['scale'\] = 3: expected values"),
        ({"options": {"scale": []}}, r"options\['scale'\] = \[\]: expected values"),
        ({"options": {"scale": "number"}}, r"options\['scale'\] has 'number'"),
        (
            {"options": ["scale"], "never_together": ["scale"]},
            "never_together has 'scale': expected pairs",
        ),
        (
            {"options": ["scale"], "never_together": [("scale", "sinks")]},
            "never_together has 'sinks', which options lacks",
        ),
        (
            {"options": [], "tensor_dtypes": {"sinks": ["float16"]}},
            "tensor_dtypes has 'sinks', which options lacks",
        ),
        (
            {"options": [], "cache_dtypes": ["float8_e5m2"]},
            "cache_dtypes has only float8_e5m2, and options lacks 'k_scale'",
        ),
    ],
)
def test_a_contradiction_is_named(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"SUPPORT.{words}"):
        Support(**fields)


# calls


@pytest.mark.parametrize(
    ("fields", "changes", "why"),
    [
        ({"dtypes": ["float16"]}, {}, "dtype float32"),
        ({"cache_dtypes": ["float16"]}, {}, "cache dtype float32"),
        ({"block_sizes": [2]}, {}, "block size 16"),
        ({"head_sizes": [4]}, {}, "head size 8"),
        ({"group_sizes": [4]}, {}, "group size 2"),
        ({"block_sizes": [16], "head_sizes": [8], "group_sizes": [2]}, {}, None),
        ({"dtypes": ["float16"]}, {"query": None, "key": QUERY}, "dtype float32"),
        (
            {"dtypes": ["float16"]},
            {"query": None, "prefix_output": QUERY},
            "dtype float32",
        ),
        (
            {"group_sizes": [4]},
            {"key_cache": None, "key": QUERY[:, :2]},
            "group size 2",
        ),
        ({"group_sizes": [4]}, {"key_cache": None}, None),
        ({"group_sizes": [4]}, {"query": QUERY[0]}, None),
        ({"group_sizes": [4]}, {"key_cache": CACHE[0, 0]}, None),
        ({"group_sizes": [4]}, {"key_cache": CACHE[:, :, :0]}, None),
        ({"kv_layouts": ["HND"]}, {}, "KV layout NHD"),
        ({"kv_layouts": ["HND"]}, {"key_cache": None, "value_cache": None}, None),
        (
            {"strides": {"query": "packed"}},
            {"query": strided(64, 8, 1)},
            "query that is",
        ),
        ({"alignment": 32}, {"query": strided(32, 16, 1)}, None),
        ({"alignment": 32}, {"query": strided(64, 10, 1)}, "query that is not aligned"),
        ({"alignment": 32}, {"query": strided(64, 10, 1)[:, :1]}, None),
        (
            {"alignment": 32},
            {"query": strided(64, 8, 1, offset=1)},
            "query that is not",
        ),
        ({"alignment": 32}, {"other": strided(64, 10, 1)}, None),
        *(
            (
                {"alignment": 32},
                {name: strided(64, 10, 1)},
                f"{name} that is not aligned",
            )
            for name in ("key", "value", "key_cache", "value_cache", "kv_cache", "out")
        ),
        ({"same_strides": [("query", "key_cache")]}, {}, "other strides of query than"),
        ({"same_strides": [("query", "key")]}, {}, None),
        (
            {"tensor_dtypes": {"sinks": ["float16"]}},
            {"sinks": QUERY + 1e-9},
            "sinks in",
        ),
    ],
)
def test_a_tensor_outside_of_the_support_is_named(
    fields: dict[str, Any], changes: dict[str, Any], why: str | None
) -> None:
    tensors = {
        name: tensor for name, tensor in (CALL | changes).items() if tensor is not None
    }
    found = Support(**fields).why_not(tensors, {})
    assert found is None if why is None else str(found).startswith(why)


def test_options_and_lengths_outside_of_the_support_are_named() -> None:
    sinks = torch.full((4,), 1e-9)
    own = Support(options=["sinks"], tensor_dtypes={"sinks": ["float16"]})
    assert str(own.why_not(CALL, {"sinks": sinks})).startswith("sinks in float32")
    assert own.why_not(CALL, {"sinks": torch.ones(4)}) is None
    assert own.why_not(CALL, {"scale": 1.0}) == "option scale"
    packed = Support(options=[], strides={"query": "packed"})
    turned = {"query": QUERY.transpose(0, 1)}
    assert packed.why_not(turned, {"scale": 1.0}) == "option scale"
    assert packed.why_not(turned, {}) == "query that is not packed"
    lens = Support(query_lens=range(2), seq_lens=[4, 5])
    assert lens.why_not(CALL, {}, [1, 2], [4]) == "2 new tokens of a request"
    assert lens.why_not(CALL, {}, [1, 0], [4, 6]) == "6 keys of a request"
    assert lens.why_not(CALL, {}, [1, 0], [4, 5]) is None
    assert Support().why_not(CALL, {"scale": 1.0}, [7], [9]) is None


@pytest.mark.parametrize(
    ("declared", "value", "why"),
    [
        (None, 3.0, None),
        ([1.0, 2.0], 2.0, None),
        ([1.0, 2.0], 3.0, "option scale = 3.0"),
        ("float", 3.0, None),
        ("float", 3, "option scale = 3"),
        (["int", 0.5], 0.5, None),
        ("tensor", torch.ones(4), None),
        ("per head", torch.ones(4), None),
        ("per head", torch.ones(4, 2), "option scale = tensor"),
        ([1.0], torch.ones(1), "option scale = per head"),
    ],
)
def test_values_of_an_option_are_among_the_declared_ones(
    declared: Any, value: Any, why: str | None
) -> None:
    own = Support(options={"scale": declared})
    assert own.why_not_options({"scale": value}) == why


def test_options_that_cannot_be_combined_are_named() -> None:
    own = Support(options=["scale", "sinks"], never_together=[("scale", "sinks")])
    assert own.why_not_options({"scale": 1.0}) is None
    found = own.why_not_options({"scale": 1.0, "sinks": torch.ones(2)})
    assert found == "options scale and sinks together"


def test_the_kinds_of_values() -> None:
    ones, one = torch.ones(4), torch.ones(1)
    assert kind_of("causal", ones.bool()) == "per request"
    assert kind_of("causal", True) == "bool"
    assert kind_of("alibi_slopes", ones) == "per head"
    assert kind_of("position_bias", ones[None]) == "tensor"
    assert kind_of("k_scale", one) == kind_of("k_scale", one[0]) == "one element"
    assert kind_of("k_scale", ones) == "per head"
    assert kind_of("k_scale", one[None, None]) == "per slot"


def test_a_cache_of_records_may_be_declared_by_the_name_of_its_format() -> None:
    """Three formats of latents have the same dtype."""
    query = torch.zeros(1, 1, 192)
    for size, why in ((656, None), (352, "cache dtype uint8")):
        records = torch.zeros(2, 64, size, dtype=torch.uint8)
        call = {"query": query, "kv_cache": records, "key_cache": records[:, :, None]}
        support = Support(cache_dtypes=["fp8_ds_mla"])
        assert support.why_not(call, {}) == why
        assert Support(cache_dtypes=["uint8"]).why_not(call, {}) is None


@pytest.mark.parametrize(
    ("declared", "device", "why"),
    [
        (None, "cuda", None),
        (["cpu"], "cpu", None),
        (["cuda"], "cuda", None),
        (["sm_90"], "cuda", None),
        (["sm_80", "cpu"], "cuda", "device sm_90; SUPPORT declares sm_80, cpu"),
        (["cuda"], "cpu", "device cpu; SUPPORT declares cuda"),
    ],
)
def test_a_device_or_its_capability_is_declared(
    monkeypatch: pytest.MonkeyPatch, declared: Any, device: str, why: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert Support(devices=declared).why_not_device(torch.device(device)) == why
