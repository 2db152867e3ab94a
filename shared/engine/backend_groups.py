"""Attention groups: layers that share one metadata builder.

The layers of one KV-cache group have one block table, and therefore one metadata object per step.
If they run on different backends, each backend builds its own. A backend uses its workspace only
while a layer runs, so all builders share one workspace buffer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from ..contract.specs import KVCacheGroupSpec, KVCacheSpec
from ..validation.kv_cache import check_layers_present
from .backend_interface import AttentionBackend, AttentionMetadataBuilder


@runtime_checkable
class SharesWorkspace(Protocol):
    """A builder whose layers use a workspace buffer that other layers may use after them."""

    def get_workspace_buffer(self) -> Tensor:
        """Return the buffer, which is allocated by the first call."""

    def set_workspace_buffer(self, buffer: Tensor) -> None:
        """Use another builder's buffer."""


@dataclass(frozen=True)
class AttentionGroup:
    """Layers of one cache group that run on one backend.

    Args:
        backend: backend of all these layers.
        layer_names: names of at least one layer.
        kv_cache_spec: content of a block of each layer.
        kv_cache_group_id: index of their KV-cache group in the config, and of its block table.
        metadata_builder: the builder of their metadata.
    """

    backend: type[AttentionBackend]
    layer_names: tuple[str, ...]
    kv_cache_spec: KVCacheSpec
    kv_cache_group_id: int
    metadata_builder: AttentionMetadataBuilder


def init_attn_backend(
    kv_cache_groups: Sequence[KVCacheGroupSpec],
    static_forward_context: Mapping[str, Any],
    device: torch.device | str,
) -> tuple[dict[str, type[AttentionBackend]], list[AttentionGroup]]:
    """Return each layer's backend, and the groups that share a builder.

    Args:
        kv_cache_groups: the config's groups.
        static_forward_context: layers by name, each with a method `get_attn_backend`.
        device: device of the caches.

    Returns:
        Backends by layer name, and the groups. They are in the order of the config's groups, and
        within one in the order of the backends' first layers. The first builder with a workspace
        (`SharesWorkspace`) provides it to the later ones.

    Raises:
        KeyError: a layer of a group is missing in `static_forward_context`.
        ValueError: a group has no layers.

    Source:
        vLLM's function of that name. It assigns the backend of a group's first layer to all layers
        of the group, and shares the workspace of backends that have "FLASHINFER" in their names.
    """
    attn_backends: dict[str, type[AttentionBackend]] = {}
    attn_groups = []
    workspace: Tensor | None = None
    for group_id, group in enumerate(kv_cache_groups):
        names = group.layer_names
        if not names:
            raise ValueError(
                f"kv_cache_groups[{group_id}] has no layers: expected at least one"
            )
        check_layers_present("static_forward_context", static_forward_context, names)
        members: dict[type[AttentionBackend], list[str]] = {}
        for name in names:
            attn_backends[name] = static_forward_context[name].get_attn_backend()
            members.setdefault(attn_backends[name], []).append(name)
        for backend, own in members.items():
            builder = backend.get_builder_cls()(group.kv_cache_spec, own, device)
            if isinstance(builder, SharesWorkspace):
                if workspace is None:
                    workspace = builder.get_workspace_buffer()
                else:
                    builder.set_workspace_buffer(workspace)
            attn_groups.append(
                AttentionGroup(
                    backend, tuple(own), group.kv_cache_spec, group_id, builder
                )
            )
    return attn_backends, attn_groups
