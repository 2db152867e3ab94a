"""Which models, prompts and masks are refused when another library's model runs on a twin?"""

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..contract.operations import Implementation, load_implementation
from .primitives import check_positive

ATTENTION_KINDS = ("full_attention", "sliding_attention", "chunked_attention")


def load_named(implementation: str) -> Implementation:
    """Return an implementation; refuse a name that stands for none."""
    try:
        return load_implementation(implementation)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"implementation = {implementation!r} cannot be loaded ({error}): expected"
            " 'reference', 'optimized', or the dotted name of a package with the same files"
        ) from error


# --- prompts


def check_limits(**limits: int | None) -> None:
    """Refuse limits below 1; None is no limit."""
    check_positive(
        **{name: number for name, number in limits.items() if number is not None}
    )


def check_prompts(
    prompts: Sequence[Sequence[int]], vocabulary: int, extra: int, most: int | None
) -> None:
    """Refuse prompts that are empty, hold no tokens, or can never fit.

    Args:
        prompts: their tokens.
        vocabulary: token ids of the model.
        extra: tokens behind the prompt that the cache has to hold too.
        most: tokens that the whole cache holds; None: as many as it takes.
    """
    for place, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompts[{place}] is empty: expected at least one token")
        for index, token in enumerate(prompt):
            if isinstance(token, bool) or not isinstance(token, Integral):
                raise TypeError(
                    f"prompts[{place}][{index}] = {token!r} is {type(token).__name__}:"
                    " expected an int; run the tokenizer first"
                )
            if not 0 <= token < vocabulary:
                raise ValueError(
                    f"prompts[{place}][{index}] = {token} is no token of the model: expected"
                    f" 0 <= token < {vocabulary}"
                )
        if most is not None and len(prompt) + extra > most:
            raise ValueError(
                f"prompts[{place}] has {len(prompt)} tokens and its answer keeps {extra} more:"
                f" {len(prompt) + extra} are more than the whole cache holds ({most});"
                " expected more blocks, a shorter prompt or a smaller max_new_tokens"
            )


def check_arrivals(arrival_steps: Sequence[int] | None, num_prompts: int) -> list[int]:
    """Return in which step each prompt arrives; refuse steps that do not fit the prompts."""
    if arrival_steps is None:
        return [0] * num_prompts
    if len(arrival_steps) != num_prompts:
        raise ValueError(
            f"arrival_steps has {len(arrival_steps)} entries: expected {num_prompts}, one a"
            " prompt"
        )
    for place, step in enumerate(arrival_steps):
        if step < 0:
            raise ValueError(f"arrival_steps[{place}] = {step}: expected at least 0")
    return list(arrival_steps)


def check_decoder_prompt(decoder_prompt: Sequence[Any], vocabulary: int) -> list[int]:
    """Return what answers begin with; refuse nothing to begin with."""
    if not decoder_prompt or any(token is None for token in decoder_prompt):
        raise ValueError(
            f"decoder_prompt = {list(decoder_prompt)}: expected at least one token, as the model"
            " has no decoder_start_token_id"
        )
    for place, token in enumerate(decoder_prompt):
        if not 0 <= token < vocabulary:
            raise ValueError(
                f"decoder_prompt[{place}] = {token} is no token of the model: expected"
                f" 0 <= token < {vocabulary}"
            )
    return list(decoder_prompt)


def check_features(prompts: Sequence[Any]) -> None:
    """Refuse features of different shapes, and tokens among features."""
    shapes = [
        list(prompt.shape) if isinstance(prompt, Tensor) else None for prompt in prompts
    ]
    for place, shape in enumerate(shapes):
        if shape is None or len(shape) != 2 or shape != shapes[0]:
            raise ValueError(
                f"prompts[{place}] has shape {shape}: expected features [bands, frames], of one"
                f" shape for all prompts ({shapes[0]})"
            )


def check_wave_fits(
    number: int, of_encoder: int, of_decoder: int, num_blocks: int | None
) -> None:
    """Refuse a prompt that has too few blocks even alone."""
    needed = max(of_encoder, of_decoder)
    if num_blocks is not None and needed > num_blocks:
        raise ValueError(
            f"num_blocks = {num_blocks}: prompts[{number}] needs {of_encoder} blocks for its"
            f" encoder and {of_decoder} for its decoder and can never run; expected at least"
            f" {needed}"
        )


