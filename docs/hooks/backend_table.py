"""Tables of what the plugin and vLLM's own backends serve on compute capability 9.0.

vLLM's side comes from the newest record in `tests/support/vllm_interfaces/`, the plugin's from its
own source files, which are read and not imported: vLLM is not installed here.
"""

import ast
import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from pagetwin.contract.cache_formats import CACHE_DTYPE_NAMES, FORMATS
from pagetwin.contract.specs import KVCacheSpec
from pagetwin.validation.integrations import load_for

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "tests" / "support" / "vllm_interfaces"
PLUGIN = ROOT / "shared" / "integrations" / "vllm"
ROWS = {
    "plain": "causal attention, bfloat16",
    "float32": "float32",
    "head_size_80": "head size 80",
    "head_size_512": "head size 512",
    "fp8": "`--kv-cache-dtype fp8`",
    "fp8_e4m3": "`fp8_e4m3`",
    "fp8_e5m2": "`fp8_e5m2`",
    "fp8_per_token_head": "`fp8_per_token_head`",
    "int8_per_token_head": "`int8_per_token_head`",
    "int4_per_token_head": "`int4_per_token_head`",
    "int4_sinks": "`int4_per_token_head` with sinks",
    "nvfp4": "`nvfp4`",
    "turboquant": "`turboquant_4bit_nc`",
    "scales_per_head": "FP8 scales per head",
    "sliding_window": "sliding window",
    "sinks": "sinks",
    "alibi": "ALiBi",
    "images": "image spans (`mm_prefix`)",
    "images_fp8": "image spans with an FP8 cache",
    "rswa": "R-SWA",
    "non_causal": "not causal",
    "encoder_only": "encoder-only",
    "cross_attention": "cross-attention",
    "batch_invariant": "batch invariance",
    "trimmed_drafts": "drafts trimmed on the device",
    "dcp": "decode context parallelism",
    "pcp": "prefill context parallelism",
    "mla": "latent attention (MLA)",
    "sparse": "sparse attention",
}
"""The features of the record, and their names in the tables. `mla` is whether the name has MLA."""
LATENT_ROWS = (
    "plain", "fp8", "fp8_e4m3", "non_causal", "batch_invariant", "trimmed_drafts", "dcp", "pcp",
)  # fmt: skip
WORDS = {
    "get_flash_attn_version(...) == 3": "FlashAttention 3 runs",
    "get_flash_attn_version() in (3, 4)": "FlashAttention 3 or 4 runs",
    "get_flash_attn_version() is not None and get_flash_attn_version() >= 3": (
        "FlashAttention 3 or 4 runs"
    ),
    "has_flashinfer_sm90_nope_mla()": "FlashInfer is 0.6.18 or newer",
    "is_fa_version_supported(3)": "FlashAttention 3 is there",
    "is_fa_version_supported(4)": "FlashAttention 4 is there",
    "is_fa_version_supported(4) and get_flash_attn_version(...) == 4": "FlashAttention 4 runs",
    "is_flashmla_dense_supported()[1] is None": "FlashMLA is there",
    "vllm_config.attention_config.use_trtllm_attention is not False and"
    " has_nvidia_artifactory()": "TRTLLM kernels can be downloaded",
    "check_shared_layer(...)": "the layer has no window, images, R-SWA, ALiBi or cross-attention",
}
"""Conditions in plain words."""
METHODS = {
    "scales_per_head": "supports_per_head_quant_scales",
    "sliding_window": "supports_sliding_window",
    "sinks": "supports_sink",
    "images": "supports_mm_prefix",
    "rswa": "supports_rswa",
    "non_causal": "supports_non_causal",
    "batch_invariant": "supports_batch_invariance",
    "trimmed_drafts": "supports_device_cpu_query_lens_mismatch",
    "sparse": "is_sparse",
}
"""The method of a backend that answers for a feature."""
CACHES = (
    "fp8", "fp8_e4m3", "fp8_e5m2", "fp8_per_token_head", "int8_per_token_head",
    "int4_per_token_head", "nvfp4",
)  # fmt: skip
Answers = dict[str, bool | str]


