"""The placeholder backend of a model without attention."""

from typing import NoReturn

import torch

from ..contract.specs import KVCacheSpec
from .backend_interface import AttentionBackend


class PlaceholderAttentionBackend(AttentionBackend):
    """The backend of a model without attention: no layer, no metadata, no builder, no cache."""

    name = "NO_ATTENTION"

    @classmethod
    def get_impl_cls(cls) -> NoReturn:
        """Raise NotImplementedError, since it has no layers."""
        raise _nothing("layer")

    @classmethod
    def get_metadata_cls(cls) -> NoReturn:
        """Raise NotImplementedError, since it has no metadata."""
        raise _nothing("metadata")

    @classmethod
    def get_builder_cls(cls) -> NoReturn:
        """Raise NotImplementedError, since it has no metadata to build."""
        raise _nothing("builder")

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int
    ) -> NoReturn:
        """Raise NotImplementedError, since it has no cache."""
        raise _nothing("cache")

    @classmethod
    def validate_configuration(
        cls, spec: KVCacheSpec, device: torch.device | str
    ) -> list[str]:
        """Return an empty list, since every configuration is valid."""
        return []


def _nothing(what: str) -> NotImplementedError:
    return NotImplementedError(
        f"the model is attention-free, so NO_ATTENTION has no {what}: expected a"
        " model with attention layers; choose a backend by name for those"
    )
