"""The public names with their signatures, one per line, as `public_names.txt` keeps them.

PYTHONPATH=tests python tests/structure/public_names.py --write
"""

import inspect
import re
import sys
from enum import EnumMeta
from importlib import import_module
from pathlib import Path
from typing import Any

PACKAGES = (
    "pagetwin.reference",
    "pagetwin.conformance",
    "pagetwin.integrations.flash_attn",
    "pagetwin.integrations.sglang",
    "pagetwin.integrations.transformers",
    "pagetwin.integrations.vllm",
    "pagetwin.gluon_interpreter",
)
"""Packages whose names are public. `pagetwin.optimized` has those of the reference."""
FILE = Path(__file__).with_name("public_names.txt")


def public_names() -> list[str]:
    """Return a line for each public name, sorted: its path and its signature."""
    lines = set()
    for package in PACKAGES:
        module = import_module(package)
        for name in getattr(module, "_MODULES", dir(module)):
            value = getattr(module, name)
            home = getattr(value, "__module__", "pagetwin")
            if name.startswith("_") or inspect.ismodule(value):
                continue
            if not home.startswith("pagetwin"):
                continue
            lines.add(f"{package}.{name}{_signature(value)}")
            if inspect.isclass(value):
                for member, function in vars(value).items():
                    if not member.startswith("_") and inspect.isfunction(function):
                        signature = _signature(function)
                        lines.add(f"{package}.{name}.{member}{signature}")
    return sorted(lines)


def _signature(value: Any) -> str:
    """Return the names and defaults of the arguments; annotations differ between versions."""
    if not callable(value):
        return ""
    if isinstance(value, EnumMeta):
        return f"({', '.join(value.__members__)})"
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    parameters = [
        parameter.replace(annotation=parameter.empty)
        for parameter in signature.parameters.values()
    ]
    plain = str(
        signature.replace(parameters=parameters, return_annotation=signature.empty)
    )
    # defaults whose texts differ between versions and systems
    return re.sub(r"=(<.*?>>?|\w+Path\([^)]*\))(?=[,)])", "=...", plain)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit((__doc__ or "").splitlines()[2].strip())
    FILE.write_text("\n".join([*public_names(), ""]), encoding="utf-8")
