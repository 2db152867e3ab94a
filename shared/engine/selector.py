"""Backend selection: by the caller, the environment or the configuration.

The caller's choice takes precedence over the environment, and the environment over the
configuration. If the chosen backend cannot run, an error is raised that gives the reason and lists
the backends that can run. No other backend is chosen silently. No state is kept between calls.
"""

import importlib
import os
from collections.abc import Collection, Iterator
from contextlib import suppress

import torch

from ..contract.specs import KVCacheSpec
from .backend_interface import AttentionBackend
from .placeholder_backend import PlaceholderAttentionBackend

ATTENTION_BACKEND_VARIABLE = "PAGETWIN_ATTENTION_BACKEND"
# the reference first, since it imports neither triton nor xformers
TWINS = ("reference", "optimized")


def load_backends() -> Iterator[type[AttentionBackend]]:
    """Yield all backends: those in `BACKENDS` of each twin, which is imported when it is reached.

    Raises:
        ImportError: a twin cannot be imported.
    """
    for twin in TWINS:
        yield from importlib.import_module(f"pagetwin.{twin}.backends.backend").BACKENDS


def backend_names() -> list[str]:
    """Return the names of all backends whose twin can be imported."""
    names = []
    # without triton, only the reference can
    with suppress(ImportError):
        for backend in load_backends():
            names.append(backend.name)
    return names


def load_backend(name: str) -> type[AttentionBackend]:
    """Return the backend of that name, whether or not it can run here.

    Raises:
        ValueError: the name is unknown. The message lists all names.
        ImportError: the twin that may have it cannot be imported.
    """
    known = []
    for backend in load_backends():
        if backend.name == name:
            return backend
        known.append(backend.name)
    raise ValueError(f"backend = {name!r}: expected one of {', '.join(known)}")


def choose_backend_name(
    name: str | None = None,
    configured: str | None = None,
    known: Collection[str] | None = None,
) -> str | None:
    """Return the chosen name: the caller's, else the environment's, else the configuration's.

    Args:
        name: Optional. The caller's choice. If None, the environment decides.
        configured: Optional. The choice if PAGETWIN_ATTENTION_BACKEND is not set either.
        known: Optional. Names of all backends. If None, those of `load_backends`.

    Returns:
        A known name, or None if none is chosen.

    Raises:
        ValueError: the name is unknown. The message says which of the three gave it.
        ImportError: the twin that may have the backend cannot be imported.

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
        names = (
            (backend.name for backend in load_backends()) if known is None else known
        )
        tried = []
        for known_name in names:
            if known_name == choice:
                return choice
            tried.append(known_name)
        raise ValueError(f"{origin} = {choice!r}: expected one of {', '.join(tried)}")
    return None


def get_attn_backend(
    name: str | None,
    spec: KVCacheSpec,
    device: torch.device | str,
    configured: str | None = None,
    is_attention_free: bool = False,
) -> type[AttentionBackend]:
    """Return the chosen backend; raise an error if it cannot run such a cache there.

    Args:
        name: Optional. "REFERENCE", "TRITON" or "XFORMERS". If None, the value of the environment
            variable PAGETWIN_ATTENTION_BACKEND, else `configured`.
        spec: block size, heads, head size and dtype of the cache.
        device: device of the cache.
        configured: Optional. The choice if neither `name` nor the environment variable is given.
        is_attention_free: whether the model has no attention. If True, the placeholder backend is
            returned, whatever is chosen.

    Raises:
        ValueError: the name is unknown, the backend cannot run, or none is chosen. The message
            gives the reason. In the last two cases it lists the backends that can run.

    Source:
        vLLM's function of that name, which selects a backend automatically and caches the result.

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
    return [
        name
        for name in backend_names()
        if not load_backend(name).validate_configuration(spec, device)
    ]
