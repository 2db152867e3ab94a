"""Settings of the vLLM plugin, read from environment variables."""

import os
from dataclasses import dataclass

IMPLEMENTATION_VARIABLE = "PAGETWIN_VLLM_IMPLEMENTATION"
WARM_UP_VARIABLE = "PAGETWIN_VLLM_WARM_UP"


@dataclass(frozen=True)
class PluginSettings:
    """What the environment says about the plugin.

    Args:
        implementation: "optimized", "reference", or the dotted name of a package with the same
            operations and backends.
        warms_up: whether kernels are compiled before the first request.
    """

    implementation: str = "optimized"
    warms_up: bool = True


def read_settings() -> PluginSettings:
    """Return the settings that the environment has now.

    Raises:
        ValueError: `PAGETWIN_VLLM_WARM_UP` is neither 0 nor 1.

    Example:
        PAGETWIN_VLLM_WARM_UP=0: PluginSettings(implementation="optimized", warms_up=False).
    """
    warm_up = os.environ.get(WARM_UP_VARIABLE) or "1"
    if warm_up not in ("0", "1"):
        raise ValueError(f"{WARM_UP_VARIABLE} = {warm_up!r}: expected 0 or 1")
    name = os.environ.get(IMPLEMENTATION_VARIABLE) or "optimized"
    return PluginSettings(name, warm_up == "1")


def is_batch_invariant() -> bool:
    """Return whether vLLM was told to be batch invariant (VLLM_BATCH_INVARIANT=1)."""
    import vllm.envs as envs

    return bool(getattr(envs, "VLLM_BATCH_INVARIANT", False))