def refuse_option_of_kind(name: str, value: object, kind: str) -> NoReturn:
    """Refuse an option that this kind of model has no use for."""
    raise ValueError(f"{name} = {value!r}: expected None, as the model is {kind}")


# --- models


def check_attention_is_ours(model: str, found: str | None, expected: str) -> None:
    """Refuse a model that kept an attention of its own."""
    if found != expected:
        raise NotImplementedError(
            f"{model} does not let its attention be replaced (it kept {found!r}): expected a"
            " model whose file looks its attention up by name (ALL_ATTENTION_FUNCTIONS)"
        )


def check_keeps_only_keys(model: str, is_stateful: bool) -> None:
    """Refuse a model that keeps more of the past than keys and values."""
    if is_stateful:
        raise NotImplementedError(
            f"{model} keeps a state of the past that is no keys and values (a recurrent or"
            " convolutional layer): expected a model whose layers all attend"
        )


def check_takes_keywords(model: str, takes: bool) -> None:
    """Refuse a model whose forward passes nothing on to its attention."""
    if not takes:
        raise NotImplementedError(
            f"{model}.forward takes no further keywords: expected a model that passes them on"
            " to its attention, which finds its pages there"
        )


def check_calls(model: str, calls: Mapping[str, int], expected: int) -> None:
    """Refuse a model in which some layer did not attend exactly once through the twin."""
    wrong = {name: count for name, count in calls.items() if count != 1}
    if len(calls) != expected or wrong:
        raise NotImplementedError(
            f"{model}: {len(calls)} of {expected} attention layers ran on the twin in this"
            f" step{f', some not once: {wrong}' if wrong else ''}; expected each once. A layer"
            " that computes its attention itself cannot be run in pages"
        )


def check_inference(query: Tensor, dropout: float) -> None:
    """Refuse what only training needs."""
    if dropout:
        raise NotImplementedError(
            f"dropout = {dropout}: expected 0; call model.eval() first"
        )
    if torch.is_grad_enabled() and query.requires_grad:
        raise NotImplementedError(
            "query requires a gradient: expected none, as the twins have no backward pass; run"
            " the model under torch.no_grad()"
        )


def check_layer_kind(module: Any, sliding_window: int | None) -> int | None:
    """Return the layer's chunk size; refuse a layer whose options do not say what its kind says."""
    config: Any = getattr(module, "config", None)
    layer = getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    of_config = getattr(config, "sliding_window", None)
    where = f"layer {layer} ({type(module).__name__})"
    if kinds is None or layer is None or layer >= len(kinds):
        wants_window = getattr(config, "use_sliding_window", True) and of_config
        if wants_window and sliding_window is None and layer is not None:
            raise NotImplementedError(
                f"{where} passes no sliding_window on, and its config has sliding_window ="
                f" {of_config}: expected the window"
            )
        return None
    kind = kinds[layer]
    if kind not in ATTENTION_KINDS:
        raise NotImplementedError(
            f"{where} is of kind {kind!r}: expected one of {', '.join(ATTENTION_KINDS)}"
        )
    if (kind == "sliding_attention") != (sliding_window is not None):
        raise NotImplementedError(
            f"{where} is of kind {kind!r} and passes sliding_window = {sliding_window} on:"
            " expected a window there and only there"
        )
    return int(config.attention_chunk_size) if kind == "chunked_attention" else None


def check_same_implementation(of_pages: str, of_model: str) -> None:
    """Refuse pages of one implementation in a model that runs on another."""
    if of_pages != of_model:
        raise ValueError(
            f"the pages are of {of_pages!r} and the model runs on {of_model!r}: expected the"
            " same implementation for both"
        )


def check_causal_batch(module: Any, causal: bool) -> None:
    """Refuse a flat batch for a layer that looks ahead."""
    if not causal or getattr(module, "layer_idx", None) is None:
        raise NotImplementedError(
            f"{type(module).__name__} is not causal, or has no layer_idx: expected a decoder's"
            " layer; an encoder runs without pagetwin=, and an encoder-decoder model with"
            " PagedCache"
        )


def check_flat_batch(metadata: Any, num_tokens: int) -> Any:
    """Return the step's metadata; refuse tokens that are not those of the step."""
    if metadata is None:
        raise ValueError("the batch has no step yet: expected begin_step(...) before")
    if metadata.num_actual_tokens != num_tokens:
        raise ValueError(
            f"{num_tokens} tokens: expected the {metadata.num_actual_tokens} of the step"
        )
    return metadata


