"""Backend selection: by the caller, the environment or the configuration.

The one that was asked for: by the caller, else by the environment, else by the configuration. A
request that cannot be met raises an error that says why, and which backends could take its place;
nothing is chosen behind the caller's back, and nothing is remembered from call to call.
"""

import importlib
import os
from collections.abc import Collection

import torch

from ..contract.specs import KVCacheSpec
from .backend_interface import AttentionBackend
from .placeholder_backend import PlaceholderAttentionBackend

ATTENTION_BACKEND_VARIABLE = "PAGETWIN_ATTENTION_BACKEND"
TWIN_OF_BACKEND = {
    "REFERENCE": "reference",
    "TRITON": "optimized",
    "XFORMERS": "optimized",
}


def load_backend(name: str) -> type[AttentionBackend]:
    """Return the backend of that name, whether or not it can run here.

    Raises:
        ValueError: there is none; the message lists what there is.
    """
    if name not in TWIN_OF_BACKEND:
        raise ValueError(
            f"backend = {name!r}: expected one of {', '.join(TWIN_OF_BACKEND)}"
        )
    module = importlib.import_module(
        f"pagetwin.{TWIN_OF_BACKEND[name]}.backends.backend"
    )
    backends: dict[str, type[AttentionBackend]] = {
        each.name: each for each in module.BACKENDS
    }
    return backends[name]


def choose_backend_name(
    name: str | None = None,
    configured: str | None = None,
    known: Collection[str] = tuple(TWIN_OF_BACKEND),
) -> str | None:
    """Return the name that was asked for: by the caller, the environment, the configuration.

    Args:
        name: the caller's choice; None: he has none.
        configured: what counts where PAGETWIN_ATTENTION_BACKEND says nothing either.
        known: the backends there are.

    Returns:
        A known name; None if nobody has chosen.

    Raises:
        ValueError: an unknown name; the message says who asked for it.

    Example:
        PAGETWIN_ATTENTION_BACKEND=TRITON: choose_backend_name(configured="XFORMERS") is "TRITON",
        and choose_backend_name("REFERENCE") is "REFERENCE".
    """
    for origin, choice in (
        ("backend", name),
        (ATTENTION_BACKEND_VARIABLE, os.environ.get(ATTENTION_BACKEND_VARIABLE)),
        ("configured backend", configured),
    ):
        if not choice:
            continue
        if choice not in known:
            raise ValueError(
                f"{origin} = {choice!r}: expected one of {', '.join(known)}"
            )
        return choice
    return None


def get_attn_backend(
    name: str | None,
    spec: KVCacheSpec,
    device: torch.device | str,
    configured: str | None = None,
    is_attention_free: bool = False,
) -> type[AttentionBackend]:
    """Return the backend that was asked for, if it can run such a cache there.

    Args:
        name: "REFERENCE", "TRITON" or "XFORMERS"; None: what the environment says
            (PAGETWIN_ATTENTION_BACKEND), else `configured`.
        spec: block size, heads, head size and dtype of the cache.
        device: where the cache lies.
        configured: the choice of last resort.
        is_attention_free: the model has no attention: a placeholder is returned, whatever was
            asked for.

    Raises:
        ValueError: no such backend, or it cannot run, or nobody has chosen; the message says why
            and what can run.

    Source:
        vLLM's function of that name, which chooses by itself and remembers its choice.

    Example:
        get_attn_backend("XFORMERS", KVCacheSpec(24, 8, 64, torch.float16), "cuda") raises:
        24 is not a multiple of 16; TRITON and REFERENCE can.
    """
    if is_attention_free:
        return PlaceholderAttentionBackend
    chosen = choose_backend_name(name, configured)
    if chosen is None:
        raise ValueError(
            "backend = None: expected a name, as argument, in the environment"
            f" ({ATTENTION_BACKEND_VARIABLE}) or configured. What can run here:"
            f" {', '.join(backends_that_can_run(spec, device)) or 'none'}"
        )
    backend = load_backend(chosen)
    reasons = backend.validate_configuration(spec, device)
    if not reasons:
        return backend
    raise ValueError(
        f"backend {chosen} cannot run here: {'; '.join(reasons)}."
        f" What can: {', '.join(backends_that_can_run(spec, device)) or 'none'}"
    )


def backends_that_can_run(spec: KVCacheSpec, device: torch.device | str) -> list[str]:
    """Return the names of the backends that can run such a cache there."""
    able = []
    for name in TWIN_OF_BACKEND:
        try:
            if not load_backend(name).validate_configuration(spec, device):
                able.append(name)
        except ImportError:
            continue
    return able
