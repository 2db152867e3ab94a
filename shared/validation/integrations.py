"""Validation of models, prompts and masks of other libraries."""

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, NoReturn

import torch
from torch import Tensor

from ..contract.operations import Implementation, load_implementation
from .primitives import check_positive

ATTENTION_KINDS = ("full_attention", "sliding_attention", "chunked_attention")


def load_named(implementation: str) -> Implementation:
    """Return an implementation; raise ValueError if the name is unknown."""
    try:
        return load_implementation(implementation)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"implementation = {implementation!r} cannot be loaded ({error}): expected"
            " 'reference', 'optimized', or the dotted name of a package with the same operations"
        ) from error


# --- prompts


def check_limits(**limits: int | None) -> None:
    """Raise ValueError for a limit below 1. None means unlimited."""
    check_positive(
        **{name: number for name, number in limits.items() if number is not None}
    )


def check_prompt_list(prompts: Any, takes_features: bool) -> None:
    """Raise for prompts that are not one list of token ids, or one tensor of features, each.

    Args:
        prompts: what the caller gave.
        takes_features: whether the model takes features, [bands, frames] per prompt.
    """
    expected = "a list of token ids per prompt, such as [[5, 6, 7], [8, 9]]"
    if takes_features:
        expected = "a list of tensors [bands, frames], one per prompt"
    if not (takes_features and isinstance(prompts, Tensor)):
        _check_is_list("prompts", prompts, expected)
    if not len(prompts):
        raise ValueError(f"prompts = {prompts!r} is empty: expected {expected}")
    for index, prompt in enumerate(prompts):
        if not takes_features:
            _check_is_list(f"prompts[{index}]", prompt, expected)
        elif not isinstance(prompt, Tensor):
            raise TypeError(
                f"prompts[{index}] = {_shortened(prompt)} is {type(prompt).__name__}:"
                f" expected {expected}; run the feature extractor first"
            )


def _check_is_list(name: str, value: Any, expected: str) -> None:
    """Raise TypeError unless a value has numbered entries and is neither text nor a tensor."""
    kind = type(value).__name__
    if isinstance(value, Tensor):
        hint = "convert token ids with .tolist(), without padding"
        if value.is_floating_point():
            hint = "token ids are integers"
        raise TypeError(
            f"{name} is {kind} of {value.dtype}, shape {list(value.shape)}: expected"
            f" {expected}; {hint}"
        )
    if isinstance(value, str | bytes | Mapping):
        raise TypeError(
            f"{name} = {_shortened(value)} is {kind}: expected {expected}; run the tokenizer"
            " first, and give its input_ids"
        )
    if not hasattr(value, "__len__") or not hasattr(value, "__getitem__"):
        raise TypeError(f"{name} = {_shortened(value)} is {kind}: expected {expected}")


