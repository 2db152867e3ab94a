"""The parts of a step's sequence metadata, and encoders."""

from typing import Any

from golden.deviations import deviation

# ---- the metadata of prompts and decodes

SPLIT = "v0_xformers_metadata_split"


def metadata(inputs: dict[str, Any], name: str) -> Any:
    return inputs["attn_metadata"].get(name)


def has_lens(inputs: dict[str, Any], name: str) -> bool:
    """Return whether lengths of sequences or of encoders are given."""
    kinds = (name, f"encoder_{name}")
    return any(metadata(inputs, kind) is not None for kind in kinds)


def has_prompts(inputs: dict[str, Any]) -> bool:
    """Return whether vLLM returns the part of the prompts."""
    is_long = has_lens(inputs, "seq_lens") and has_lens(inputs, "seq_lens_tensor")
    return bool(metadata(inputs, "num_prefills") > 0) and is_long


def has_decodes(inputs: dict[str, Any]) -> bool:
    """Return whether vLLM returns the part of the decodes."""
    is_some = bool(metadata(inputs, "num_decode_tokens") > 0)
    return is_some and has_lens(inputs, "seq_lens_tensor")


@deviation(
    SPLIT,
    fields=["prefill_metadata.raises", "prefill_metadata_cached.raises"],
    right="fields that are None stay None",
)
def prompts_have_no_lengths(inputs: dict[str, Any]) -> bool:
    """vLLM asserts that the lengths are given on the host and on the device."""
    return bool(metadata(inputs, "num_prefills") > 0) and not has_prompts(inputs)


@deviation(
    SPLIT,
    fields=["decode_metadata.raises", "decode_metadata_cached.raises"],
    right="fields that are None stay None",
)
def decodes_have_no_lengths(inputs: dict[str, Any]) -> bool:
    """vLLM asserts that the lengths are given on the device."""
    is_some = bool(metadata(inputs, "num_decode_tokens") > 0)
    return is_some and not has_decodes(inputs)


def register_lost_field(name: str) -> None:
    @deviation(
        SPLIT, fields=[f"decode_metadata.{name}"], right="the part of the decodes"
    )
    def decodes_lose_a_field(inputs: dict[str, Any]) -> bool:
        """vLLM drops it from the metadata of the decodes."""
        return has_decodes(inputs) and metadata(inputs, name) is not None


def register_shared_rows(name: str) -> None:
    @deviation(
        SPLIT, fields=[f"prefill_metadata.{name}"], right="the rows of the prompts"
    )
    def prompts_keep_all_rows(inputs: dict[str, Any]) -> bool:
        """vLLM gives the prompts the whole batch's rows, which do not belong to them."""
        has_others = bool(metadata(inputs, "num_decode_tokens") > 0)
        is_run = has_prompts(inputs) and has_others
        return is_run and metadata(inputs, name) is not None

    @deviation(
        SPLIT, fields=[f"decode_metadata.{name}"], right="the rows of the decodes"
    )
    def decodes_keep_all_rows(inputs: dict[str, Any]) -> bool:
        """vLLM gives the decodes the whole batch's rows, which do not belong to them."""
        has_others = bool(metadata(inputs, "num_prefills") > 0)
        is_run = has_decodes(inputs) and has_others
        return is_run and metadata(inputs, name) is not None


for _name in (
    "seq_lens",
    "seq_start_loc",
    "context_lens_tensor",
    "query_start_loc",
    "max_decode_query_len",
):
    register_lost_field(_name)
for _name in (
    "encoder_seq_lens",
    "encoder_seq_lens_tensor",
    "encoder_seq_start_loc",
    "cross_block_tables",
):
    register_shared_rows(_name)


@deviation(SPLIT, fields=["decode_metadata.max_query_len"], right="1: one token each")
def decodes_have_no_longest_query(inputs: dict[str, Any]) -> bool:
    """vLLM drops it from the metadata of the decodes."""
    return has_decodes(inputs)


