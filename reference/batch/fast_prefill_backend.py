"""Derived backends and metadata classes for layers that run on some tokens of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ...contract.argument_types import typed
from ...contract.fast_prefill_metadata import KV_SHARING_FAST_PREFILL_METADATA_FIELDS
from ...contract.metadata_classes import CommonAttentionMetadata
from ...engine.backend_interface import AttentionBackend, AttentionMetadataBuilder
from ...validation.primitives import check_field_names


@typed
def subclass_attention_backend(
    name_prefix: str,
    attention_backend_cls: type[AttentionBackend],
    builder_cls: type[AttentionMetadataBuilder],
) -> type[AttentionBackend]:
    """Return a new backend that differs from another one in its builder alone.

    Args:
        name_prefix: prefix of the new class's name; the other class's name follows.
        attention_backend_cls: the backend to derive from. It is not modified.
        builder_cls: builder of the new backend's metadata.

    Returns:
        A new class at every call.

    Source:
        vLLM's function of that name.

    Example:
        >>> backend, builder = BACKENDS[0], BACKENDS[0].get_builder_cls()
        >>> mine = subclass_attention_backend("My", backend, builder)
        >>> issubclass(mine, backend), mine.get_builder_cls() is builder
        (True, True)
    """
    return _derived(
        name_prefix, attention_backend_cls, get_builder_cls=lambda: builder_cls
    )


@typed
def subclass_attention_metadata(
    name_prefix: str,
    metadata_cls: type[Any],
    fields: Sequence[tuple[str, Any, Any]],
) -> type[Any]:
    """Return a new metadata class with additional fields.

    Args:
        name_prefix: prefix of the new class's name; the other class's name follows.
        metadata_cls: the dataclass to derive from. It is not modified. The new class is frozen
            if it is.
        fields: name, type and default of each new field, which is given by keyword. A field
            that exists already keeps its position and gets the new default.

    Returns:
        A new class at every call.

    Raises:
        ValueError: a mutable default, such as a list, or a name that no field can have.

    Source:
        vLLM's function of that name.

    Example:
        >>> counted = subclass_attention_metadata(
        ...     "Counted", BACKENDS[0].get_metadata_cls(), [("num_images", int, 0)]
        ... )
        >>> counted.__dataclass_fields__["num_images"].default
        0
    """
    check_field_names([name for name, _, _ in fields])
    namespace: dict[str, Any] = {
        name: field(default=default, kw_only=True) for name, _, default in fields
    }
    namespace["__annotations__"] = {name: kind for name, kind, _ in fields}
    namespace["__module__"] = metadata_cls.__module__
    derived = type(name_prefix + metadata_cls.__name__, (metadata_cls,), namespace)
    return dataclass(frozen=metadata_cls.__dataclass_params__.frozen)(derived)


class WantedTokensBuilder(AttentionMetadataBuilder):
    """A builder for the tokens whose logits are wanted; combined with a backend's own builder.

    Attributes:
        metadata_cls: class of the metadata, with the two fields of fast prefill.
        wanted_tokens: returns the step that has only the wanted tokens.
    """

    metadata_cls: type[Any]
    wanted_tokens: Callable[[CommonAttentionMetadata], CommonAttentionMetadata]

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Any:
        """Return the metadata of the wanted tokens, with the two fields of the whole step."""
        whole, wanted = common_attn_metadata, self.wanted_tokens(common_attn_metadata)
        # the next class in the order of bases is the backend's own builder
        parent: Any = super()
        built = parent.build(common_prefix_len, wanted, fast_build)
        values = {field.name: getattr(built, field.name) for field in fields(built)}
        # the layer selects its queries from all tokens by these
        values["logits_indices_padded"] = whole.logits_indices_padded
        values["num_logits_indices"] = whole.num_logits_indices
        return self.metadata_cls(**values)


def derive_fast_prefill_backend(
    prefix: str,
    underlying_attn_backend: type[AttentionBackend],
    wanted_tokens: Callable[[CommonAttentionMetadata], CommonAttentionMetadata],
) -> type[AttentionBackend]:
    """Return a backend whose builder keeps only the tokens whose logits are wanted.

    Args:
        prefix: prefix of the new class's name.
        underlying_attn_backend: the backend that runs these layers.
        wanted_tokens: returns the step that has only the wanted tokens.
    """
    # step: add two fields to the metadata
    metadata_cls = subclass_attention_metadata(
        "KVSharingFastPrefill",
        underlying_attn_backend.get_metadata_cls(),
        KV_SHARING_FAST_PREFILL_METADATA_FIELDS,
    )
    # step: build the metadata from the wanted tokens alone
    builder_cls = type(
        "FastPrefillAttentionBuilder",
        (WantedTokensBuilder, underlying_attn_backend.get_builder_cls()),
        {"metadata_cls": metadata_cls, "wanted_tokens": staticmethod(wanted_tokens)},
    )
    # step: derive a backend that returns both classes
    return _derived(
        prefix,
        underlying_attn_backend,
        get_builder_cls=lambda: builder_cls,
        get_metadata_cls=lambda: metadata_cls,
    )


def _derived(
    name_prefix: str, backend: type[AttentionBackend], **methods: Callable[[], Any]
) -> type[AttentionBackend]:
    """Return a subclass of a backend with other static methods."""
    namespace: dict[str, Any] = {"__module__": backend.__module__}
    namespace |= {name: staticmethod(method) for name, method in methods.items()}
    return type(name_prefix + backend.__name__, (backend,), namespace)
