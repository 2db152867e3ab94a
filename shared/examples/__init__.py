"""Worked examples of every operation, with all their numbers.

The documentation, `pagetwin explain` and the tests use them. Each concept has one file with its
examples and a picture for the terminal. The code of an example is in the reference's docstring.
"""

import importlib
import math
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from rich.text import Text

from ..contract.graph_support import AttentionCGSupport, GroupSupport
from ..contract.layer_parameters import PerLayerParameters
from ..contract.layouts import KVCacheLayout
from ..contract.metadata_classes import UBatchSlice
from ..contract.multimodal_features import MultiModalFeature
from ..contract.operations import CONCEPTS, Concept, Implementation
from ..contract.parallel import KeySplits
from ..contract.scheduler_classes import Request
from ..contract.specs import KVCacheConfig, KVCacheGroupSpec, KVCacheSpec, KVCacheTensor
from ..engine.layer import Attention
from ..engine.rank_group import RankGroup
from .story import Example as Example
from .story import StoryStep as StoryStep
from .v0 import NAMES as V0_NAMES


def _file_of(concept: Concept) -> ModuleType:
    """Return the file of a concept's examples, in the folder `v0` as its operations."""
    folder = ".v0" if concept.module.startswith("v0.") else ""
    return importlib.import_module(f"{folder}.{concept.name}", __name__)


_FILES = {concept.name: _file_of(concept) for concept in CONCEPTS}
EXAMPLES: tuple[Example, ...] = tuple(
    example for file in _FILES.values() for example in file.EXAMPLES
)


def draw(concept: str) -> list[Text]:
    """Return a concept's picture for the terminal, at most 76 columns wide."""
    picture: list[Text] = _FILES[concept].draw()
    return picture


def example_names(implementation: Implementation) -> dict[str, Any]:
    """Return the names that examples may use, their operations taken from one twin."""
    names: dict[str, Any] = {
        "torch": torch,
        "math": math,
        "KVCacheSpec": KVCacheSpec,
        "MultiModalFeature": MultiModalFeature,
        "PerLayerParameters": PerLayerParameters,
        "UBatchSlice": UBatchSlice,
        "KVCacheConfig": KVCacheConfig,
        "KVCacheGroupSpec": KVCacheGroupSpec,
        "KVCacheTensor": KVCacheTensor,
        "KVCacheLayout": KVCacheLayout,
        "KeySplits": KeySplits,
        "RankGroup": RankGroup,
        "Attention": Attention,
        "BACKENDS": implementation.backends,
        "AttentionCGSupport": AttentionCGSupport,
        "GroupSupport": GroupSupport,
        "Request": Request,
        **V0_NAMES,
    }
    return names | implementation.operations


def run_example(
    example: Example, names: dict[str, Any]
) -> Iterator[tuple[str, str, str]]:
    """Run an example call by call: source text, what it promises, its output here.

    Args:
        example: what to run.
        names: result of `example_names`, modified in place: the example adds its own.
    """
    for source, shows in example.calls:
        try:
            call = compile(source, example.operation, "eval")
        except SyntaxError:
            exec(source, names)
            yield source, shows, ""
            continue
        result = eval(call, names)
        yield source, shows, "" if result is None else repr(result)


def examples_of(concept: str) -> tuple[Example, ...]:
    """Return the examples of a concept, in the order of its operations."""
    examples: tuple[Example, ...] = _FILES[concept].EXAMPLES
    return examples
