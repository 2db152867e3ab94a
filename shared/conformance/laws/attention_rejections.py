"""Laws of invalid attention calls: they raise, and nothing is written before they do.

Errors in the contents of tensors are raised if PAGETWIN_CHECK_VALUES=1, which the laws set: on a
GPU the check costs time and cannot be part of a graph.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...contract.attention_options import pack_options
from ..candidates.calls.calling import declared, expect_right, run_call
from ..candidates.fitting import fit_case
from ..candidates.setting import Setting
from ..cases.batches import NAN, BatchPlan
from ..cases.options import Call, bias_table, paged_call, quantised_call, ragged_call
from ..checks.canaries import copy_of, expect_memory, kept
from ..checks.expect import Disagreement, expect_rejection
from .law import law

Changes = dict[str, Any]
Change = Callable[[Call], Changes]
"""What makes a call invalid: changed arguments, or changed `out` and `lse`."""

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TREE = torch.ones(2, 4, 4, dtype=torch.bool).tril()


def ints(*numbers: int) -> Tensor:
    """Return int32 numbers."""
    return torch.tensor(numbers, dtype=torch.int32)


def cache_of(call: Call, name: str = "key_cache") -> Tensor:
    """Return a cache of a call."""
    cache: Tensor = call.arguments[name]
    return cache


def out_of(call: Call, more: int = 0) -> Tensor:
    """Return an output for a call, with `more` extra elements per head."""
    tokens, heads, size = call.query.shape
    return torch.zeros(tokens, heads, size + more, dtype=call.dtype)


def lse_of(call: Call) -> Tensor:
    """Return a log-sum-exp for a call."""
    tokens, heads, _ = call.query.shape
    return torch.zeros(heads, tokens)


def queries_as_output(call: Call) -> Changes:
    """Return queries that are the output too."""
    query = call.query.clone()
    return {"query": query, "out": query}


def results_in_one_place(call: Call) -> Changes:
    """Return an output whose first numbers are the log-sum-exp's too."""
    tokens, heads, _ = call.query.shape
    out = torch.zeros(call.query.shape)
    return {"out": out, "lse": out.view(-1)[: heads * tokens].view(heads, tokens)}


def output_in(call: Call, name: str) -> Changes:
    """Return an output in the memory of a cache, and that cache."""
    cache = cache_of(call, name).clone().contiguous()
    size = call.query.numel()
    memory = torch.cat([cache.flatten(), cache.new_zeros(size)])
    start = cache.numel() - 1
    return {
        name: memory[: cache.numel()].view(cache.shape),
        "out": memory[start : start + size].view(call.query.shape),
    }


def ranges_of(call: Call, numbers: int = 2) -> Tensor:
    """Return query ranges for a call; they are valid if `numbers` is 2."""
    return torch.zeros(len(call.query), numbers, dtype=torch.int32)


def narrowed(tensor: Tensor) -> Tensor:
    """Return the tensor in another 16-bit dtype."""
    is_half = tensor.dtype == torch.float16
    return tensor.to(torch.bfloat16 if is_half else torch.float16)


INF = float("inf")
SCALARS: dict[str, Change] = {
    f"{name} = {number}": lambda call, name=name, number=number: {name: number}  # type: ignore[misc]
    for name, numbers in (
        ("scale", (INF, -INF, NAN, 1e39, -1e39, 1e-40, -1e-50)),
        ("logits_soft_cap", (INF, -INF, NAN, 0.0, -2.0, 1e39, 1e-40, 1e-50)),
    )
    for number in numbers
}
"""Numbers that float32 does not have, and those without a meaning."""
PER_HEAD: dict[str, Change] = {
    f"{number} in {name}": lambda call, name=name, number=number: {  # type: ignore[misc]
        name: with_number(OF_HEADS[name](), number)
    }
    for name, numbers in (
        ("sinks", (INF, NAN, 3e38, -3e38)),
        ("position_bias", (INF, 3e38, -3e38)),
        ("alibi_slopes", (INF, -INF, NAN, 1e30, -1e30)),
    )
    for number in numbers
}
"""Numbers with which a score is not finite, but for -inf: that takes no weight."""
OF_HEADS: dict[str, Callable[[], Tensor]] = {
    "sinks": lambda: torch.ones(4),
    "alibi_slopes": lambda: torch.ones(4),
    "position_bias": lambda: bias_table(4),
}