def backend_table() -> str:
    """Return one row per feature, and one column per backend that is not for latent attention."""
    answers = {
        name: serves for name, serves in all_answers().items() if "MLA" not in name
    }
    return _table(list(ROWS), answers)


def latent_backend_table() -> str:
    """Return the same of latent attention, with backends for sparse attention."""
    answers = {name: serves for name, serves in all_answers().items() if "MLA" in name}
    return _table([*LATENT_ROWS, "sparse"], answers)


def backend_differences() -> str:
    """Return one row per backend of vLLM: what it alone serves, and what the plugin alone does."""
    answers = all_answers()
    lines = [
        "| backend | it rejects, pagetwin serves | it serves, pagetwin rejects |",
        "|---|---|---|",
    ]
    for name, theirs in answers.items():
        if name.startswith("pagetwin"):
            continue
        is_latent = "MLA" in name
        sparse = "pagetwin, sparse MLA" if theirs["sparse"] else "pagetwin, MLA"
        ours = answers[sparse if is_latent else "pagetwin"]
        rows = (*LATENT_ROWS, "sparse") if is_latent else ROWS
        # latent attention has other backends, and an option that is not read is not served
        pairs = {
            ROWS[row]: (theirs[row] not in (False, "not read"), bool(ours[row]))
            for row in rows
            if row != "mla"
        }
        cells = [
            ", ".join(words for words, pair in pairs.items() if pair == wanted) or "-"
            for wanted in ((False, True), (True, False))
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(answer: bool | str, plain: bool | str = True) -> str:
    """Return an answer in words. What holds as for a plain layer is "yes".

    Raises:
        KeyError: `WORDS` does not have the condition.
    """
    if answer is True or answer == plain:
        return "yes"
    if answer is False:
        return "no"
    if answer == "not read":
        return "no, and no error"
    return f"if {WORDS[str(answer)]}"


def _table(rows: list[str], answers: dict[str, Answers]) -> str:
    # the plugin comes first: a wide table scrolls
    first = sorted(answers, key=lambda name: not name.startswith("pagetwin"))
    answers = {name: answers[name] for name in first}
    lines = [
        f"| | {' | '.join(answers)} |",
        f"|---|{'---|' * len(answers)}",
    ]
    for row in rows:
        cells = [
            cell(serves[row], serves["plain"] if row != "plain" else True)
            for serves in answers.values()
        ]
        lines.append(f"| {ROWS[row]} | {' | '.join(cells)} |")
    return "\n".join(lines)


@cache
def newest_record() -> dict[str, Any]:
    """Return the newest recorded interface of vLLM."""
    paths = RECORDS.glob("*.json")
    newest = max(paths, key=lambda path: tuple(map(int, path.stem.split("."))))
    facts: dict[str, Any] = json.loads(newest.read_text(encoding="utf-8"))
    return facts


def all_answers() -> dict[str, Answers]:
    """Return what each backend serves: vLLM's own, and the three of the plugin."""
    found: dict[str, Answers] = {}
    for name, recorded in newest_record()["backends"].items():
        is_latent = "MLA" in name
        found[name] = {**recorded["serves"], "mla": is_latent}
    found["pagetwin"] = plugin_answers() | {"mla": plugin_answers("latent")["plain"]}
    found["pagetwin, MLA"] = plugin_answers("latent")
    found["pagetwin, sparse MLA"] = plugin_answers("sparse")
    return found


# --- the plugin's own declarations


CLASSES = {
    "paged": ("backend", "PagetwinBackend", "impl", "PagetwinImpl"),
    "latent": ("latent", "PagetwinLatentBackend", "latent", "PagetwinLatentImpl"),
    "sparse": ("sparse", "PagetwinSparseBackend", "sparse", "PagetwinSparseImpl"),
}
"""The plugin's backend and implementation of each kind of attention, with their files."""
BASES = {
    "Reasons": ("backend", "Reasons"),
    "PagetwinLatentBackend": ("latent", "PagetwinLatentBackend"),
}
"""Base classes of the plugin's own."""


def plugin_answers(kind: str = "paged") -> Answers:
    """Return what the plugin's backend of a kind of attention declares."""
    name, backend, module, impl = CLASSES[kind]
    latent = kind != "paged"
    caches = _names(name, backend, "supported_kv_cache_dtypes")
    serves: Answers = {
        "plain": True,
        "float32": "float32" in _names(name, backend, "supported_dtypes"),
    }
    for size in () if latent else (80, 512):
        serves[f"head_size_{size}"] = _takes_head_size(size)
    serves |= {cache: cache in caches for cache in CACHES}
    serves["turboquant"] = any(cache.startswith("turboquant") for cache in caches)
    serves |= {row: _answer(name, backend, method) for row, method in METHODS.items()}
    serves["images_fp8"] = bool(serves["images"] and serves["fp8"])
    serves["int4_sinks"] = bool(serves["sinks"] and serves["int4_per_token_head"])
    kinds = _member(name, backend, "supports_attn_type")
    serves["encoder_only"] = serves["cross_attention"] = kinds is not None
    serves["pcp"] = _answer(module, impl, "supports_pcp")
    shares = _answer(module, impl, "supports_dcp")
    serves["dcp"] = "check_shared_layer(...)" if shares and not latent else shares
    if not latent:
        serves["alibi"] = "alibi_slopes" in ast.unparse(_class("impl", impl))
    return serves


@cache
def _class(module: str, name: str) -> ast.ClassDef:
    """Return a class of the plugin."""
    tree = ast.parse((PLUGIN / f"{module}.py").read_text(encoding="utf-8"))
    return next(x for x in tree.body if isinstance(x, ast.ClassDef) and x.name == name)


def _member(module: str, name: str, member: str) -> ast.expr | None:
    """Return what a method of a class, or of its bases, returns, or the value of an attribute.

    If none has it, None.
    """
    classes = [_class(module, name)]
    for node in classes:
        classes += [
            _class(*BASES[base])
            for base in map(ast.unparse, node.bases)
            if base in BASES
        ]
    for statement in (x for node in classes for x in node.body):
        if isinstance(statement, ast.FunctionDef) and statement.name == member:
            last = statement.body[-1]
            return last.value if isinstance(last, ast.Return) else None
        if (
            isinstance(statement, ast.AnnAssign)
            and ast.unparse(statement.target) == member
        ):
            return statement.value
    return None


def _answer(module: str, name: str, member: str) -> bool:
    """Return an answer that is written as True or False, or that of vLLM's base class."""
    value = _member(module, name, member)
    if value is None:
        return bool(newest_record()["defaults"][member])
    return bool(ast.literal_eval(value))


def _names(module: str, name: str, attribute: str) -> set[str]:
    """Return the dtypes of a list."""
    value = _member(module, name, attribute)
    assert isinstance(value, ast.List)
    found: set[str] = set()
    for element in value.elts:
        if isinstance(element, ast.Constant):
            found.add(str(element.value))
        elif isinstance(element, ast.Attribute):
            found.add(element.attr)
        elif ast.unparse(element) == "*FP8_NAMES":
            found |= set(CACHE_DTYPE_NAMES)
        elif ast.unparse(element) == "*SCALED_NAMES":
            found |= {name for name, form in FORMATS.items() if form.is_measured}
    return found


def _takes_head_size(size: int) -> bool:
    """Return whether the optimized twin takes heads of a size."""
    backend = load_for("the table of backends", "optimized").backends[0]
    return not backend.why_not(KVCacheSpec(16, 1, size, torch.bfloat16))
