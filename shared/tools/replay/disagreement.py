"""What is left behind when the twins disagree?

One file from which the step can be run again, without the trace and without the steps before it:
the batch, the queries, keys and values, the blocks of the cache that the batch owns (the rest was
NaN), what each twin answered, and which law was broken. It holds plain tensors, lists and strings,
so loading it runs no code.
"""

import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .batch import Batch
from .model import LayerInputs

FORMAT = "pagetwin step 1"


@dataclass(frozen=True)
class Difference:
    """Which law a twin broke, and where.

    Args:
        twin: its place among the twins that ran.
        law: what should hold.
        found: where it does not: place, value found, value expected.
        answer: [tokens, query_heads, head_size] the twin's attention, as far as it got.
        exact: the same in float64, as it should be.
    """

    twin: int
    law: str
    found: str
    answer: Tensor | None = None
    exact: Tensor | None = None


@dataclass(frozen=True)
class StoredStep:
    """A step that can be run again.

    Args:
        step: its number in the replay.
        layer: the layer it was.
        twins: names of the twins.
        device: where it ran.
        batch: its requests.
        inputs: the layer's queries, keys and values.
        num_blocks: blocks in the cache.
        block_ids: [used] the blocks that the batch owns.
        blocks: [2, used, block_size, kv_heads, head_size] what they held before the step.
    """

    step: int
    layer: int
    twins: tuple[str, ...]
    device: str
    batch: Batch
    inputs: LayerInputs
    num_blocks: int
    block_ids: Tensor
    blocks: Tensor

    def cache(self, device: str) -> Tensor:
        """Return the whole cache before the step; NaN in every block nobody owns."""
        shape = (2, self.num_blocks, *self.blocks.shape[2:])
        cache = torch.full(shape, torch.nan, dtype=self.blocks.dtype, device=device)
        cache[:, self.block_ids.to(device)] = self.blocks.to(device)
        return cache


class Disagreement(Exception):
    """The twins disagree; the message is what a person should read.

    Args:
        difference: which law was broken.
        stored: the step.
        path: the file that reproduces it; None: none was written.
    """

    def __init__(
        self, difference: Difference, stored: StoredStep, path: Path | None
    ) -> None:
        self.difference = difference
        self.stored = stored
        self.path = path
        name = stored.twins[difference.twin]
        super().__init__(
            f"step {stored.step}, layer {stored.layer}, {name}: {difference.law} does not"
            f" hold: {difference.found}"
        )


def save_step(path: Path, stored: StoredStep, difference: Difference) -> None:
    """Write a step and what was wrong with it; the file appears whole or not at all."""
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
        "twin": difference.twin,
        "law": difference.law,
        "found": difference.found,
        "answer": _on_cpu(difference.answer),
        "exact": _on_cpu(difference.exact),
    }
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        torch.save(content, unfinished)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def load_step(path: Path) -> tuple[StoredStep, Difference]:
    """Return a step and what was wrong with it.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: a file that is none of ours, or is damaged.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"{path}: expected a file that `pagetwin replay` wrote about a disagreement"
        )
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, ValueError, KeyError):
        content = None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError(
            f"{path} is not a stored step, or it is damaged: expected a file that"
            " `pagetwin replay` wrote about a disagreement"
        )
    try:
        return _read(content)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is a stored step but lacks or mangles {error}: expected it as"
            " `pagetwin replay` wrote it"
        ) from None


def _read(content: dict[str, Any]) -> tuple[StoredStep, Difference]:
    stored = StoredStep(
        step=content["step"],
        layer=content["layer"],
        twins=tuple(content["twins"]),
        device=content["device"],
        batch=Batch(
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
    difference = Difference(
        twin=content["twin"],
        law=content["law"],
        found=content["found"],
        answer=content["answer"],
        exact=content["exact"],
    )
    return stored, difference


def _on_cpu(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.cpu()