def with_number(numbers: Tensor, number: float) -> Tensor:
    """Return the tensor with another number in its middle."""
    changed = numbers.clone().contiguous()
    changed.view(-1)[numbers.numel() // 2] = number
    return changed


SHAPES: dict[str, Change] = {
    "queries of two axes": lambda call: {"query": call.query[:, 0]},
    "queries of another size": lambda call: {"query": call.query[..., :-1]},
    "heads that do not divide": lambda call: {
        "query": torch.cat([call.query, call.query[:, :1]], 1)
    },
    "no query heads": lambda call: {"query": call.query[:, :0]},
    "queries of another dtype": lambda call: {"query": narrowed(call.query)},
    "queries of integers": lambda call: {"query": call.query.int()},
    "starts of 64 bits": lambda call: {
        "query_start_loc": call.arguments["query_start_loc"].long()
    },
    "too few starts": lambda call: {
        "query_start_loc": call.arguments["query_start_loc"][:-1]
    },
    "starts of two axes": lambda call: {
        "query_start_loc": call.arguments["query_start_loc"][None]
    },
    "a negative bound of queries": lambda call: {"max_query_len": -1},
    "an output of too few rows": lambda call: {"out": out_of(call)[1:]},
    "an output of too few heads": lambda call: {"out": out_of(call)[:, 2:]},
    "an output of another size": lambda call: {"out": out_of(call, 1)},
    "an output without heads": lambda call: {"out": out_of(call).flatten(1)},
    "a log-sum-exp of tokens by heads": lambda call: {
        "lse": torch.zeros(len(call.query), 5)
    },
    "a log-sum-exp of too few heads": lambda call: {
        "lse": torch.zeros(3, len(call.query))
    },
    "a log-sum-exp of three axes": lambda call: {
        "lse": torch.zeros(4, len(call.query), 1)
    },
    "a window of nothing": lambda call: {"sliding_window": 0},
    "a negative window": lambda call: {"sliding_window": -3},
    "a chunk of nothing": lambda call: {"attention_chunk_size": 0},
    "slopes for other heads": lambda call: {"alibi_slopes": torch.ones(3)},
    "slopes in float16": lambda call: {"alibi_slopes": torch.ones(4).half()},
    "sinks for other heads": lambda call: {"sinks": torch.ones(5)},
    "sinks of two axes": lambda call: {"sinks": torch.ones(4, 1)},
    "sinks in float64": lambda call: {"sinks": torch.ones(4).double()},
    "flags for other requests": lambda call: {"causal": torch.ones(3).bool()},
    "flags that are numbers": lambda call: {"causal": torch.ones(2)},
    "ranges for other tokens": lambda call: {"query_ranges": ranges_of(call)[1:]},
    "ranges of three numbers": lambda call: {"query_ranges": ranges_of(call, 3)},
    "ranges of 64 bits": lambda call: {"query_ranges": ranges_of(call).long()},
    "a bias for other heads": lambda call: {"position_bias": bias_table(3)},
    "a bias without a middle": lambda call: {"position_bias": torch.ones(4, 6)},
    "a bias in float16": lambda call: {"position_bias": bias_table(4).half()},
    "an FP8 output without a scale": lambda call: {"out": out_of(call).to(E4M3)},
    "a scale of an output that has none": lambda call: {"out_scale": 0.5},
    "an output scale for each head": lambda call: {
        "out": out_of(call).to(E5M2),
        "out_scale": torch.ones(4),
    },
    "slopes on another device": lambda call: {
        "alibi_slopes": torch.ones(4, device="meta")
    },
    "sinks on another device": lambda call: {"sinks": torch.ones(4, device="meta")},
}
SHAPES |= {
    f"an output of {dtype}".replace("torch.", ""): lambda call, dtype=dtype: {  # type: ignore[misc]
        "out": torch.zeros(call.query.shape, dtype=dtype)
    }
    for dtype in (
        *(torch.bool, torch.int8, torch.uint8, torch.int32, torch.complex64),
        torch.float8_e8m0fnu,
    )
}
SHAPES |= {
    f"a log-sum-exp of {dtype}".replace("torch.", ""): lambda call, dtype=dtype: {  # type: ignore[misc]
        "lse": lse_of(call).to(dtype)
    }
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.bool, torch.int32, torch.complex64),
    )
}
SHAPES |= {
    "an output with one row for all tokens": lambda call: {
        "out": out_of(call)[:1].expand(call.query.shape)
    },
    "an output with one number per head": lambda call: {
        "out": out_of(call)[..., :1].expand(call.query.shape)
    },
    "a log-sum-exp with one number per head": lambda call: {
        "lse": lse_of(call)[:, :1].expand(4, len(call.query))
    },
    "queries as output": queries_as_output,
    "an output and a log-sum-exp in one place": results_in_one_place,
}
SHAPES |= SCALARS | {
    f"out_scale = {number}": lambda call, number=number: {
        "out": out_of(call).to(E4M3),
        "out_scale": number,
    }
    for number in (0.0, -0.5, INF, NAN, 1e39, 1e-40)
}
PAGED_SHAPES: dict[str, Change] = {
    "keys of three axes": lambda call: {"key_cache": cache_of(call)[0]},
    "values of other blocks": lambda call: {
        "value_cache": cache_of(call, "value_cache")[:-1]
    },
    "values of other heads": lambda call: {
        "value_cache": cache_of(call, "value_cache")[:, :, :1]
    },
    "values of shorter blocks": lambda call: {
        "value_cache": cache_of(call, "value_cache")[:, :-1]
    },
    "values of another dtype": lambda call: {
        "value_cache": narrowed(cache_of(call, "value_cache"))
    },
    "caches of integers": lambda call: {
        name: cache_of(call, name).nan_to_num().int()
        for name in ("key_cache", "value_cache")
    },
    "a table of 64 bits": lambda call: {
        "block_table": call.arguments["block_table"].long()
    },
    "a table of one axis": lambda call: {
        "block_table": call.arguments["block_table"][0]
    },
    "a table for other requests": lambda call: {
        "block_table": call.arguments["block_table"][:1]
    },
    "lengths of 64 bits": lambda call: {"seq_lens": call.arguments["seq_lens"].long()},
    "lengths of other requests": lambda call: {"seq_lens": ints(20, 9, 1)},
    "a negative bound of keys": lambda call: {"max_seq_len": -1},
    "a bound that no row holds": lambda call: {"max_seq_len": 10**6},
    "a tree beside flags": lambda call: {
        "tree_mask": TREE,
        "causal": torch.tensor([True, True]),
    },
    "a tree that is not causal": lambda call: {"tree_mask": TREE, "causal": False},
    "a tree that is not square": lambda call: {"tree_mask": TREE[:, :3]},
    "a tree for other requests": lambda call: {"tree_mask": TREE[:1]},
    "a tree of numbers": lambda call: {"tree_mask": TREE.float()},
    "an output in the key cache": lambda call: output_in(call, "key_cache"),
    "an output in the value cache": lambda call: output_in(call, "value_cache"),
    "a scale of keys that have none": lambda call: {"k_scale": 1.0},
    "a scale of values that have none": lambda call: {"v_scale": 1.0},
    "lengths on another device": lambda call: {
        "seq_lens": torch.ones(2, dtype=torch.int32, device="meta")
    },
}
SCALES: dict[str, Change] = {
    f"{name}: {words}": lambda call, name=name, scale=scale: {name: scale}  # type: ignore[misc]
    for name in ("k_scale", "v_scale")
    for words, scale in (
        ("none", None),
        ("zero", 0.0),
        ("negative", -0.5),
        ("no number", NAN),
        ("infinite", INF),
        ("infinite in float32", 1e39),
        ("subnormal", 1e-40),
        ("of other heads", torch.ones(3)),
        ("of each query head", torch.ones(4)),
        ("float16", torch.ones(2).half()),
        ("of two axes", torch.ones(1, 2)),
    )
}
CONTENTS: dict[str, Change] = {
    "starts that do not begin at 0": lambda call: {
        "query_start_loc": changed_number(call, "query_start_loc", 0, 1)
    },
    "starts that fall": lambda call: {
        "query_start_loc": changed_number(
            call, "query_start_loc", -1, call.query_lens[0] - 1
        )
    },
    "starts past the tokens": lambda call: {
        "query_start_loc": changed_number(
            call, "query_start_loc", -1, len(call.query) + 1
        )
    },
    "a bound below the queries": lambda call: {"max_query_len": call.query_lens[0] - 1},
} | PER_HEAD
PAGED_CONTENTS: dict[str, Change] = {
    "a block that is not there": lambda call: {
        "block_table": changed_entry(call, len(cache_of(call)))
    },
    "a negative block": lambda call: {"block_table": changed_entry(call, -1)},
    "a length below 0": lambda call: {"seq_lens": ints(20, -1), "causal": False},
    "a bound below the keys": lambda call: {"max_seq_len": 19},
    "more new tokens than keys": lambda call: {
        "seq_lens": ints(call.query_lens[0] - 1, 9)
    },
    "more queries than keys in a window": lambda call: {
        "seq_lens": ints(call.query_lens[0] - 1, 9),
        "causal": False,
        "sliding_window": 4,
    },
    "more queries than keys under a bias": lambda call: {
        "seq_lens": ints(20, 0),
        "causal": False,
        "position_bias": bias_table(4),
    },
    "a tree in which a token misses itself": lambda call: {
        "tree_mask": TREE & ~torch.eye(4, device=TREE.device).bool()
    },
}


