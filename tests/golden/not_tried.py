"""Recorded cases that are not tried: what they record does not exist here.

A condition reads a case's inputs. It says which class, mask, format or field is missing. A file has
no adapter if its function is missing. A case is tried as soon as its condition no longer holds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pagetwin.contract.cache_formats import FORMATS

from .adapters.specs import NO_EFFECT, spec_class
from .cases import ADAPTERS, Case
from .deviations import Condition

FILES = {
    "v033_kv_quant_mode": "names of cache formats",
    "v033_mamba_manager_functions": "recurrent state",
    "v033_mamba_manager_histories": "recurrent state",
    "v033_mamba_prefill_checkpoint": "recurrent state",
}
"""Files whose function does not exist here, and what it belongs to."""


@dataclass(frozen=True)
class Gap:
    """What some cases of a file need and what is missing.

    Args:
        name: name of its condition.
        file: case file.
        reason: what is missing.
        holds: the condition.
    """

    name: str
    file: str
    reason: str
    holds: Condition


GAPS: list[Gap] = []


def not_tried(*files: str) -> Callable[[Condition], Condition]:
    """Register a condition. Its docstring says what is missing."""

    def register(condition: Condition) -> Condition:
        reason = " ".join((condition.__doc__ or "").split())
        for file in files:
            name = getattr(condition, "__name__", "gap")
            GAPS.append(Gap(name, file, reason, condition))
        return condition

    return register


def why_not_tried(case: Case) -> str:
    """Return what is missing; empty if the case is tried."""
    if not any(file == case.file for file, _ in ADAPTERS):
        return FILES.get(case.file, "")
    gaps = [gap for gap in GAPS if gap.file == case.file]
    return next((gap.reason for gap in gaps if gap.holds(case.inputs)), "")


# ---- specs of caches

SPECS = (
    "v033_kv_cache_spec_sizes",
    "v033_kv_cache_spec_memory",
    "v033_kv_cache_spec_merge",
)


@not_tried(*SPECS)
def the_class_of_a_spec_is_missing(inputs: dict[str, Any]) -> bool:
    """The class of the spec does not exist here."""
    return spec_class(inputs["class"]) is None


@not_tried("v033_kv_cache_spec_sizes")
def the_format_of_a_backend_is_missing(inputs: dict[str, Any]) -> bool:
    """The backend changes the spec for a cache format that does not exist here."""
    mode = inputs.get("kv_quant_mode", "NONE").lower()
    is_known = mode in ("none", "fp8_per_tensor", *FORMATS)
    # a latent cache has formats of its own
    is_known &= inputs["class"] != "MLAAttentionSpec" or mode not in FORMATS
    return "backend" in inputs and not is_known


@not_tried("v033_kv_cache_spec_sizes")
def the_backend_is_sparse(inputs: dict[str, Any]) -> bool:
    """The backend changes the spec for sparse attention, which does not exist here."""
    return "SPARSE" in inputs.get("backend", "")


@not_tried("v033_kv_cache_spec_merge")
def specs_differ_in_a_missing_field(inputs: dict[str, Any]) -> bool:
    """The specs differ in a field that does not exist here."""
    specs = inputs.get("specs", [])
    return any(
        spec.get(name) != specs[0].get(name) for spec in specs for name in NO_EFFECT
    )


# ---- steps of a draft model


@not_tried("v033_draft_metadata")
def metadata_of_another_backend_are_updated(inputs: dict[str, Any]) -> bool:
    """The backend (Octave) or the loop of drafts does not exist here."""
    names = ("num_actual_tokens", "draft_tokens")
    return any(name in inputs for name in names)


# ---- sparse attention


@not_tried("v033_convert_req_index_to_global_index")
def a_block_is_longer_than_its_slots(inputs: dict[str, Any]) -> bool:
    """Blocks with a stride of their own in numbers of slots do not exist here."""
    return inputs["block_stride_rows"] is not None


@not_tried("v033_convert_req_index_to_global_index")
def keys_are_in_a_workspace(inputs: dict[str, Any]) -> bool:
    """A workspace with a copy of a prompt's keys does not exist here."""
    return inputs["prefill_workspace_request_ids"] is not None


@not_tried("v033_convert_req_index_to_global_index")
def the_row_of_a_request_is_negative(inputs: dict[str, Any]) -> bool:
    """A request without a row in the block table has no keys here."""
    rows = inputs["idx_mapping"]
    return rows is not None and min(rows) < 0


@not_tried("v033_sparse_index_helpers")
def other_helpers_are_called(inputs: dict[str, Any]) -> bool:
    """Rows without keys get none here, and bounds of requests follow from start locations."""
    return "physical_indices" in inputs or "req_idx" in inputs


# ---- score functions and masks


@not_tried(
    "v033_unified_attention_fp8_per_tensor",
    "v033_unified_attention_fp8_per_token_head",
    "v033_unified_attention_int4_per_token_head",
    "v033_unified_attention_int8_per_token_head",
)
def slopes_are_of_the_square_root(inputs: dict[str, Any]) -> bool:
    """A bias by the square root of the distance does not exist here."""
    return bool(inputs.get("alibi_sqrt"))


@not_tried("v033_mm_prefix_rswa_visible_keys")
def a_token_has_an_image_and_a_prompt(inputs: dict[str, Any]) -> bool:
    """Two ranges for one token, that of its image and its prompt (R-SWA), do not exist here."""
    both = ("mm_prefix_range", "rswa_window")
    return all(inputs.get(name) is not None for name in both)


@not_tried("v033_unified_attention_masks")
def chunks_see_the_chunks_before_them(inputs: dict[str, Any]) -> bool:
    """Chunks that attend to earlier chunks do not exist here."""
    is_chunked = inputs["sliding_window"] is not None
    return is_chunked and (inputs.get("chunk_lookback") or 0) > 0
