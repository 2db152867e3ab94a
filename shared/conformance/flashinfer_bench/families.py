"""Families of definitions: operations whose definitions differ only in their sizes."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """Definitions that differ only in their constants.

    Args:
        name: What precedes the constants in the name of a definition.
        op_type: The category of the operation.
        operation: The operation whose laws apply.
        constants: The constant axes, each with its letters in the name of a definition.
        is_decode: Whether each request has exactly one query.
        summary: One sentence for the description of a definition.
    """

    name: str
    op_type: str
    operation: str
    constants: dict[str, str]
    is_decode: bool
    summary: str

    @property
    def pattern(self) -> str:
        """The form of the names of its definitions."""
        return "_".join(
            [
                self.name,
                *(f"{letters}<{axis}>" for axis, letters in self.constants.items()),
            ]
        )

    @property
    def source(self) -> str:
        """The name of the file of its reference."""
        return self.name if self.op_type == "dsa_paged" else self.op_type

    @property
    def is_paged(self) -> bool:
        """Whether keys are in a paged cache."""
        return "page_size" in self.constants


HEADS = {"num_qo_heads": "h", "num_kv_heads": "kv", "head_dim": "d"}
LATENTS = {"num_qo_heads": "h", "head_dim_ckv": "ckv", "head_dim_kpe": "kpe"}
PAGES = {"page_size": "ps"}
KV = {"num_kv_heads": "kv", "head_dim": "d"}
STATES = {"num_heads": "h", "head_dim": "d"}
FAMILIES = (
    Family(
        "gqa_paged_decode",
        "gqa_paged",
        "paged_attention",
        HEADS | PAGES,
        True,
        "Attention of one query per request over a paged KV cache.",
    ),
    Family(
        "gqa_paged_prefill_causal",
        "gqa_paged",
        "paged_attention",
        HEADS | PAGES,
        False,
        "Causal attention of the new tokens of each request over a paged KV cache.",
    ),
    Family(
        "gqa_ragged_prefill_causal",
        "gqa_ragged",
        "paged_attention",
        HEADS,
        False,
        "Causal attention over keys and values that are stored request after request.",
    ),
    Family(
        "gqa_ragged_decode",
        "gqa_ragged",
        "paged_attention",
        HEADS,
        True,
        "Attention of one query per request over keys and values stored request after request.",
    ),
    Family(
        "mla_paged_decode",
        "mla_paged",
        "latent_decode_attention",
        LATENTS | PAGES,
        True,
        "Latent attention (MLA) of one query per request over a paged cache of latents.",
    ),
    Family(
        "mla_paged_prefill_causal",
        "mla_paged",
        "latent_decode_attention",
        LATENTS | PAGES,
        False,
        "Causal latent attention (MLA) of the new tokens of each request over a paged cache.",
    ),
    Family(
        "dsa_sparse_attention",
        "dsa_paged",
        "sparse_attention",
        LATENTS | {"topk": "topk"} | PAGES,
        False,
        "Latent attention (MLA) of each query over the slots of a paged cache that it selects.",
    ),
    Family(
        "dsa_topk_indexer_fp8",
        "dsa_paged",
        "select_keys",
        {"num_index_heads": "h", "index_head_dim": "d", "topk": "topk"} | PAGES,
        False,
        "Slots of the keys with the largest scores of an indexer, for one query per request.",
    ),
    Family(
        "merge_state",
        "cascade_merge",
        "merge_attn_states",
        STATES,
        False,
        "Attention over two sets of keys, from the results over each.",
    ),
    Family(
        "paged_kv_append",
        "cache_append",
        "reshape_and_cache",
        KV | PAGES,
        False,
        "Write of new keys and values to their slots of a paged KV cache.",
    ),
)
EXPORTED = (
    "gqa_paged_decode_h32_kv8_d128_ps1",
    "gqa_paged_decode_h32_kv8_d128_ps64",
    "gqa_paged_prefill_causal_h32_kv8_d128_ps1",
    "gqa_paged_prefill_causal_h32_kv8_d128_ps64",
    "gqa_ragged_decode_h32_kv8_d128",
    "gqa_ragged_prefill_causal_h32_kv8_d128",
    "mla_paged_decode_h16_ckv512_kpe64_ps1",
    "mla_paged_decode_h16_ckv512_kpe64_ps64",
    "mla_paged_prefill_causal_h16_ckv512_kpe64_ps64",
    "dsa_sparse_attention_h16_ckv512_kpe64_topk2048_ps64",
    "dsa_topk_indexer_fp8_h64_d128_topk2048_ps64",
    "merge_state_h32_d128",
    "paged_kv_append_kv8_d128_ps64",
)
"""The definitions that are written if none is named."""
