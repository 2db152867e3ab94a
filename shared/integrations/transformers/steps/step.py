"""One step of a `PagedBatch`: what a run of the model needs to know of it.

A step is handed to the model as the keyword `pagetwin` and as the attention mask. Layers pass on
one of the two. A step is used by one run of one model: the inputs of an earlier step raise an
error, and so does a second run.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from ....contract.metadata_classes import CommonAttentionMetadata
from ....validation.library_caches import check_is_step, check_mask_of_step
from ....validation.library_models import raise_on_mask_read
from .no_data import TensorWithoutData


@dataclass(frozen=True, eq=False)
class Step:
    """The requests of one run of the model.

    Args:
        batch: the `PagedBatch`, which has the pages of all layers.
        metadata: what each request computes, and where its keys are.
        layers_run: the layers that computed attention with the pages so far; modified in place.
    """

    batch: Any
    metadata: CommonAttentionMetadata
    layers_run: set[int] = field(default_factory=set)

    @property
    def positions(self) -> list[int]:
        """[tokens] the position of each new token in its sequence."""
        return [
            position
            for first, last in zip(
                self.metadata.num_computed_tokens_cpu.tolist(),
                self.metadata.seq_lens_cpu.tolist(),
                strict=True,
            )
            for position in range(first, last)
        ]


PASSED_ON = {
    Tensor.to,
    Tensor.contiguous,
    Tensor.detach,
    Tensor.expand,
    Tensor.__getitem__,
}
"""Tensor functions after which a mask is still the mask of its step."""


class StepMask(TensorWithoutData):
    """The attention mask of a step.

    The library passes a mask of four dimensions on unchanged. Otherwise it would build a mask of
    tokens by tokens that is never read.
    """

    step: Step

    @classmethod
    def of(cls, step: Step) -> "StepMask":
        """Return the mask of a step."""
        num_tokens, device = step.metadata.num_actual_tokens, step.batch.device
        empty = torch.empty(1, 1, num_tokens, 0, dtype=torch.bool, device=device)
        found = empty.as_subclass(cls)
        found.step = step
        return found

    @classmethod
    def reject(cls, operation: str) -> NoReturn:
        """Raise for a model that computes with its mask."""
        raise_on_mask_read(operation)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return the mask itself if a layer passes it on; raise if it computes with it."""
        if func in PASSED_ON and isinstance(args[0], cls):
            return args[0]
        return super().__torch_function__(func, types, args, kwargs)


def step_of(given: Any, mask: Tensor | None) -> Step | None:
    """Return the step of a layer's call; None outside of a step.

    Args:
        given: Optional. The keyword `pagetwin` of the call.
        mask: Optional. The attention mask of the call.

    Raises:
        TypeError: the keyword is not a step.
        ValueError: keyword and mask are of different steps.
        NotImplementedError: the model has replaced the mask of the step.
    """
    of_mask = mask.step if isinstance(mask, StepMask) else None
    if given is None:
        return of_mask
    step: Step = check_is_step(given, Step)
    if mask is not None:
        check_mask_of_step(of_mask is not None, of_mask is step)
    return step
