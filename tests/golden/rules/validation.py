"""Numbers out of range and tensors of other types, which vLLM does not validate."""

from itertools import pairwise
from typing import Any

import torch

from golden.adapters.layer import VLLM_BACKENDS
from golden.deviations import deviation

A_VALUE_ERROR = "a ValueError that names the number"

# ---- builders


@deviation("attention_metadata_builder_defaults", fields=["raises"], right="at least 0")
def a_draft_index_is_negative(inputs: dict[str, Any]) -> bool:
    """vLLM does not read the index of a draft."""
    given = inputs["kwargs"]
    if inputs["method"] != "build_for_drafting" or set(given) != {"draft_index"}:
        return False
    return given["draft_index"] is None or given["draft_index"] < 0


@deviation(
    "attention_metadata_builder_defaults",
    fields=["abstract_methods"],
    right="a constructor of its own",
    value=lambda _: ["build"],
)
def the_abstract_methods_of_a_builder_are_asked(inputs: dict[str, Any]) -> bool:
    """vLLM's builder leaves its constructor abstract."""
    return inputs["method"] == "abstract"


CASCADE = {
    "common_prefix_len",
    "query_lens",
    "num_query_heads",
    "num_kv_heads",
    "use_alibi",
    "use_sliding_window",
    "use_local_attention",
    "num_sms",
}
"""Arguments of vLLM 0.11.0; 0.11.1 needs `dcp_world_size` as well."""


@deviation("attention_metadata_builder_defaults", fields=["raises"], right="one rank")
def the_number_of_ranks_is_left_out(inputs: dict[str, Any]) -> bool:
    """vLLM 0.11.1 has no default for an argument that 0.11.0 does not have."""
    is_asked = inputs["method"] == "use_cascade_attention"
    return is_asked and set(inputs["kwargs"]) == CASCADE


@deviation(
    "attention_metadata_builder_init_reorder_batch_threshold",
    fields=["raises"],
    right=A_VALUE_ERROR,
    versions=("", "0.11.0"),
)
def a_threshold_or_a_count_is_out_of_range(inputs: dict[str, Any]) -> bool:
    """vLLM accepts thresholds and ranks below 1, and negative numbers of drafts."""
    threshold = inputs["reorder_batch_threshold"]
    drafts = (inputs["speculative_config"] or {}).get("num_speculative_tokens")
    is_low = threshold is not None and threshold < 1
    is_low |= inputs["decode_context_parallel_size"] < 1
    return is_low or (drafts is not None and drafts < 0)


# ---- steps


@deviation("compute_causal_conv1d_metadata", fields=["raises"], right="raises")
def starts_are_not_int32_starts(inputs: dict[str, Any]) -> bool:
    """vLLM takes starts of any integer type, that begin anywhere, and that decrease by less than
    a block."""
    starts = inputs["query_start_loc_p"]
    numbers = starts.tolist()
    lens = [end - begin for begin, end in pairwise(numbers)]
    if any(length <= -8 for length in lens):
        return False  # both raise
    is_other = starts.dtype != torch.int32 or numbers[:1] != [0]
    return is_other or any(length < 0 for length in lens)


CHUNKS = "make_local_attention_virtual_batches"


@deviation(CHUNKS, fields=["raises"], right="no virtual requests")
def a_chunked_step_has_no_requests(inputs: dict[str, Any]) -> bool:
    """vLLM takes the maximum of no lengths."""
    chunk, block = inputs["attn_chunk_size"], inputs.get("block_size", 0)
    is_run = block > 0 and chunk > 0 and chunk % block == 0
    return is_run and not len(inputs["common_attn_metadata"]["seq_lens_cpu"])


@deviation(CHUNKS, fields=["raises"], right="a TypeError: int32")
def a_chunked_step_has_64_bits(inputs: dict[str, Any]) -> bool:
    """vLLM takes lengths of any integer type."""
    lens = inputs["common_attn_metadata"]["seq_lens_cpu"]
    return len(lens) > 0 and lens.dtype != torch.int32


FILL = "v033_fill_mm_prefix_query_ranges"


