"""Law of selections: what a token of sparse attention selects are keys of its own sequence.

An indexer gives each token some positions. They are not after the token, none of them twice, and as
many as there are, up to the most that a token selects. Where the slots that were read are known,
they are those of the positions. Which positions are best is not checked.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...contract.latent_formats import find_latent_format
from ...contract.operations import load_implementation
from ..findings import Corruption
from ..step import HostStep, Integers
from .row_case import RowCase, take_rows


@dataclass(frozen=True)
class SelectedKeys:
    """What tokens select.

    Args:
        positions: [rows, selected] positions in the sequence of the token's request; negative
            entries select nothing.
        most: positions that a token selects, if its sequence has as many.
        slots: Optional. [rows, selected] the slots that were read, -1 where nothing is selected. If
            None, they are not known.
    """

    positions: Tensor
    most: int
    slots: Tensor | None = None

    def take(self, rows: Tensor) -> "SelectedKeys":
        """Return the selections of some tokens, [rows] int64."""
        slots = None if self.slots is None else take_rows(self.slots, rows)
        return replace(self, positions=take_rows(self.positions, rows), slots=slots)


def check_selection(
    layer: str, selection: SelectedKeys, step: HostStep, tokens: Sequence[int]
) -> Corruption | None:
    """Return the first violation of some tokens' selections.

    Args:
        layer: name of the layer.
        selection: what the tokens select.
        step: the step.
        tokens: [rows] the new tokens.
    """
    positions = selection.positions.cpu().numpy()
    slots = None if selection.slots is None else selection.slots.cpu().numpy()
    for row, token in enumerate(tokens):
        read = None if slots is None else slots[row]
        finding = check_token(layer, positions[row], read, selection.most, step, token)
        if finding is not None:
            return finding
    return None


def check_token(
    layer: str,
    positions: Integers,
    slots: Integers | None,
    most: int,
    step: HostStep,
    token: int,
) -> Corruption | None:
    """Return the first violation of one token's selection; see `check_selection`.

    Args:
        positions, slots: [selected] those of the token.
    """
    own, row = step.position_of(token), step.row_of(token)
    named = positions[positions >= 0]
    visible = own + 1
    later = named[named > own]
    counts = np.unique(named, return_counts=True)
    found = ""
    if later.size:
        length = int(step.seq_lens[row])
        where = "after it" if later[0] < length else f"of a sequence of {length} tokens"
        found = f"selects position {later[0]}, {where}: expected at most {own}"
    elif (counts[1] > 1).any():
        twice = int(counts[1].argmax())
        found = f"selects position {counts[0][twice]} {counts[1][twice]} times: expected once"
    elif len(named) != min(most, visible):
        found = (
            f"selects {len(named)} of {visible} positions: expected"
            f" {min(most, visible)}"
        )
    elif slots is not None:
        found = _wrong_slot(positions, slots, step, row)
    if not found:
        return None
    evidence: dict[str, Any] = {
        "kind": "selection",
        "layer": layer,
        "token": token,
        "most": most,
        "positions": torch.from_numpy(positions.copy()),
        "slots": None if slots is None else torch.from_numpy(slots.copy()),
    }
    return Corruption(
        "selection", f"{layer}: position {own} {found}", row, evidence=evidence
    )


def _wrong_slot(positions: Integers, slots: Integers, step: HostStep, row: int) -> str:
    """Return which slot was read that is not that of its position; empty if there is none.

    A kernel may have moved the slots to the front of the row.
    """
    size, named = step.block_size, positions[positions >= 0]
    blocks = step.block_table[row, named // size].astype(np.int64)
    expected, read = blocks * size + named % size, slots[slots >= 0]
    if len(read) != len(expected):
        return f"reads {len(read)} slots: expected {len(expected)}, one per position"
    wrong = np.flatnonzero(read != expected)
    if not wrong.size:
        return ""
    first = int(wrong[0])
    block = int(read[first]) // size
    is_own = block in step.blocks_of(row).tolist()
    whose = "its request" if is_own else "no block of its request"
    return (
        f"reads slot {read[first]}, of {whose} (block {block}), for position {named[first]}:"
        f" expected slot {expected[first]}, in block {blocks[first]}"
    )


def recheck(evidence: dict[str, Any], step: HostStep) -> Corruption | None:
    """Return the violation of a stored selection; None if there is none."""
    slots = evidence["slots"]
    return check_token(
        evidence["layer"],
        evidence["positions"].numpy(),
        None if slots is None else slots.numpy(),
        evidence["most"],
        step,
        evidence["token"],
    )


def gather_selected(
    call: Any, selection: SelectedKeys, step: HostStep, tokens: Sequence[int]
) -> RowCase:
    """Return the case of some rows of sparse attention: each selected slot is a block of one.

    Args:
        call: a `RecordedCall`, whose queries and outputs are those of the tokens.
        selection: what the tokens select, which `check_selection` has accepted.
        step: the step.
        tokens: [rows] the new tokens.
    """
    device, size = call.query.device, step.block_size
    named = [row[row >= 0] for row in selection.positions.cpu().numpy()]
    blocks = [
        step.block_table[step.row_of(token), row // size]
        for token, row in zip(tokens, named, strict=True)
    ]
    block_ids = torch.from_numpy(np.concatenate(blocks).astype(np.int64)).to(device)
    offsets = torch.from_numpy(np.concatenate(named).astype(np.int64) % size).to(device)
    key, query = call.key_cache[block_ids, offsets][:, None], call.query
    form = find_latent_format(call.key_cache[:, :, 0])
    if form is None:
        value = call.value_cache[block_ids, offsets][:, None]
    else:
        numbers = torch.empty(len(key), form.width, device=device)
        index = torch.arange(len(key), dtype=torch.int32, device=device)
        ends = torch.tensor([0, len(key)], dtype=torch.int32, device=device)
        load_implementation("reference").gather_latent_cache(
            key[:, :, 0], numbers, index[None], ends
        )
        query, key = query.float(), numbers[:, None, None]
        value = key[..., : form.kv_lora_rank]
    lens = [len(row) for row in named]
    table = np.zeros((len(lens), max(lens)), dtype=np.int32)
    starts = np.cumsum([0, *lens])
    for row, length in enumerate(lens):
        table[row, :length] = np.arange(starts[row], starts[row] + length)
    return RowCase(
        layer=call.layer,
        query=query,
        output=call.output,
        key_blocks=key,
        value_blocks=value,
        block_table=torch.from_numpy(table).to(device),
        seq_lens=torch.tensor(lens, dtype=torch.int32).to(device),
        scale=call.scale,
        options=replace(call.options, causal=None),
        implementation=call.implementation,
    )
