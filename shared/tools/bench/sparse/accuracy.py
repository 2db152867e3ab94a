"""Accuracy checks of sparse attention, of the indexer's scores and of selections."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ....contract.indexer_cache import split_indexer_cache
from ..accuracy import ExpectedRows, Finding, choose_rows, find_expected
from .inputs import FP8, AnyInputs, IndexInputs, SelectInputs, SparseInputs


@dataclass(frozen=True)
class ExpectedSelection:
    """The expected selection of every token.

    Args:
        scores: [tokens, keys] float32.
        selected: Keys that a token selects at most.
    """

    scores: Tensor
    selected: int

    def check(self, out: Tensor, _dtype: torch.dtype) -> Finding:
        """Return whether positions [tokens, selected] have the largest scores, in any order.

        Of equal scores any are right. -1 is expected where fewer keys are
        visible.
        """
        tokens, keys = self.scores.shape
        if list(out.shape) != [tokens, self.selected]:
            return Finding(False, f"its output has shape {list(out.shape)}")
        found = out.long().sort(1).values
        wrong = (found < -1) | (found >= keys)
        wrong[:, 1:] |= (found[:, 1:] == found[:, :-1]) & (found[:, 1:] >= 0)
        if bool(wrong.any()):
            token, column = wrong.nonzero()[0].tolist()
            return Finding(
                False,
                f"row {token} has the position {int(found[token, column])}, which is outside"
                " or twice",
            )
        own = self.scores.gather(1, found.clamp(min=0))
        wrong = (own == -torch.inf) & (found >= 0)
        if bool(wrong.any()):
            token = int(wrong.any(1).nonzero()[0])
            return Finding(False, f"row {token} has a key that is not visible")
        own = own.masked_fill(found < 0, -torch.inf).sort(1, descending=True).values
        right = torch.full_like(own, -torch.inf)
        taken = min(self.selected, keys)
        right[:, :taken] = self.scores.topk(taken, dim=1).values
        wrong = own != right
        if bool(wrong.any()):
            token = int(wrong.any(1).nonzero()[0])
            return Finding(False, f"row {token} does not have the largest scores")
        return Finding(True)


Expected = ExpectedRows | ExpectedSelection


def find_any_expected(inputs: AnyInputs) -> Expected:
    """Return what is expected of a workload that is not a write."""
    if isinstance(inputs, SelectInputs):
        return ExpectedSelection(inputs.scores, inputs.workload.selected)
    if isinstance(inputs, IndexInputs):
        return expect_scores(inputs)
    if isinstance(inputs, SparseInputs):
        # the same by definition, and computed by another function than is timed
        return find_expected(inputs.paged)
    return find_expected(inputs)


def expect_scores(inputs: IndexInputs) -> ExpectedRows:
    """Return the scores of about twelve tokens, computed one by one in float64."""
    workload = inputs.workload
    rows = choose_rows(workload)
    codes, scales = split_indexer_cache(inputs.kv_cache)
    starts = torch.tensor([0, *workload.query_lens]).cumsum(0)
    parts: list[list[Tensor]] = [[], [], []]
    for token in rows:
        req = int(torch.searchsorted(starts, token, right=True)) - 1
        seen = workload.kv_lens[req] - int(starts[req + 1]) + token + 1
        blocks = inputs.block_table[req, : -(-seen // workload.block_size)].long()
        key = codes[blocks].view(FP8).flatten(0, 1)[:seen]
        scale = scales[blocks].flatten()[:seen]
        for part, dtype in zip(
            parts, (torch.float64, torch.float32, torch.float64), strict=True
        ):
            weights, query = inputs.weights[token].to(dtype), inputs.query[token]
            numbers = query.to(dtype), key.to(dtype)
            if part is parts[2]:
                # the sum of all absolute products
                weights, numbers = weights.abs(), (numbers[0].abs(), numbers[1].abs())
            products = numbers[0] @ numbers[1].T
            score = weights @ products.relu() * scale.to(dtype)
            row = score.new_full((1, 1, inputs.max_seq_len), -torch.inf)
            row[0, 0, :seen] = score
            part.append(row)
    exact, same_dtype, sizes = (torch.cat(part) for part in parts)
    return ExpectedRows(
        torch.tensor(rows, device=exact.device), exact, same_dtype, sizes
    )
