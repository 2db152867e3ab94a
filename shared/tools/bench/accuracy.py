"""Accuracy check: outputs are compared with the reference before anything is timed.

About twelve rows of each batch are compared with the reference in float64: rows spread over the
batch, and the last rows of requests spread over it, with the shortest and the longest request. Each
row has an error budget (`contract/budgets.py`). All other elements have to be finite. A cache write
is compared as a whole, bit for bit.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...contract.budgets import judge_rows
from ...contract.operations import load_implementation
from .coded_inputs import as_bytes, decode, encode
from .inputs import Inputs, fill_with_nan
from .workloads import Workload

ROWS = 6
"""Number of rows spread over the tokens, and again over the requests."""


@dataclass(frozen=True)
class Finding:
    """Accuracy of one output.

    Args:
        ok: Whether every row is within its budget.
        message: What is wrong. Empty if nothing is.
        share: The worst error as a share of its row's budget.
        error: Norm of the errors of all rows, divided by the norm of the expected rows.
    """

    ok: bool
    message: str = ""
    share: float = 0.0
    error: float = 0.0


@dataclass(frozen=True)
class ExpectedRows:
    """Expected values of some rows of the output.

    Args:
        rows: [rows] tokens.
        exact: [rows, query_heads, head_size] float64.
        same_dtype: [rows, query_heads, head_size] the result of plain torch in the dtype.
        sizes: [rows, query_heads, head_size] the same weighted average, of absolute values.
    """

    rows: Tensor
    exact: Tensor
    same_dtype: Tensor
    sizes: Tensor

    def check(self, out: Tensor, dtype: torch.dtype) -> Finding:
        """Return the accuracy of an output [tokens, query_heads, head_size]."""
        if out.shape[1:] != self.exact.shape[1:]:
            return Finding(False, f"its output has shape {list(out.shape)}")
        if not bool(torch.isfinite(out).all()):
            token = int((~torch.isfinite(out)).flatten(1).any(1).nonzero()[0])
            return Finding(False, f"row {token} was not written, or is not finite")
        found = out[self.rows]
        verdict = judge_rows(found, self.exact, self.same_dtype, dtype, self.sizes)
        error = float((found.double() - self.exact).norm() / self.exact.norm())
        row = int(self.rows[verdict.row])
        message = "" if verdict.ok else str(replace(verdict, row=row))
        return Finding(verdict.ok, message, verdict.worst, error)


def choose_rows(workload: Workload) -> list[int]:
    """Return about twelve tokens of a batch."""
    tokens, reqs = workload.tokens, len(workload.query_lens)
    last = torch.tensor(workload.query_lens).cumsum(0) - 1
    by_length = sorted(range(reqs), key=lambda req: workload.kv_lens[req])
    between = {(2 * turn + 1) * reqs // (2 * ROWS) for turn in range(ROWS)}
    chosen = {turn * (tokens - 1) // (ROWS - 1) for turn in range(ROWS)}
    for req in between | {by_length[0], by_length[-1]}:
        chosen.add(int(last[req]))
    return sorted(chosen)


def find_expected(inputs: Inputs) -> ExpectedRows:
    """Return the reference's values of about twelve rows, computed one by one."""
    rows = choose_rows(inputs.workload)
    found = [_attend_alone(inputs, row) for row in rows]
    exact, same_dtype, sizes = (
        torch.cat([row_values[part] for row_values in found]) for part in range(3)
    )
    return ExpectedRows(
        torch.tensor(rows, device=exact.device), exact, same_dtype, sizes
    )


def expect_all(inputs: Inputs) -> ExpectedRows:
    """Return the reference's values of all rows of a small paged batch."""
    workload = inputs.workload
    key, value = inputs.numbers(slice(None), torch.float32)
    reference = load_implementation("reference")

    def attend(values: Tensor, dtype: torch.dtype) -> Tensor:
        out: Tensor = reference.paged_attention(
            inputs.query.to(key.dtype),
            key,
            values,
            inputs.block_table,
            inputs.query_start_loc,
            inputs.seq_lens,
            inputs.max_query_len,
            inputs.max_seq_len,
            scale=workload.scale,
            out=torch.empty_like(inputs.fresh(), dtype=dtype),
            compute_dtype=dtype,
            options=inputs.options(),
        )
        return out

    return ExpectedRows(
        torch.arange(workload.tokens, device=inputs.device),
        attend(value, torch.float64),
        attend(value, workload.dtype),
        attend(value.abs(), torch.float64),
    )


