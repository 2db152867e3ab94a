"""Verdicts on the kernels of other projects: tables made from docs/data/verdicts.jsonl.

It has the newest verdict on each adapter, and the laws that it breaks.
`docs/adapters/explanations.json` says of each failure whose fault it is, and why.
"""

import json
from pathlib import Path
from typing import Any

from page_data import DATA, read_rows
from page_rows import FAILED, size_of_case

EXPLANATIONS = Path(__file__).parents[1] / "adapters" / "explanations.json"
FAULTS = {
    "kernel": "the kernel",
    "convention": "none, the kernel has another convention",
    "adapter": "the adapter",
    "budget": "the error budget",
    "law": "the law",
}
"""Whose fault a failure may be."""
TITLES = {
    "cudnn_paged": "cuDNN, paged",
    "flash_attention_3_latent": "FlashAttention-3, latent decodes",
    "flash_attention_3_paged": "FlashAttention-3, paged",
    "flash_attention_3_sparse": "FlashAttention-3, selected keys",
    "flash_attention_paged": "FlashAttention-2, paged",
    "flash_attn_names": "pagetwin by the names of flash-attn",
    "flashinfer_decode": "FlashInfer, decodes",
    "flashinfer_latent": "FlashInfer fa2, latent",
    "flashinfer_latent_fa3": "FlashInfer fa3, latent",
    "flashinfer_output": "FlashInfer fa2, output alone",
    "flashinfer_paged": "FlashInfer fa2",
    "flashinfer_paged_fa3": "FlashInfer fa3",
    "flashinfer_xqa": "XQA, decodes",
    "flashmla_fp8": "FlashMLA, records of FP8",
    "flashmla_latent": "FlashMLA, latent decodes",
    "flashmla_sparse": "FlashMLA, selected latents",
    "flex_compiled": "FlexAttention, compiled",
    "flex_paged": "FlexAttention, not compiled",
    "optimized": "pagetwin.optimized",
    "reference": "pagetwin.reference",
    "torch_sdpa": "torch SDPA, decodes",
    "torch_varlen": "torch varlen_attn, ragged",
    "vllm_cache": "vLLM's cache write and merge",
    "vllm_formats": "vLLM's caches with a scale per token and head",
    "vllm_spans": "vLLM's images and prefixes over such caches",
    "vllm_unified": "vLLM's unified_attention",
    "xformers_split_k": "xFormers split-K, decodes",
}
Verdict = dict[str, Any]


def newest_verdicts(folder: Path = DATA) -> dict[str, Verdict]:
    """Return the newest verdict on each adapter, with the laws that it breaks.

    An adapter whose library was never installed has a verdict without counts.
    """
    found: dict[str, Verdict] = {}
    for row in read_rows("verdicts", folder):
        if "law" in row:
            found[row["adapter"]]["laws"].append(row)
        else:
            found[row["adapter"]] = row | {"laws": []}
    order = [*TITLES]
    return dict(sorted(found.items(), key=lambda entry: order.index(entry[0])))


def explanations() -> list[dict[str, Any]]:
    """Return what is known about the failures.

    Each has the adapter, the laws that fail (or the first words of `what` they all found wrong), a
    title, whose fault it is, why, and where it is known upstream.
    """
    found: list[dict[str, Any]] = json.loads(EXPLANATIONS.read_text(encoding="utf-8"))
    return found


def explains(explanation: dict[str, Any], adapter: str, law: dict[str, Any]) -> bool:
    """Return whether an explanation is about the failure of a law."""
    if explanation["adapter"] != adapter or law["status"] not in FAILED:
        return False
    if law["law"] in explanation.get("laws", ()):
        return True
    what: str = law.get("what") or ""
    return "what" in explanation and what.startswith(explanation["what"])


def verdict_table() -> str:
    """Return one row per kernel: its library, the laws by outcome, the cases, and the run."""
    lines = [
        "| kernel | library | held | broken | not finished | undeclared | cases | device, date,"
        " commit |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for name, verdict in newest_verdicts().items():
        counts = verdict["counts"]
        if not counts:
            why = f"no law ended: {verdict.get('why') or verdict['ended']}"
            lines.append(f"| {TITLES[name]} | {verdict['library']} | | | | | | {why} |")
            continue
        failed = sum(counts.get(kind, 0) for kind in FAILED)
        where = f"{verdict['device']}, {verdict['date'][:10]}, {verdict['commit'][:7]}"
        cells = [
            f"[{TITLES[name]}](#{name})",
            verdict["library"],
            str(counts.get("held", 0)),
            str(failed),
            str(counts.get("not finished", 0)),
            str(counts.get("undeclared", 0)),
            f"{verdict['cases']:,}",
            where,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def verdict_details() -> str:
    """Return a section per kernel: each failure with its explanation and its smallest input."""
    parts = []
    for name, verdict in newest_verdicts().items():
        if not verdict["counts"]:
            continue
        parts.append(f"### {TITLES[name]} {{: #{name} }}")
        parts.append(_summary_of(verdict))
        known = [
            explanation
            for explanation in explanations()
            if explanation["adapter"] == name
        ]
        for explanation in known:
            laws = [law for law in verdict["laws"] if explains(explanation, name, law)]
            if laws:
                parts.append(_failure(explanation, laws))
        parts += [
            f"Not explained: *{law['law']}*."
            for law in verdict["laws"]
            if not any(explains(explanation, name, law) for explanation in known)
        ]
    return "\n\n".join(parts)


def _summary_of(verdict: Verdict) -> str:
    """Return what was judged, and what was not."""
    counts = verdict["counts"]
    versions = ", ".join(
        f"{package} {version}" for package, version in verdict["versions"].items()
    )
    words = [f"Laws that hold: {counts.get('held', 0)}, on {verdict['cases']:,} cases"]
    words.append(f" ({verdict['library']}; {versions}; {verdict['ended']}).")
    if verdict["undeclared"]:
        first = "; ".join(verdict["undeclared"])
        words.append(f" Undeclared, among others: {first}.")
    return "".join(words)


def _failure(explanation: dict[str, Any], laws: list[dict[str, Any]]) -> str:
    """Return a failure: whose fault it is and why, the smallest input, and the laws."""
    first = min(laws, key=size_of_case)
    parts = [f"**{explanation['title']}** Fault: {FAULTS[explanation['fault']]}."]
    parts[0] += f" {explanation['why']}"
    if "upstream" in explanation:
        parts[0] += f" {explanation['upstream']}"
    if case := first.get("case"):
        parts.append(f"Smallest input of *{first['law']}*:\n\n```python\n{case}\n```")
    if first.get("message"):
        parts.append(f"The error: `{first['message']}`")
    elif first.get("what"):
        parts.append(
            f"{first['what'].capitalize()}, {first['where']}: found {first['found']},"
            f" right is {first['right']}."
        )
    if len(laws) > 1:
        others = ", ".join(f"*{law['law']}*" for law in laws if law is not first)
        parts.append(f"Laws that fail alike: {others}.")
    return "\n\n".join(parts)
