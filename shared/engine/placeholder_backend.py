"""The placeholder backend of a model without attention."""

from typing import NoReturn

import torch

from ..contract.specs import KVCacheSpec
from .backend_interface import AttentionBackend


class PlaceholderAttentionBackend(AttentionBackend):
    """Stands where a backend is expected and nothing attends; whoever uses it is told so."""

    name = "NO_ATTENTION"

    @staticmethod
    def get_supported_head_sizes() -> list[int]:
        """Return an empty list: any."""
        return []

    @staticmethod
    def get_impl_cls() -> NoReturn:
        """Raise: there is nothing to run."""
        raise _nothing("layer")

    @staticmethod
    def get_metadata_cls() -> NoReturn:
        """Raise: there is nothing to describe."""
        raise _nothing("metadata")

    @staticmethod
    def get_builder_cls() -> NoReturn:
        """Raise: there is nothing to build."""
        raise _nothing("builder")

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> NoReturn:
        """Raise: there is nothing to keep."""
        raise _nothing("cache")

    @classmethod
    def validate_configuration(
        cls, spec: KVCacheSpec, device: torch.device | str
    ) -> list[str]:
        """Return an empty list: nothing can be wrong with nothing."""
        return []


def _nothing(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"the model is attention-free, so NO_ATTENTION has no {what}: expected a"
        " model with attention layers; choose a backend by name for those"
    )
