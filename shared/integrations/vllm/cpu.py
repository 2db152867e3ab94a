"""CPUs: vLLM's platform for them ignores the choice of a backend, so the plugin replaces it."""

import logging
from typing import Any

from .versions import BACKEND_NAME

logger = logging.getLogger(__name__)


def serve_on_cpu() -> None:
    """Let vLLM's platform for CPUs take CUSTOM, if it runs there. May be called several times.

    Without this a model is served by vLLM's own backend although another one was chosen. Choices
    other than CUSTOM are vLLM's.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if not current_platform.is_cpu():
        return
    platform: Any = type(current_platform)
    plain = platform.get_attn_backend_cls.__func__
    if getattr(plain, "takes_custom", False):
        return

    def choose(
        cls: Any,
        selected_backend: Any,
        attn_selector_config: Any,
        *args: Any,
        **kw: Any,
    ) -> str:
        """Return the path of a layer's backend, as the platform for CUDA does."""
        custom: Any = AttentionBackendEnum[BACKEND_NAME]
        if selected_backend != custom:
            given = (selected_backend, attn_selector_config)
            return str(plain(cls, *given, *args, **kw))
        reasons = custom.get_class().validate_configuration(
            device_capability=None, **attn_selector_config._asdict()
        )
        if reasons:
            raise ValueError(
                f"Selected backend {custom} is not valid for this configuration."
                f" Reason: {reasons}"
            )
        logger.info("Using %s backend.", custom)
        return str(custom.get_path())

    choose.takes_custom = True  # type: ignore[attr-defined]
    platform.get_attn_backend_cls = classmethod(choose)
