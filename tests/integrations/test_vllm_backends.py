"""vLLM's own backends: what is recorded of them, and the tables of them and of the plugin."""

import importlib
import io
import sys
import zipfile
from types import SimpleNamespace
from typing import Any

import pytest
from support.fake_vllm import VERSIONS, fake_vllm, recorded
from support.source_tree import ROOT
from support.vllm_backends import FEATURES, LAYER, alibi, validate
from support.vllm_source import Source

sys.path.append(str(ROOT / "docs" / "hooks"))
backend_table: Any = importlib.import_module("backend_table")

pytestmark = pytest.mark.quick

NEWEST = VERSIONS[-1]
PAGE = ROOT / "docs" / "integrations" / "vllm_backends.md"
# read in vLLM 0.33.0 by a person: backends with True, and those with a condition
BY_HAND: dict[str, tuple[str, str]] = {
    "fp8": ("TRITON_ATTN FLASHINFER", "FLASH_ATTN"),
    "fp8_e4m3": ("TRITON_ATTN FLASHINFER HPC_ATTN", "FLASH_ATTN"),
    "int8_per_token_head": ("TRITON_ATTN", ""),
    "int4_per_token_head": ("TRITON_ATTN", ""),
    "fp8_per_token_head": ("TRITON_ATTN", ""),
    "int4_sinks": ("TRITON_ATTN", ""),
    "nvfp4": ("FLASHINFER", ""),
    "turboquant": ("TURBOQUANT", ""),
    "sinks": ("TRITON_ATTN", "FLASH_ATTN FLASHINFER"),
    "images": ("TRITON_ATTN FLEX_ATTENTION", "FLASH_ATTN"),
    "images_fp8": ("TRITON_ATTN", ""),
    "rswa": ("FLASH_ATTN TRITON_ATTN FLEX_ATTENTION", ""),
    "non_causal": ("FLASH_ATTN TRITON_ATTN FLASHINFER FLEX_ATTENTION", ""),
    "batch_invariant": ("FLASH_ATTN TRITON_ATTN FLEX_ATTENTION", ""),
    "cross_attention": ("FLASH_ATTN TRITON_ATTN", ""),
    "dcp": ("FLASH_ATTN FLASHINFER", ""),
    "pcp": ("", ""),
    "sparse": ("", ""),
}


@pytest.mark.parametrize("feature", BY_HAND)
def test_the_record_has_what_a_person_read_in_the_source(feature: str) -> None:
    found = recorded("0.33.0")["backends"]
    serves = {
        name: backend["serves"][feature]
        for name, backend in found.items()
        if "MLA" not in name
    }
    yes, by_condition = (set(names.split()) for names in BY_HAND[feature])
    assert {name for name, answer in serves.items() if answer is True} == yes
    assert {
        name for name, answer in serves.items() if isinstance(answer, str)
    } == by_condition


# --- the tables


def rows_of(table: str) -> list[list[str]]:
    """Return the cells of a table, without the line after its head."""
    lines = [line.strip("| ").split(" | ") for line in table.splitlines()]
    return [lines[0], *lines[2:]]


@pytest.mark.parametrize("macro", ["backend_table", "latent_backend_table"])
def test_the_table_of_the_page_has_the_answers_of_the_record(macro: str) -> None:
    assert f"{{{{ {macro} }}}}" in PAGE.read_text(encoding="utf-8")
    head, *rows = rows_of(getattr(backend_table, macro)())
    features = {words: feature for feature, words in backend_table.ROWS.items()}
    found = recorded(NEWEST)["backends"]
    names = [name for name in head if name in found]
    assert set(names) == {
        name for name in found if ("MLA" in name) == (macro[0] == "l")
    }
    for words, *cells in rows:
        feature = features[words]
        if feature == "mla":
            continue
        for name, shown in zip(head, cells, strict=True):
            if name not in found:  # the plugin
                continue
            answer, plain = (found[name]["serves"][x] for x in (feature, "plain"))
            expected = {True: "yes", False: "no"}.get(answer)
            if expected is None and answer == plain and feature != "plain":
                expected = "yes"
            assert shown == expected or (
                expected is None and shown.startswith(("if ", "no, "))
            )