def _shortened(value: object) -> str:
    """Return a value as text of at most 40 characters."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def check_prompts(
    prompts: Sequence[Sequence[int]],
    vocabulary: int,
    num_output_tokens: int,
    max_tokens: int | None,
) -> None:
    """Raise for prompts that are empty, contain anything but tokens, or can never fit.

    Args:
        prompts: token ids of each prompt.
        vocabulary: number of token ids of the model.
        num_output_tokens: tokens after the prompt that the cache has to hold too.
        max_tokens: Optional. Slots of the whole cache. If None, they are unlimited.
    """
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompts[{index}] is empty: expected at least one token")
        for position, token in enumerate(prompt):
            if isinstance(token, bool) or not isinstance(token, Integral):
                raise TypeError(
                    f"prompts[{index}][{position}] = {token!r} is {type(token).__name__}:"
                    " expected an int; run the tokenizer first"
                )
            if not 0 <= token < vocabulary:
                raise ValueError(
                    f"prompts[{index}][{position}] = {token} is not a token of the model: expected"
                    f" 0 <= token < {vocabulary}"
                )
        num_tokens = len(prompt) + num_output_tokens
        if max_tokens is not None and num_tokens > max_tokens:
            raise ValueError(
                f"prompts[{index}] has {len(prompt)} tokens and its output needs"
                f" {num_output_tokens} more slots: {num_tokens} are more than the whole cache has"
                f" ({max_tokens}); expected more blocks, a shorter prompt or a smaller"
                " max_new_tokens"
            )


def check_arrivals(arrival_steps: Sequence[int] | None, num_prompts: int) -> list[int]:
    """Return the step in which each prompt arrives; raise if the steps do not fit the prompts."""
    if arrival_steps is None:
        return [0] * num_prompts
    if len(arrival_steps) != num_prompts:
        raise ValueError(
            f"arrival_steps has {len(arrival_steps)} entries: expected {num_prompts}, one per"
            " prompt"
        )
    for index, step in enumerate(arrival_steps):
        if step < 0:
            raise ValueError(f"arrival_steps[{index}] = {step}: expected at least 0")
    return list(arrival_steps)


def check_decoder_prompt(decoder_prompt: Sequence[Any], vocabulary: int) -> list[int]:
    """Return the first tokens of every output; raise if there are none."""
    if not decoder_prompt or any(token is None for token in decoder_prompt):
        raise ValueError(
            f"decoder_prompt = {list(decoder_prompt)}: expected at least one token, as the model"
            " has neither decoder_start_token_id nor bos_token_id"
        )
    for index, token in enumerate(decoder_prompt):
        if not 0 <= token < vocabulary:
            raise ValueError(
                f"decoder_prompt[{index}] = {token} is not a token of the model: expected"
                f" 0 <= token < {vocabulary}"
            )
    return list(decoder_prompt)


def check_features(prompts: Sequence[Any]) -> None:
    """Raise ValueError for features of different shapes."""
    shapes = [list(prompt.shape) for prompt in prompts]
    for index, shape in enumerate(shapes):
        if len(shape) != 2 or shape != shapes[0]:
            raise ValueError(
                f"prompts[{index}] has shape {shape}: expected features [bands, frames], of one"
                f" shape for all prompts ({shapes[0]})"
            )


def check_wave_fits(
    number: int, encoder_blocks: int, decoder_blocks: int, num_blocks: int | None
) -> None:
    """Raise ValueError for a prompt that needs more blocks than there are."""
    needed = max(encoder_blocks, decoder_blocks)
    if num_blocks is not None and needed > num_blocks:
        raise ValueError(
            f"num_blocks = {num_blocks}: prompts[{number}] needs {encoder_blocks} blocks for its"
            f" encoder and {decoder_blocks} for its decoder and can never run; expected at least"
            f" {needed}"
        )


def raise_option_not_supported(name: str, value: object, kind: str) -> NoReturn:
    """Raise ValueError for an option that this kind of model does not support."""
    raise ValueError(f"{name} = {value!r}: expected None, as the model is {kind}")


# --- models


def check_attention_replaced(model: str, found: str | None, expected: str) -> None:
    """Raise NotImplementedError if a model kept its own attention."""
    if found != expected:
        raise NotImplementedError(
            f"{model} does not let its attention be replaced (it kept {found!r}): expected a"
            " model whose file looks its attention up by name (ALL_ATTENTION_FUNCTIONS)"
        )


def check_attends_everywhere(model: str, is_stateful: bool) -> None:
    """Raise NotImplementedError for a model with recurrent or convolutional layers."""
    if is_stateful:
        raise NotImplementedError(
            f"{model} keeps a state of the past besides keys and values (a recurrent or"
            " convolutional layer): expected a model with attention in all layers"
        )


def check_takes_keywords(model: str, takes: bool) -> None:
    """Raise NotImplementedError for a model that passes no keywords on to its attention."""
    if not takes:
        raise NotImplementedError(
            f"{model}.forward takes no further keywords: expected a model that passes them on"
            " to its attention function, which gets the pages from them"
        )


def check_calls(model: str, calls: Mapping[str, int], expected: int) -> None:
    """Raise NotImplementedError unless each layer ran on the twin exactly once."""
    wrong = {name: count for name, count in calls.items() if count != 1}
    if len(calls) != expected or wrong:
        raise NotImplementedError(
            f"{model}: {len(calls)} of {expected} attention layers ran on the twin in this"
            f" step{f', some not once: {wrong}' if wrong else ''}; expected each once. A layer"
            " that computes its own attention cannot use a paged cache"
        )


def check_pages_used(model: str, found: int, expected: int) -> None:
    """Raise NotImplementedError unless each layer read the pages of the step."""
    if found != expected:
        raise NotImplementedError(
            f"{model}: {found} of {expected} attention layers got the pages of this step: expected"
            " layers that pass on either further keywords (pagetwin=) or attention_mask unchanged"
        )


def check_in_step(module: str, is_in_step: bool) -> None:
    """Raise NotImplementedError for a replaced attention module outside of a step."""
    if not is_in_step:
        raise NotImplementedError(
            f"{module} runs on a twin only in a step of PagedBatch: expected generate(...) or"
            " model(**batch.model_inputs(...)), without a cache of the library"
        )


def check_no_rounded_alibi(model: str, has_alibi: bool) -> None:
    """Raise NotImplementedError for a Falcon model with ALiBi."""
    if has_alibi:
        raise NotImplementedError(
            f"{model} has alibi = True: transformers rounds the bias of each key to bfloat16 in"
            " every dtype, which no slope per head expresses; expected rotary positions (alibi ="
            " False), or run this model with model.generate of the library"
        )


def check_no_merged_attention(model: str, classes: Iterable[type]) -> None:
    """Raise NotImplementedError for a decoder that merges self-attention and cross-attention."""
    merged = [each.__name__ for each in classes if "MergedAttention" in each.__name__]
    if merged:
        raise NotImplementedError(
            f"{model}: {merged[0]} computes one softmax over the keys of the decoder and of the"
            " encoder, which are in two block tables; expected separate cross-attention (such as"
            " T5Gemma), or run this model with model.generate of the library"
        )


def check_inference(query: Tensor, dropout: float) -> None:
    """Raise NotImplementedError for dropout and for gradients."""
    if dropout:
        raise NotImplementedError(
            f"dropout = {dropout}: expected 0; call model.eval() first"
        )
    if torch.is_grad_enabled() and query.requires_grad:
        raise NotImplementedError(
            "query requires a gradient: expected none, as the twins have no backward pass; run"
            " the model under torch.no_grad()"
        )


def check_layer_kind(
    module: Any, sliding_window: int | None, causal: bool
) -> int | None:
    """Return the layer's chunk size; raise if its options contradict its kind."""
    config: Any = getattr(module, "config", None)
    # cross-attention; the kinds are those of the decoder's self-attention
    if not causal and getattr(config, "is_decoder", False):
        return None
    layer = getattr(module, "layer_idx", None)
    kinds = getattr(config, "layer_types", None)
    of_config = getattr(config, "sliding_window", None)
    where = f"layer {layer} ({type(module).__name__})"
    if kinds is None or layer is None or layer >= len(kinds):
        wants_window = getattr(config, "use_sliding_window", True) and of_config
        if wants_window and sliding_window is None and layer is not None:
            raise NotImplementedError(
                f"{where} passes no sliding_window, and its config has sliding_window ="
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
            f"{where} is of kind {kind!r} and passes sliding_window = {sliding_window}:"
            " expected a window in layers of that kind and only in those"
        )
    return int(config.attention_chunk_size) if kind == "chunked_attention" else None


