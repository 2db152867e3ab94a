"""A copy of a model that shares its weights and runs on the library's own attention.

A model's attention is chosen by its configuration, which other threads may use at the same time. So
a run with the library's own attention takes a copy of the modules and configurations, in which
every replaced attribute has its original value again.
"""

from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedConfig

from .replaced import LOCK, restore_in_copy

ATTENTION = "_attn_implementation_internal"
"""The attribute of a configuration that names the attention function."""

OWN_PREFIX = "pagetwin_"
"""How the names of the registered twins begin."""


def library_copy(model: nn.Module) -> Any:
    """Return a copy of a model that runs on the library's own attention.

    A model that was set to a twin for good runs on the library's "eager" attention.
    """
    copies: dict[int, Any] = {}
    with LOCK:
        for original in (*model.modules(), *configs_of(model)):
            copied = copies[id(original)] = object.__new__(type(original))
            copied.__dict__.update(original.__dict__)
            restore_in_copy(copied, original)
    for copied in copies.values():
        # step: let the copies refer to each other instead of to the originals
        for name, value in copied.__dict__.items():
            copied.__dict__[name] = copies.get(id(value), value)
        if isinstance(copied, nn.Module):
            copied._modules = {
                name: copies.get(id(child), child)
                for name, child in copied._modules.items()
            }
        elif str(copied.__dict__.get(ATTENTION)).startswith(OWN_PREFIX):
            copied.__dict__[ATTENTION] = "eager"
    return copies[id(model)]


def configs_of(model: nn.Module) -> Iterator[PreTrainedConfig]:
    """Yield the configurations of a model, of its parts, and those inside of them."""
    found = [getattr(module, "config", None) for module in model.modules()]
    while found:
        config = found.pop(0)
        if isinstance(config, PreTrainedConfig):
            yield config
            found += [
                getattr(config, sub_config, None) for sub_config in config.sub_configs
            ]