def test_a_difference_is_a_feature_of_one_side_alone() -> None:
    rows = {row[0]: row[1:] for row in rows_of(backend_table.backend_differences())[1:]}
    assert set(rows) == set(recorded(NEWEST)["backends"])
    assert rows["TRITON_ATTN"] == ["`nvfp4`, decode context parallelism", "-"]
    assert "`int4_per_token_head` with sinks" in rows["FLASH_ATTN"][0]
    assert "sinks" in rows["FLEX_ATTENTION"][0]
    assert rows["FLASH_ATTN"][1] == "FP8 scales per head"


@pytest.mark.parametrize("version", VERSIONS[-1:])
@pytest.mark.parametrize("kind", list(backend_table.CLASSES))
def test_the_plugins_column_is_what_its_classes_declare(
    version: str, kind: str
) -> None:
    shown = backend_table.plugin_answers(kind)
    defaults = recorded(version)["defaults"]
    use_mla = kind != "paged"
    with fake_vllm(version, use_mla, use_sparse=kind == "sparse"):
        from pagetwin.integrations.vllm.plugin import choose_backend

        backend = choose_backend()
        impl = backend.get_impl_cls()

        def declared(owner: Any, name: str) -> Any:
            """Return an answer of ours, or of vLLM's base class."""
            ours = [x for x in owner.__mro__ if x.__module__.startswith("pagetwin")]
            if not any(name in vars(x) for x in ours):
                return defaults[name]
            value = getattr(owner, name)
            return value() if callable(value) else value

        for feature, method in backend_table.METHODS.items():
            assert shown[feature] == declared(backend, method), feature
        assert bool(shown["dcp"]) == declared(impl, "supports_dcp")
        assert shown["pcp"] == declared(impl, "supports_pcp")
        for cache in backend_table.CACHES:
            assert shown[cache] == (cache in backend.supported_kv_cache_dtypes), cache
        dtypes = {str(dtype) for dtype in backend.supported_dtypes}
        assert shown["float32"] == ("torch.float32" in dtypes)
        if not use_mla:
            assert shown["cross_attention"] == backend.supports_attn_type(
                "encoder_decoder"
            )
            assert shown["encoder_only"] == backend.supports_attn_type("encoder_only")


def test_the_plugin_shares_keys_of_layers_without_distances_alone() -> None:
    """The condition that the table gives for decode context parallelism."""
    run = SimpleNamespace(name="twin", operations=["DecodeContextParallel"])
    config = SimpleNamespace(parallel_config=SimpleNamespace(use_ubatching=False))
    plain: dict[str, Any] = {
        "sliding_window": None,
        "alibi_slopes": None,
        "attn_type": "decoder",
        "is_batch_invariant": False,
    }
    with fake_vllm(NEWEST):
        from pagetwin.integrations.vllm.shared_layers import check_shared_layer

        check_shared_layer(2, run, config, **plain)  # type: ignore[arg-type]
        for change in (
            {"sliding_window": 128},
            {"alibi_slopes": [0.5]},
            {"attn_type": "encoder_decoder"},
        ):
            with pytest.raises(NotImplementedError, match=next(iter(change))):
                check_shared_layer(2, run, config, **plain | change)  # type: ignore[arg-type]


# --- how the source is read

BASE = """
class AttentionBackend:
    @classmethod
    def supports_sink(cls) -> bool:
        return False
    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype):
        return kv_cache_dtype in cls.supported_kv_cache_dtypes
    @classmethod
    def supports_combination(cls, head_size, kv_cache_dtype, has_sink, device_capability):
        return None
    @classmethod
    def validate_configuration(cls, head_size, kv_cache_dtype, has_sink, device_capability):
        reasons = []
        if not cls.supports_kv_cache_dtype(kv_cache_dtype):
            reasons.append("cache")
        if has_sink and not cls.supports_sink():
            reasons.append("sinks")
        combination_reason = cls.supports_combination(head_size)
        if combination_reason is not None:
            reasons.append(combination_reason)
        return reasons
"""
OTHER = """
from vllm.v1.attention.backend import AttentionBackend
from vllm.helpers import has_library, is_new
class Impl:
    def __init__(self, alibi_slopes):
        {init}
class Backend(AttentionBackend):
    supported_kv_cache_dtypes = ["auto", "fp8"]
    @staticmethod
    def get_impl_cls():
        return Impl
    @classmethod
    def supports_sink(cls):
        {sinks}
    @classmethod
    def supports_combination(cls, head_size, kv_cache_dtype, has_sink, device_capability):
        {reason}
"""
HELPERS = """
def is_new():
    return current_platform.is_device_capability_family(90)
"""