@deviation(FILL, fields=["raises"], right="raises")
def ranges_are_not_of_the_step(inputs: dict[str, Any]) -> bool:
    """vLLM takes starts of any integer type and more new tokens than tokens, and ignores ranges
    of requests that a step without tokens does not have."""
    ranges, starts = inputs["mm_prefix_range"], inputs["query_start_loc_cpu"]
    if ranges is None:
        return False
    tokens, reqs = int(starts[-1]), len(starts) - 1
    is_known = all(int(req) < reqs for req in ranges)
    if tokens > inputs["out_rows"] or (tokens > 0 and not is_known):
        return False  # both raise
    new = starts.diff()
    is_short = bool((new > inputs["seq_lens_cpu"]).any())
    return starts.dtype != torch.int32 or is_short or not is_known


@deviation("v033_split_prefill_chunks", fields=["raises"], right=A_VALUE_ERROR)
def a_workspace_or_a_length_is_out_of_range(inputs: dict[str, Any]) -> bool:
    """vLLM accepts negative lengths, and a workspace without room if every sequence is empty."""
    lens, room = inputs["seq_lens_cpu"].tolist(), inputs["workspace_size"]
    if any(length > room for length in lens):
        return False  # both raise
    return room < 1 or any(length < 0 for length in lens)


@deviation(
    "v033_common_attention_metadata_methods", fields=["raises"], right="an IndexError"
)
def more_is_kept_than_there_is(inputs: dict[str, Any]) -> bool:
    """vLLM slices requests and tokens without an error."""
    common = inputs["common_attn_metadata"]
    reqs, tokens = inputs["num_actual_reqs"], inputs["num_actual_tokens"]
    is_known = 0 <= reqs <= common["num_reqs"]
    return not (is_known and 0 <= tokens <= len(common["slot_mapping"]))


@deviation(
    "v033_compute_mm_prefix_ranges",
    fields=["ranges", "tensor"],
    right="no range: the leading padding is longer than the feature",
)
def a_feature_is_shorter_than_its_padding(inputs: dict[str, Any]) -> bool:
    """vLLM returns a range that ends before it begins."""
    pad = inputs["span_pad"]
    features = [feature for row in inputs["mm_features_per_req"] for feature in row]
    features = [
        feature for feature in features if feature["modality"] in ("image", "video")
    ]
    if not pad:  # a feature without tokens
        return any(not e["length"] and e["is_embed"] is None for e in features)
    return any(
        feature["offset"] // pad * pad + pad > feature["offset"] + feature["length"]
        for feature in features
    )


# ---- slots and caches


@deviation("compute_slot_mapping_start_idx", fields=["raises"], right=A_VALUE_ERROR)
def a_window_is_negative(inputs: dict[str, Any]) -> bool:
    """vLLM subtracts a negative window."""
    window = inputs["sliding_window"]
    return bool(inputs["is_prompt"]) and window is not None and window < 0


@deviation(
    "_compute_slot_mapping_python",
    "_compute_slot_mapping_numpy",
    fields=["raises"],
    right=A_VALUE_ERROR,
)
def a_range_begins_before_the_row(inputs: dict[str, Any]) -> bool:
    """vLLM counts negative positions from the end of the row."""
    begin, end = inputs["range_start"], inputs["range_end"]
    size, row = inputs["block_size"], len(inputs["block_table"])
    is_read = begin // size >= -row and end <= row * size
    return begin < 0 and begin <= end and (is_read or begin == end)


PACKED = "paged_attention_kv_cache_layout"


def packed_elements(inputs: dict[str, Any]) -> int:
    """Return the elements of 16 bytes."""
    return 16 // int(getattr(torch, inputs["dtype"]).itemsize)


