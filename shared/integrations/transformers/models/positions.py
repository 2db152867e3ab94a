"""Where a model takes its positions from, and up to which position that is exact.

In a step the tokens of several requests are one row, so a token's index in the row is not its
position. The library's models get positions as `position_ids`. Some models derive something else
from the row, or from all requests together:

- a model that ignores `position_ids` and counts the tokens of the row;
- a model whose first position is not 0, because it counts from the padding id;
- rotary frequencies that depend on the longest sequence of the batch (dynamic NTK, LongRoPE);
- a temperature of the queries that depends on their index in the row (Llama 4).
"""

import sys
from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

PADDING_POSITIONS = "create_position_ids_from_input_ids"
"""The library's name of the function that counts positions from the padding id."""


def ignores_position_ids(module: nn.Module) -> bool:
    """Whether no model in the file of an attention module takes `position_ids`."""
    forwards = [
        vars(owner)["forward"]
        for owner in _classes_of_file(module)
        if issubclass(owner, PreTrainedModel) and "forward" in vars(owner)
    ]
    takes = ["position_ids" in signature(forward).parameters for forward in forwards]
    return bool(takes) and not any(takes)


def counts_from_padding(module: nn.Module) -> bool:
    """Whether a model in the file of an attention module counts positions from the padding id."""
    file = sys.modules[type(module).__module__]
    owners = [file, *_classes_of_file(module)]
    return any(PADDING_POSITIONS in vars(owner) for owner in owners)


def _classes_of_file(module: nn.Module) -> Iterator[type]:
    name = type(module).__module__
    for var in list(vars(sys.modules[name]).values()):
        if isinstance(var, type) and var.__module__ == name:
            yield var


def rope_limit(config: Any) -> tuple[str, int] | None:
    """Return the kind of rotary positions and the longest sequence that has its own frequencies.

    Args:
        config: the configuration of a model, or of its text part.

    Returns:
        None if the frequencies are the same for all sequences. Otherwise longer sequences change
        the frequencies of every request in the step.
    """
    parameters = getattr(config, "rope_parameters", None) or {}
    # some models have a set of parameters per kind of layer
    nested = [
        parameter for parameter in parameters.values() if isinstance(parameter, dict)
    ]
    limits = []
    for rope in [parameters, *nested]:
        kind = rope.get("rope_type") or ""
        length = config.max_position_embeddings if "dynamic" in kind else None
        if kind == "longrope":
            length = rope["original_max_position_embeddings"]
        if length is not None:
            limits.append((int(length), kind))
    if not limits:
        return None
    length, kind = min(limits)
    return kind, length


def decoder_of(model: Any) -> nn.Module:
    """Return the part of a model that takes the tokens; other parts may be for images."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    found: nn.Module = model if decoder is None else decoder
    return found


def table_limit(stack: nn.Module) -> tuple[str, int] | None:
    """Return the name and the length of a model's shortest table of positions.

    Args:
        stack: an encoder or a decoder.

    Returns:
        None if it has no table, or one that grows.
    """
    tables = []
    for module_name, module in stack.named_modules():
        name = module_name.rpartition(".")[2]
        if _is_table(name) and isinstance(module, nn.Embedding):
            # some models have unused rows at the beginning of a table
            rows = module.num_embeddings - int(getattr(module, "offset", 0))
            tables.append((rows, module_name))
        for attribute, value in {**vars(module), **module._buffers}.items():
            is_matrix = isinstance(value, Tensor) and value.dim() == 2
            if is_matrix and value.is_floating_point() and _is_table(attribute):
                tables.append((len(value), f"{module_name}.{attribute}".strip(".")))
    if not tables:
        return None
    rows, name = min(tables)
    return name, rows


def _is_table(name: str) -> bool:
    """Whether the library gives this name to tables with a row per position."""
    words = ("wpe", "embed_positions", "position_embedding", "pos_encoding")
    return any(word in name for word in words)


def scales_by_row(module: nn.Module) -> bool:
    """Whether a layer scales its queries by their index in the row (Llama 4, without RoPE)."""
    is_tuned = bool(getattr(module, "attn_temperature_tuning", False))
    return is_tuned and not getattr(module, "use_rope", True)


def scale_by_position(module: Any, query: Tensor, positions: list[int]) -> Tensor:
    """Return queries with the temperature of their positions.

    The layer has scaled them by their index in the row. For an index below `floor_scale` that is
    a factor of 1.

    Args:
        module: a layer for which `scales_by_row` is True.
        query: [tokens, query_heads, head_size].
        positions: [tokens] position of each query.

    Source:
        "Scalable-Softmax Is Superior for Attention", arXiv 2501.19399.
    """
    position = torch.tensor(positions, device=query.device).float()
    steps = torch.floor((position + 1.0) / module.floor_scale)
    factors: Tensor = torch.log1p(steps) * module.attn_scale + 1.0
    return (query * factors[:, None, None]).to(query.dtype)
