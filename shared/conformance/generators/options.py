"""Calls with options of attention: choices that cover all pairs of values, and random ones.

OPTIONS names all properties in which calls differ, and the values that the tests draw. The value of
an option is drawn by its file in `validation/options`. A choice gives each option one value. DESIGN
is a list of choices that contains every pair of values at least once, except the pairs in REFUSED,
which are invalid and raise. `build_call` turns a choice into tensors, with poison (NaN, ids out of
range) in everything that must not be read.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from ...contract.attention_options import pack_options
from ...contract.operations import Implementation
from ...validation.options import OPTIONS as OPTION_FILES
from ...validation.options import Drawing, Option
from ...validation.options.alibi import slopes as slopes
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
from .batches import (
    GARBAGE,
    LAYOUTS,
    NAN,
    TABLES,
    BatchPlan,
    build,
    draw_rows,
    empty_cache,
    heads_of,
)

Choice = dict[str, str]
"""One value for each option."""


@dataclass(frozen=True)
class Axis:
    """A property in which calls differ, besides the options.

    Args:
        values: Names of the values that the tests draw. The first one is the plain one.
        meaning: Its meaning in a few words.
        default: Its value in calls that do not set it, in a few words.
    """

    values: tuple[str, ...]
    meaning: str
    default: str


DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
OPTIONS: dict[str, Axis | Option] = {
    "operation": Axis(
        ("paged_attention", "encoder_attention"),
        "keys in pages, or one after another",
        "-",
    ),
    "causal": OPTION_FILES["causal"],
    "batch": Axis(
        ("mixed", "prefill", "decode", "verification"),
        "whole prompts, single tokens, a few drafts, or all of it",
        "-",
    ),
    "sliding_window": OPTION_FILES["sliding_window"],
    "attention_chunk_size": OPTION_FILES["attention_chunk_size"],
    "tree_mask": OPTION_FILES["tree_mask"],
    "query_ranges": OPTION_FILES["query_ranges"],
    "logits_soft_cap": OPTION_FILES["logits_soft_cap"],
    "alibi_slopes": OPTION_FILES["alibi_slopes"],
    "position_bias": OPTION_FILES["position_bias"],
    "sinks": OPTION_FILES["sinks"],
    "cache": Axis(
        ("as the query", "e4m3", "e5m2"), "dtype of keys and values", "as the query"
    ),
    "scales": Axis(
        ("none", "numbers", "one element", "each head"),
        "`k_scale`, `v_scale`: what an FP8 cache's numbers stand for",
        "none",
    ),
    "dtype": Axis(("float32", "float16", "bfloat16"), "dtype of the queries", "-"),
    "out": Axis(
        ("given", "made", "e4m3", "e5m2"),
        "the output: given, made, or in FP8 with an `out_scale`",
        "made",
    ),
    "batch_invariant": OPTION_FILES["batch_invariant"],
    "lse": Axis(("given", "none"), "the log-sum-exp is wanted", "none"),
    "value_head_size": Axis(
        ("as the keys", "other"), "elements of a value", "as the keys"
    ),
    "layout": Axis(LAYOUTS, "strides of keys and values", "any"),
    "block_size": Axis(("16", "1", "3", "24"), "slots in a block", "any"),
    "group": Axis(("2", "1", "3", "8"), "query heads that share a kv head", "any"),
    "head_size": Axis(("16", "1", "24", "80"), "elements of a head", "any"),
    "query": Axis(("fused", "apart"), "a slice of a projection, or packed", "any"),
    "scale": Axis(("none", "0.3"), "what scores are multiplied with", "1/sqrt(size)"),
}
"""All axes and options, in the order of the tables in the documentation."""
PLAIN: Choice = {name: option.values[0] for name, option in OPTIONS.items()}


@dataclass(frozen=True)
class RefusedPair:
    """Two options with values that cannot be combined.

    Args:
        one, other: Each an option and some of its values. No value of one can be combined with any
            value of the other.
        reason: The reason.
        words: A part of the error message.
    """

    one: tuple[str, tuple[str, ...]]
    other: tuple[str, tuple[str, ...]]
    reason: str
    words: str

    def pairs(self) -> Iterator[tuple[tuple[str, str], tuple[str, str]]]:
        for a in self.one[1]:
            for b in self.other[1]:
                yield (self.one[0], a), (self.other[0], b)


def _on(name: str) -> tuple[str, tuple[str, ...]]:
    return name, OPTIONS[name].values[1:]


ENCODER = ("operation", ("encoder_attention",))
CROSS = ("causal", ("cross",))
MORE_QUERIES = "more queries than keys have no positions among them to count from"
REFUSED = (
    RefusedPair(
        ENCODER,
        _on("tree_mask"),
        "trees grow behind a cached context",
        "tree_mask is given: expected None, since the keys and values are not read",
    ),
    RefusedPair(
        ENCODER,
        _on("cache"),
        "what is not cached is not quantised",
        "expected torch.float16 or torch.bfloat16 or torch.float32",
    ),
    RefusedPair(
        ENCODER,
        _on("scales"),
        "what is not cached is not quantised",
        "k_scale is given: expected None, since the keys and values are not read",
    ),
    RefusedPair(
        ENCODER,
        _on("block_size"),
        "there are no blocks without a cache",
        "unexpected keyword argument 'block_table'",
    ),
    RefusedPair(
        ("tree_mask", ("tree",)),
        _on("causal"),
        "the mask says what is seen",
        "tree_mask is given beside causal",
    ),
    *(
        RefusedPair(
            CROSS, _on(name), MORE_QUERIES, f"{name} is given: expected at most as many"
        )
        for name in (
            "sliding_window",
            "attention_chunk_size",
            "query_ranges",
            "alibi_slopes",
            "position_bias",
        )
    ),
    RefusedPair(
        ("cache", ("as the query",)),
        _on("scales"),
        "only FP8 numbers have scales",
        "k_scale is given but the cache is",
    ),
    RefusedPair(
        ("scales", ("none",)),
        _on("cache"),
        "FP8 numbers mean nothing without scales",
        "k_scale = None: expected a scale",
    ),
)
_FORBIDDEN = {
    pair for refused in REFUSED for a, b in refused.pairs() for pair in ((a, b), (b, a))
}

Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs_of(choice: Choice) -> set[Pair]:
    """Return all pairs of values of a choice."""
    return set(combinations(choice.items(), 2))


def all_pairs() -> set[Pair]:
    """Return all valid pairs of values."""
    return {
        ((name, value), (other, its))
        for name, other in combinations(OPTIONS, 2)
        for value in OPTIONS[name].values
        for its in OPTIONS[other].values
        if ((name, value), (other, its)) not in _FORBIDDEN
    }


def allowed(choice: Choice, name: str) -> list[str]:
    """Return the values of an option that are valid together with those of a choice."""
    return [
        value
        for value in OPTIONS[name].values
        if not any(((name, value), beside) in _FORBIDDEN for beside in choice.items())
    ]


def draw_choice(pick: Random, start: Iterable[tuple[str, str]] = ()) -> Choice:
    """Return a random choice in the order of OPTIONS that contains the given values."""
    while True:
        choice = dict(start)
        for name in pick.sample(list(OPTIONS), len(OPTIONS)):
            values = [choice[name]] if name in choice else allowed(choice, name)
            if not values:
                break
            choice[name] = pick.choice(values)
        else:
            return {name: choice[name] for name in OPTIONS}


def cover_pairs(candidates: int = 60) -> list[Choice]:
    """Return choices that contain every valid pair, each the best of some random candidates.

    Every choice starts from a pair that is still missing, so that the search ends.
    """
    pick = Random(0)
    missing = all_pairs()
    design: list[Choice] = []
    while missing:
        first = min(missing)
        drawn = [draw_choice(pick, first) for _ in range(candidates)]
        best = max(drawn, key=lambda choice: len(pairs_of(choice) & missing))
        missing -= pairs_of(best)
        design.append(best)
    return design


@st.composite
def choices(draw: st.DrawFn) -> tuple[Choice, int]:
    """Draw any valid choice, and a seed for its batch."""
    seed = draw(st.integers(0, 2**20))
    return draw_choice(Random(seed)), seed


DESIGN = cover_pairs()


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
    """

    operation: str
    arguments: dict[str, Any]
    dtype: torch.dtype
    out_dtype: torch.dtype | None
    wants_lse: bool
    query_lens: tuple[int, ...]
    key_lens: tuple[int, ...]
    rows: list[list[int]]

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
                given[name] = value.to(self.query.device)
            elif value is not None:
                given[name] = value
        return replace(self, arguments=given)

    def run(self, twin: Implementation) -> tuple[Tensor, Tensor | None]:
        """Return output and log-sum-exp of one twin; tensors that are passed are full of NaN."""
        return self.run_into(twin, self.out_dtype, self.wants_lse)

    def run_both(self, twin: Implementation) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp, both passed as tensors."""
        out, lse = self.run_into(twin, self.out_dtype or self.dtype, True)
        assert lse is not None
        return out, lse

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
                (tokens, heads, values.shape[-1]),
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
        """Return queries, keys and values of each request on the host, as stored."""
        queries = torch.split(
            self.query.cpu()[: sum(self.query_lens)], list(self.query_lens)
        )
        if "key" in self.arguments:
            pair = [self.arguments[name].cpu() for name in ("key", "value")]
            found = [
                [
                    each[: sum(self.key_lens)].split(list(self.key_lens))[req]
                    for each in pair
                ]
                for req in range(len(self.key_lens))
            ]
            return [OracleRequest(q, *kv) for q, kv in zip(queries, found, strict=True)]
        pair = [self.arguments[name].cpu() for name in ("key_cache", "value_cache")]
        block_size = pair[0].shape[1]
        requests = []
        for question, key_len, row in zip(
            queries, self.key_lens, self.rows, strict=True
        ):
            blocks = [row[place // block_size] for place in range(key_len)]
            offsets = [place % block_size for place in range(key_len)]
            requests.append(
                OracleRequest(question, *(each[blocks, offsets] for each in pair))
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
            empty = (each.cpu()[:0] for each in (self.query, keys, values))
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


def draw_lens(
    pick: Random, batch: str, crosses: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the queries and keys of each request, below and above one chunk or tile."""
    prefill = pick.choice([(5, 5), (20, 20), (33, 33), (1, 1)])
    decode = (1, pick.choice([1, 2, 16, 17, 33, 64, 65, 90]))
    chunk = (7, pick.choice([7, 31, 45, 70]))
    drafts = (pick.randint(2, 5), pick.choice([5, 16, 40, 66]))
    lens = {
        "mixed": [decode, prefill, (0, pick.choice([0, 9])), chunk],
        "prefill": [prefill, (pick.choice([3, 12]),) * 2],
        "decode": [decode, (1, pick.randint(1, 50)), (1, pick.randint(1, 50))],
        "verification": [drafts, (3, pick.randint(3, 50)), (1, 20)],
    }[batch]
    if crosses:
        # any lengths, including an encoder without tokens
        few = [0, pick.choice([1, 3, 33]), pick.choice([0, 2, 17]), 1]
        lens = [
            (query_len, few[req] if req < 3 else key_len)
            for req, (query_len, key_len) in enumerate(lens)
        ]
    pick.shuffle(lens)
    return tuple(one for one, _ in lens), tuple(other for _, other in lens)