def check_same_implementation(pages_of: str, model_runs_on: str) -> None:
    """Raise ValueError if pages and model use different implementations."""
    if pages_of != model_runs_on:
        raise ValueError(
            f"the pages are of {pages_of!r} and the model runs on {model_runs_on!r}: expected the"
            " same implementation for both"
        )


def check_causal_batch(module: Any, causal: bool) -> None:
    """Raise NotImplementedError for a layer that is not causal."""
    if not causal or getattr(module, "layer_idx", None) is None:
        raise NotImplementedError(
            f"{type(module).__name__} is not causal, or has no layer_idx: expected a layer of a"
            " decoder; run an encoder without pagetwin=, and an encoder-decoder model with"
            " PagedCache"
        )


def check_flat_batch(metadata: Any, num_tokens: int) -> Any:
    """Return the step's metadata; raise if the number of tokens is not that of the step."""
    if metadata is None:
        raise ValueError("the batch has no step yet: expected begin_step(...) first")
    if metadata.num_actual_tokens != num_tokens:
        raise ValueError(
            f"{num_tokens} tokens: expected the {metadata.num_actual_tokens} of the step"
        )
    return metadata


# --- masks


def check_mask(mask: Tensor, num_reqs: int, query_len: int, key_len: int) -> None:
    """Raise unless a mask is a bool tensor, query by key."""
    if mask.dtype != torch.bool:
        raise TypeError(
            f"attention_mask is {mask.dtype}: expected torch.bool, True where a query attends to"
            " a key, or the two-dimensional mask of padding"
        )
    expected = [num_reqs, 1, query_len, key_len]
    if list(mask.shape) not in (expected, [1, *expected[1:]]):
        raise ValueError(
            f"attention_mask has shape {list(mask.shape)}: expected {expected}"
        )


