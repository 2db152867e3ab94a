"""Sparse attention: slots of selected positions."""

from typing import Any

import torch
from torch import Tensor

from golden.adapters.attention import starts_of
from golden.cases import SKIP, adapter


def int32(numbers: Any) -> Tensor:
    """Return numbers as vLLM passes them."""
    return torch.as_tensor(numbers, dtype=torch.int32)


def convert(twin: Any, inputs: dict[str, Any], req_id: Any, **options: Any) -> Any:
    """Return the slots of selected positions, and their counts."""
    table, positions = int32(inputs["block_table"]), inputs["token_indices"]
    names = ("dcp_world_size", "dcp_rank", "dcp_kv_cache_interleave_size")
    recorded = ("dcp_size", "dcp_rank", "interleave")
    ranks = {
        name: inputs[key]
        for name, key in zip(names, recorded, strict=True)
        if key in inputs
    }
    return twin.convert_req_index_to_global_index(
        int32(req_id), table, positions, inputs["block_size"], **ranks, **options
    )


@adapter("v033_convert_req_index_to_global_index")
def convert_indices(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Compact the rows if counts are returned, as vLLM does."""
    is_compact = inputs["return_valid_counts"]
    req_id = int32(inputs["req_id"])
    if inputs["idx_mapping"] is not None:
        req_id = int32(inputs["idx_mapping"])[req_id.long()]
    slots, count = convert(twin, inputs, req_id, compact_valid_to_front=is_compact)
    return {"out": slots, "valid_counts": count.tolist()}


@adapter("v033_sparse_index_helpers")
def index_helpers(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Convert with ranks of context parallelism."""
    is_compact = inputs["compact_valid_to_front"]
    slots, count = convert(
        twin, inputs, inputs["req_id"], compact_valid_to_front=is_compact
    )
    return {"out": slots, "valid_counts": count.tolist()}


@adapter("v033_compute_global_topk_indices_and_lens")
def global_topk(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Convert in place; tokens that are not valid are padding."""
    valid = zip(inputs["token_to_req"], inputs["is_valid_token"], strict=True)
    given = inputs | {"token_indices": inputs["topk_indices"]}
    slots, count = convert(
        twin, given, [req if is_valid else -1 for req, is_valid in valid]
    )
    return {"global_indices": slots, "lens": count.tolist()}


@adapter("v033_compressed_slot_mapping")
def compressed_slots(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Look up the slots of states; the tokens' own slots tell the rank."""
    slots = twin.get_compressed_slot_mapping(
        torch.tensor(inputs["slot_mapping"]), int32(inputs["query_start_loc"]),
        int32(inputs["seq_lens"]), int32(inputs["block_table"]),
        inputs["states_per_block"], inputs["compress_ratio"], inputs["dcp_world_size"],
        inputs["cp_interleave"],
    )  # fmt: skip
    return {"slot_mapping": slots.tolist()}


@adapter("v033_sparse_swa_indices")
def window_indices(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Find the image of each token, then the slots of its keys."""
    new, lens = inputs["query_lens"], int32(inputs["seq_lens"])
    starts, valid = starts_of(new), torch.ones(sum(new), dtype=torch.bool)
    valid[inputs["invalid_tokens"]] = False
    is_causal, options = "image_spans" in inputs, {}
    if is_causal:
        options["replay_start"] = int32(inputs["replay_start"])
    if inputs.get("image_spans"):
        ranges = torch.full((sum(new), 2), -1, dtype=torch.int32)
        spans = {
            req: [tuple(span) for span in own]
            for req, own in enumerate(inputs["image_spans"])
        }
        twin.fill_mm_prefix_query_ranges(ranges, spans, starts, lens)
        most = inputs["max_image_tokens"]
        options |= {"query_ranges": ranges, "max_image_tokens": most}
    slots, count = twin.compute_swa_indices_and_lens(
        starts, lens, valid, int32(inputs["block_table"]), inputs["block_size"],
        inputs["window"], inputs["index_width"], is_causal, **options,
    )  # fmt: skip
    # ranges of tokens are positions here, not distances
    return {
        "slots": slots,
        "lens": count.tolist(),
        "left_visible": SKIP,
        "right_visible": SKIP,
    }


@adapter("v033_indexer_metadata")
def indexer_metadata(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Call the function that a case is of, which its inputs tell."""
    if "ring_block" in inputs:
        return ring_slots(twin, inputs)
    if "max_decode_len" in inputs:
        lens, table, new = twin.prepare_uniform_decode(
            int32(inputs["seq_lens"]),
            int32(inputs["block_table"]),
            inputs["max_decode_len"],
        )
        names = ("decode_seq_lens", "expanded_block_table", "decode_lens")
        return dict(zip(names, (lens, table, new), strict=True))
    if "tp_size" in inputs:
        names = ("compress_ratio", "tp_size", "min_rows")
        rows = twin.balanced_prefill_row_shard(
            int32(inputs["seq_lens"]),
            int32(inputs["query_lens"]),
            *(inputs[name] for name in names),
        )
        return {"rows": rows}
    rows = inputs["query_slice"]
    chunk = twin.build_prefill_chunk_metadata(
        inputs["start_idx"], inputs["end_idx"], starts_of(inputs["query_lens"]),
        int32(inputs["seq_lens"]), inputs["compress_ratio"], rows and slice(*rows),
        inputs["dcp_world_size"], inputs["dcp_rank"], inputs["interleave"],
    )  # fmt: skip
    return {"result": None} if chunk is None else vars(chunk)


def ring_slots(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Find the slots of rings; the position of a request's last token is its length."""
    starts = starts_of(inputs["query_lens"])
    lens = [inputs["positions"][end - 1] + 1 for end in starts[1:].tolist()]
    slots = twin.compute_kpool_tail_slot_mapping(
        starts, int32(lens), int32(inputs["ring_block"])[:, None], inputs["capacity"],
        len(inputs["slot_mapping"]),
    )  # fmt: skip
    return {"slot_mapping": slots.tolist()}


@adapter("v033_indexer_k_quant_and_cache", on_device=True)
def indexer_write(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Write keys; the layout of a block says what vLLM's writer for AMD GPUs does."""
    k, size, blocks = inputs["k"], inputs["block_size"], inputs["num_blocks"]
    dim = k.shape[1]
    cache = torch.full(
        (blocks, size, dim + 4), inputs["fill_byte"], dtype=torch.uint8, device=k.device
    )
    slots = torch.tensor(inputs["slot_mapping"], device=k.device)
    twin.indexer_k_quant_and_cache(k, cache, slots, inputs["scale_fmt"])
    pages = cache.view(blocks, -1)
    if size > 1:
        pages[:, : size * dim] = in_tiles(pages[:, : size * dim], size, dim)
    return {"cache": pages, "layout": SKIP}


def in_tiles(codes: Tensor, size: int, dim: int) -> Tensor:
    """Return rows of codes as vLLM's writer for AMD GPUs stores them: tiles of 16 by 16."""
    tiles = codes.reshape(-1, size // 16, 16, dim // 16, 16)
    return tiles.transpose(2, 3).flatten(1).clone()


@adapter("v033_indexer_logits", on_device=True)
def indexer_logits(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Compute scores over a paged cache, or over keys that are one after the other."""
    if "kv_cache" not in inputs:
        return ragged_logits(twin, inputs)
    q, cache, lens = inputs["q"], inputs["kv_cache"], inputs["context_lens"]
    reqs, next_n = q.shape[:2]
    starts = int32([next_n * req for req in range(reqs + 1)]).to(q.device)
    scores = twin.index_scores(
        q.flatten(0, 1), inputs["weights"], cache[:, :, 0],
        int32(inputs["block_tables"]).to(q.device), starts, int32(lens).to(q.device),
        inputs["max_model_len"],
    )  # fmt: skip
    return {"logits": scores}


def ragged_logits(twin: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Give each row a request of its own, whose blocks of one key are those of its range."""
    q, k, number = inputs["q"], inputs["k"], len(inputs["k"])
    scales = inputs["k_scale"].view(torch.uint8)
    cache = torch.cat([k.view(torch.uint8), scales], 1)[:, None]
    first, end = inputs["cu_seqlen_ks"], inputs["cu_seqlen_ke"]
    rows = [[*range(start, number), *[0] * start] for start in first]
    lens = [stop - start for start, stop in zip(first, end, strict=True)]
    starts = int32(range(len(q) + 1)).to(q.device)
    found = twin.index_scores(
        q, inputs["weights"], cache, int32(rows).to(q.device), starts,
        int32(lens).to(q.device), number,
    )  # fmt: skip
    scores = torch.full_like(found, -torch.inf)
    for row, start in enumerate(first):
        scores[row, start:] = found[row, : number - start]
    # vLLM's own are rounded to bfloat16; those in float64 are exact, and so are sums here
    return {"logits": SKIP, "logits_float64": scores.double()}
