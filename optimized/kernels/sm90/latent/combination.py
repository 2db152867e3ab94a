"""Second launch of Hopper latent decodes on the host: how many rows a program combines."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ....runtime.launcher import Launcher
from ..common.entry import launch_by_pointers
from .combine import LatentCombineArguments, latent_combine_kernel

FEW_ROWS = 256
"""Rows of split row tiles up to which a program combines ONE_ROW, and otherwise TWO_ROWS.

Both in µs, on an H200: one request of 65,536 keys with 16 heads (16 rows) 15.3 and 25.0, with 128
heads (128 rows) 9.2 and 14.1; 8 of 8,192 keys with 16 heads (128 rows) 3.8 and 5.2, with 128 heads
(1,024 rows) 7.5 and 5.0; 64 of 4,096 keys with 16 heads (1,024 rows) 6.5 and 3.9. The records
`2026-11-26-nvidia-h200-...-latent-variants.jsonl` have the launches."""
ONE_ROW = {"ROWS": 1, "SPLITS": 16}
TWO_ROWS = {"ROWS": 2, "SPLITS": 8}
"""Rows of a program, and partial results that it loads at once."""


class Combination:
    """The launches of the combination for all calls with one signature."""

    def __init__(self) -> None:
        self._few, self._many = (
            Launcher(
                latent_combine_kernel,
                lower_partials,
                constants,
                num_warps=4,
                num_stages=1,
                is_dependent=True,
            )
            for constants in (ONE_ROW, TWO_ROWS)
        )

    def launch(
        self,
        given: Mapping[str, Any],
        max_splits: int,
    ) -> None:
        """Combine the partial results, and clear the rows of no request.

        Args:
            given: arguments of the kernel by name. Outputs are modified in place.
            max_splits: split row tiles, at most.
        """
        partial_rows = given["partial_rows"]
        is_few = max_splits * partial_rows <= FEW_ROWS
        rows = (ONE_ROW if is_few else TWO_ROWS)["ROWS"]
        launch_by_pointers(
            self._few if is_few else self._many,
            (-(-partial_rows // rows), max_splits + 1, 1),
            LatentCombineArguments,
            given,
        )


def lower_partials(*tensors: Any) -> tuple[Any, ...]:
    """Return the tensors of a launch with the splits as int32."""
    return lower_splits(LatentCombineArguments, tensors)


def lower_splits(arguments: Any, tensors: Sequence[Any]) -> tuple[Any, ...]:
    """Return the first arguments of a launch with the splits as int32.

    Args:
        arguments: NamedTuple of the arguments.
        tensors: the first of them.
    """
    return tuple(
        tensor.view(torch.int32) if name == "splits" else tensor
        for name, tensor in zip(arguments._fields, tensors, strict=False)
    )
