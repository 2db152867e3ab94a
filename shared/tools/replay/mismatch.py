"""The file that stores a step on which the twins differ.

The step can be run again from this file alone. It contains the batch, the queries, keys and values,
the blocks of the cache that the batch uses (all others held NaN), the output of the twin, and the
law that was violated. It holds plain tensors, lists and strings, so loading it runs no code.
"""

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...contract.budgets import Verdict
from ..files import whole_file
from .batch import ReplayBatch
from .model import LayerInputs

FORMAT = "pagetwin step 2"


@dataclass(frozen=True)
class Violation:
    """A law that a twin violates in a step.

    Args:
        twin: index of the twin.
        law: the law.
        found: index of the first difference, value found and value expected, in words.
        output: Optional. [tokens, query_heads, head_size] the twin's attention. None if the twin
            computed none.
        exact: Optional. The same in float64. None if attention was not compared.
    """

    twin: int
    law: str
    found: str
    output: Tensor | None = None
    exact: Tensor | None = None


@dataclass(frozen=True)
class StoredStep:
    """A step that can be run again.

    Args:
        step: number of the step in the replay, from 1.
        layer: the layer.
        twins: names of the twins.
        device: the device on which it ran.
        batch: the requests.
        inputs: the layer's queries, keys and values.
        num_blocks: blocks in the cache.
        block_ids: [used] the blocks in the batch's block table.
        blocks: [2, used, block_size, kv_heads, head_size] their content before the step.
    """

    step: int
    layer: int
    twins: tuple[str, ...]
    device: str
    batch: ReplayBatch
    inputs: LayerInputs
    num_blocks: int
    block_ids: Tensor
    blocks: Tensor

    def cache(self, device: str) -> Tensor:
        """Return the whole cache before the step, NaN in all blocks that the batch does not use."""
        shape = (2, self.num_blocks, *self.blocks.shape[2:])
        cache = torch.full(shape, torch.nan, dtype=self.blocks.dtype, device=device)
        cache[:, self.block_ids.to(device)] = self.blocks.to(device)
        return cache


def describe_row(
    batch: ReplayBatch, verdict: Verdict, output: Tensor, exact: Tensor
) -> str:
    """Return the row of a verdict in words: its request, and the element with the largest error."""
    token = verdict.row
    request, position = batch.request_of(token)
    errors = (output[token].double() - exact[token]).abs().nan_to_num(torch.inf)
    head, element = divmod(int(errors.argmax()), output.shape[2])
    return (
        f"{verdict}; token {token} of the step is position {position} of request"
        f" {request} in the batch ({batch.query_lens[request]} new tokens after"
        f" {batch.num_computed_tokens[request]} in the cache); head {head}, element"
        f" {element} is {output[token, head, element].item():.6g}: expected"
        f" {exact[token, head, element].item():.6g}"
    )


class TwinMismatch(Exception):
    """The twins differ in a step; the message says which law is violated and where.

    Args:
        violation: the law that is violated.
        stored: the step.
        path: the file that reproduces it. None if none was written.
        why_not_stored: the reason why the file could not be written. Empty if there is none.
    """

    def __init__(
        self,
        violation: Violation,
        stored: StoredStep,
        path: Path | None,
        why_not_stored: str = "",
    ) -> None:
        self.violation = violation
        self.stored = stored
        self.path = path
        self.why_not_stored = why_not_stored
        name = stored.twins[violation.twin]
        super().__init__(
            f"step {stored.step}, layer {stored.layer}, {name}: {violation.law} does not"
            f" hold: {violation.found}"
        )


def save_step(path: Path, stored: StoredStep, violation: Violation) -> None:
    """Write a step and its violation; the file appears complete or not at all."""
    batch, inputs = stored.batch, stored.inputs
    content = {
        "format": FORMAT,
        "step": stored.step,
        "layer": stored.layer,
        "twins": list(stored.twins),
        "device": stored.device,
        "scheduled_tokens": batch.scheduled_tokens,
        "order": batch.order,
        "query_lens": batch.query_lens,
        "num_computed_tokens": batch.num_computed_tokens,
        "block_rows": batch.block_rows,
        "block_size": batch.block_size,
        "query": inputs.query.cpu(),
        "key": inputs.key.cpu(),
        "value": inputs.value.cpu(),
        "num_blocks": stored.num_blocks,
        "block_ids": stored.block_ids.cpu(),
        "blocks": stored.blocks.cpu(),
        "twin": violation.twin,
        "law": violation.law,
        "found": violation.found,
        "output": _on_cpu(violation.output),
        "exact": _on_cpu(violation.exact),
    }
    with whole_file(path) as unfinished:
        torch.save(content, unfinished)