def source_of(
    init: str = "pass", sinks: str = "pass", reason: str = "return None"
) -> Source:
    """Return a wheel with one backend."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("vllm/v1/attention/backend.py", BASE)
        other = OTHER.format(init=init, sinks=sinks, reason=reason)
        archive.writestr("vllm/other.py", other)
        archive.writestr("vllm/helpers.py", HELPERS)
    return Source(zipfile.ZipFile(file), {})


@pytest.mark.parametrize(
    ("sinks", "expected"),
    [
        ("return True", True),
        ("return super().supports_sink()", False),
        ("return is_new()", True),
        ("return not is_new()", False),
        (
            "return current_platform.is_xpu() or cls.supports_kv_cache_dtype('fp8')",
            True,
        ),
        ("return has_library()", "has_library()"),
        ("return is_new() and has_library(3)", "has_library(3)"),
        ("return has_library(head_size) in (3, 4)", "has_library(...) in (3, 4)"),
        (
            "if has_library():\n            return False\n        return True",
            "not has_library()",
        ),
        ("if x:\n            return is_new()\n        return y", "x or y"),
    ],
)
def test_an_answer_is_decided_or_left_as_an_expression(
    sinks: str, expected: Any
) -> None:
    source = source_of(sinks=sinks)
    owner = source.class_of("vllm.other", "Backend")
    answer = validate(source, owner, LAYER | {"has_sink": True})
    assert getattr(answer, "text", answer) == expected
    # a layer without sinks does not depend on it
    assert validate(source, owner, LAYER) is True


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("return 'always'", False),
        ("return f'{head_size} is too large' if head_size > 64 else None", False),
        (
            "return 'missing' if lacks() else None",
            "('missing' if lacks() else None) is None",
        ),
        (
            "return super().supports_combination()",
            "super().supports_combination() is None",
        ),
        (
            "if device_capability.major == 9:\n            return 'Hopper'\n        return None",
            False,
        ),
        ("if head_size == 64:\n            return 'small'\n        return None", True),
        (
            "if not has_library():\n            return 'missing'\n        return None",
            "has_library()",
        ),
    ],
)
def test_a_reason_rejects_a_layer(reason: str, expected: Any) -> None:
    source = source_of(reason=reason)
    answer = validate(source, source.class_of("vllm.other", "Backend"), LAYER)
    assert getattr(answer, "text", answer) == expected


def test_a_cache_that_is_not_declared_is_rejected_though_the_last_check_holds() -> None:
    """The first and the last check gave the answer together, and the one between was lost."""
    source = source_of()
    owner = source.class_of("vllm.other", "Backend")
    assert validate(source, owner, LAYER | {"kv_cache_dtype": "fp8"}) is True
    assert validate(source, owner, LAYER | FEATURES["nvfp4"]) is False


@pytest.mark.parametrize(
    ("init", "expected"),
    [
        ("self.alibi_slopes = alibi_slopes", "not read"),
        ("self.alibi_slopes = alibi_slopes; run(self.alibi_slopes)", True),
        ("\n        if alibi_slopes is not None:\n            raise ValueError", False),
        (
            "\n        given = [alibi_slopes]\n        if any(given):\n            raise Error",
            False,
        ),
    ],
)
def test_slopes_are_read_rejected_or_ignored(init: str, expected: Any) -> None:
    source = source_of(init=init)
    assert alibi(source, source.class_of("vllm.other", "Backend")) == expected
