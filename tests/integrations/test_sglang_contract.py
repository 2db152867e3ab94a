"""The SGLang plugin against the interface of every recorded release; SGLang is not needed."""

import ast
import inspect
import logging
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
from pagetwin.integrations.sglang.plugin import NEWEST, OLDEST, check_version
from support.fake_sglang import (
    ATTENTION,
    BASES,
    BATCH,
    CONFIG,
    MEMORY,
    RUNNER,
    SPECULATION,
    VERSIONS,
    WINDOWS,
    fake_sglang,
    members,
    recorded,
)
from support.sglang_steps import EngineSteps, Layer, Pool, make_runner
from support.source_tree import ROOT
from torch import nn

pytestmark = pytest.mark.quick

FOLDER = ROOT / "shared" / "integrations" / "sglang"
SOURCES = {path.name: path.read_text("utf-8") for path in FOLDER.glob("*.py")}
CLAIMED = {"layer": (ATTENTION, "RadixAttention"), "batch": (BATCH, "ForwardBatch")}


def test_the_releases_that_are_named_are_recorded() -> None:
    numbers = [tuple(map(int, version.split("."))) for version in VERSIONS]
    assert numbers[0] == OLDEST and numbers[-1] == NEWEST
    assert numbers == sorted(numbers)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_entry_point_is_in_the_group_that_sglang_loads(version: str) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    group = recorded(version)["plugin_group"]
    assert f'[project.entry-points."{group}"]' in text
    assert 'pagetwin = "pagetwin.integrations.sglang:register"' in text


@pytest.mark.parametrize("version", VERSIONS)
def test_every_name_that_the_plugin_imports_exists(version: str) -> None:
    modules = recorded(version)["modules"]
    count = 0
    for name, source in SOURCES.items():
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.ImportFrom) or node.level:
                continue
            if not (node.module or "").startswith("sglang"):
                continue
            for alias in node.names:
                path = f"{node.module}.{alias.name}"
                names = modules.get(node.module, {"names": []})["names"]
                assert path in modules or alias.name in names, (name, path)
                count += 1
    assert count > 6


@pytest.mark.parametrize("version", VERSIONS)
def test_no_abstract_method_is_left_and_methods_take_what_sglangs_take(
    version: str,
) -> None:
    described = recorded(version)["modules"][BASES]["classes"]["AttentionBackend"]
    with fake_sglang(version):
        from pagetwin.integrations.sglang.backend import PagetwinSglangBackend

        assert not getattr(PagetwinSglangBackend, "__abstractmethods__", frozenset())
        count = 0
        for method, facts in described["methods"].items():
            mine = inspect.getattr_static(PagetwinSglangBackend, method)
            if not inspect.isfunction(mine) or "pagetwin" not in mine.__module__:
                continue
            if method == "__init__":
                continue
            plain = [name for name, kind, _ in facts["parameters"] if kind == "plain"]
            signature = inspect.signature(mine)
            signature.bind(*[0] * len(plain))
            signature.bind(0, **dict.fromkeys(plain[1:], 0))
            count += 1
        assert count == 7


@pytest.mark.parametrize("version", VERSIONS)
def test_our_methods_accept_every_call_that_sglang_makes(version: str) -> None:
    with fake_sglang(version):
        from pagetwin.integrations.sglang.backend import PagetwinSglangBackend

        seen = set()
        for caller, hooks in recorded(version)["calls"].items():
            if "triton_backend" in caller:
                continue  # calls of its own classes
            for hook, forms in hooks.items():
                method = getattr(PagetwinSglangBackend, hook, None)
                if method is None:
                    continue
                for positional, keywords in forms:
                    given = dict.fromkeys(keywords, 0)
                    inspect.signature(method).bind(*[0] * (positional + 1), **given)
                    seen.add(hook)
        assert {
            "forward_decode",
            "forward_extend",
            "get_cuda_graph_seq_len_fill_value",
            "init_cuda_graph_state",
            "init_forward_metadata",
            "init_forward_metadata_in_graph",
            "init_forward_metadata_out_graph",
        } <= seen


