"""The layer, the xFormers backend, and names of vLLM's modules."""

from typing import Any

import torch

from golden.deviations import deviation

KINDS = ("decoder", "encoder", "encoder_only", "encoder_decoder")
CACHE_DTYPES = ("auto", "fp8", "fp8_e4m3", "fp8_e5m2")
HEAD_SIZES = range(32, 257, 8)


# ---- the layer


def register_zero_scale(name: str, tensor: str) -> None:
    @deviation(
        "attention_layer_calc_kv_scales",
        fields=[f"_{name}_scale"],
        right="1: zeros do not determine a scale",
        value=lambda inputs: torch.tensor(1.0),
    )
    def a_tensor_is_zero(inputs: dict[str, Any]) -> bool:
        """vLLM sets a scale of 0, by which every later number becomes infinite or NaN."""
        every = [inputs[name] for name in ("query", "key", "value")]
        is_run = all(tensor is not None and tensor.numel() for tensor in every)
        return is_run and not inputs[tensor].any()


for _name, _tensor in (("q", "query"), ("k", "key"), ("v", "value")):
    register_zero_scale(_name, _tensor)


@deviation("attention_layer_init", fields=["raises"], right="a ValueError")
def a_layers_type_is_unknown(inputs: dict[str, Any]) -> bool:
    """vLLM accepts any string as the type of attention."""
    heads, kv_heads = (
        inputs["num_heads"],
        inputs.get("num_kv_heads") or inputs["num_heads"],
    )
    is_new = inputs["prefix"] not in inputs["existing_prefixes"]
    target = inputs.get("kv_sharing_target_layer_name")
    is_shared = target is None or target in inputs["existing_prefixes"]
    is_made = heads and heads % kv_heads == 0 and is_new and is_shared
    return bool(is_made) and inputs.get("attn_type", "decoder") not in KINDS


# ---- the xFormers backend

STATIC = "xformers_backend_static"


@deviation(
    STATIC, fields=["result"], right="XFORMERS, as in 0.11", value=lambda _: "XFORMERS"
)
def the_name_is_asked(inputs: dict[str, Any]) -> bool:
    """The recorded version has the number of vLLM's engine in the name."""
    return inputs["method"] == "get_name"


def asked_block_size(inputs: dict[str, Any]) -> int | None:
    is_shape = inputs["method"] == "get_kv_cache_shape"
    return inputs["args"][1] if is_shape else None


@deviation(STATIC, fields=["raises"], right="a ValueError: a block has slots")
def a_cache_has_blocks_without_slots(inputs: dict[str, Any]) -> bool:
    """vLLM accepts 0, and every multiple of 16 below it, as a size."""
    size = asked_block_size(inputs)
    return size is not None and size <= 0 and size % 16 == 0


@deviation(STATIC, fields=["raises"], right="any block size", twins=("reference",))
def the_reference_takes_any_block_size(inputs: dict[str, Any]) -> bool:
    """vLLM's backend rejects block sizes that are not multiples of 16."""
    size = asked_block_size(inputs)
    return size is not None and size > 0 and size % 16 != 0


def is_made_by_vllm(inputs: dict[str, Any]) -> bool:
    """Return whether vLLM's xFormers backend creates the layer."""
    return (
        inputs.get("alibi_slopes") is None
        and inputs.get("kv_sharing_target_layer_name") is None
        and inputs.get("attn_type", "decoder") == "decoder"
        and inputs["head_size"] in HEAD_SIZES
        and inputs["num_kv_heads"] != 0
    )


def is_made_here(inputs: dict[str, Any], head_sizes: Any = None) -> bool:
    """Return whether the layer is valid here.

    Args:
        inputs: arguments of the layer.
        head_sizes: Optional. Supported sizes. If None, all.
    """
    kind, window = inputs.get("attn_type", "decoder"), inputs["sliding_window"]
    slopes, cap = inputs.get("alibi_slopes"), inputs["logits_soft_cap"]
    target = inputs.get("kv_sharing_target_layer_name")
    is_uncached = kind in ("encoder", "encoder_only")
    is_cross = kind == "encoder_decoder"
    size, kv_heads = inputs["head_size"], inputs["num_kv_heads"]
    return (
        kv_heads > 0
        and inputs["num_heads"] > 0
        and inputs["num_heads"] % kv_heads == 0
        and (window is None or window > 0)
        and (cap is None or cap >= 0)
        and (slopes is None or len(slopes) == inputs["num_heads"])
        and inputs["kv_cache_dtype"] in CACHE_DTYPES
        and kind in KINDS
        and not (is_cross and (window is not None or slopes is not None))
        and not (is_uncached and target is not None)
        and (size > 0 if head_sizes is None else size in head_sizes)
    )


