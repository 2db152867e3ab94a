"""Versions of vLLM: what differs between the interfaces of its minor releases.

vLLM changes its backend interface in minor releases. `INTERFACES` has one entry per minor release.
The facts were read from the wheels (`tests/support/vllm_interfaces/record.py`), and a test compares
this table with them.
"""

import logging
import re
from dataclasses import dataclass
from functools import cache

from ...contract.extras import require

logger = logging.getLogger(__name__)

BACKEND_NAME = "CUSTOM"
"""The name that vLLM has for a backend of another package, in all releases."""
OWN_NAME = "PAGETWIN"
"""The name that the plugin adds, in releases that take names of other packages."""


@dataclass(frozen=True)
class VllmInterface:
    """The parts of one minor release's interface that the plugin depends on.

    Args:
        minor: major and minor number, such as (0, 25).
        torch: release of torch that vLLM requires.
        is_packed: whether a cache is [num_blocks, kv_heads, block_size, key and value elements].
            If not, it is [num_blocks, 2, block_size, kv_heads, head_size].
        has_shape_hooks: whether the backend gives the shape and the memory order of its cache.
            If not, vLLM does.
        has_cascade: whether vLLM asks for cascade attention.
        takes_names: whether another package may add the name of its backend.
        has_sparse_class: whether layers of sparse latent attention have a base class of their own.
            If not, they derive from that of latent attention, and say that they are sparse.
    """

    minor: tuple[int, int]
    torch: str
    is_packed: bool
    has_shape_hooks: bool
    has_cascade: bool
    takes_names: bool
    has_sparse_class: bool = False

    @property
    def name(self) -> str:
        """The release as text, such as "0.25"."""
        return ".".join(map(str, self.minor))


INTERFACES = (
    VllmInterface((0, 25), "2.11.0", False, True, True, False, has_sparse_class=True),
    VllmInterface((0, 26), "2.11.0", True, True, True, False),
    VllmInterface((0, 27), "2.13.0", True, True, True, False),
    VllmInterface((0, 28), "2.13.0", True, True, True, False),
    VllmInterface((0, 29), "2.13.0", True, False, True, False),
    VllmInterface((0, 30), "2.13.0", True, False, True, False),
    VllmInterface((0, 31), "2.13.0", True, False, True, False),
    VllmInterface((0, 32), "2.13.0", True, False, False, True),
    VllmInterface((0, 33), "2.14.0", True, False, False, True),
)
"""One entry per minor release, the oldest first."""


def find_interface(version: str) -> VllmInterface:
    """Return the interface of a version of vLLM.

    Of a version that is newer than all known ones, or whose number cannot be read, the newest
    known interface is returned, and one warning is logged.

    Args:
        version: `vllm.__version__`, such as "0.25.1" or "0.34.0.dev12+g1a2b3c".

    Raises:
        RuntimeError: the version is older than all known ones.

    Example:
        >>> find_interface("0.28.0").name
        '0.28'
    """
    oldest, newest = INTERFACES[0], INTERFACES[-1]
    found = re.match(r"(\d+)\.(\d+)", version)
    minor = (int(found[1]), int(found[2])) if found else None
    for interface in INTERFACES:
        if interface.minor == minor:
            return interface
    if minor is not None and minor < oldest.minor:
        raise RuntimeError(
            f"vllm = {version}: expected {oldest.name} to {newest.name};"
            f" pip install 'vllm>={oldest.name}'"
        )
    logger.warning(
        "vLLM %s is not known to pagetwin, whose plugin was checked with the interfaces of %s to"
        " %s: that of %s is used; if the engine does not start, install vllm==%s.* or choose"
        " another --attention-backend",
        version,
        oldest.name,
        newest.name,
        newest.name,
        newest.name,
    )
    return newest


@cache
def installed_interface() -> VllmInterface:
    """Return the interface of the installed vLLM. An unknown version is logged once.

    Raises:
        ImportError: vLLM is not installed.
        RuntimeError: vLLM is older than the oldest supported version.
    """
    require("pagetwin.integrations.vllm", "vllm")
    import vllm

    return find_interface(vllm.__version__)
