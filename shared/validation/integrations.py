"""Validation of the numbers and prompts that a caller gives to an integration."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor

from ..contract.operations import Implementation, load_implementation
from .primitives import check_positive


def load_named(implementation: Any) -> Implementation:
    """Return an implementation; raise if the name is unknown or it cannot run here."""
    if not isinstance(implementation, str):
        raise TypeError(
            f"implementation = {_shortened(implementation)} is {type(implementation).__name__}:"
            " expected 'reference', 'optimized', or the dotted name of a package with the same"
            " operations"
        )
    try:
        return load_implementation(implementation)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"implementation = {implementation!r} cannot be loaded ({error}): expected"
            " 'reference', 'optimized', or the dotted name of a package with the same operations"
        ) from error


@cache
def load_for(variable: str, name: str) -> Implementation:
    """Return an implementation that an environment variable names.

    Raises:
        ValueError: it cannot be loaded; the message begins with the variable.
    """
    try:
        return load_named(name)
    except ValueError as error:
        raise ValueError(f"{variable}: {error}") from error


# --- numbers


def read_int(name: str, value: Any, hint: str = "") -> int:
    """Return an integer of Python; raise TypeError for anything but an integer.

    Integers of NumPy and integer tensors without dimensions count. A bool is not an integer.
    """
    kind = str(getattr(value, "dtype", ""))
    is_bool = isinstance(value, bool) or kind in ("bool", "torch.bool")
    try:
        if is_bool or getattr(value, "ndim", None):
            raise TypeError
        return operator.index(value)
    except (TypeError, RuntimeError):
        raise TypeError(
            f"{name} = {_shortened(value)} is {type(value).__name__}: expected an integer{hint}"
        ) from None


def read_count(name: str, value: Any) -> int:
    """Return an integer of at least 1."""
    number = read_int(name, value)
    check_positive(**{name: number})
    return number


def read_ids(name: str, value: Any, hint: str = "") -> list[int]:
    """Return the integers of a list, a tuple, a set, an array or a tensor of one dimension.

    Args:
        name: what the message calls the value.
        value: what the caller gave.
        hint: what the message for an entry ends with.
    """
    if isinstance(value, Tensor | np.ndarray):
        if value.ndim != 1:
            raise TypeError(
                f"{name} has shape {list(value.shape)}: expected one dimension, an integer per"
                " entry"
            )
        if str(value.dtype).removeprefix("torch.").startswith(("int", "uint")):
            value = value.tolist()
    elif isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError(
            f"{name} = {_shortened(value)} is {type(value).__name__}: expected a list of integers"
        )
    return [
        read_int(f"{name}[{index}]", number, hint) for index, number in enumerate(value)
    ]


def read_id_or_ids(name: str, value: Any) -> list[int]:
    """Return the integers of one integer, or of a list, array or tensor of integers."""
    is_one = isinstance(value, int) or getattr(value, "ndim", None) == 0
    if not is_one and (isinstance(value, str) or not isinstance(value, Iterable)):
        raise TypeError(
            f"{name} = {_shortened(value)} is {type(value).__name__}: expected an integer, or a"
            " list of integers"
        )
    return [read_int(name, value)] if is_one else read_ids(name, value)


def read_rows(name: str, value: Any) -> list[list[int]]:
    """Return the integers of a list of lists, or of a matrix."""
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise TypeError(
            f"{name} = {_shortened(value)} is {type(value).__name__}: expected a list of lists of"
            " integers"
        )
    return [read_ids(f"{name}[{index}]", row) for index, row in enumerate(value)]


def check_block_ids(name: str, rows: Sequence[Sequence[int]], num_blocks: int) -> None:
    """Raise IndexError for a block id outside the cache."""
    for number, row in enumerate(rows):
        for index, block_id in enumerate(row):
            if not 0 <= block_id < num_blocks:
                raise IndexError(
                    f"{name}: block id {block_id} (entry {index} of row {number}) is outside the"
                    f" cache: expected 0 <= block id < {num_blocks}"
                )


# --- prompts


def check_limits(**limits: Any) -> dict[str, int | None]:
    """Return limits as integers of at least 1, or None where that means unlimited."""
    return {
        name: None
        if value is None and name == "num_blocks"
        else read_count(name, value)
        for name, value in limits.items()
    }


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


def read_prompts(
    prompts: Sequence[Any],
    vocabulary: int,
    num_output_tokens: int,
    max_tokens: int | None,
) -> list[list[int]]:
    """Return prompts as integers; raise for one that is empty, has an unknown token or never fits.

    Args:
        prompts: token ids of each prompt.
        vocabulary: number of token ids of the model.
        num_output_tokens: tokens after the prompt that the cache has to hold too.
        max_tokens: Optional. Slots of the whole cache. If None, they are unlimited.
    """
    found = []
    for index, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompts[{index}] is empty: expected at least one token")
        found.append(_read_tokens(f"prompts[{index}]", prompt, vocabulary))
        num_tokens = len(prompt) + num_output_tokens
        if max_tokens is not None and num_tokens > max_tokens:
            raise ValueError(
                f"prompts[{index}] has {len(prompt)} tokens and its output needs"
                f" {num_output_tokens} more slots: {num_tokens} are more than the whole cache has"
                f" ({max_tokens}); expected more blocks, a shorter prompt or a smaller"
                " max_new_tokens"
            )
    return found


def _read_tokens(name: str, value: Any, vocabulary: int) -> list[int]:
    """Return the token ids of a list; raise for anything else and for an unknown token."""
    tokens = read_ids(name, value, "; run the tokenizer first")
    for position, token in enumerate(tokens):
        if not 0 <= token < vocabulary:
            raise ValueError(
                f"{name}[{position}] = {token} is not a token of the model: expected"
                f" 0 <= token < {vocabulary}"
            )
    return tokens


def check_arrivals(arrival_steps: Any, num_prompts: int) -> list[int]:
    """Return the step in which each prompt arrives; raise if the steps do not fit the prompts."""
    if arrival_steps is None:
        return [0] * num_prompts
    steps = read_ids("arrival_steps", arrival_steps)
    if len(steps) != num_prompts:
        raise ValueError(
            f"arrival_steps has {len(steps)} entries: expected {num_prompts}, one per"
            " prompt"
        )
    for index, step in enumerate(steps):
        if step < 0:
            raise ValueError(f"arrival_steps[{index}] = {step}: expected at least 0")
    return steps


def check_decoder_prompt(decoder_prompt: Any, vocabulary: int) -> list[int]:
    """Return the first tokens of every output; raise if there are none."""
    if decoder_prompt is None:
        raise ValueError(
            "decoder_prompt = None: expected at least one token, as the model has neither"
            " decoder_start_token_id nor bos_token_id"
        )
    tokens = _read_tokens("decoder_prompt", decoder_prompt, vocabulary)
    if not tokens:
        raise ValueError("decoder_prompt = []: expected at least one token")
    return tokens


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


def check_option_unused(name: str, value: object, kind: str) -> None:
    """Raise ValueError for an option that this kind of model does not support."""
    if value is not None:
        raise ValueError(f"{name} = {value!r}: expected None, as the model is {kind}")


# --- sampling


def check_is_config(config: Any, expected: type) -> None:
    """Raise TypeError for settings that are not those of the library."""
    if not isinstance(config, expected):
        raise TypeError(
            f"generation_config = {_shortened(config)} is {type(config).__name__}: expected a"
            " GenerationConfig of transformers"
        )


def check_generation_config(config: Any) -> None:
    """Raise for settings that ask for more than greedy decoding or sampling of one sequence."""
    mode = config.get_generation_mode()
    if str(getattr(mode, "value", mode)) not in ("greedy_search", "sample"):
        raise NotImplementedError(
            f"generation_config asks for {getattr(mode, 'value', mode)}: expected greedy decoding"
            " or sampling; use model.generate of the library, with a PagedCache"
        )
    for name, without in (
        ("num_return_sequences", (None, 1)),
        ("guidance_scale", (None, 1)),
        ("stop_strings", (None,)),
        ("max_time", (None,)),
        ("token_healing", (None, False)),
    ):
        value = getattr(config, name, None)
        if value not in without:
            raise NotImplementedError(
                f"generation_config.{name} = {value!r} is not supported: expected"
                f" {' or '.join(map(repr, without))}; use model.generate of the library, with a"
                " PagedCache"
            )


def check_no_max_length(config: Any, has_limit: bool) -> None:
    """Raise NotImplementedError for a length of prompt and output together."""
    if (
        config.max_length is not None
        and config.max_new_tokens is None
        and not has_limit
    ):
        raise NotImplementedError(
            f"generation_config.max_length = {config.max_length} counts the prompt too, and"
            " prompts have different lengths: expected max_new_tokens instead"
        )


def check_seeds(seed: Any, num_prompts: int) -> list[int]:
    """Return a seed per prompt, from one or from as many."""
    seeds = read_id_or_ids("seed", seed)
    if isinstance(seed, int) or getattr(seed, "ndim", None) == 0:
        seeds = [seeds[0] + number for number in range(num_prompts)]
    if len(seeds) != num_prompts:
        raise ValueError(
            f"seed has {len(seeds)} entries: expected {num_prompts}, one per prompt, or one number"
        )
    for index, entry in enumerate(seeds):
        if not 0 <= entry < 2**63:
            raise ValueError(f"seed[{index}] = {entry}: expected 0 <= seed < 2**63")
    return seeds


def check_streamers(streamer: Any, num_prompts: int) -> list[Any]:
    """Return a streamer or None per prompt."""
    if streamer is None:
        return [None] * num_prompts
    streamers = [streamer] if hasattr(streamer, "put") else streamer
    if not isinstance(streamers, list | tuple):
        raise TypeError(
            f"streamer = {_shortened(streamer)} is {type(streamer).__name__}: expected a streamer"
            " of transformers, or a list with one per prompt"
        )
    if len(streamers) != num_prompts:
        raise ValueError(
            f"streamer is {len(streamers)} streamers: expected {num_prompts}, one per prompt (None"
            " for a prompt that is not streamed)"
        )
    for index, entry in enumerate(streamers):
        if entry is not None and not (hasattr(entry, "put") and hasattr(entry, "end")):
            raise TypeError(
                f"streamer[{index}] = {_shortened(entry)} is {type(entry).__name__}: expected a"
                " streamer of transformers, with put and end"
            )
    return list(streamers)
