"""Whether a device is a Hopper chip."""

from functools import cache

import torch

from ....runtime.launcher import INTERPRETED


@cache
def is_hopper(device: torch.device) -> bool:
    """Return whether a device is a chip of compute capability 9.0."""
    if INTERPRETED or device.type != "cuda":
        return False
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor) == (9, 0)
