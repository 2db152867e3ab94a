"""Which small faults of attention must a law tell?

Each wraps one operation of the reference and spoils its arguments or its results, in all calls or
in some. Beside it stand the laws that it breaks.
"""

import math
from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any

import torch
from pagetwin.conformance.harness.candidate import load_candidate
from pagetwin.contract.attention_options import pack_options
from torch import Tensor

RIGHT = load_candidate("reference")
Operation = Callable[..., Any]
Fault = Callable[[Operation], Operation]


def by_keyword(operation: Operation) -> Operation:
    """Return an operation that takes its options, if any, as keyword arguments."""

    @wraps(operation)
    def call(*given: Any, **named: Any) -> Any:
        if "options" in signature(operation).parameters:
            named = pack_options(**named)
        return operation(*given, **named)

    return call


def changed(**changes: Callable[[dict[str, Any]], Any]) -> Fault:
    """Return a fault: some arguments become others before the operation sees them."""

    def fault(operation: Operation) -> Operation:
        def spoilt(*given: Any, **named: Any) -> Any:
            names = list(signature(operation).parameters)
            named = dict(zip(names, given, strict=False)) | named
            for name, change in changes.items():
                if named.get(name) is not None:
                    named[name] = change(named)
            return operation(**named)

        return spoilt

    return fault


def dropped(*names: str) -> Fault:
    """Return a fault: some arguments are not passed on."""

    def fault(operation: Operation) -> Operation:
        return lambda *given, **named: operation(
            *given, **{name: each for name, each in named.items() if name not in names}
        )

    return fault


def after(change: Callable[[Any, dict[str, Any]], Any]) -> Fault:
    """Return a fault: the result becomes another."""

    def fault(operation: Operation) -> Operation:
        def spoilt(*given: Any, **named: Any) -> Any:
            found = operation(*given, **named)
            spoilt_result = change(found, named)
            return found if spoilt_result is None else spoilt_result

        return spoilt

    return fault


def only_if(is_so: Callable[[dict[str, Any]], bool], fault: Fault) -> Fault:
    """Return a fault that shows in some calls only."""

    def partly(operation: Operation) -> Operation:
        wrong = fault(operation)
        return lambda *given, **named: (wrong if is_so(named) else operation)(
            *given, **named
        )

    return partly


def last_keys_hidden(named: dict[str, Any]) -> Tensor:
    query_lens = named["query_start_loc"].diff()
    return torch.where(
        named["seq_lens"] > query_lens, named["seq_lens"] - 1, named["seq_lens"]
    )


def lse_in_base_2(found: Any, named: dict[str, Any]) -> None:
    if named.get("lse") is not None:
        named["lse"] /= math.log(2)


def rows_left(found: Tensor, named: dict[str, Any]) -> None:
    found[int(named["query_start_loc"][-1]) :] = torch.tensor(1.0).to(found.dtype)


def leaking(found: Tensor, named: dict[str, Any]) -> None:
    """Zero times what lies in a slot that nobody owns."""
    cache = named["value_cache"].float()
    if found.dtype.is_floating_point and found.element_size() > 1:
        found += 0 * cache[:, 0, 0, 0].sum().to(found.dtype)


def sinks_once_more(found: Tensor, named: dict[str, Any]) -> None:
    if named["dcp_rank"] and named.get("sinks") is not None:
        named["lse"].copy_(torch.logaddexp(named["lse"], named["sinks"][:, None]))


def before_checks(operation: Operation) -> Operation:
    """Write, and look at the arguments then."""

    def spoilt(*given: Any, **named: Any) -> Any:
        if named.get("out") is not None:
            named["out"].copy_(torch.zeros(()).to(named["out"].dtype))
        return operation(*given, **named)

    return spoilt


def without_answer(operation: Operation) -> Operation:
    """Return something where an error is due."""

    def spoilt(*given: Any, **named: Any) -> Any:
        try:
            return operation(*given, **named)
        except (ValueError, TypeError, IndexError):
            return named.get("out")

    return spoilt


def left_behind(operation: Operation) -> Operation:
    """Add up what earlier calls left, as counters do that nobody sets back."""
    calls = [0]

    def spoilt(*given: Any, **named: Any) -> Any:
        found = operation(*given, **named)
        calls[0] += 1
        found[:1] += (calls[0] - 1) * 0.5
        return found

    return spoilt


