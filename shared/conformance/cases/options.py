"""Calls of attention with any options, as tensors.

choice_calls.py makes them from a choice of options, with poison (NaN, ids out of range) in
everything that must not be read. The value of an option is drawn by its file in
`validation/options`.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...contract.attention_options import pack_options
from ...contract.cache_formats import find_format, head_size_of
from ...contract.operations import Implementation
from ...validation.option import Drawing
from ...validation.options import OPTIONS as OPTION_FILES
from ...validation.options.alibi_slopes import slopes as slopes
from ...validation.options.position_bias import bias_table as bias_table
from ..oracles.brute_force import (
    Answer,
    Flip,
    OracleRequest,
    attend_by_hand,
    judge_log_sum_exp,
    judge_out,
    quantise_by_hand,
)
from ..oracles.cache_formats import decode_by_hand
from .batches import NAN, BatchPlan, build, put_on
from .forms import laid_out
from .option_pairs import Choice

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


@dataclass(frozen=True)
class Call:
    """One call of an attention operation, and its lengths and block ids on the host.

    Args:
        operation: The name of the operation.
        arguments: All arguments by name, including options, without `out` and `lse`.
        dtype: Element type of the queries.
        out_dtype: Optional. Element type of the output tensor that is passed. If None, no output
            is passed.
        wants_lse: Whether a tensor for the log-sum-exp is passed.
        query_lens, key_lens: Queries and keys of each request.
        rows: The block ids of each request. Empty if the keys are not in blocks.
        out_form: Optional. How the output that is passed is stored, one of `forms.FORMS`. If None,
            it is packed.
    """

    operation: str
    arguments: dict[str, Any]
    dtype: torch.dtype
    out_dtype: torch.dtype | None
    wants_lse: bool
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    rows: list[list[int]]
    out_form: str | None = None

    @property
    def query(self) -> Tensor:
        tensor: Tensor = self.arguments["query"]
        return tensor

    @property
    def keywords(self) -> dict[str, Any]:
        """The arguments of the operation, with all options in one object."""
        return pack_options(**self.arguments)

    def changed(self, **changes: Any) -> "Call":
        """Return the call with other arguments, moved to its device.

        An argument that is None is removed. A tensor on "meta" is not moved: it represents a
        tensor on another device.
        """
        given = {name: v for name, v in self.arguments.items() if name not in changes}
        for name, value in changes.items():
            if isinstance(value, Tensor) and value.device.type != "meta":
                given[name] = put_on(value, self.query.device)
            elif value is not None:
                given[name] = value
        return replace(self, arguments=given)

    def new_out(self) -> Tensor | None:
        """Return an output tensor full of NaN in the form of the call; None if none is passed."""
        if self.out_dtype is None:
            return None
        tokens, heads, _ = self.query.shape
        values = self.arguments.get("value_cache", self.arguments.get("value"))
        assert values is not None
        out = torch.full(
            (tokens, heads, head_size_of(values)),
            NAN,
            dtype=self.out_dtype,
            device=self.query.device,
        )
        return out if self.out_form is None else laid_out(out, self.out_form)

    def run(self, twin: Implementation) -> tuple[Tensor, Tensor | None]:
        """Return output and log-sum-exp of one twin; tensors that are passed are full of NaN."""
        return self.run_into(twin, self.out_dtype, self.wants_lse)

    def run_into(
        self,
        twin: Implementation,
        out_dtype: torch.dtype | None,
        wants_lse: bool,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None]:
        tokens, heads, _ = self.query.shape
        name = "value_cache" if "value_cache" in self.arguments else "value"
        values = self.arguments[name]
        given: dict[str, Any] = {}
        if out_dtype is not None:
            given["out"] = torch.full(
                (tokens, heads, head_size_of(values)),
                NAN,
                dtype=out_dtype,
                device=self.query.device,
            )
        if wants_lse:
            given["lse"] = torch.full((heads, tokens), NAN, device=self.query.device)
        operation = getattr(twin, self.operation)
        out = operation(**pack_options(**self.arguments, **given, **more))
        assert given.get("out", out) is out
        return out, given.get("lse")

    def requests(self) -> list[OracleRequest]:
        """Return queries, keys and values of each request on the host, as stored.

        Those of a format with a scale per token are the numbers that they stand for.
        """
        queries = torch.split(
            self.query.cpu()[: sum(self.query_lens)], list(self.query_lens)
        )
        if "key" in self.arguments:
            pair = [self.arguments[name].cpu() for name in ("key", "value")]
            found = [
                [
                    side[: sum(self.key_lens)].split(list(self.key_lens))[req]
                    for side in pair
                ]
                for req in range(len(self.key_lens))
            ]
            return [OracleRequest(q, *kv) for q, kv in zip(queries, found, strict=True)]
        pair = [self.arguments[name].cpu() for name in ("key_cache", "value_cache")]
        scales = [self.arguments.get(name) for name in ("k_scale", "v_scale")]
        form = find_format(pair[0].dtype, scales[0])
        if form.is_measured:
            names = ("k_global_scale", "v_global_scale")
            factors = [self.arguments.get(name) for name in names]
            pair = [
                decode_by_hand(form, *half)
                for half in zip(pair, scales, factors, strict=True)
            ]
            # they are multiplied already
            pair += [torch.ones(side.shape[:3]) for side in pair]
        block_size = pair[0].shape[1]
        requests = []
        for query, key_len, row in zip(queries, self.key_lens, self.rows, strict=True):
            blocks = [row[position // block_size] for position in range(key_len)]
            offsets = [position % block_size for position in range(key_len)]
            requests.append(
                OracleRequest(query, *(side[blocks, offsets] for side in pair))
            )
        return requests

    def answer(
        self, flip: Flip = lambda req, own, key: False, **changes: Any
    ) -> Answer:
        """Return the exact result, optionally with other options."""
        options = {"causal": self.operation == "paged_attention"}
        options |= self.arguments | changes
        requests = self.requests()
        if not requests:  # an empty batch: only the shapes are known
            given = self.arguments
            keys = given["key_cache"][0] if "key_cache" in given else given["key"]
            values = (
                given["value_cache"][0] if "value_cache" in given else given["value"]
            )
            empty = (
                tensor.new_empty(0, tensor.shape[1], head_size_of(tensor), device="cpu")
                for tensor in (self.query, keys, values)
            )
            requests = [OracleRequest(*empty)]
        return attend_by_hand(requests, options, len(self.query), flip)

    def judge(self, out: Tensor, answer: Answer, reference: Implementation) -> Any:
        """Return the comparison of an output with the exact result."""
        plain = self.changed(out_scale=None)
        same, _ = plain.run_into(reference, None, False, compute_dtype=self.dtype)
        return judge_out(out, answer, same, self.dtype, self.arguments.get("out_scale"))

    def assert_right(
        self, out: Tensor, lse: Tensor | None, reference: Implementation
    ) -> Answer:
        """Assert that a result is within its error budgets, and return the exact result."""
        answer = self.answer()
        verdict = self.judge(out, answer, reference)
        assert verdict.ok, verdict
        if lse is not None:
            share = judge_log_sum_exp(lse, answer)
            assert share <= 1, f"log-sum-exp: {share:.2f} of its budget"
        return answer


def starts_of(lens: Iterable[int], device: torch.device) -> Tensor:
    """Return [reqs + 1] the first row of each request, and the total."""
    starts = [0]
    for length in lens:
        starts.append(starts[-1] + length)
    return torch.tensor(starts, dtype=torch.int32, device=device)


def stored_as(tensor: Tensor, scale: Tensor | float, dtype: torch.dtype) -> Tensor:
    """Return the numbers as a cache of that dtype stores them."""
    if dtype not in (DTYPES["e4m3"], DTYPES["e5m2"]):
        return tensor.to(dtype)
    scale = scale.cpu() if isinstance(scale, Tensor) else scale
    return quantise_by_hand(tensor, scale, dtype)


def make_options(choice: Choice, drawing: Drawing) -> dict[str, Any]:
    """Return the options of a choice by name, without those at their first value."""
    made: dict[str, Any] = {}
    for name, option in OPTION_FILES.items():
        if name == "causal" or choice[name] != option.values[0]:
            made[name] = option.draw(choice[name], drawing)
    return made


def paged_call(
    plan: BatchPlan,
    device: torch.device,
    needles: Iterable[tuple[int, int]] = (),
    **options: Any,
) -> Call:
    """Return a call of paged attention on a plan's batch, with options and needles.

    `needles` are (request, key) pairs. All queries have a component along the needles, so that
    nearly all attention weight of a query is on the needles in its visible range.
    """
    batch = build(plan, device)
    needles = list(needles)
    if needles:
        scale = plan.head_size**-0.5 if plan.scale is None else plan.scale
        generator = torch.Generator().manual_seed(plan.seed)
        lean = torch.randn(plan.kv_heads, plan.head_size, generator=generator)
        lean = torch.nn.functional.normalize(lean, dim=1).to(device)
        live = batch.query[: batch.tokens].float()
        leaning = 0.25 * live + 2 * lean.repeat_interleave(plan.group, 0)
        batch.query[: batch.tokens] = leaning.to(plan.dtype)
        for req, key in needles:
            block_id = batch.rows[req][key // plan.block_size]
            batch.key_cache[block_id, key % plan.block_size] = (12 / scale * lean).to(
                plan.dtype
            )
            batch.value_cache[block_id, key % plan.block_size] += 3
    call = Call(
        operation="paged_attention",
        arguments={"causal": True} | batch.arguments(),
        dtype=plan.dtype,
        out_dtype=plan.dtype,
        wants_lse=True,
        query_lens=plan.query_lens,
        key_lens=plan.kv_lens,
        rows=batch.rows,
    )
    return call.changed(**options)


def ragged_call(call: Call) -> Call:
    """Return a paged call as a call of encoder_attention, with the keys in a ragged tensor."""
    requests = call.requests()
    paged = ("key_cache", "value_cache", "block_table", "seq_lens", "max_seq_len")
    no_keys, no_values = (call.arguments[name][0, :0].cpu() for name in paged[:2])
    return replace(
        call.changed(
            **dict.fromkeys(paged),
            key=torch.cat([no_keys, *(request.key for request in requests)]),
            value=torch.cat([no_values, *(request.value for request in requests)]),
            key_start_loc=starts_of(call.key_lens, call.query.device),
            max_key_len=max(call.key_lens, default=0),
        ),
        operation="encoder_attention",
        rows=[],
    )


def quantised_call(
    call: Call, dtype: torch.dtype, k_scale: Tensor | float, v_scale: Tensor | float
) -> Call:
    """Return a paged call whose cache holds the same numbers in FP8."""
    caches = {
        name: stored_as(call.arguments[name].cpu(), scale, dtype)
        for name, scale in (("key_cache", k_scale), ("value_cache", v_scale))
    }
    return call.changed(**caches, k_scale=k_scale, v_scale=v_scale)


def tree_of(parents: list[int | None], width: int | None = None) -> Tensor:
    """Return [width, width] the tree mask of new tokens, from the parent of each."""
    width = len(parents) if width is None else width
    mask = torch.zeros(width, width, dtype=torch.bool)
    for token, parent in enumerate(parents):
        if parent is not None:
            mask[token] = mask[parent]
        mask[token, token] = True
    return mask