MEANT: dict[str, Change] = dict.fromkeys(
    (
        "starts of 64 bits",
        "a negative bound of queries",
        "logits_soft_cap = inf",
        "logits_soft_cap = 1e+39",
        "a table of 64 bits",
        "lengths of 64 bits",
        "a negative bound of keys",
        "a bound that no row holds",
        "a scale of keys that have none",
        "a scale of values that have none",
        "starts of keys of 64 bits",
        "a bound below the queries",
        "a bound below the keys",
    ),
    lambda call: {},
) | {
    "slopes in float16": lambda call: {"alibi_slopes": torch.ones(4)},
    "sinks in float64": lambda call: {"sinks": torch.ones(4)},
    "flags that are numbers": lambda call: {"causal": True},
    "ranges of 64 bits": lambda call: {"query_ranges": ranges_of(call)},
    "a bias in float16": lambda call: {"position_bias": bias_table(4).half().float()},
    "a tree of numbers": lambda call: {"tree_mask": TREE},
    "k_scale: float16": lambda call: {"k_scale": torch.ones(2)},
    "v_scale: float16": lambda call: {"v_scale": torch.ones(2)},
}
"""For each input that should be rejected, its only possible meaning: changes to the valid call.

A kernel that does not use the number, or that reads any dtype, may return the answer of that call.
"""


