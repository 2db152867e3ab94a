"""A folder in the layout of the Hub's kernels, for programs that load attention by a name."""

import json
from pathlib import Path

import torch

from ...validation.integrations import load_named
from .install import FUNCTIONS

VARIANT = "build/torch-universal"
"""The folder of a build for every version of torch and every chip."""


def write_hub_kernel(folder: str | Path, implementation: str = "optimized") -> Path:
    """Write a kernel whose functions are those of a twin, and return its folder.

    `LOCAL_KERNELS=org/name=FOLDER` in the environment makes the library `kernels` take it for
    `org/name` without a network.

    Args:
        folder: A folder that does not exist or is empty.
        implementation: "reference", "optimized", or the dotted name of a package.

    Raises:
        FileExistsError: The folder holds something, or is a file. Nothing is written.
        ValueError: The implementation cannot be loaded. Nothing is written.

    Source:
        The layout and the metadata that `kernels` 0.17 reads.
    """
    load_named(implementation)
    folder = Path(folder)
    expected = "expected a folder that does not exist or is empty"
    if folder.exists() and not folder.is_dir():
        raise FileExistsError(f"{folder} is a file: {expected}")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: {expected}")
    build = folder / VARIANT
    build.mkdir(parents=True)
    lines = [
        f'"""flash-attn\'s functions on pagetwin\'s {implementation}."""',
        "",
        "from pagetwin.integrations.flash_attn import FlashAttention",
        "",
        f"_FUNCTIONS = FlashAttention({implementation!r})",
        *(f"{name} = _FUNCTIONS.{name}" for name in FUNCTIONS),
    ]
    (build / "__init__.py").write_text("\n".join([*lines, ""]), encoding="utf-8")
    metadata = {
        "id": "pagetwin_flash_attn",
        "name": "pagetwin-flash-attn",
        "version": 1,
        "license": "Apache-2.0",
        "python-depends": [],
        "backend": {"type": "cuda" if torch.version.cuda else "cpu"},
    }
    text = json.dumps(metadata, indent=1)
    (build / "metadata.json").write_text(f"{text}\n", encoding="utf-8")
    return folder