def _attend_alone(inputs: Inputs, token: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return one row: in float64, in its own dtype, and the average of absolute values."""
    workload, device = inputs.workload, inputs.device
    starts = torch.tensor([0, *workload.query_lens]).cumsum(0)
    req = int(torch.searchsorted(starts, token, right=True)) - 1
    new, kv_len = workload.query_lens[req], workload.kv_lens[req]
    # in a request of its own, a token is the last one of its visible range
    visible = kv_len - new + token - int(starts[req]) + 1 if workload.causal else kv_len
    query = inputs.query[token : token + 1]
    one = torch.tensor([0, 1], dtype=torch.int32, device=device)
    reference = load_implementation("reference")
    if workload.kind == "encoder":
        begin, reach = int(starts[req]), workload.sliding_window or kv_len
        first = max(begin, token - reach + 1)
        last = min(begin + kv_len, token + reach)
        key, value = inputs.key[first:last], inputs.value[first:last]
        keys = last - first
        ends = torch.tensor([0, keys], dtype=torch.int32, device=device)

        def attend(values: Tensor, dtype: torch.dtype) -> Tensor:
            out = torch.empty_like(query, dtype=dtype)
            result: Tensor = reference.encoder_attention(
                query, key, values, one, ends, 1, keys, out=out, compute_dtype=dtype
            )
            return result

    else:
        blocks = -(-visible // workload.block_size)
        own = inputs.block_table[req, :blocks].long()
        key, value = inputs.numbers(own, torch.float32)
        table = torch.arange(blocks, dtype=torch.int32, device=device)[None]
        length = torch.tensor([visible], dtype=torch.int32, device=device)

        def attend(values: Tensor, dtype: torch.dtype) -> Tensor:
            out = query.new_empty(*query.shape[:2], workload.value_size, dtype=dtype)
            result: Tensor = reference.paged_attention(
                query.to(key.dtype),
                key,
                values,
                table,
                one,
                length,
                1,
                visible,
                scale=workload.scale,
                out=out,
                compute_dtype=dtype,
                options=inputs.options(),
            )
            return result

    return (
        attend(value, torch.float64),
        attend(value, workload.dtype),
        attend(value.abs(), torch.float64),
    )


def check_write(inputs: Inputs) -> Finding:
    """Return whether all bytes of the caches, which held NaN before the write, are right.

    If codes or scales of written slots alone are others, the finding has an error: that of the
    numbers that they mean.
    """
    caches = (inputs.key_cache, inputs.value_cache)
    scales = (inputs.k_scale, inputs.v_scale)
    given = zip(
        ("key", "value"), (inputs.key, inputs.value), caches, scales, strict=True
    )
    message, errors = "", list[float]()
    for name, new, cache, scale in given:
        right = [(new.to(cache.dtype), cache)]
        if scale is not None:
            form = inputs.workload.form
            assert form is not None
            shape = (len(new), 1, *cache.shape[2:])
            made = torch.zeros(shape, dtype=torch.uint8, device=new.device)
            made = made.view(cache.dtype)
            measured = form.empty_scales(made)
            encode(form, new[:, None], made, measured)
            right = [(made[:, 0], cache), (measured[:, 0], scale)]
        is_off = False
        for stored, found in right:
            expected = torch.empty(found.shape, dtype=found.dtype, device=found.device)
            fill_with_nan(expected)
            slots = as_bytes(expected).flatten(0, 1)
            slots[inputs.slot_mapping] = as_bytes(stored.contiguous())
            wrong = as_bytes(expected) != as_bytes(found.contiguous())
            wrong = wrong.flatten(2).any(2).flatten()  # [slots]
            if not wrong.any():
                continue
            message = message or f"{name} at slot {int(wrong.nonzero()[0])} is wrong"
            is_off = True
            wrong[inputs.slot_mapping] = False
            if scale is None or bool(wrong.any()):
                return Finding(False, message)
        if is_off and scale is not None:
            at = inputs.slot_mapping
            codes, of_codes = (
                as_bytes(part.contiguous()).flatten(0, 1)[at].view(part.dtype)
                for part in (cache, scale)
            )
            meant = decode(right[0][0][:, None], right[1][0][:, None], torch.float32)
            is_meant = decode(codes[:, None], of_codes[:, None], torch.float32)
            errors.append(float((is_meant - meant).norm() / meant.norm()))
    return Finding(
        not message, message, error=float(torch.tensor([0.0, *errors]).max())
    )