def are_views_in_vllm(inputs: dict[str, Any]) -> bool:
    """Return whether vLLM divides the packed cache into views, whose sizes follow from others."""
    x, sizes = (
        packed_elements(inputs),
        [inputs[name] for name in ("block_size", "num_kv_heads", "head_size")],
    )
    elements = inputs["num_blocks"] * sizes[0] * sizes[1] * sizes[2]
    per_group = inputs["num_blocks"] * sizes[1] * (sizes[2] // x) * x
    return bool(per_group and elements % per_group == 0)


@deviation(PACKED, fields=["raises"], right="no blocks are views too")
def a_packed_cache_is_empty(inputs: dict[str, Any]) -> bool:
    """vLLM cannot infer the last axis of a cache without blocks."""
    is_sized = inputs["block_size"] > 0
    is_whole = inputs["head_size"] % packed_elements(inputs) == 0
    return is_sized and is_whole and not inputs["num_blocks"]


@deviation(PACKED, fields=["raises"], right=A_VALUE_ERROR)
def a_packed_cache_has_sizes_that_do_not_fit(inputs: dict[str, Any]) -> bool:
    """vLLM infers a wrong block size where the head is not a multiple of 16 bytes, and accepts
    blocks without slots."""
    is_sized = inputs["block_size"] > 0
    is_whole = inputs["head_size"] % packed_elements(inputs) == 0
    return are_views_in_vllm(inputs) and not (is_sized and is_whole)


# ---- layers


@deviation("get_mla_dims", fields=["raises"], right=A_VALUE_ERROR)
def a_latent_size_is_not_a_size(inputs: dict[str, Any]) -> bool:
    """vLLM takes any value as a size."""
    config = inputs["model_config"]["hf_text_config"]
    needed = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    if not all(name in config for name in needed):
        return False  # both raise
    sizes = [config[name] for name in needed]
    if config.get("q_lora_rank") is not None:
        sizes.append(config["q_lora_rank"])
    return any(not isinstance(size, int | float) or size < 1 for size in sizes)


@deviation("xformers_backend_static", fields=["raises"], right=A_VALUE_ERROR)
def a_cache_has_negative_sizes_or_no_heads(inputs: dict[str, Any]) -> bool:
    """vLLM does not compare the sizes with 0."""
    if inputs["method"] != "get_kv_cache_shape" or len(inputs["args"]) != 4:
        return False
    blocks, block_size, heads, head_size = inputs["args"]
    is_low = blocks < 0 or heads < 1 or head_size < 1
    return is_low and block_size > 0 and block_size % 16 == 0


LAYER = "attention_layer_init"


def is_layer_of_vllm(inputs: dict[str, Any]) -> bool:
    """Return whether vLLM makes the layer."""
    heads = inputs["num_heads"]
    kv_heads = inputs.get("num_kv_heads")
    kv_heads = heads if kv_heads is None else kv_heads
    target = inputs.get("kv_sharing_target_layer_name")
    is_shared = target is None or target in inputs["existing_prefixes"]
    is_new = inputs["prefix"] not in inputs["existing_prefixes"]
    return bool(kv_heads and heads % kv_heads == 0 and is_new and is_shared)


@deviation(LAYER, fields=["raises"], right=A_VALUE_ERROR)
def a_number_of_a_layer_is_not_a_number(inputs: dict[str, Any]) -> bool:
    """vLLM makes layers without heads or elements, and without a scale."""
    sizes = [inputs["num_heads"], inputs["head_size"], inputs.get("num_kv_heads")]
    is_low = any(size is not None and size < 1 for size in sizes)
    return is_layer_of_vllm(inputs) and (is_low or inputs["scale"] is None)


@deviation(
    LAYER,
    fields=["backend"],
    right="the name of the backend that runs the layer",
    value=lambda inputs: inputs["backend_name"],
)
def a_backends_name_is_not_vllms(inputs: dict[str, Any]) -> bool:
    """vLLM's layer has a member of its enumeration of backends, or None."""
    name = inputs.get("backend_name", VLLM_BACKENDS[0])
    return is_layer_of_vllm(inputs) and name not in VLLM_BACKENDS


@deviation(LAYER, fields=["extra_repr"], right="a float")
def a_scale_is_an_integer(inputs: dict[str, Any]) -> bool:
    """vLLM prints the scale as it was given."""
    return is_layer_of_vllm(inputs) and isinstance(inputs["scale"], int)


@deviation("attention_layer_forward", fields=["raises"], right="no scales are measured")
def scales_are_asked_without_metadata(inputs: dict[str, Any]) -> bool:
    """vLLM asks metadata that is None, or a mapping of layers, whether to measure."""
    config = inputs.get("cache_config") or {}
    metadata = inputs["attn_metadata"]
    is_object = metadata is not None and not isinstance(metadata, dict | str)
    return bool(config.get("calculate_kv_scales")) and not is_object