def raise_unsupported_mask(req: int, query: int, key: int, shown: bool) -> NoReturn:
    """Raise for a mask that contains more than padding, causality, window and chunk."""
    raise NotImplementedError(
        f"attention_mask[{req}, 0, {query}, {key}] = {shown}: expected {not shown}, which"
        " follows from padding, causality and window; other masks are not supported"
    )


def raise_unsupported_bias(shape: list[int]) -> NoReturn:
    """Raise NotImplementedError for a bias that is not a function of the distance."""
    raise NotImplementedError(
        f"position_bias of shape {shape} is not the same for all pairs of one distance:"
        " expected a bias by key - query alone"
    )


# --- caches of the library


def check_paged_lengths(
    lengths: Sequence[int] | None, rows: Sequence[object], num_reqs: int
) -> None:
    """Raise ValueError if the number of requests has changed."""
    known = len(lengths) if lengths is not None else len(rows) or num_reqs
    if known != num_reqs:
        raise ValueError(
            f"{num_reqs} requests: expected {known}, as the cache has"
            f" {'lengths' if lengths is not None else 'rows'} for {known}; make a new"
            " PagedCache for other requests"
        )


def check_paged_ranges(
    keys: Sequence[tuple[int, int]],
    queries: Sequence[tuple[int, int]],
    stored: Sequence[int],
    query_len: int,
    depends_on_position: bool,
    sliding_window: int | None,
    attention_chunk_size: int | None,
) -> list[int]:
    """Return how many keys each request has; raise for padding that pages cannot leave out.

    Args:
        keys: for each request the first key that its mask shows, and the end (exclusive).
        queries: for each request its first query that is not padding, and the end (exclusive).
        stored: for each request the keys in its pages.
        query_len: queries of each request.
        depends_on_position: whether a query's position changes its result.
        sliding_window, attention_chunk_size: Optional. Limits that may mask the first keys.
    """
    for req, (first, end) in enumerate(keys):
        # a window or a chunk masks early keys for every query; padding there is not supported
        num_masked = 0
        position = stored[req] - query_len
        if sliding_window is not None:
            num_masked = max(num_masked, position - sliding_window + 1)
        if attention_chunk_size is not None:
            chunk_start = position // attention_chunk_size * attention_chunk_size
            num_masked = max(num_masked, chunk_start)
        is_whole = queries[req] == (0, query_len) and end == stored[req]
        if first > num_masked or (depends_on_position and not is_whole):
            raise NotImplementedError(
                f"request {req}: its mask shows keys {first} to {end} of {stored[req]} to"
                f" queries {queries[req][0]} to {queries[req][1]} of {query_len}: expected all"
                " of them; padding before or among a decoder's tokens is not supported by"
                " PagedCache (generate needs none)"
            )
        if end > stored[req]:
            raise ValueError(
                f"request {req}: its mask shows {end} keys, but only {stored[req]} are in the"
                " pages: expected the lengths that PagedCache was given, or none given to it"
            )
    return [end for _, end in keys]


def raise_on_read(operation: str) -> NoReturn:
    """Raise TypeError for a computation with keys or values that are stored in pages."""
    raise TypeError(
        f"{operation} would read keys or values that are stored in pages: expected a model whose"
        " attention is a registered twin, model.set_attn_implementation(register(...))"
    )


def raise_on_crop() -> NoReturn:
    """Raise NotImplementedError: a paged cache cannot be shortened."""
    raise NotImplementedError(
        "crop is not supported: a PagedCache only grows; make a new one"
    )
