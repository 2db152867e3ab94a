"""Validation of the merging of partial results."""

import math

from torch import Tensor

from .memory import check_results_apart
from .primitives import FLOATS, check_dtype, check_same_device
from .results import LSE_DTYPES


def check_merge(
    prefix_output: Tensor,
    prefix_lse: Tensor,
    suffix_output: Tensor,
    suffix_lse: Tensor,
    prefill_tokens_with_context: int | None,
    output: Tensor | None,
    output_lse: Tensor | None,
    prefix_lse_base: float,
    suffix_lse_base: float,
) -> None:
    """Reject two partial results of different queries, or with different logarithm bases."""
    check_dtype("prefix_output", prefix_output, *FLOATS)
    check_dtype("suffix_output", suffix_output, prefix_output.dtype)
    if prefix_output.dim() != 3:
        raise ValueError(
            f"prefix_output has shape {list(prefix_output.shape)}: expected [tokens,"
            " query_heads, head_size]"
        )
    tokens, query_heads, _ = prefix_output.shape
    for name, tensor in (("suffix_output", suffix_output), ("output", output)):
        if tensor is not None and tensor.shape != prefix_output.shape:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}: expected"
                f" {list(prefix_output.shape)}, as prefix_output has"
            )
    if output is not None:
        check_dtype("output", output, *FLOATS)
    if output_lse is not None:
        check_dtype("output_lse", output_lse, *LSE_DTYPES)
    check_dtype("prefix_lse", prefix_lse, *LSE_DTYPES)
    check_dtype("suffix_lse", suffix_lse, prefix_lse.dtype)
    for name, tensor in (
        ("prefix_lse", prefix_lse),
        ("suffix_lse", suffix_lse),
        ("output_lse", output_lse),
    ):
        if tensor is not None and tuple(tensor.shape) != (query_heads, tokens):
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}: expected [{query_heads}, {tokens}]"
            )
    check_same_device(
        prefix_output=prefix_output,
        prefix_lse=prefix_lse,
        suffix_output=suffix_output,
        suffix_lse=suffix_lse,
        output=output,
        output_lse=output_lse,
    )
    check_results_apart(
        {"output": output, "output_lse": output_lse},
        {
            "prefix_output": prefix_output,
            "suffix_output": suffix_output,
            "prefix_lse": prefix_lse,
            "suffix_lse": suffix_lse,
        },
        in_place=True,
    )
    _check_bases(prefix_lse_base, suffix_lse_base)
    count = prefill_tokens_with_context
    if count is not None and not 0 <= count <= tokens:
        raise ValueError(
            f"prefill_tokens_with_context = {count}: expected 0 to {tokens}, the tokens"
        )


def _check_bases(prefix_lse_base: float, suffix_lse_base: float) -> None:
    """Raise an error for other bases than e and 2, and for two that differ."""
    for name, base in (
        ("prefix_lse_base", prefix_lse_base),
        ("suffix_lse_base", suffix_lse_base),
    ):
        if base not in (math.e, 2):
            raise ValueError(f"{name} = {base}: expected math.e or 2")
    if prefix_lse_base != suffix_lse_base:
        raise ValueError(
            f"prefix_lse_base = {prefix_lse_base} but suffix_lse_base = {suffix_lse_base}:"
            " expected the same; log2_lse_to_ln turns a log-sum-exp of base 2 into a natural"
            " one"
        )


def check_combine(outputs: Tensor, lses: Tensor) -> None:
    """Reject partial results of different queries."""
    check_dtype("outputs", outputs, *FLOATS)
    check_dtype("lses", lses, *LSE_DTYPES)
    if outputs.dim() != 4 or lses.shape != outputs.shape[:3]:
        raise ValueError(
            f"outputs has shape {list(outputs.shape)} and lses {list(lses.shape)}: expected"
            " [parts, tokens, query_heads, head_size] and [parts, tokens, query_heads]"
        )
    check_same_device(outputs=outputs, lses=lses)


def check_lse(lse: Tensor) -> None:
    """Reject a log-sum-exp that is not float32 or float64."""
    check_dtype("lse", lse, *LSE_DTYPES)
