"""Specs of caches: pages that are too small, and what a copy or a merged spec loses."""

from fractions import Fraction
from typing import Any

from pagetwin.contract.cache_formats import FORMATS

from golden.adapters.specs import spec_of
from golden.deviations import deviation

SIZES, MEMORY = "v033_kv_cache_spec_sizes", "v033_kv_cache_spec_memory"
MERGE = "v033_kv_cache_spec_merge"


def recorded_specs(inputs: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the specs of a case, and that of a copy with another block size."""
    if "specs" in inputs:
        return [{"class": inputs["class"], **spec} for spec in inputs["specs"]]
    copies = [inputs["new_block_size"]] if "new_block_size" in inputs else []
    return [inputs, *({**inputs, "block_size": size} for size in copies)]


VISIBLE = ("sliding_window", "attention_chunk_size")


def are_merged(inputs: dict[str, Any]) -> bool:
    """Return whether the specs differ in nothing but in whether they have a window or chunks."""
    specs = inputs.get("specs")
    if specs is None:
        return True
    names = VISIBLE if inputs["class"] == "FullAttentionSpec" else ()
    given = [{spec.get(name) for spec in specs} - {None} for name in names]
    kept = [{k: v for k, v in spec.items() if k not in names} for spec in specs]
    is_one = all(len(sizes) <= 1 for sizes in given) and not (given and all(given))
    return is_one and all(rest == kept[0] for rest in kept)


def is_returned(inputs: dict[str, Any]) -> bool:
    """Return whether vLLM returns: it only rejects alignments below 1, and specs that differ."""
    wanted = inputs.get("block_stride_alignment")
    is_aligned = not isinstance(wanted, int) or wanted > 0
    return is_aligned and are_merged(inputs)


def is_too_small(recorded: dict[str, Any]) -> bool:
    """Return whether a padded page does not hold its content."""
    padded = recorded.get("page_size_padded")
    if padded is None:
        return False
    left_out = ("page_size_padded", "block_stride_alignment")
    kept = {name: value for name, value in recorded.items() if name not in left_out}
    return bool(padded < spec_of(recorded["class"], kept).real_page_size_bytes)


def has_cells(recorded: dict[str, Any]) -> bool:
    """Return whether a block has a cell."""
    per_state = Fraction(recorded.get("tokens_per_state", 1))
    return bool(recorded["block_size"] >= per_state)


@deviation(SIZES, MEMORY, MERGE, fields=["raises"], right="a ValueError for the spec")
def a_padded_page_is_smaller_than_its_content(inputs: dict[str, Any]) -> bool:
    """vLLM compares the sizes where the bytes of a page are read."""
    specs = recorded_specs(inputs)
    if not is_returned(inputs) or not all(map(has_cells, specs)):
        return False
    return any(map(is_too_small, specs))


@deviation(
    SIZES, MEMORY, MERGE, fields=["raises"], right="a ValueError: a block has cells"
)
def a_block_has_no_cell(inputs: dict[str, Any]) -> bool:
    """vLLM accepts a block of fewer tokens than one state, whose page has no bytes."""
    return is_returned(inputs) and not all(map(has_cells, recorded_specs(inputs)))


# ---- copies with another block size


def pages_of_a_copy(inputs: dict[str, Any]) -> tuple[int, int, int] | None:
    """Return the rounded page before, and the content and rounded page after a new block size.

    None if the page is not rounded up to an alignment.
    """
    if "new_block_size" not in inputs or not inputs.get("alignment"):
        return None
    if not all(map(has_cells, recorded_specs(inputs))):
        return None
    old, copy = (spec_of(inputs["class"], spec) for spec in recorded_specs(inputs))
    if old.page_size_bytes == old.real_page_size_bytes:
        return None
    return old.page_size_bytes, copy.real_page_size_bytes, copy.page_size_bytes


@deviation(MERGE, fields=["page_size_bytes"], right="the bytes of a new spec")
def a_copy_needs_no_padding(inputs: dict[str, Any]) -> bool:
    """vLLM keeps the padded size of the old page if the new one needs no padding, which is too
    small or too large for it."""
    pages = pages_of_a_copy(inputs)
    return pages is not None and pages[1] == pages[2] != pages[0]


# ---- groups


@deviation(MERGE, fields=["alignment"], right="as in the specs")
def the_pages_of_a_group_are_aligned(inputs: dict[str, Any]) -> bool:
    """vLLM's merged spec has the padded size of a page, and not its alignment."""
    specs = inputs.get("specs")
    if specs is None or not are_merged(inputs) or not all(map(has_cells, specs)):
        return False
    return bool(specs[0].get("alignment"))


# ---- formats of their own


@deviation(
    SIZES, "v033_nvfp4_kv_layout", fields=["raises"], right="a ValueError for the size"
)
def codes_do_not_fill_their_bytes_or_blocks(inputs: dict[str, Any]) -> bool:
    """vLLM rounds the bytes of the last code and of the last scale down."""
    form = FORMATS["nvfp4"]
    if "class" in inputs:
        mode = inputs.get("kv_quant_mode", "NONE").lower()
        if "backend" not in inputs or mode not in FORMATS:
            return False
        form = FORMATS[mode]
    return bool(inputs["head_size"] % form.head_size_step)