for _twin, _sizes in (("optimized", HEAD_SIZES), ("reference", None)):

    @deviation(
        "xformers_impl_init",
        fields=["raises"],
        right="every kind, ALiBi, shared caches and, in the reference, head size",
        twins=(_twin,),
    )
    def a_layer_is_supported_here(inputs: dict[str, Any], sizes: Any = _sizes) -> bool:
        """vLLM's backend rejects ALiBi, shared caches, and all kinds but a decoder's."""
        return not is_made_by_vllm(inputs) and is_made_here(inputs, sizes)

    @deviation(
        "xformers_impl_init",
        fields=["raises"],
        right="a ValueError: the layer would compute something else",
        twins=(_twin,),
    )
    def a_layer_is_rejected_here(inputs: dict[str, Any], sizes: Any = _sizes) -> bool:
        """vLLM's backend accepts heads that do not divide, empty windows, negative caps and any
        name of a cache's dtype."""
        return is_made_by_vllm(inputs) and not is_made_here(inputs, sizes)


# ---- its metadata


def query_lens(common: dict[str, Any]) -> list[int]:
    lens: list[int] = common["query_start_loc_cpu"].diff().tolist()
    return lens


def first_prefill(common: dict[str, Any]) -> int:
    """Return the index of the first request with more than one new token."""
    lens = query_lens(common)
    others = (index for index, length in enumerate(lens) if length > 1)
    return next(others, len(lens))


def trusts_its_maximum(common: dict[str, Any]) -> bool:
    """Return whether vLLM counts all requests as decodes without counting their tokens."""
    return bool(common["max_query_len"] <= 1)


def is_unordered(common: dict[str, Any]) -> bool:
    lens = query_lens(common)
    is_short = any(length <= 1 for length in lens[first_prefill(common) :])
    return is_short and not trusts_its_maximum(common)


def outgrows_its_row(inputs: dict[str, Any], reqs: int, live: bool = False) -> bool:
    """Return whether one of the first requests has more keys than its row.

    Args:
        inputs: the case's inputs.
        reqs: number of requests that are compared.
        live: whether requests without new tokens are left out.
    """
    common = inputs["common_attn_metadata"]
    width = common["block_table_tensor"].shape[1]
    room = width * inputs["kv_cache_spec"]["block_size"]
    pairs = zip(query_lens(common), common["seq_lens_cpu"].tolist(), strict=True)
    longer = [length > room and (new > 0 or not live) for new, length in pairs]
    return any(longer[:reqs])


def makes_a_mask(inputs: dict[str, Any]) -> bool:
    """Return whether xFormers makes vLLM's mask of the decodes."""
    common = inputs["common_attn_metadata"]
    every = len(query_lens(common))
    decodes = every if trusts_its_maximum(common) else first_prefill(common)
    return not is_unordered(common) and not outgrows_its_row(inputs, decodes)


def makes_a_mask_here(inputs: dict[str, Any]) -> bool:
    """Return whether the optimized twin makes the mask of the decodes that have tokens."""
    decodes = first_prefill(inputs["common_attn_metadata"])
    return not outgrows_its_row(inputs, decodes, live=True)


BUILD, PARTS = (
    "xformers_metadata_builder_build",
    "xformers_metadata_prefill_decode_split",
)
METADATA_RIGHT = (
    "requests after the first prefill are prefills; attention validates rows"
)


@deviation(BUILD, PARTS, fields=["raises"], right=METADATA_RIGHT, twins=("reference",))
def a_batch_is_unordered_or_longer_than_its_rows(inputs: dict[str, Any]) -> bool:
    """vLLM asserts that decodes come first, and xFormers that their rows hold the keys."""
    return not makes_a_mask(inputs)


@deviation(BUILD, PARTS, fields=["raises"], right=METADATA_RIGHT, twins=("optimized",))
def a_batch_is_unordered_or_its_prefills_are_longer(inputs: dict[str, Any]) -> bool:
    """vLLM asserts that decodes come first, and takes prefills for decodes if its maximum says
    so."""
    return not makes_a_mask(inputs) and makes_a_mask_here(inputs)


@deviation(BUILD, PARTS, fields=["*"], right="counts the new tokens")
def a_prefill_is_longer_than_the_maximum(inputs: dict[str, Any]) -> bool:
    """vLLM counts all requests as decodes if `max_query_len` says so."""
    common = inputs["common_attn_metadata"]
    is_low = trusts_its_maximum(common) and max(query_lens(common), default=0) > 1
    return makes_a_mask(inputs) and is_low


