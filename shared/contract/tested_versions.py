"""Versions of torch and triton that were tested together, compared with the installed ones.

No version is a bound of the package's dependencies: pagetwin is installed beside other software
without moving its torch. Nothing here imports torch, triton or numpy.
"""

import re
from importlib.metadata import PackageNotFoundError, requires, version

TRITON_RANGE = "3.6 to 3.9"
TORCH_RANGE = "2.10 to 2.15"
TRITON_OF_TORCH = {
    (2, 10): (3, 6),
    (2, 11): (3, 6),
    (2, 12): (3, 7),
    (2, 13): (3, 7),
    (2, 14): (3, 8),
    (2, 15): (3, 9),
}
"""The triton with which a CUDA build of each torch was built."""


def why_untested() -> str:
    """Return the sentence for versions of torch and triton that were not tested, or nothing.

    The versions are those of the installed packages. A build of torch without CUDA runs with each
    supported triton. One with CUDA requires the triton with which it was built.
    """
    torch, triton = installed("torch"), installed("triton")
    tested = f"pagetwin was tested with torch {TORCH_RANGE} and triton {TRITON_RANGE}"
    if torch and release(torch) not in TRITON_OF_TORCH:
        return f"torch {torch} is installed, and {tested}"
    if triton and release(triton) not in TRITON_OF_TORCH.values():
        return f"triton {triton} is installed, and {tested}"
    if not torch or not triton:
        return ""
    built = TRITON_OF_TORCH[release(torch)]
    needs_its_own = any(
        re.match("triton *==", line) for line in requires("torch") or ()
    )
    if needs_its_own and release(triton) != built:
        return (
            f"torch {torch} was built with triton {built[0]}.{built[1]}, and triton {triton} is"
            " installed: install the version that torch requires"
        )
    return ""


def why_too_old() -> str:
    """Return the sentence for a triton without what the kernels use, or nothing."""
    triton = installed("triton")
    oldest = min(TRITON_OF_TORCH.values())
    if not triton or release(triton) >= oldest:
        return ""
    return (
        f"pagetwin.optimized needs triton {TRITON_RANGE}, and triton {triton} is installed, which"
        " belongs to an older torch; pagetwin.reference has the same functions and runs anywhere"
    )


def installed(package: str) -> str:
    """Return the version of an installed package, or an empty string."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def release(version: str) -> tuple[int, int]:
    """Return major and minor number of a version such as "2.4.0rc1"."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)
