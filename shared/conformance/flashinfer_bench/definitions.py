"""Definitions: the attention operations of FlashInfer-Bench that the laws can judge.

A definition fixes the sizes of an operation: its name ends with its constants, as in
"gqa_paged_decode_h32_kv8_d128_ps64". The names, the axes, and the order of inputs and outputs are
those of the dataset flashinfer-trace. Nothing here imports torch.

Source:
    https://github.com/flashinfer-ai/flashinfer-bench, its pages about the schema and the op types.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

from .families import FAMILIES, Family

REFERENCES = Path(__file__).parent / "references"
DTYPE = "bfloat16"
"""The dtype of queries, caches and outputs of all definitions."""

LARGEST, LARGEST_PRODUCT = 1024, 2**32
"""Limits of the sizes in a name: the tensors of its workloads have to fit the memory."""
LEAST_TOPK, LARGEST_TOPK = 512, 8192
"""Limits of `topk`, which is an axis of indices alone. The rows of the laws fit the smaller one."""

AXES = {
    "batch_size": "Number of requests.",
    "total_q": "Number of queries of all requests.",
    "total_tokens": "Number of new tokens of all requests.",
    "total_kv": "Number of keys of all requests.",
    "num_pages": "Number of pages of the cache.",
    "len_indptr": "Number of requests, plus 1.",
    "num_kv_indices": "Number of page ids of all requests.",
    "seq_len": "Number of queries.",
    "num_tokens": "Number of queries of all requests.",
    "num_heads": "Number of query heads.",
    "num_qo_heads": "Number of query heads.",
    "num_kv_heads": "Number of KV heads.",
    "head_dim": "Elements per head.",
    "head_dim_ckv": "Elements of a latent.",
    "head_dim_kpe": "Elements of a rope key.",
    "page_size": "Tokens per page.",
    "topk": "Slots that a query selects at most.",
    "num_index_heads": "Number of heads of the indexer.",
    "index_head_dim": "Elements of a head of the indexer.",
    "kv_cache_num_heads": "Number of heads of the indexer's keys.",
    "head_dim_with_scale": "Bytes of a key: its codes and a float32 scale.",
    "max_num_pages": "Columns of the block table.",
}
"""What each axis counts."""
INPUTS = {
    "q": "Queries, request after request.",
    "q_nope": "Queries in the space of the latents, request after request.",
    "q_pe": "The part of the queries with rotary position.",
    "k": "Keys, request after request.",
    "v": "Values, request after request.",
    "k_cache": "Paged cache of keys.",
    "v_cache": "Paged cache of values.",
    "ckv_cache": "Paged cache of latents.",
    "kpe_cache": "Paged cache of rope keys.",
    "append_key": "New keys.",
    "append_value": "New values.",
    "batch_indices": "The request of each new token.",
    "positions": "The position of each new token in its request, from 0.",
    "qo_indptr": "Where the queries of each request start.",
    "kv_indptr": "Where the page ids of each request start.",
    "kv_indices": "Page ids, request after request.",
    "kv_last_page_len": "Tokens in the last page of each request, from 1 to page_size.",
    "sparse_indices": "Slots of each query: page id * page_size + offset. -1 selects nothing.",
    "q_index_fp8": "Queries of the indexer.",
    "k_index_cache_fp8": "Pages of keys: the FP8 codes of all tokens, then the scales of all.",
    "weights": "What each head's score is multiplied by.",
    "seq_lens": "Number of keys of each request.",
    "block_table": "Page ids of each request. Entries past its keys are never read.",
    "sm_scale": "Factor of the scores.",
    "v_a": "Attention over the first set of keys.",
    "s_a": "Its log-sum-exp in base 2. -inf for an empty set; then v_a is not read.",
    "v_b": "Attention over the second set of keys.",
    "s_b": "Its log-sum-exp in base 2. -inf for an empty set; then v_b is not read.",
}
"""What each input contains."""
RESULTS = {
    "output": "Attention. 0 for a query without a visible key.",
    "lse": "Log-sum-exp of the scores in base 2. -inf without a visible key.",
    "k_appended": "The cache of keys after the append. Other slots keep their contents.",
    "v_appended": "The cache of values after the append. Other slots keep their contents.",
    "topk_indices": "Slots, page id * page_size + offset, in any order; -1 where keys are missing.",
    "v_merged": "Attention over both sets. 0 if both are empty.",
    "s_merged": "Its log-sum-exp in base 2. -inf if both sets are empty.",
}
"""What each output contains."""
INT32 = (
    "batch_indices", "positions", "kv_indices", "kv_last_page_len", "sparse_indices",
    "seq_lens", "block_table", "topk_indices",
)  # fmt: skip
"""Inputs in int32, beside those that say where requests start."""
FLOAT32 = ("sm_scale", "weights", "lse", "s_a", "s_b", "s_merged")
"""Inputs and outputs in float32."""
EIGHT_BITS = {"q_index_fp8": "float8_e4m3fn", "k_index_cache_fp8": "int8"}
"""Inputs in eight bits."""
SCALE_BYTES = 4
"""Bytes of the scale of an indexer's key."""


