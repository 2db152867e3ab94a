"""Arguments and results of an operator of torch, from the signature of a public operation.

An operator takes tensors and numbers, so each field of `AttentionOptions` is an argument of its
own, and what may be a number or a tensor becomes two arguments, `causal` and `causal_tensor`. A
result has the axes of the return annotation, whose sizes are those of the arguments
(`shared/contract/shapes.py` names the axes).
"""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

import torch
from jaxtyping import AbstractArray
from torch import Tensor

from ...contract.attention_options import AttentionOptions
from ...contract.cache_formats import CODES_PER_ELEMENT
from ...contract.latent_formats import find_record_heads

OPTIONS = "options"
"""The argument that is an AttentionOptions."""


def flatten_options(signature: inspect.Signature) -> Iterator[inspect.Parameter]:
    """Yield a signature's parameters, with one for each option in place of `options`."""
    for parameter in signature.parameters.values():
        if parameter.name != OPTIONS:
            yield parameter
            continue
        for field in fields(AttentionOptions):
            yield parameter.replace(
                name=field.name, annotation=field.type, default=field.default
            )


def lower_parameters(
    parameters: Sequence[inspect.Parameter], left_out: Sequence[str]
) -> Iterator[inspect.Parameter]:
    """Yield parameters as an operator has them."""
    for parameter in parameters:
        if parameter.name in left_out:
            continue
        kinds = _kinds(parameter.annotation)
        optional = NoneType in kinds
        kinds = [kind for kind in kinds if kind is not NoneType]
        numbers = [kind for kind in kinds if kind is not Tensor]
        if Tensor in kinds and numbers:
            (number,) = numbers
            annotation = number | None if optional else number
            yield parameter.replace(annotation=annotation)
            tensor = parameter.replace(name=f"{parameter.name}_tensor", default=None)
            yield tensor.replace(annotation=Tensor | None)
        else:
            (kind,) = kinds
            yield parameter.replace(annotation=kind | None if optional else kind)


def output_parameters(out: Sequence[str]) -> list[inspect.Parameter]:
    """Return the outputs of the overload `out`; the first one is required."""
    return [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            annotation=Tensor if name == out[0] else Tensor | None,
            default=inspect.Parameter.empty if name == out[0] else None,
        )
        for name in out
    ]


STORED = {"key_elements": "head_size", "value_elements": "value_head_size"}
"""Axis of a cache -> that of the keys or values that are read from it."""


class Results:
    """Makes an operation's results, without contents, from the names of the axes."""

    def __init__(
        self,
        signature: inspect.Signature,
        like: Sequence[str],
        sizes: Mapping[str, str],
        takes_records: bool = False,
    ) -> None:
        self.sizes, self.takes_records = sizes, takes_records
        self.axes = {
            name: parameter.annotation.dim_str.split()
            for name, parameter in signature.parameters.items()
            if _is_array(parameter.annotation)
        }
        returned = signature.return_annotation
        self.is_many = get_origin(returned) is tuple
        arrays = [
            annotation
            for annotation in (get_args(returned) if self.is_many else [returned])
            if _is_array(annotation)
        ]
        like = like or [next(iter(self.axes), "")] * len(arrays)
        self.results = [
            (annotation.dim_str.split(), name, _only_dtype(annotation))
            for annotation, name in zip(arrays, like, strict=True)
        ]

    def empty(self, given: Mapping[str, Any]) -> Any:
        """Return what an operation returns, given its arguments."""
        if not self.results:
            return None
        sizes = {axis: given[name] for axis, name in self.sizes.items()}
        if self.takes_records:
            form = find_record_heads(given["key_cache"], given["value_cache"])
            if form is not None:
                sizes["value_head_size"] = form.kv_lora_rank
        # without a dtype, what is read from a cache comes as it is stored
        is_stored = "dtype" in given and given["dtype"] is None
        for name, axes in self.axes.items():
            shape = given[name].shape
            if len(axes) != len(shape):
                raise ValueError(
                    f"{name} has shape {list(shape)}: expected [{', '.join(axes)}]"
                )
            codes = 1 if is_stored else CODES_PER_ELEMENT.get(given[name].dtype, 1)
            for axis, size in zip(axes, shape, strict=True):
                sizes.setdefault(axis, size)
                if axis in STORED:
                    sizes.setdefault(STORED[axis], size * codes)
        made = []
        for axes, name, only in self.results:
            dtype = only or given.get("dtype") or given[name].dtype
            shape = [sizes[axis] for axis in axes]
            made.append(given[name].new_empty(shape, dtype=dtype))
        return tuple(made) if self.is_many else made[0]


def _kinds(annotation: Any) -> list[Any]:
    """Return the types that an argument may have, arrays as Tensor."""
    is_union = get_origin(annotation) in (Union, UnionType)
    members = get_args(annotation) if is_union else (annotation,)
    return [with_plain_tensors(member) for member in members]


def with_plain_tensors(annotation: Any) -> Any:
    """Return an annotation with Tensor for every array."""
    if _is_array(annotation):
        return Tensor
    if origin := get_origin(annotation):
        return origin[tuple(map(with_plain_tensors, get_args(annotation)))]
    return annotation


def _is_array(annotation: Any) -> bool:
    return inspect.isclass(annotation) and issubclass(annotation, AbstractArray)


def _only_dtype(annotation: Any) -> torch.dtype | None:
    """Return the dtype of such arrays, or None if they may have several."""
    dtypes = annotation.dtypes
    return getattr(torch, dtypes[0]) if len(dtypes) == 1 else None