@pytest.mark.parametrize("version", VERSIONS)
def test_the_pools_accept_the_calls_of_the_plugin(version: str) -> None:
    modules = recorded(version)["modules"]
    forms = [
        tuple(form)
        for name, hooks in recorded(version)["calls"].items()
        if "triton_backend" in name
        for positional, keywords in hooks["set_kv_buffer"]
        for form in [(positional, tuple(keywords))]
    ]
    assert (6, ()) in forms  # SGLang's own backend makes the call that the plugin makes
    for module, name in ((MEMORY, "MHATokenToKVPool"), (WINDOWS, "SWAKVPool")):
        methods = modules[module]["classes"][name]["methods"]
        taken = [x for x, *_ in methods["set_kv_buffer"]["parameters"]]
        assert taken[2:7] == ["loc_info", "cache_k", "cache_v", "k_scale", "v_scale"]
        assert "get_kv_buffer" in methods
    locations = modules[MEMORY]["classes"]["KVWriteLoc"]["attributes"]
    assert list(locations)[:2] == ["loc", "swa_loc"]
    assert {"layers_mapping", "translate_loc_from_full_to_swa"} <= members(
        version, WINDOWS, "SWAKVPool"
    )
    assert "req_to_token" in members(version, MEMORY, "ReqToTokenPool")


@pytest.mark.parametrize("version", VERSIONS)
def test_every_field_that_the_plugin_reads_exists(version: str) -> None:
    text = "\n".join(SOURCES.values()).replace("forward_batch.", "batch.")
    for variable, (module, name) in CLAIMED.items():
        read = set(re.findall(rf"\b{variable}\.(\w+)", text)) - {"get"}
        assert len(read) > 7
        assert read <= members(version, module, name), variable
    asked = set(re.findall(r'layer\.get\("(\w+)"', text))
    assert len(asked) == 3
    assert asked <= members(version, ATTENTION, "RadixAttention")
    runner = set(re.findall(r"\b(?:model_)?runner\.(\w+)", text))
    assert len(runner) > 8
    assert runner <= members(version, RUNNER, "ModelRunner")
    modes = recorded(version)["modules"][BATCH]["classes"]["ForwardMode"]["truths"]
    asked = set(re.findall(r"mode\.(is_\w+)", text))
    assert len(asked) == 3 and asked <= set(modes)
    drafts = members(version, SPECULATION, "EagleVerifyInput")
    assert {"draft_token_num", "topk", "tree_topk"} <= drafts
    spec = recorded(version)["modules"]["sglang.srt.speculative.spec_info"]
    assert "ragged_verify_layout" in spec["classes"]["SpecInput"]["attributes"]
    config = members(version, CONFIG, "ModelConfig")
    assert {"head_dim", "context_len", "is_encoder_decoder"} <= config


@pytest.mark.parametrize("version", VERSIONS)
def test_every_setting_that_the_plugin_reads_is_read_by_sglang_too(
    version: str,
) -> None:
    settings = recorded(version)["settings"]
    assert {"attn_dp_size", "attn_cp_size", "attn_dcp_size"} <= {*settings["parallel"]}
    assert {"speculative_algorithm", "speculative_eagle_topk"} <= {*settings["spec"]}
    assert {
        "overlap.enable_two_batch_overlap",
        "deterministic.enable_deterministic_inference",
    } <= {*settings["exec"]}


@pytest.mark.parametrize("version", VERSIONS)
def test_registration_may_happen_in_every_process_and_twice(version: str) -> None:
    with fake_sglang(version):
        from pagetwin.integrations.sglang import plugin
        from sglang.srt.arg_groups import choices
        from sglang.srt.layers.attention import attention_registry

        plugin.register()
        plugin.register()
        for name in (
            "ATTENTION_BACKEND_CHOICES",
            "DETERMINISTIC_ATTENTION_BACKEND_CHOICES",
            "RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND",
        ):
            assert getattr(choices, name) == ["triton", "pagetwin"]
            assert name in recorded(version)["modules"][choices.__name__]["names"]
        assert list(attention_registry.ATTENTION_BACKENDS) == ["pagetwin"]
        make = attention_registry.ATTENTION_BACKENDS["pagetwin"]
        pool = Pool(1, 2, 32, 32, torch.float32, 64)
        backend = make(make_runner(pool, 16, device="cpu"))
        assert type(backend).__name__ == "PagetwinSglangBackend"


def test_importing_the_plugin_imports_neither_sglang_nor_triton() -> None:
    program = (
        "import sys, pagetwin.integrations.sglang\n"
        "print(sorted({'sglang', 'triton'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


REJECTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    r"latent attention \(MLA\)": ({"use_mla_backend": True}, {}),
    "a draft model: .* --speculative-draft-attention-backend": (
        {"is_draft_worker": True},
        {},
    ),
    "cross-attention": ({"is_encoder_decoder": True}, {}),
    "speculative_algorithm = NGRAM: expected one of EAGLE": (
        {},
        {"speculative_algorithm": "NGRAM"},
    ),
    "--speculative-eagle-topk 1": ({}, {"speculative_eagle_topk": 4}),
    "no --enable-dp-attention": ({}, {"attn_dp_size": 2}),
    "context parallelism": ({}, {"attn_dcp_size": 2}),
    "context parallelism: ": ({}, {"attn_cp_size": 2}),
    "no --enable-two-batch-overlap": ({}, {"enable_two_batch_overlap": True}),
    "kv_cache_dtype = torch.uint8": ({"kv_cache_dtype": torch.uint8}, {}),
    "head_size = 1280": ({"head_dim": 1280}, {}),
}


