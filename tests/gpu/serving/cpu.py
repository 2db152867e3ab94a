"""vLLM's build for CPUs: a platform that chooses pagetwin's backend if it is asked to."""

import os
from typing import Any


def prepare_cpu(implementation: str) -> None:
    """Let vLLM's platform for CPUs choose CUSTOM, which it ignores otherwise.

    Args:
        implementation: "reference", or "optimized", which needs TRITON_INTERPRET=1 in the
            environment of the process: Triton reads it when it is imported.
    """
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    os.environ["PAGETWIN_VLLM_IMPLEMENTATION"] = implementation
    plain = CpuPlatform.get_attn_backend_cls.__func__
    if getattr(plain, "chooses_custom", False):
        return

    def choose(cls: Any, selected: Any, *args: Any, **kwargs: Any) -> str:
        if selected != AttentionBackendEnum.CUSTOM:
            path: str = plain(cls, selected, *args, **kwargs)
            return path
        # as the platform for CUDA does
        return ".".join(AttentionBackendEnum.CUSTOM.get_class().full_cls_name())

    choose.chooses_custom = True  # type: ignore[attr-defined]
    CpuPlatform.get_attn_backend_cls = classmethod(choose)
