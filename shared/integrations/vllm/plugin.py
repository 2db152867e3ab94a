"""Entry point of the vLLM plugin: registration, the choice of the backend class, and CPUs."""

import copyreg
import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from ...contract.extras import require
from .versions import BACKEND_NAME, OWN_NAME, installed_interface

logger = logging.getLogger(__name__)

PATHS = {BACKEND_NAME: f"{__name__}.Backend", OWN_NAME: f"{__name__}.NamedBackend"}
"""Where vLLM finds the backend class of each name. A class returns the name that it is found by."""
READ_ALIKE = {"int4_per_token_head_vllm": "int4_per_token_head"}
"""Names of formats that vLLM does not have, and those of vLLM whose caches are the same."""
RECORDER = "pagetwin.recorder.wrappers.vllm"
"""The module that a recorded backend's path leads to."""

if TYPE_CHECKING:
    from .backend import PagetwinBackend


def register() -> None:
    """Make `--attention-backend CUSTOM` select pagetwin. May be called several times.

    From vLLM 0.32 on `PAGETWIN` does too, and CUSTOM stays with the package that has it already.
    vLLM calls this in every process. Of vLLM, the registry of backends, the settings of caches and
    the platform are imported. From vLLM 0.33 on `--kv-cache-dtype` also takes the names of our
    formats that vLLM does not have. If PAGETWIN_RECORD is set, every backend of the registry is
    recorded, not only this one.

    Raises:
        ImportError: vLLM is not installed.
    """
    require("pagetwin.integrations.vllm", "vllm")

    log_with_vllm()
    register_names()
    register_cache_names()
    serve_on_cpu()
    if os.environ.get("PAGETWIN_RECORD"):
        from ...recorder.wrappers.vllm import record_vllm_backends

        record_vllm_backends()


def register_names() -> None:
    """Register the backend under the names that the installed vLLM takes."""
    from vllm.v1.attention.backends.registry import (
        AttentionBackendEnum,
        register_backend,
    )

    takes_names = hasattr(AttentionBackendEnum, "register")
    if takes_names and OWN_NAME not in AttentionBackendEnum.__members__:
        # a second registration of the same string is an error
        register_backend(OWN_NAME, PATHS[OWN_NAME])
        copyreg.pickle(AttentionBackendEnum, _reduce_member)
    custom: Any = AttentionBackendEnum[BACKEND_NAME]
    owner = _path_of(custom)
    if owner not in (None, PATHS[BACKEND_NAME]):
        if takes_names:
            logger.info(
                "%s is %s: choose --attention-backend %s for pagetwin",
                BACKEND_NAME,
                owner,
                OWN_NAME,
            )
            return
        logger.warning(
            "%s was %s and is pagetwin's now: set VLLM_PLUGINS to the plugin that is to have it",
            BACKEND_NAME,
            owner,
        )
    register_backend(custom, PATHS[BACKEND_NAME])


def register_cache_names() -> None:
    """Add the names of our cache formats to vLLM's, in releases that take other names.

    Caches of such a format have the bytes of a format that vLLM has, and are read alike.
    """
    import vllm.config.cache as settings

    if not hasattr(settings, "register_kv_cache_dtype"):
        return
    from vllm.config.cache import is_known_kv_cache_dtype, register_kv_cache_dtype

    for name, alike in READ_ALIKE.items():
        if not is_known_kv_cache_dtype(name):
            register_kv_cache_dtype(name)(_make_handler(name, alike))


def _make_handler(name: str, alike: str) -> type[Any]:
    """Return the class by which vLLM treats a name as another one."""

    def torch_dtype(self: Any) -> Any:
        from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE

        return STR_DTYPE_TO_TORCH_DTYPE[alike]

    def quant_mode(self: Any) -> Any:
        from vllm.v1.kv_cache_interface import get_kv_quant_mode

        return get_kv_quant_mode(alike)

    members = {"name": name, "torch_dtype": torch_dtype, "quant_mode": quant_mode}
    return type("PagetwinCacheFormat", (), members)