def changed_entry(call: Call, block_id: int) -> Tensor:
    """Return the block table with another id in an entry that is used."""
    table: Tensor = call.arguments["block_table"].clone()
    table[0, len(call.rows[0]) - 1] = block_id
    return table


def changed_number(call: Call, name: str, index: int, number: int) -> Tensor:
    """Return a tensor of a call with another number at one index."""
    numbers: Tensor = call.arguments[name].clone()
    numbers[index] = number
    return numbers


def base_call(setting: Setting) -> Call:
    """Return a valid call: 3 + 1 new tokens of 20 + 9 keys, blocks of NaN around its cache.

    A kernel that reads a block outside of the cache then reads only memory of this test. The call
    is within the candidate's declared support, so only the invalid input can be rejected.
    """
    plan = fit_case(BatchPlan((3, 1), (20, 9)), setting.candidate.support)
    call = paged_call(plan, setting.device)
    wide = {
        name: torch.nn.functional.pad(
            cache_of(call, name), (0, 0, 0, 0, 0, 0, 2, 2), value=NAN
        )[2:-2]
        for name in ("key_cache", "value_cache")
    }
    return declared(setting, call.changed(**wide))


def expect_rejected(setting: Setting, what: str, call: Call, change: Change) -> None:
    """Raise Disagreement if an invalid call returns, or writes before it raises.

    A candidate with limited declared support may also return the answer of the call that was
    meant. A candidate that promises everything the twins do must raise where they raise.
    """
    if not setting.candidate.promises_all:
        run_call(setting, call)  # the valid call must not raise
    shape = call.query.shape
    results: dict[str, Tensor] = {}
    with setting.device:
        changes = change(call)
        if call.out_dtype is not None:
            results["out"] = torch.full(shape, 7.0, dtype=call.out_dtype)
        if call.wants_lse:
            results["lse"] = torch.full((shape[1], shape[0]), 7.0)
    results |= {name: changes.pop(name) for name in ("out", "lse") if name in changes}
    removed = [name for name, value in changes.items() if value is None]
    bad = call.changed(**changes)
    arguments = bad.arguments | dict.fromkeys(removed)
    tensors = {
        name: argument
        for name, argument in (arguments | results).items()
        if isinstance(argument, Tensor) and argument.device.type != "meta"
    }
    operation = getattr(setting.candidate, call.operation)
    before = {name: copy_of(tensor) for name, tensor in tensors.items()}
    answers: list[Any] = []

    def run_changed() -> Any:
        answers.append(operation(**pack_options(**arguments, **results)))
        return answers[0]

    try:
        expect_rejection(what, run_changed)
    except Disagreement:
        if setting.candidate.promises_all or what not in MEANT:
            raise
        meant = call.changed(**MEANT[what](call))
        expect_right(setting, meant, (answers[0], results.get("lse")))
        return
    for name, tensor in tensors.items():
        expect_memory(f"{name} after the rejection", tensor, before[name])