def requests_left(found: Tensor, named: dict[str, Any]) -> None:
    found[int(named["query_start_loc"][:65][-1]) :] = torch.tensor(0.0).to(found.dtype)


def heads_left(found: Tensor, named: dict[str, Any]) -> None:
    found[:, 32:] = torch.tensor(0.0).to(found.dtype)


def tanh_without_cap(operation: Operation) -> Operation:
    def spoilt(*given: Any, **named: Any) -> Any:
        if named.get("logits_soft_cap") is not None:
            named["logits_soft_cap"] *= 1.01
        return operation(*given, **named)

    return spoilt


PAGED: dict[str, tuple[Fault, list[str]]] = {
    "the last key is hidden where there is a context": (
        changed(seq_lens=last_keys_hidden),
        [
            "every new token sees its sequence up to itself",
            "a query sees all up to itself and nothing behind",
        ],
    ),
    "a last tile that is full is hidden where all are alike": (
        only_if(
            lambda named: len(set(named["seq_lens"].tolist())) == 1,
            changed(
                seq_lens=lambda named: torch.where(
                    named["seq_lens"] % 32 == 0,
                    (named["seq_lens"] - 32).maximum(named["query_start_loc"].diff()),
                    named["seq_lens"],
                )
            ),
        ),
        [
            "equal requests are right at every length",
            "requests are right however their lengths share the work",
        ],
    ),
    "requests behind the 64th are left out": (
        after(requests_left),
        ["there may be any number of requests"],
    ),
    "heads behind the 32nd are left out": (
        after(heads_left),
        ["groups and heads may be larger than a tile"],
    ),
    "something is left to the next call": (
        left_behind,
        ["a batch leaves nothing to the next"],
    ),
    "a window of one key more": (
        changed(sliding_window=lambda named: named["sliding_window"] + 1),
        [
            "a query sees no key outside of its window or chunk",
            "keys before every window and chunk are never read",
        ],
    ),
    "a window of one key more, in trees only": (
        only_if(
            lambda named: named.get("tree_mask") is not None,
            changed(sliding_window=lambda named: named["sliding_window"] + 1),
        ),
        ["a new token of a tree sees its ancestors and no sibling"],
    ),
    "chunks of one position more": (
        changed(attention_chunk_size=lambda named: named["attention_chunk_size"] + 1),
        ["a query sees no key outside of its window or chunk"],
    ),
    "a range that ends one early": (
        changed(
            query_ranges=lambda named: (
                named["query_ranges"] - torch.tensor([0, 1], dtype=torch.int32)
            )
        ),
        ["a query sees its range whatever hides it"],
    ),
    "siblings see each other": (
        dropped("tree_mask"),
        ["a new token of a tree sees its ancestors and no sibling"],
    ),
    "flags are not looked at": (
        only_if(
            lambda named: isinstance(named.get("causal"), Tensor), dropped("causal")
        ),
        ["a query sees all up to itself and nothing behind"],
    ),
    "each option dropped in turn: cap": (
        dropped("logits_soft_cap"),
        ["paged attention is right for every pair of options"],
    ),
    "a cap that is one per cent off": (
        tanh_without_cap,
        ["paged attention is right under any options"],
    ),
    "slopes dropped": (
        dropped("alibi_slopes"),
        ["a bias counts from the query to the key"],
    ),
    "a bias turned round": (
        changed(position_bias=lambda named: named["position_bias"].flip(1)),
        ["a bias counts from the query to the key"],
    ),
    "sinks dropped where a row is long": (
        only_if(lambda named: named["max_seq_len"] > 100, dropped("sinks")),
        ["a sink takes its share of the weight once"],
    ),
    "sinks dropped where nothing is seen": (
        only_if(lambda named: int(named["seq_lens"].min()) == 0, dropped("sinks")),
        ["a query without a key gets zero and no weight"],
    ),
    "the first head's scale for all": (
        changed(
            k_scale=lambda named: (
                named["k_scale"].flatten()[0]
                if isinstance(named["k_scale"], Tensor)
                else named["k_scale"]
            )
        ),
        ["paged attention is right for every pair of options"],
    ),
    "the value's scale for the keys": (
        changed(k_scale=lambda named: named["v_scale"]),
        ["paged attention is right under any options"],
    ),
    "a default scale whatever is given": (
        dropped("scale"),
        ["every argument of attention is obeyed"],
    ),
    "a log-sum-exp to base 2": (
        after(lse_in_base_2),
        ["paged attention is right for every pair of options"],
    ),
    "rows behind the last request keep something": (
        after(rows_left),
        [
            "every new token sees its sequence up to itself",
            "an empty batch leaves rows of zeros",
        ],
    ),
    "free slots times zero": (
        after(leaking),
        ["what nobody owns moves no bit"],
    ),
    "an output is made though one is given": (
        dropped("out"),
        ["nothing is written beside the output"],
    ),
    "the queries are scaled in place": (
        after(lambda found, named: named["query"].mul_(1.0000001) and None),
        ["attention changes nothing that it reads"],
    ),
    "another rounding each time": (
        after(lambda found, named: found.add_(1e-8 * torch.rand(())) and None),
        ["the same attention gives the same bits"],
    ),
    "a bound as the length of all rows": (
        changed(
            seq_lens=lambda named: torch.full_like(
                named["seq_lens"], int(named["seq_lens"].max())
            )
        ),
        [
            "neither order nor neighbours matter",
            "larger bounds change nothing beyond rounding",
        ],
    ),
    "it writes before it looks": (
        before_checks,
        ["attention over pages refuses what does not fit"],
    ),
    "nothing is refused": (
        without_answer,
        [
            "attention over pages refuses what does not fit",
            "scales of a cache that make no sense are refused",
            "contents that make no sense are refused if asked",
        ],
    ),
}
OTHERS: dict[str, tuple[str, Fault, list[str]]] = {
    "encoder: sinks dropped where a row is long": (
        "encoder_attention",
        only_if(
            lambda named: (
                int(named["key_start_loc"].diff().max()) > 64
                and named.get("sinks") is not None
            ),
            dropped("sinks"),
        ),
        ["requests on keys in a row are right however long each is"],
    ),
    "encoder: causal": (
        "encoder_attention",
        changed(causal=lambda named: True),
        ["a decoder sees all keys in a row of its own encoder"],
    ),
    "encoder: starts of the queries for the keys": (
        "encoder_attention",
        changed(key_start_loc=lambda named: named["query_start_loc"]),
        ["encoder attention is right for every pair of options"],
    ),
    "encoder: nothing is refused": (
        "encoder_attention",
        without_answer,
        [
            "attention over keys in a row refuses what does not fit",
            "starts that make no sense are refused if asked",
        ],
    ),
    "merge: natural whatever the base": (
        "merge_attn_states",
        dropped("prefix_lse_base", "suffix_lse_base"),
        ["two parts join by their weight"],
    ),
    "merge: a prefix for all": (
        "merge_attn_states",
        dropped("prefill_tokens_with_context"),
        ["two parts join by their weight"],
    ),
    "merge: the suffix alone": (
        "merge_attn_states",
        changed(
            prefix_lse=lambda named: torch.full_like(named["prefix_lse"], -math.inf)
        ),
        [
            "a joint output is made where none is given",
            "a part may be joined into itself",
        ],
    ),
    "merge: infinity is a number": (
        "merge_attn_states",
        changed(prefix_lse=lambda named: named["prefix_lse"].clamp(max=1e30)),
        ["two parts join by their weight"],
    ),
    "merge: no log-sum-exp": (
        "merge_attn_states",
        dropped("output_lse"),
        ["two parts join by their weight"],
    ),
    "merge: nothing is refused": (
        "merge_attn_states",
        without_answer,
        ["states that do not fit are refused"],
    ),
    "combine: natural always": (
        "lse_weighted_combine",
        dropped("is_lse_base_on_e"),
        ["any number of parts joins by their weight"],
    ),
    "combine: the last part left out": (
        "lse_weighted_combine",
        lambda operation: (
            lambda outputs, lses, **named: operation(
                outputs[: max(1, len(outputs) - 1)],
                lses[: max(1, len(lses) - 1)],
                **named,
            )
        ),
        ["the natural logarithm is the default"],
    ),
    "combine: nothing is refused": (
        "lse_weighted_combine",
        lambda operation: (
            lambda outputs, lses, **named: operation(
                outputs,
                lses.float().expand(outputs.shape[:3]) if lses.dim() > 2 else lses,
            )
        ),
        ["parts that do not fit are refused"],
    ),
    "base: the wrong way": (
        "log2_lse_to_ln",
        lambda operation: lambda lse: lse / math.log(2),
        ["a logarithm changes its base by one rounding"],
    ),
    "cascade: a block of the prefix less": (
        "cascade_attention",
        after(lambda found, named: found.mul_(1 + 1e-2 * named["common_prefix_len"])),
        [
            "a prefix read once is a prefix read with every request",
            "no key is lost at the end of the prefix",
            "a shorter prefix gives the same",
        ],
    ),
    "cascade: sinks dropped": (
        "cascade_attention",
        dropped("sinks"),
        ["a prefix read once is a prefix read with every request"],
    ),
    "cascade: the log-sum-exp left": (
        "cascade_attention",
        dropped("lse"),
        ["a shorter prefix gives the same"],
    ),
    "cascade: nothing is refused": (
        "cascade_attention",
        without_answer,
        [
            "a prefix that cannot be is refused",
            "a prefix that is not shared is refused if asked",
        ],
    ),
    "decode over latents: the window dropped": (
        "latent_decode_attention",
        dropped("sliding_window"),
        ["a decode over latents sees its window only"],
    ),
    "decode over latents: the cache's width for the scale": (
        "latent_decode_attention",
        lambda operation: (
            lambda **named: operation(
                **({"scale": named["kv_cache"].shape[2] ** -0.5} | named)
            )
        ),
        ["a decode over latents is full multi head attention"],
    ),
    "decode over latents: one key less": (
        "latent_decode_attention",
        changed(seq_lens=last_keys_hidden),
        [
            "a latent that outweighs all others is found",
            "a prompt of latents in chunks is the prompt in one",
        ],
    ),
    "prefill over latents: one chunk only": (
        "latent_prefill_attention",
        lambda operation: only_first_chunk(operation),
        ["a prefill over latents is full multi head attention"],
    ),
    "prefill over latents: from the cache": (
        "latent_prefill_attention",
        lambda operation: (
            lambda **named: RIGHT.latent_decode_attention(
                **{
                    name: each
                    for name, each in named.items()
                    if name
                    not in ("kv_c", "k_pe", "num_context_tokens", "max_context_chunk")
                }
            )
        ),
        ["what nobody owns of latents moves no bit"],
    ),
    "prefill over latents: nothing is refused": (
        "latent_prefill_attention",
        without_answer,
        [
            "latent attention refuses what does not fit",
            "batches of latents that make no sense are refused if asked",
        ],
    ),
    "write of latents: the rope key first": (
        "concat_and_cache_mla",
        lambda operation: (
            lambda kv_c, k_pe, cache, slots, *scale: operation(
                k_pe, kv_c, cache, slots, *scale
            )
        ),
        ["a latent and its rope key are written to their slot"],
    ),
    "write of latents: the slot -1 is the last": (
        "concat_and_cache_mla",
        lambda operation: (
            lambda kv_c, k_pe, cache, slots, *scale: operation(
                kv_c, k_pe, cache, slots % (cache.shape[0] * cache.shape[1]), *scale
            )
        ),
        ["a latent and its rope key are written to their slot"],
    ),
    "ranks: sinks on all": (
        "dcp_attention",
        after(sinks_once_more),
        ["all ranks together attend to the whole"],
    ),
    "ranks: one position in a row": (
        "dcp_attention",
        dropped("dcp_kv_cache_interleave_size"),
        [
            "a rank attends to the keys that it keeps",
            "a new token sees no key behind it on any rank",
        ],
    ),
    "ranks: nothing is refused": (
        "dcp_attention",
        without_answer,
        [
            "a share that cannot be is refused",
            "a share that makes no sense is refused if asked",
        ],
    ),
}


def only_first_chunk(operation: Operation) -> Operation:
    """Return a prefill that forgets all of its context behind the first chunk."""

    def spoilt(**named: Any) -> Any:
        chunk = named.pop("max_context_chunk", None)
        if chunk is None or chunk >= named["num_context_tokens"]:
            return operation(**named)
        query_lens = named["query_start_loc"].diff()
        context = (named["seq_lens"] - query_lens).clamp(max=chunk)
        named["seq_lens"] = (context + query_lens).int()
        return operation(**named)

    return spoilt


FAULTS = {
    f"paged: {name}": ("paged_attention", *fault) for name, fault in PAGED.items()
}
FAULTS |= OTHERS