def _path_of(member: Any) -> str | None:
    """Return the path of a registered backend, not of its recorder; None if there is none."""
    try:
        path = str(member.get_path())
    except ValueError:
        return None
    recorder = sys.modules.get(RECORDER)
    if recorder is not None and path.startswith(f"{RECORDER}."):
        found: str | None = recorder.plain_path(member.name)
        return found
    return path


def _reduce_member(member: Any) -> Any:
    """Pickle the added name by name, so that a process registers it before it reads it.

    A member is pickled by its value. A spawned process reads the configuration before vLLM loads
    plugins, and would not find the value.
    """
    if member.name == OWN_NAME:
        return _load_member, (member.name,)
    return type(member), (member.value,)


def _load_member(name: str) -> Any:
    """Return a member of vLLM's registry, after the registration."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    register_names()
    return AttentionBackendEnum[name]


def serve_on_cpu() -> None:
    """Let vLLM's platform for CPUs take pagetwin, if it runs there. May be called several times.

    That platform ignores the choice of a backend, so the model would be served by vLLM's own.
    Other choices are vLLM's.

    Raises:
        ImportError: vLLM is not installed.
    """
    require("pagetwin.integrations.vllm", "vllm")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    platform: Any = type(current_platform)
    plain = platform.get_attn_backend_cls.__func__
    if getattr(plain, "takes_pagetwin", False):
        return

    def choose(
        cls: Any,
        selected_backend: Any,
        attn_selector_config: Any,
        *args: Any,
        **kw: Any,
    ) -> str:
        """Return the path of a layer's backend, as the platform for CUDA does."""
        chosen = selected_backend
        if chosen is None or _path_of(chosen) not in PATHS.values():
            return str(plain(cls, chosen, attn_selector_config, *args, **kw))
        reasons = chosen.get_class().validate_configuration(
            device_capability=None, **attn_selector_config._asdict()
        )
        if reasons:
            raise ValueError(
                f"Selected backend {chosen} is not valid for this configuration."
                f" Reason: {reasons}"
            )
        logger.info("Using %s backend.", chosen)
        return str(chosen.get_path())

    choose.takes_pagetwin = True  # type: ignore[attr-defined]
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
    for backend_name, path in PATHS.items():
        if path == f"{__name__}.{name}":
            return choose_backend(backend_name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def choose_backend(name: str = BACKEND_NAME) -> "type[PagetwinBackend]":
    """Return the backend class for the model that vLLM is building.

    A model with latent attention (MLA) gets the class for it, and one with an indexer that for
    sparse latent attention. vLLM has one name for all.

    Args:
        name: the name that the class returns: CUSTOM, or PAGETWIN from vLLM 0.32 on.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: vLLM is older than the oldest supported version.
    """
    require("pagetwin.integrations.vllm", "vllm")
    from vllm.config import get_current_vllm_config_or_none

    installed_interface()
    config = get_current_vllm_config_or_none()
    model = None if config is None else config.model_config
    is_named = name == OWN_NAME
    if model is not None and model.use_mla and selected_keys(model) is not None:
        from . import sparse

        classes: Any = (sparse.PagetwinSparseBackend, sparse.NamedSparseBackend)
    elif model is not None and model.use_mla:
        from . import latent

        classes = (latent.PagetwinLatentBackend, latent.NamedLatentBackend)
    else:
        from . import backend

        classes = (backend.PagetwinBackend, backend.NamedBackend)
    chosen: type[PagetwinBackend] = classes[is_named]
    return chosen


def selected_keys(model: Any) -> int | None:
    """Return how many keys a model's indexer selects per token; None if it has no indexer.

    Args:
        model: vLLM's `ModelConfig`. A model with an indexer has `index_topk`, as vLLM reads it.
    """
    text = getattr(model, "hf_text_config", None)
    topk: int | None = getattr(text, "index_topk", None)
    return topk