@deviation(SPLIT, fields=["decode_metadata.cross_slot_mapping"], right="none")
def decodes_keep_the_slots_of_the_encoder(inputs: dict[str, Any]) -> bool:
    """vLLM keeps the slots of tokens that only prompts send through the encoder."""
    has_others = bool(metadata(inputs, "num_prefills") > 0)
    is_run = has_decodes(inputs) and has_others
    return is_run and metadata(inputs, "cross_slot_mapping") is not None


@deviation(
    SPLIT,
    fields=["prefill_metadata.num_encoder_tokens"],
    right="the encoder's tokens belong to the prompts",
)
def prompts_lose_the_encoder_tokens(inputs: dict[str, Any]) -> bool:
    """vLLM does not pass the number on."""
    return has_prompts(inputs) and metadata(inputs, "num_encoder_tokens") is not None


@deviation(
    SPLIT,
    fields=["decode_metadata.num_encoder_tokens"],
    right="0: the encoder's tokens belong to the prompts",
)
def decodes_lose_the_encoder_tokens(inputs: dict[str, Any]) -> bool:
    """vLLM does not pass the number on."""
    return has_decodes(inputs) and metadata(inputs, "num_encoder_tokens") is not None


@deviation(
    SPLIT,
    fields=["decode_metadata.enable_kv_scales_calculation"],
    right="as in the whole step",
)
def decodes_calculate_scales_again(inputs: dict[str, Any]) -> bool:
    """vLLM sets the flag again for the decodes."""
    flag = metadata(inputs, "enable_kv_scales_calculation")
    return has_decodes(inputs) and flag is False


# ---- encoders


@deviation(
    "get_seq_len_block_table_args",
    fields=["raises"],
    right="the prompt's own lengths and no table",
)
def a_model_has_only_an_encoder(inputs: dict[str, Any]) -> bool:
    """vLLM has no branch for a model without a decoder."""
    return inputs["attn_type"] == "encoder_only" and bool(inputs["is_prompt"])


@deviation("get_seq_len_block_table_args", fields=["raises"], right="rejected")
def a_needed_field_is_none(inputs: dict[str, Any]) -> bool:
    """vLLM returns None where a length or a table is needed."""
    names = {
        "encoder": ("encoder_seq_lens_tensor", "max_encoder_seq_len"),
        "encoder_decoder": (
            "encoder_seq_lens_tensor",
            "max_encoder_seq_len",
            "cross_block_tables",
        ),
    }
    needed = names.get(inputs["attn_type"], ())
    return any(metadata(inputs, name) is None for name in needed)


@deviation(
    "get_num_prefill_decode_query_kv_tokens", fields=["raises"], right="rejected"
)
def an_attention_type_is_unknown(inputs: dict[str, Any]) -> bool:
    """vLLM treats any other string as a decoder."""
    known = ("decoder", "encoder", "encoder_only", "encoder_decoder")
    return inputs["attn_type"] not in known


CROSS = "is_all_cross_attn_metadata_set"


def missing_attribute(inputs: dict[str, Any]) -> bool:
    """Return whether vLLM reads an attribute that the object does not have."""
    given = inputs["attn_metadata"]
    if CROSS_ATTRIBUTES[0] in given and not given[CROSS_ATTRIBUTES[0]]:
        return False
    for name in CROSS_ATTRIBUTES:
        if name not in given:
            return True
        if given[name] is None:
            return False
    return False


CROSS_ATTRIBUTES = (
    "is_all_encoder_attn_metadata_set",
    "cross_slot_mapping",
    "cross_block_tables",
)


@deviation(CROSS, fields=["raises"], right="a field that is not given is None")
def an_attribute_is_missing(inputs: dict[str, Any]) -> bool:
    """vLLM reads attributes of any object, which it may not have."""
    return inputs["via"] == "namespace" and missing_attribute(inputs)


@deviation(CROSS, fields=["result"], right="True or False")
def the_last_value_is_not_a_bool(inputs: dict[str, Any]) -> bool:
    """vLLM returns the value of its `and` expression: a value that is not True or False."""
    if inputs["via"] != "namespace" or missing_attribute(inputs):
        return False
    first = inputs["attn_metadata"]["is_all_encoder_attn_metadata_set"]
    return not first and first is not False
