"""Setting: the arguments of a law besides its case."""

from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from ...contract.operations import Implementation
from .candidate import Candidate
from .fitting import fit_case

Drawn = TypeVar("Drawn")


@dataclass(frozen=True)
class Setting:
    """The arguments of a law besides its case.

    Args:
        candidate: The implementation under test.
        truth: The reference.
        device: The device of the tensors.
        is_fitting: Whether the drawn case is outside of the declared support, so that the nearest
            one inside of it is tried.
    """

    candidate: Candidate
    truth: Implementation
    device: torch.device
    is_fitting: bool = False

    def fit(self, drawn: Drawn) -> Drawn:
        """Return a plan made by a law; if `is_fitting`, the nearest one inside of the support.

        The number of heads is kept, because the law may make options per head.
        """
        if not self.is_fitting:
            return drawn
        support = replace(self.candidate.support, group_sizes=None)
        fitted: Drawn = fit_case(drawn, support)
        return fitted

    def fitting(self) -> "Setting":
        """Return the setting in which plans are fitted to the declared support."""
        return replace(self, is_fitting=True)