@dataclass(frozen=True)
class Definition:
    """An operation with fixed sizes.

    Args:
        family: Its family.
        sizes: The value of each constant axis of the family, in the family's order.
    """

    family: Family
    sizes: tuple[int, ...]

    @property
    def name(self) -> str:
        """The name of the definition."""
        letters = self.family.constants.values()
        ends = [
            f"{letters_of_axis}{n}"
            for letters_of_axis, n in zip(letters, self.sizes, strict=True)
        ]
        return "_".join([self.family.name, *ends])

    @cached_property
    def constants(self) -> dict[str, int]:
        """The value of each constant axis."""
        found = dict(zip(self.family.constants, self.sizes, strict=True))
        if self.family.operation == "select_keys":
            bytes_of_key = found["index_head_dim"] + SCALE_BYTES
            found |= {"kv_cache_num_heads": 1, "head_dim_with_scale": bytes_of_key}
        return found

    @cached_property
    def inputs(self) -> dict[str, list[str] | None]:
        """The axes of each input, in the order of the arguments. None is a number."""
        rows = "batch_size" if self.family.is_decode else "total_q"
        kv = ["num_kv_heads", "head_dim"]
        if self.family.op_type == "cascade_merge":
            state: list[str] | None = ["seq_len", "num_heads", "head_dim"]
            sums: list[str] | None = ["seq_len", "num_heads"]
            return {"v_a": state, "s_a": sums, "v_b": state, "s_b": sums}
        if self.family.op_type == "cache_append":
            tokens, pages = ["total_tokens", *kv], ["num_pages", "page_size", *kv]
            return {
                "append_key": tokens,
                "append_value": tokens,
                "batch_indices": tokens[:1],
                "positions": tokens[:1],
                "k_cache": pages,
                "v_cache": pages,
                "kv_indices": ["num_kv_indices"],
                "kv_indptr": ["len_indptr"],
            }
        if self.family.operation == "select_keys":
            cache = ["num_pages", "page_size", "kv_cache_num_heads"]
            heads = ["batch_size", "num_index_heads"]
            return {
                "q_index_fp8": [*heads, "index_head_dim"],
                "k_index_cache_fp8": [*cache, "head_dim_with_scale"],
                "weights": heads,
                "seq_lens": heads[:1],
                "block_table": ["batch_size", "max_num_pages"],
            }
        found: dict[str, list[str] | None]
        is_sparse = self.family.operation == "sparse_attention"
        rows = "num_tokens" if is_sparse else rows
        if self.family.op_type in ("mla_paged", "dsa_paged"):
            found = {
                "q_nope": [rows, "num_qo_heads", "head_dim_ckv"],
                "q_pe": [rows, "num_qo_heads", "head_dim_kpe"],
                "ckv_cache": ["num_pages", "page_size", "head_dim_ckv"],
                "kpe_cache": ["num_pages", "page_size", "head_dim_kpe"],
            }
        elif self.family.is_paged:
            cache = ["num_pages", "page_size", *kv]
            found = {
                "q": [rows, "num_qo_heads", "head_dim"],
                "k_cache": cache,
                "v_cache": cache,
            }
        else:
            found = {
                "q": [rows, "num_qo_heads", "head_dim"],
                "k": ["total_kv", *kv],
                "v": ["total_kv", *kv],
            }
        if is_sparse:
            return found | {"sparse_indices": [rows, "topk"], "sm_scale": None}
        if not self.family.is_decode:
            found["qo_indptr"] = ["len_indptr"]
        found["kv_indptr"] = ["len_indptr"]
        if self.family.is_paged:
            found["kv_indices"] = ["num_kv_indices"]
            if self.constants["page_size"] > 1:
                found["kv_last_page_len"] = ["batch_size"]
        return found | {"sm_scale": None}

    @property
    def outputs(self) -> dict[str, list[str]]:
        """The axes of each output, in the order of the results."""
        first = next(iter(self.inputs.values()))
        assert first is not None
        if self.family.op_type == "cascade_merge":
            return {"v_merged": first, "s_merged": first[:2]}
        if self.family.op_type == "cache_append":
            cache = self.inputs["k_cache"]
            assert cache is not None
            return {"k_appended": cache, "v_appended": cache}
        if self.family.operation == "select_keys":
            return {"topk_indices": ["batch_size", "topk"]}
        return {"output": first, "lse": first[:2]}

    @property
    def axes(self) -> list[str]:
        """The names of all axes, in the order in which tensors use them."""
        shapes = [*self.inputs.values(), *self.outputs.values()]
        return list(dict.fromkeys(axis for shape in shapes for axis in shape or ()))

    @property
    def constraints(self) -> list[str]:
        """What relates axes and contents of inputs, as Python."""
        found: list[str] = []
        if self.family.op_type == "cascade_merge":
            return found
        if self.family.op_type == "cache_append":
            return ["num_kv_indices == kv_indptr[-1].item()"]
        if self.family.operation == "select_keys":
            return found
        if self.family.op_type == "dsa_paged":
            return ["sparse_indices.shape[-1] == topk"]
        if self.family.is_decode:
            found.append("len_indptr == batch_size + 1")
        else:
            found.append("total_q == qo_indptr[-1].item()")
            if "batch_size" in self.axes:
                found.append("len_indptr == batch_size + 1")
        count = "num_kv_indices" if self.family.is_paged else "total_kv"
        return [*found, f"{count} == kv_indptr[-1].item()"]

    @property
    def reference(self) -> str:
        """The source of the reference: a function `run` that takes the inputs."""
        source = (REFERENCES / f"{self.family.source}.py").read_text(encoding="utf-8")
        first = next(iter(self.inputs))
        lines = [f"def run({', '.join(self.inputs)}):"]
        if self.family.is_decode:
            lines.append(
                f"    qo_indptr = torch.arange(len(kv_indptr), device={first}.device)"
            )
        taken = re.search(r"^def (\w+)\((.*?)\)", source, re.DOTALL | re.MULTILINE)
        assert taken is not None
        if self.family.operation == "select_keys":
            lines = [f"def run({', '.join(self.inputs)}):"]
            words = ", ".join([*self.inputs, str(self.constants["topk"])])
            lines.append(f"    return ({taken[1]}({words}),)")
            return "\n".join([source.rstrip(), "", "", *lines, ""])
        names = re.findall(r"(\w+):", taken[2])
        if "kv_last_page_len" in names and "kv_last_page_len" not in self.inputs:
            lines.append("    kv_last_page_len = torch.ones_like(kv_indptr[1:])")
        lines.append(f"    return {taken[1]}({', '.join(names)})")
        return "\n".join([source.rstrip(), "", "", *lines, ""])

    def to_json(self) -> dict[str, Any]:
        """Return the definition in the schema of flashinfer-trace."""

        def axis(name: str) -> dict[str, Any]:
            kind: dict[str, Any] = {"type": "var"}
            if name in self.constants:
                kind = {"type": "const", "value": self.constants[name]}
            return kind | {"description": AXES[name]}

        stages = ["stage:decode" if self.family.is_decode else "stage:prefill"]
        return {
            "name": self.name,
            "description": self.family.summary,
            "op_type": self.family.op_type,
            "tags": stages
            if "qo_indptr" in self.inputs or self.family.is_decode
            else [],
            "axes": {name: axis(name) for name in self.axes},
            "constraints": self.constraints,
            "inputs": {
                name: {
                    "shape": shape,
                    "dtype": dtype_of(name),
                    "description": INPUTS[name],
                }
                for name, shape in self.inputs.items()
            },
            "outputs": {
                name: {
                    "shape": shape,
                    "dtype": dtype_of(name),
                    "description": RESULTS[name],
                }
                for name, shape in self.outputs.items()
            },
            "reference": self.reference,
        }