def build_call(choice: Choice, seed: int, device: torch.device) -> Call:
    """Return a call with every option as chosen, on a batch drawn from the seed.

    About half of the requests hold a needle: a key that outweighs all others of its sequence.
    Choices with an invalid pair are built as well.
    """
    pick = Random(f"options {seed}")
    generator = torch.Generator().manual_seed(seed)
    query_lens, key_lens = draw_lens(pick, choice["batch"], choice["causal"] == "cross")
    reqs, tokens = len(query_lens), sum(query_lens)
    kv_heads, group = pick.choice([1, 2]), int(choice["group"])
    heads, size = kv_heads * group, int(choice["head_size"])
    value_size = {"as the keys": size, "other": size + 5}[choice["value_head_size"]]
    dtype = DTYPES[choice["dtype"]]
    stored = dtype if choice["cache"] == "as the query" else DTYPES[choice["cache"]]
    scale = None if choice["scale"] == "none" else float(choice["scale"])

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    arguments: dict[str, Any] = {} if scale is None else {"scale": scale}
    scales: list[Tensor | float] = [1.0, 1.0]
    if choice["scales"] != "none":
        scales = [
            torch.tensor(base, device=device).reshape(shape)
            for base, shape in ((0.11, []), (0.023, [1]))
        ]
        if choice["scales"] == "numbers":
            scales = [0.11, 0.023]
        if choice["scales"] == "each head":
            steps = torch.arange(1.0, kv_heads + 1, device=device)
            scales = [0.11 * steps, 0.023 / steps]
        arguments |= {"k_scale": scales[0], "v_scale": scales[1]}

    # step: draw queries, keys and values, with needles among the keys
    padding = pick.choice([0, 0, 2])
    lean = torch.nn.functional.normalize(random(kv_heads, size), dim=1)
    questions = random(tokens, heads, size)
    keys = [random(count, kv_heads, size) for count in key_lens]
    values = [random(count, kv_heads, value_size) for count in key_lens]
    factor = size**-0.5 if scale is None else scale
    for req in range(reqs):
        if not key_lens[req] or pick.random() < 0.5:
            continue
        own = slice(sum(query_lens[:req]), sum(query_lens[: req + 1]))
        questions[own] = 0.25 * questions[own] + 2 * lean.repeat_interleave(group, 0)
        last = key_lens[req] - 1
        places = [0, last, last - query_lens[req] + 1, last - 6, last - 7, last - 32]
        places += [last // 8 * 8, last // 33 * 33, last // 32 * 32]
        place = min(max(0, pick.choice(places)), last)
        keys[req][place] = 12 / factor * lean
        values[req][place] += 3

    # step: store them in the chosen layout
    wide = heads * size + (24 if choice["query"] == "fused" else 0)
    query = torch.full((tokens + padding, wide), NAN, dtype=dtype, device=device)
    query = heads_of(query[:, : heads * size], heads)
    query[:tokens] = questions.to(dtype).to(device)
    arguments |= {
        "query": query,
        "query_start_loc": starts_of(query_lens, device),
        "max_query_len": max(query_lens) + pick.choice([0, 3]),
    }
    sizes, block_size = (size, value_size), int(choice["block_size"])
    rows: list[list[int]] = []
    if choice["operation"] == "encoder_attention":
        count = sum(key_lens) + padding
        key, value = (
            empty_cache(choice["layout"], 1, count, kv_heads, each, stored, device)[
                half
            ][0]
            for half, each in enumerate(sizes)
        )
        if sum(key_lens):
            for tensor, drawn, its in (
                (key, keys, scales[0]),
                (value, values, scales[1]),
            ):
                tensor[: sum(key_lens)] = stored_as(torch.cat(drawn), its, stored)
        arguments |= {
            "key": key,
            "value": value,
            "key_start_loc": starts_of(key_lens, device),
            "max_key_len": max(key_lens) + pick.choice([0, 3]),
        }
        if block_size != 16:
            arguments["block_table"] = None
    else:
        counts = [-(-key_len // block_size) for key_len in key_lens]
        rows, num_blocks = draw_rows(counts, pick.choice(TABLES), generator)
        max_blocks = max(counts) + pick.choice([0, 1])
        table = torch.tensor(GARBAGE, dtype=torch.int32).repeat(reqs, max_blocks)
        table = table[:, :max_blocks].contiguous()
        caches = [
            empty_cache(
                choice["layout"], num_blocks, block_size, kv_heads, each, stored, device
            )[half]
            for half, each in enumerate(sizes)
        ]
        for req, row in enumerate(rows):
            table[req, : len(row)] = torch.tensor(row, dtype=torch.int32)
            for cache, drawn, its in zip(caches, (keys, values), scales, strict=True):
                numbers = stored_as(drawn[req], its, stored)
                for start in range(0, key_lens[req], block_size):
                    part = numbers[start : start + block_size]
                    cache[row[start // block_size], : len(part)] = part
        longest = max_blocks * block_size
        arguments |= {
            "key_cache": caches[0],
            "value_cache": caches[1],
            "block_table": table.to(device),
            "seq_lens": torch.tensor(key_lens, dtype=torch.int32, device=device),
            "max_seq_len": min(max(key_lens) + pick.choice([0, 3]), longest),
        }

    # step: make the options
    drawing = Drawing(pick, query_lens, key_lens, heads, padding, device)
    arguments |= make_options(choice, drawing)
    out_dtype = {"given": dtype, "made": None}.get(
        choice["out"], DTYPES.get(choice["out"])
    )
    if out_dtype not in (None, dtype):
        number = pick.choice([0.01, 0.05])
        arguments["out_scale"] = pick.choice(
            [number, torch.tensor(number).to(device), torch.tensor([number]).to(device)]
        )
    return Call(
        operation=choice["operation"],
        arguments=arguments,
        dtype=dtype,
        out_dtype=out_dtype,
        wants_lse=choice["lse"] == "given",
        query_lens=query_lens,
        key_lens=key_lens,
        rows=rows,
    )


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
    return replace(
        call.changed(
            **dict.fromkeys(paged),
            key=torch.cat([request.key for request in requests]),
            value=torch.cat([request.value for request in requests]),
            key_start_loc=starts_of(call.key_lens, call.query.device),
            max_key_len=max(call.key_lens),
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