# --- masks


def check_mask(mask: Tensor, num_reqs: int, query_len: int, key_len: int) -> None:
    """Refuse a mask that is no table of bools, query by key."""
    if mask.dtype != torch.bool:
        raise TypeError(
            f"attention_mask is {mask.dtype}: expected torch.bool, True where a query sees a"
            " key, or the two-dimensional mask of padding"
        )
    expected = [num_reqs, 1, query_len, key_len]
    if list(mask.shape) not in (expected, [1, *expected[1:]]):
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}: expected {expected}"
        )


def refuse_mask(req: int, query: int, key: int, shown: bool) -> NoReturn:
    """Refuse a mask that says more than padding, causality, window and chunk."""
    raise NotImplementedError(
        f"attention_mask[{req}, 0, {query}, {key}] = {shown}: expected {not shown}, as padding,"
        " causality and window say; other masks have no place in a paged batch"
    )


def refuse_bias(shape: list[int]) -> NoReturn:
    """Refuse a bias that is no function of the distance."""
    raise NotImplementedError(
        f"position_bias of shape {shape} is not the same for all pairs of one distance:"
        " expected a bias by key - query alone"
    )


# --- caches of the library


def check_paged_lengths(
    lengths: Sequence[int] | None, rows: Sequence[object], num_reqs: int
) -> None:
    """Refuse another number of requests than the cache was made for."""
    known = len(lengths) if lengths is not None else len(rows) or num_reqs
    if known != num_reqs:
        raise ValueError(
            f"{num_reqs} requests: expected {known}, as the cache has"
            f" {'lengths' if lengths is not None else 'rows'} for so many; take a new"
            " PagedCache for other requests"
        )


def check_paged_spans(
    keys: Sequence[tuple[int, int]],
    queries: Sequence[tuple[int, int]],
    stored: Sequence[int],
    query_len: int,
    counts_positions: bool,
    sliding_window: int | None,
    attention_chunk_size: int | None,
) -> list[int]:
    """Return how many keys each request has; refuse padding that pages cannot leave out.

    Args:
        keys: for each request the first key that its mask shows, and the one past the last.
        queries: for each request its first query that is no padding, and the one past the last.
        stored: for each request the keys in its pages.
        query_len: queries of each request.
        counts_positions: whether queries are positions of the sequence.
        sliding_window, attention_chunk_size: what may hide the first keys; None: nothing.
    """
    for req, (first, end) in enumerate(keys):
        # a window or a chunk hides early keys from every query; so does padding, which is refused
        hidden = 0
        position = stored[req] - query_len
        if sliding_window is not None:
            hidden = max(hidden, position - sliding_window + 1)
        if attention_chunk_size is not None:
            hidden = max(
                hidden, position // attention_chunk_size * attention_chunk_size
            )
        is_whole = queries[req] == (0, query_len) and end == stored[req]
        if first > hidden or (counts_positions and not is_whole):
            raise NotImplementedError(
                f"request {req}: its mask shows keys {first} to {end} of {stored[req]} to"
                f" queries {queries[req][0]} to {queries[req][1]} of {query_len}: expected all"
                " of them; padding before or among a decoder's tokens has no place in a"
                " PagedCache (generate needs none)"
            )
        if end > stored[req]:
            raise ValueError(
                f"request {req}: its mask shows {end} keys, but only {stored[req]} are in the"
                " pages: expected the lengths that PagedCache was given, or none given to it"
            )
    return [end for _, end in keys]


def check_reorder(lengths: Sequence[int] | None, order: Sequence[int]) -> None:
    """Refuse to give a request the content of one of another length."""
    if lengths is None:
        return
    for req, taken in enumerate(order):
        if lengths[req] != lengths[taken]:
            raise ValueError(
                f"request {req} of {lengths[req]} tokens shall get the content of request"
                f" {taken} of {lengths[taken]}: expected equal lengths"
            )


def refuse_reading(operation: str) -> NoReturn:
    """Refuse to compute with keys that lie in pages."""
    raise TypeError(
        f"{operation} would read keys or values that lie in pages: expected a model whose"
        " attention is a registered twin, model.set_attn_implementation(register(...))"
    )


def refuse_crop() -> NoReturn:
    """Refuse to shorten a cache of pages."""
    raise NotImplementedError(
        "crop: expected a cache that only grows; take a new PagedCache"
    )