@deviation(BUILD, fields=["metadata.attn_bias"], right="padding has no row in the mask")
def a_decode_has_no_token(inputs: dict[str, Any]) -> bool:
    """vLLM's mask has a request without queries for padding."""
    common = inputs["common_attn_metadata"]
    decodes = query_lens(common)[: first_prefill(common)]
    return makes_a_mask(inputs) and 0 in decodes


@deviation(
    PARTS,
    fields=["prefill_metadata_bias_is_parent_bias"],
    right="no mask, as no decode has a token",
    twins=("optimized",),
)
def all_decodes_are_padding(inputs: dict[str, Any]) -> bool:
    """vLLM makes a mask for requests without queries."""
    common = inputs["common_attn_metadata"]
    lens, first = query_lens(common), first_prefill(common)
    is_run = makes_a_mask(inputs) and not trusts_its_maximum(common)
    return is_run and 0 < first < len(lens) and not any(lens[:first])


@deviation(PARTS, fields=["prefill_metadata.slot_mapping"], right="slots of its tokens")
def slots_follow_the_last_prefill(inputs: dict[str, Any]) -> bool:
    """vLLM's metadata of the prefills keeps the padding after the last token."""
    common = inputs["common_attn_metadata"]
    has_prefills = first_prefill(common) < len(query_lens(common))
    is_longer = len(common["slot_mapping"]) > common["num_actual_tokens"]
    is_run = makes_a_mask(inputs) and not trusts_its_maximum(common)
    return is_run and has_prefills and is_longer


# ---- its metadata, with counters that contradict the starts

PROPERTIES = "xformers_metadata_properties"


class Parts:
    """The counters of a metadata object and the starts of its requests.

    Args:
        given: fields of the metadata.
    """

    def __init__(self, given: dict[str, Any]) -> None:
        self.starts = given["query_start_loc"].tolist()
        self.reqs, self.slots = len(self.starts) - 1, len(given["slot_mapping"])
        self.decodes = given.get("num_decodes", 0)
        self.decode_tokens = given.get("num_decode_tokens", 0)
        self.prefills = given.get("num_prefills", 0)
        self.prefill_tokens = given.get("num_prefill_tokens", 0)

    @property
    def has_decodes(self) -> bool:
        """Whether the part of the decodes is built: it has a request, which both sides need."""
        return bool(self.decode_tokens) and self.decodes > 0 < self.reqs

    @property
    def has_prefills(self) -> bool:
        """Whether the part of the prefills is built."""
        return bool(self.prefills) and self.decodes < self.reqs

    @property
    def ends(self) -> tuple[int, int]:
        """First token of the prefills and the token after their last one."""
        last = min(self.decodes + self.prefills, self.reqs)
        return self.starts[self.decodes], self.starts[last]


@deviation(
    PROPERTIES,
    fields=["decode_metadata.num_actual_tokens", "decode_metadata.slot_mapping"],
    right="the tokens between the starts",
)
def decode_tokens_contradict_the_starts(inputs: dict[str, Any]) -> bool:
    """vLLM relies on the number of the decodes' tokens."""
    parts = Parts(inputs["metadata"])
    is_other = parts.decode_tokens != parts.starts[min(parts.decodes, parts.reqs)]
    return parts.has_decodes and is_other


@deviation(
    PROPERTIES,
    fields=[
        f"prefill_metadata.{name}"
        for name in (
            "query_start_loc",
            "seq_lens",
            "block_table",
            "max_query_len",
            "max_seq_len",
        )
    ],
    right="as many requests as there are prefills",
)
def there_are_more_requests_than_counted(inputs: dict[str, Any]) -> bool:
    """vLLM's metadata of the prefills has all requests after the decodes."""
    parts = Parts(inputs["metadata"])
    return parts.has_prefills and parts.prefills < parts.reqs - parts.decodes


@deviation(
    PROPERTIES,
    fields=["prefill_metadata.num_actual_tokens"],
    right="the tokens between the starts",
)
def prefill_tokens_contradict_the_starts(inputs: dict[str, Any]) -> bool:
    """vLLM relies on the number of the prefills' tokens."""
    parts = Parts(inputs["metadata"])
    if not parts.has_prefills:
        return False
    begin, end = parts.ends
    return bool(parts.prefill_tokens != end - begin)


@deviation(
    PROPERTIES, fields=["prefill_metadata.slot_mapping"], right="slots of its tokens"
)
def slots_are_not_those_of_the_prefills(inputs: dict[str, Any]) -> bool:
    """vLLM's metadata of the prefills keeps all slots after those of the decodes."""
    parts = Parts(inputs["metadata"])
    if not parts.has_prefills:
        return False
    return (parts.decode_tokens, parts.slots) != parts.ends