def dtype_of(name: str) -> str:
    """Return the dtype of an input or an output."""
    if name in FLOAT32:
        return "float32"
    if name in EIGHT_BITS:
        return EIGHT_BITS[name]
    return "int32" if name in INT32 or "indptr" in name else DTYPE


def find_definition(name: str) -> Definition:
    """Return a definition by its name.

    Raises:
        ValueError: The name is not that of a known family, or its constants contradict each other.
    """
    for family in FAMILIES:
        ends = "".join(rf"_{letters}(\d+)" for letters in family.constants.values())
        found = re.fullmatch(family.name + ends, name)
        if found is None:
            continue
        sizes = tuple(int(size) for size in found.groups())
        definition = Definition(family, sizes)
        heads, kv_heads = sizes[0], definition.constants.get("num_kv_heads", 1)
        topk = definition.constants.get("topk", LEAST_TOPK)
        if not LEAST_TOPK <= topk <= LARGEST_TOPK:
            raise ValueError(
                f"definition = {name!r}: expected topk from {LEAST_TOPK} to {LARGEST_TOPK}"
            )
        rest = [n for axis, n in definition.constants.items() if axis != "topk"]
        is_large = max(rest) > LARGEST or prod(rest) > LARGEST_PRODUCT
        if min(sizes) < 1 or is_large or heads % kv_heads:
            raise ValueError(
                f"definition = {name!r}: expected sizes from 1 to {LARGEST}, a product of at most"
                f" {LARGEST_PRODUCT:,}, and a number of query heads that is a multiple of the"
                " number of KV heads"
            )
        return definition
    known = ", ".join(family.pattern for family in FAMILIES)
    raise ValueError(f"definition = {name!r} is not known: expected {known}")