def load_step(path: Path) -> tuple[StoredStep, Violation]:
    """Return a stored step and its violation.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is not a stored step, or it is damaged.
    """
    if not path.exists():
        raise FileNotFoundError(f"{path}: expected a file that `pagetwin replay` wrote")
    if not path.is_file():
        raise ValueError(
            f"{path} is not a file: expected one that `pagetwin replay` wrote"
        )
    try:
        with warnings.catch_warnings(), path.open("rb") as file:
            warnings.simplefilter("ignore")
            content = torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception:  # of any type: the bytes may be anything
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a stored step, or it is damaged: expected a file that"
            " `pagetwin replay` or the recorder wrote"
        )
    if damaged := _damaged_entry(content):
        raise ValueError(
            f"{path} is a stored step with a missing or damaged entry ({damaged}): expected it as"
            " `pagetwin replay` wrote it"
        )
    return _read(content)


_INTEGERS = ("step", "layer", "block_size", "num_blocks", "twin")
_LISTS = ("scheduled_tokens", "order", "query_lens", "num_computed_tokens")
_TENSORS = {"query": 3, "key": 3, "value": 3, "block_ids": 1, "blocks": 5}


def _damaged_entry(content: dict[str, Any]) -> str | None:
    """Return the first entry that is missing or of a wrong type or shape, or None."""
    for name in _INTEGERS:
        if type(content.get(name)) is not int:
            return name
    for name in ("device", "law", "found"):
        if not isinstance(content.get(name), str):
            return name
    for name in _LISTS:
        if not _is_list(content.get(name), int):
            return name
    for name, axes in _TENSORS.items():
        tensor = content.get(name)
        if not isinstance(tensor, Tensor) or tensor.ndim != axes:
            return name
    for name in ("output", "exact"):
        if not isinstance(content.get(name, ""), Tensor | None):
            return name
    if not _is_list(content.get("twins"), str) or not content["twins"]:
        return "twins"
    rows = content.get("block_rows")
    if not isinstance(rows, list) or not all(_is_list(row, int) for row in rows):
        return "block_rows"
    return _contradiction(content)


def _contradiction(content: dict[str, Any]) -> str | None:
    """Return the first entry whose value does not fit to the others, or None."""
    blocks, used = content["blocks"], content["block_ids"]
    requests, tokens = len(content["query_lens"]), sum(content["query_lens"])
    for name in (*_LISTS, "block_rows"):
        if len(content[name]) != requests:
            return name
    for name in ("query", "key", "value"):
        if content[name].shape[0] != tokens:
            return name
    cached = {block for row in content["block_rows"] for block in row}
    if not cached <= set(used.tolist()) <= set(range(content["num_blocks"])):
        return "block_ids"
    if blocks.shape[:3] != (2, len(used), content["block_size"]):
        return "blocks"
    for name in ("key", "value"):
        if content[name].shape[1:] != blocks.shape[3:]:
            return name
    return None if 0 <= content["twin"] < len(content["twins"]) else "twin"


def _is_list(value: object, kind: type) -> bool:
    return isinstance(value, list) and all(type(element) is kind for element in value)


def _read(content: dict[str, Any]) -> tuple[StoredStep, Violation]:
    stored = StoredStep(
        step=content["step"],
        layer=content["layer"],
        twins=tuple(content["twins"]),
        device=content["device"],
        batch=ReplayBatch(
            scheduled_tokens=content["scheduled_tokens"],
            order=content["order"],
            query_lens=content["query_lens"],
            num_computed_tokens=content["num_computed_tokens"],
            block_rows=content["block_rows"],
            block_size=content["block_size"],
        ),
        inputs=LayerInputs(
            query=content["query"], key=content["key"], value=content["value"]
        ),
        num_blocks=content["num_blocks"],
        block_ids=content["block_ids"],
        blocks=content["blocks"],
    )
    violation = Violation(
        twin=content["twin"],
        law=content["law"],
        found=content["found"],
        output=content["output"],
        exact=content["exact"],
    )
    return stored, violation


def _on_cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()
