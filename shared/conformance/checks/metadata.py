"""Comparison of the metadata of a step with the expected one, field by field."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ...contract.metadata_classes import CommonAttentionMetadata
from .expect import Disagreement, expect_same


def values_of(metadata: Any) -> dict[str, Any]:
    """Return the fields of metadata by name."""
    return {field.name: getattr(metadata, field.name) for field in fields(metadata)}


def remember(metadata: Any) -> dict[str, Any]:
    """Return copies of the fields, for a later comparison."""
    return deepcopy(values_of(metadata))


def expect_fields(
    what: str, found: Any, right: Mapping[str, Any], device: torch.device
) -> None:
    """Raise a Disagreement if a field of metadata is not exactly the expected one.

    Numbers must be Python numbers. Tensors must be on the host if their name ends in `_cpu` or is
    listed in `ON_THE_HOST`, else on the device.

    Args:
        what: The metadata, in words.
        found: An instance of a dataclass.
        right: The expected fields by name. Other fields must have the default of the class.
        device: The device of the tensors that are not on the host.
    """
    for field in fields(found):
        value = right.get(field.name, field.default)
        expect_field(f"{what}.{field.name}", getattr(found, field.name), value, device)
    if unknown := set(right) - {field.name for field in fields(found)}:
        raise Disagreement(what, "as a whole", "no such fields", sorted(unknown))


ON_THE_HOST = ("_cpu", "is_prefilling", "logits_indices_padded")


def expect_field(what: str, found: Any, right: Any, device: torch.device) -> None:
    """Raise a Disagreement if a value has another type, device or content."""
    if isinstance(right, Tensor):
        expect_same(what, packed(found), packed(right))
        expected = "cpu" if what.endswith(ON_THE_HOST) else device.type
        if found.device.type != expected:
            raise Disagreement(what, "its device", found.device, expected)
        return
    if type(found) is not type(right):
        raise Disagreement(what, "as a whole", repr(found), repr(right))
    expect_same(what, found, right)


def packed(tensor: Any) -> Any:
    """Return a packed copy of a tensor; return other values unchanged."""
    if not isinstance(tensor, Tensor):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def expect_unchanged(what: str, metadata: Any, before: Mapping[str, Any]) -> None:
    """Raise a Disagreement if metadata differs from the copies of `remember`."""
    for name, value in before.items():
        expect_same(f"{what}.{name} afterwards", getattr(metadata, name), value)


def seen_by(
    metadata: CommonAttentionMetadata, block_size: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Return the slots of the keys that each new token attends to, by device and by host lengths.

    In causal attention, a new token is as far from the end of its sequence as from the last new
    token of its request. Starts, lengths and block table therefore determine its visible range.
    """
    table = metadata.block_table_tensor.tolist()
    copies = []
    for starts, lens in (
        (metadata.query_start_loc, metadata.seq_lens),
        (metadata.query_start_loc_cpu, metadata.seq_lens_cpu),
    ):
        found = []
        begins = starts.tolist()
        for req, seq_len in enumerate(lens.tolist()):
            for token in range(begins[req], begins[req + 1]):
                last = seq_len - begins[req + 1] + token
                found.append(
                    [
                        table[req][position // block_size] * block_size
                        + position % block_size
                        for position in range(last + 1)
                    ]
                )
        copies.append(found)
    return copies[0], copies[1]


def expect_rows(what: str, table: Tensor, rows: Sequence[Sequence[int]]) -> None:
    """Raise a Disagreement if the rows of a block table do not begin with these ids."""
    expect_same(f"{what}, its element type", str(table.dtype), "torch.int32")
    expect_same(f"{what}, its rows", table.shape[0], len(rows))
    for req, (found, row) in enumerate(zip(table.tolist(), rows, strict=True)):
        expect_numbers(f"row {req} of {what}", found[: len(row)], list(row))


def expect_numbers(what: str, found: Any, right: Any) -> None:
    """Raise a Disagreement if lists of integers differ. Long ones are compared as a whole first."""
    if found != right:
        expect_same(what, found, right)