@law("paged_attention", cases=[*SHAPES, *PAGED_SHAPES], claim="rejects shapes")
def paged_attention_rejects_invalid_arguments(setting: Setting, what: str) -> None:
    """Shapes, dtypes, devices and numbers; a valid call of the same form does not raise."""
    change = (SHAPES | PAGED_SHAPES)[what]
    expect_rejected(setting, what, base_call(setting), change)


@law("paged_attention", cases=["query", "key_cache"], claim="rejects shapes")
def an_output_that_is_read_is_rejected_after_valid_calls_too(
    setting: Setting, name: str
) -> None:
    """What earlier calls were found to fulfil says nothing about addresses."""
    call = base_call(setting)
    for _ in range(3):
        run_call(setting, call, out=torch.empty_like(call.query))
    read = call.query
    if name != "query":
        read = call.arguments[name].view(-1)[: read.numel()].view(read.shape)
    with kept(**{name: call.arguments[name]}):
        expect_rejection(name, lambda: run_call(setting, call, out=read))


@law("paged_attention", cases=[*SCALES], claim="rejects shapes")
def invalid_scales_of_a_cache_are_rejected(setting: Setting, what: str) -> None:
    call = quantised_call(base_call(setting), E4M3, 0.1, 0.1)
    expect_rejected(setting, what, call, SCALES[what])


@law("paged_attention", cases=[*CONTENTS, *PAGED_CONTENTS], claim="rejects contents")
def invalid_contents_are_rejected_if_they_are_checked(
    setting: Setting, what: str
) -> None:
    change = (CONTENTS | PAGED_CONTENTS)[what]
    expect_rejected(setting, what, base_call(setting), change)


RAGGED: dict[str, Change] = {
    "keys of four axes": lambda call: {"key": call.arguments["key"][None]},
    "values of other tokens": lambda call: {"value": call.arguments["value"][:-1]},
    "values of other heads": lambda call: {"value": call.arguments["value"][:, :1]},
    "values of another dtype": lambda call: {
        "value": narrowed(call.arguments["value"])
    },
    "FP8 keys": lambda call: {
        name: call.arguments[name].to(E4M3) for name in ("key", "value")
    },
    "too few starts of keys": lambda call: {"key_start_loc": ints(0, 29)},
    "starts of keys of 64 bits": lambda call: {
        "key_start_loc": call.arguments["key_start_loc"].long()
    },
    "a negative bound of keys": lambda call: {"max_key_len": -1},
}
RAGGED_CONTENTS: dict[str, Change] = {
    "starts of keys that fall": lambda call: {"key_start_loc": ints(0, 30, 29)},
    "starts of keys past the keys": lambda call: {"key_start_loc": ints(0, 20, 30)},
    "a bound below the keys": lambda call: {"max_key_len": 19},
    "a causal request with too few keys": lambda call: {
        "key_start_loc": ints(0, 2, 29),
        "max_key_len": 27,
    },
}


@law("encoder_attention", cases=[*SHAPES, *RAGGED], claim="rejects shapes")
def ragged_attention_rejects_invalid_arguments(setting: Setting, what: str) -> None:
    call = ragged_call(base_call(setting))
    expect_rejected(setting, what, call, (SHAPES | RAGGED)[what])


@law("encoder_attention", cases=[*CONTENTS, *RAGGED_CONTENTS], claim="rejects contents")
def invalid_starts_are_rejected_if_contents_are_checked(
    setting: Setting, what: str
) -> None:
    call = ragged_call(base_call(setting))
    change = (CONTENTS | RAGGED_CONTENTS)[what]
    expect_rejected(setting, what, call, change)
