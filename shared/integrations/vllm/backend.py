"""The attention backend for vLLM: what vLLM asks before it builds a model."""

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf

from ...contract.latent_formats import LATENT_FORMATS
from ...contract.layer_pages import measured_format, why_no_page
from ...contract.specs import KVCacheSpec
from .builder import PagetwinMetadataBuilder, load_plugin_implementation
from .caches import FP8_NAMES, MODEL_DTYPES, SCALED_NAMES, choose_shape, with_scales
from .impl import PagetwinImpl
from .settings import IMPLEMENTATION_VARIABLE
from .versions import BACKEND_NAME, OWN_NAME, installed_interface

_Shape: Any = choose_shape(installed_interface())


class Reasons:
    """Reasons in one sentence each, which both backends give through `supports_combination`."""

    supported_kv_cache_dtypes: ClassVar[list[str]]

    @classmethod
    def is_sparse(cls) -> bool:
        """Return False: layers that attend to keys that an indexer selects."""
        return False

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Return False: images whose tokens attend to each other."""
        return False

    @classmethod
    def supports_rswa(cls) -> bool:
        """Return False: windows that do not hide the prompt."""
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Return True: of the host's lengths the maxima alone are used, as upper bounds.

        A model with images, whose ranges need more, is rejected with trimmed drafts (`StepRanges`).
        """
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Return why a layer cannot be served, or None. vLLM adds it to its own words.

        A device without a compute capability is a CPU.
        """
        reasons = []
        if use_sparse and not cls.is_sparse():
            reasons.append(
                "use_sparse: expected dense attention, or latent attention (MLA) of a model with"
                " index_topk in its configuration"
            )
        if use_mm_prefix and not cls.supports_mm_prefix():
            reasons.append("use_mm_prefix: expected causal prompts")
        if device_capability is not None and device_capability.major < 8:
            reasons.append(
                f"compute capability {device_capability.major}.{device_capability.minor}:"
                " expected 8.0 or newer"
            )
        known = cls.supported_kv_cache_dtypes
        if kv_cache_dtype is not None and kv_cache_dtype not in known:
            is_record = kv_cache_dtype in LATENT_FORMATS
            why = ", as sparse layers alone read its records" if is_record else ""
            reasons.append(
                f"kv_cache_dtype = {kv_cache_dtype}: expected {', '.join(known)}{why}"
            )
        given = MODEL_DTYPES.get(kv_cache_dtype or "auto", dtype)
        if given != dtype:
            reasons.append(
                f"kv_cache_dtype = {kv_cache_dtype}: expected auto or a quantized format with a"
                f" model of {dtype}"
            )
        form = measured_format(kv_cache_dtype or "auto")
        if form is not None and (reason := why_no_page(form, head_size)):
            reasons.append(reason)
        backend = load_plugin_implementation().backends[0]
        # vLLM's default block size is 16; no reason depends on the number of heads
        spec = KVCacheSpec(block_size or 16, 1, head_size, dtype)
        device = "cpu" if device_capability is None else "cuda"
        found = backend.validate_configuration(spec, device)
        if any(reason.startswith("device = cpu") for reason in found):
            found.append(f"or {IMPLEMENTATION_VARIABLE}=reference")
        return "; ".join([*reasons, *found]) or None


class PagetwinBackend(Reasons, _Shape, AttentionBackend):
    """Paged and encoder attention on a twin, in vLLM's terms."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]
    supported_kv_cache_dtypes: ClassVar[list[str]] = [
        "auto",
        *MODEL_DTYPES,
        *FP8_NAMES,
        *SCALED_NAMES,
    ]
    # vLLM then calls do_kv_cache_update by itself, before forward
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """Return the name, which vLLM looks up among its own."""
        return BACKEND_NAME

    @staticmethod
    def get_impl_cls() -> type[Any]:
        """Return the class that runs a layer."""
        return PagetwinImpl

    @staticmethod
    def get_builder_cls() -> type[Any]:
        """Return the class that builds the metadata of a step."""
        return PagetwinMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Return the block sizes: multiples of 16. vLLM divides no block of such a size."""
        return [MultipleOf(16)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the description of a cache, with the bytes of scales that are stored in it.

        vLLM calls it from 0.28 on. Before that, `get_kv_cache_shape` says how large a state is.
        """
        return with_scales(spec)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        """Return True: `supports_combination` gives the reason if a size does not fit."""
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        """Return True for every kind of attention that vLLM has."""
        return attn_type in {kind.value for kind in AttentionType}

    @classmethod
    def supports_sink(cls) -> bool:
        """Return True."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Return True."""
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Return True: the tokens of an image attend to each other, with any cache."""
        return True

    @classmethod
    def supports_rswa(cls) -> bool:
        """Return True: windows that do not hide the prompt."""
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        """Return True: drafts that attend to each other."""
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Return True: the option `batch_invariant` of the operations."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Return whether the chip is an Ampere GPU or newer, or a CPU."""
        return capability is None or bool(capability.major >= 8)


class NamedBackend(PagetwinBackend):
    """The same, under the plugin's own name."""

    @staticmethod
    def get_name() -> str:
        """Return the name, which vLLM looks up among the registered ones."""
        return OWN_NAME
