"""Validation of paged caches that models of other libraries use: steps, owners, padding."""

from collections.abc import Sequence
from typing import Any, NoReturn, TypeVar

from torch import Tensor

Expected = TypeVar("Expected")


def check_same_implementation(pages_of: str, model_runs_on: str) -> None:
    """Raise ValueError if pages and model use different implementations."""
    if pages_of != model_runs_on:
        raise ValueError(
            f"the pages are of {pages_of!r} and the model runs on {model_runs_on!r}: expected the"
            " same implementation for both"
        )


def check_owner(cache: str, layer: int, module: str, is_owner: bool) -> None:
    """Raise ValueError if a cache is used by a second model."""
    if not is_owner:
        raise ValueError(
            f"layer {layer} ({module}) is not the one that wrote the pages of layer {layer} of"
            f" this {cache}: expected one model per {cache}; make another one for another model"
        )


# --- steps of a PagedBatch


def check_step_length(query_lens: Sequence[int]) -> None:
    """Raise ValueError for a step without tokens."""
    if not sum(query_lens):
        raise ValueError(
            f"query_lens = {list(query_lens)}: expected at least one new token, as a model does"
            " not run on none; leave the step out"
        )


def check_step(step: Expected | None) -> Expected:
    """Return the current step; raise ValueError if none has begun."""
    if step is None:
        raise ValueError("the batch has no step yet: expected begin_step(...) first")
    return step


def check_tokens(expected: int, num_tokens: int) -> None:
    """Raise ValueError if the number of tokens is not that of the step."""
    if num_tokens != expected:
        raise ValueError(f"{num_tokens} tokens: expected the {expected} of the step")


def check_no_recorder(has_recorder: bool) -> None:
    """Raise TypeError for a copy of a batch that a recorder follows."""
    if has_recorder:
        raise TypeError(
            "a copy of a PagedBatch with a recorder: expected a batch without one, as a recorder"
            " follows the blocks of one batch"
        )


def check_is_step(given: Any, expected: type[Expected]) -> Expected:
    """Return the keyword `pagetwin` of a layer; raise TypeError if it is not a step."""
    if not isinstance(given, expected):
        raise TypeError(
            f"pagetwin = {type(given).__name__}: expected what model_inputs(...) of a PagedBatch"
            " returns; call model(**batch.model_inputs(tokens))"
        )
    return given


def check_mask_of_step(is_step_mask: bool, is_same: bool) -> None:
    """Raise if a layer of a step gets another mask than that of the step."""
    if not is_step_mask:
        raise NotImplementedError(
            "attention_mask is not the one of this step: expected a model that passes it on"
            " unchanged, and no attention_mask beside model_inputs(...); a step knows which keys"
            " each token attends to"
        )
    if not is_same:
        raise ValueError(
            "pagetwin and attention_mask are of different steps: expected both of one"
            " model_inputs(...)"
        )


def check_current_step(is_current: bool, layer: int, has_run: bool) -> None:
    """Raise for the inputs of an earlier step, and for a second run of a layer in a step."""
    if not is_current:
        raise ValueError(
            "the inputs are of an earlier step: expected model_inputs(...) of the step that began"
            " last, as its blocks and positions are others"
        )
    if has_run:
        raise NotImplementedError(
            f"layer {layer} has run in this step already and would overwrite its keys: expected"
            " begin_step(...) before each run of the model, and a model that runs each layer once"
        )


def check_one_row(query: Tensor, key: Tensor, num_tokens: int) -> None:
    """Raise ValueError unless queries and keys are those of one flat step."""
    found = [query.shape[0], query.shape[2], key.shape[2]]
    if found != [1, num_tokens, num_tokens]:
        raise ValueError(
            f"{found[0]} rows of {found[1]} tokens and {found[2]} keys: expected one row with the"
            f" {num_tokens} tokens of the step, and no cache of the library"
        )


# --- PagedCache


def check_num_requests(num_reqs: int, known: int, what: str) -> None:
    """Raise ValueError if the number of requests has changed."""
    if num_reqs != known:
        raise ValueError(
            f"{num_reqs} requests: expected {known}, as the cache has {what} for {known}; make a"
            " new PagedCache for other requests"
        )


def check_lengths(lengths: list[int]) -> list[int]:
    """Return the stored tokens of each request; raise ValueError for a number below 0."""
    for index, length in enumerate(lengths):
        if length < 0:
            raise ValueError(f"lengths[{index}] = {length}: expected at least 0")
    return lengths


def check_in_turn(layer: int, found: int, expected: int) -> None:
    """Raise ValueError if a layer has not seen the tokens that the others have."""
    if found != expected:
        raise ValueError(
            f"layer {layer} of the cache has {found} tokens and another layer has {expected}: an"
            " earlier run of the model ended before its last layer; expected reset() first, or a"
            " new PagedCache"
        )


def check_same_tokens(is_same: bool) -> None:
    """Raise NotImplementedError if the masks of two layers show different tokens."""
    if not is_same:
        raise NotImplementedError(
            "the attention masks of two layers show different tokens as padding: expected the same"
            " tokens in all layers, as they share their block tables"
        )


def check_crop(tokens_to_remove: int, length: int) -> None:
    """Raise ValueError for more tokens than there are."""
    if tokens_to_remove > length:
        raise ValueError(
            f"crop removes {tokens_to_remove} tokens: expected at most the {length} of the cache"
        )


def check_request_indices(indices: Sequence[int], num_reqs: int) -> None:
    """Raise IndexError for the index of a request that is not in the cache."""
    for number, index in enumerate(indices):
        if not -num_reqs <= index < num_reqs:
            raise IndexError(
                f"indices[{number}] = {index}: expected the index of one of the {num_reqs}"
                " requests of the cache"
            )


def raise_on_read(operation: str) -> NoReturn:
    """Raise TypeError for a computation with keys or values that are stored in pages."""
    raise TypeError(
        f"{operation} would read keys or values that are stored in pages: expected a model whose"
        " attention is a registered twin, model.set_attn_implementation(register(...)), and gets"
        " the keys as the cache returns them; latent attention does not"
    )


def raise_on_one_layer(operation: str) -> NoReturn:
    """Raise TypeError for an operation on one layer of a cache."""
    raise TypeError(
        f"{operation} of one layer: expected cache.{operation}(...), as all layers of a"
        " PagedCache share their block tables"
    )
