"""Entry point of the vLLM plugin: registration, the choice of the backend class, and CPUs."""

import logging
import os
from typing import TYPE_CHECKING, Any

from ...contract.extras import require
from .versions import BACKEND_NAME, installed_interface

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from .backend import PagetwinBackend


def register() -> None:
    """Make `--attention-backend CUSTOM` select pagetwin. May be called several times.

    vLLM calls it in every process. Of vLLM, the registry of backends and the platform are imported.
    If PAGETWIN_RECORD is set, every backend of the registry is recorded, not only this one.

    Raises:
        ImportError: vLLM is not installed.
    """
    require("pagetwin.integrations.vllm", "vllm")
    from vllm.v1.attention.backends.registry import (
        AttentionBackendEnum,
        register_backend,
    )

    log_with_vllm()
    register_backend(AttentionBackendEnum[BACKEND_NAME], f"{__name__}.Backend")
    serve_on_cpu()
    if os.environ.get("PAGETWIN_RECORD"):
        from ...recorder.wrappers.vllm import record_vllm_backends

        record_vllm_backends()


def serve_on_cpu() -> None:
    """Let vLLM's platform for CPUs take CUSTOM, if it runs there. May be called several times.

    That platform ignores the choice of a backend, so the model would be served by vLLM's own.
    Choices other than CUSTOM are vLLM's.

    Raises:
        ImportError: vLLM is not installed.
    """
    require("pagetwin.integrations.vllm", "vllm")
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


def log_with_vllm() -> None:
    """Give pagetwin's loggers the handlers and the level of vLLM's, unless they have some.

    vLLM configures its own loggers alone.
    """
    ours, theirs = logging.getLogger("pagetwin"), logging.getLogger("vllm")
    if not ours.hasHandlers() and theirs.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = theirs.propagate


def __getattr__(name: str) -> Any:
    # vLLM resolves the registered path by getattr when it chooses a backend
    if name == "Backend":
        return choose_backend()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def choose_backend() -> "type[PagetwinBackend]":
    """Return the backend class for the model that vLLM is building.

    A model with latent attention (MLA) gets the class for it. vLLM has one name for both.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: vLLM is older than the oldest supported version.
    """
    require("pagetwin.integrations.vllm", "vllm")
    from vllm.config import get_current_vllm_config_or_none

    installed_interface()
    config = get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    if model is not None and model.use_mla:
        from .latent import PagetwinLatentBackend

        return PagetwinLatentBackend
    from .backend import PagetwinBackend

    return PagetwinBackend