@pytest.mark.parametrize("reason", REJECTED)
def test_what_cannot_be_served_is_rejected_in_one_sentence(reason: str) -> None:
    given, settings = REJECTED[reason]
    with fake_sglang(VERSIONS[-1], **settings):
        from pagetwin.integrations.sglang import make_backend

        runner = make_runner(None, 16, device="cpu", **given)
        with pytest.raises(ValueError, match=reason) as raised:
            make_backend(runner)
        said = str(raised.value)
        assert said.startswith("--attention-backend pagetwin cannot serve this: ")
        assert ". " not in said and "\n" not in said


@pytest.mark.parametrize(
    ("reason", "given"),
    [
        ("logit_capping_method = log", {"logit_capping_method": "log"}),
        ("xai_temperature_len", {"xai_temperature_len": 1024}),
        ("both directions", {"attn_type": "decoder_bidirectional"}),
    ],
)
def test_layers_that_cannot_be_served_are_rejected_before_a_step(
    reason: str, given: dict[str, Any]
) -> None:
    layer = nn.Module()
    vars(layer).update(given)
    with fake_sglang(VERSIONS[-1]):
        from pagetwin.integrations.sglang import make_backend

        runner = make_runner(None, 16, device="cpu", model=nn.ModuleList([layer] * 2))
        with pytest.raises(ValueError, match=reason) as raised:
            make_backend(runner)
        assert str(raised.value).count(reason) == 1


def test_deterministic_inference_gives_batch_invariant_rows() -> None:
    with fake_sglang(VERSIONS[-1], enable_deterministic_inference=True):
        steps = EngineSteps()
        options = steps.backend._options_of(steps.layers[0], torch.float32, None)
        assert options.batch_invariant


def test_small_pages_are_served_with_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with fake_sglang(VERSIONS[-1]):
        from pagetwin.integrations.sglang import make_backend

        pool = Pool(1, 2, 32, 32, torch.float32, 64)
        with caplog.at_level(logging.WARNING):
            make_backend(make_runner(pool, 1, device="cpu"))
        (said,) = caplog.messages
        assert "--page-size 16" in said


def test_the_reference_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGETWIN_SGLANG_IMPLEMENTATION", "reference")
    with fake_sglang(VERSIONS[-1]):
        backend = EngineSteps().backend
        with pytest.raises(ValueError, match="or --disable-cuda-graph"):
            backend.init_cuda_graph_state(4, 4)


def test_an_unknown_implementation_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGETWIN_SGLANG_IMPLEMENTATION", "fast")
    with fake_sglang(VERSIONS[-1]), pytest.raises(ValueError, match="'fast' cannot be"):
        EngineSteps()


def test_an_older_release_is_rejected_and_a_newer_one_gets_one_warning(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(RuntimeError, match=r"pip install 'sglang>=0\.5\.20'"):
        check_version("0.5.19")
    with caplog.at_level(logging.WARNING):
        for version in VERSIONS:
            check_version(version)
        assert not caplog.messages
        check_version("0.6.0.dev3")
    (said,) = caplog.messages
    assert "SGLang 0.6.0.dev3 is not known" in said and "sglang==0.5.23" in said


def test_a_layer_of_the_steps_has_what_sglangs_layer_has() -> None:
    with fake_sglang(VERSIONS[-1]):
        (layer,) = EngineSteps().layers
        assert isinstance(layer, Layer)
        assert set(vars(layer)) <= members(VERSIONS[-1], ATTENTION, "RadixAttention")
        batch = vars(EngineSteps().batch("EXTEND", [1]))
        assert set(batch) <= members(VERSIONS[-1], BATCH, "ForwardBatch")


def test_the_page_has_every_release_and_the_environment_variable() -> None:
    page = (ROOT / "docs" / "integrations" / "sglang.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| 0.")]
    told = {
        version: row[1]
        for row in rows
        for version in row[0].removeprefix("| ").split(", ")
    }
    assert told == {version: recorded(version)["torch"] for version in VERSIONS}
    for name in re.findall(r'"(PAGETWIN_[A-Z_]+)"', "\n".join(SOURCES.values())):
        assert f"`{name}`" in page
