"""Layers of a model that is tuned: from options, from its config.json, or a standard list."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MOST_HEADS, MOST_HEAD_SIZE = 4096, 1024
SHARE_HEADS = re.compile(r"(\d{1,4})/(\d{1,4})")
DTYPES = ("bfloat16", "float16", "float32")
FORMATS = (
    "auto", "fp8_e4m3", "fp8_e5m2", "int8_per_token_head", "fp8_per_token_head",
    "int4_per_token_head",
)  # fmt: skip
"""Cache formats whose caches the benchmark draws."""


@dataclass(frozen=True)
class LayerSizes:
    """One kind of layer.

    Args:
        query_heads, kv_heads, head_size: its heads.
        window: Optional. Keys that a query attends to. If None, all of them.
        is_main: Whether all its kernels are tuned, or only those that most of its time is in.
    """

    query_heads: int
    kv_heads: int
    head_size: int
    window: int | None = None
    is_main: bool = True

    @property
    def name(self) -> str:
        """The layer in words."""
        window = "" if self.window is None else f", window {self.window}"
        return f"{self.query_heads}/{self.kv_heads} heads of {self.head_size}{window}"


STANDARD = (
    LayerSizes(32, 8, 128),
    LayerSizes(64, 8, 64, is_main=False),
    LayerSizes(16, 8, 256, is_main=False),
)
"""Layers that are tuned if no model is named: head sizes of most open models."""


def given_layer(heads: str, head_size: int, window: int | None) -> LayerSizes:
    """Return the layer of the options.

    Raises:
        ValueError: The heads are not two numbers of which one divides the other.
    """
    found = SHARE_HEADS.fullmatch(heads)
    query_heads, kv_heads = map(int, found.groups()) if found else (0, 0)
    if not kv_heads or not query_heads or query_heads % kv_heads:
        raise ValueError(
            f"heads = {heads!r}: expected query heads and kv heads, such as 32/8, of which the"
            " second divides the first"
        )
    return LayerSizes(query_heads, kv_heads, head_size, window)


def layers_of_model(path: Path) -> tuple[tuple[LayerSizes, ...], str | None]:
    """Return the kinds of layers of a model, and its dtype if the file names one.

    Args:
        path: A config.json of Hugging Face, or its folder.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not such a file, or the model has latent attention.
    """
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"model = {path}: expected a model's config.json, or its folder"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        config = None
    if not isinstance(config, dict):
        raise ValueError(f"model = {path}: expected a model's config.json")
    dtype = config.get("dtype") or config.get("torch_dtype")
    config = config.get("text_config") or config
    dtype = config.get("dtype") or config.get("torch_dtype") or dtype
    if config.get("kv_lora_rank"):
        raise ValueError(
            f"model = {path} has latent attention (kv_lora_rank), whose kernels have no tables:"
            " expected a model with a key and a value per kv head"
        )
    query_heads = _integer(config, "num_attention_heads", path)
    kv_heads = query_heads
    if config.get("num_key_value_heads") is not None:
        kv_heads = _integer(config, "num_key_value_heads", path)
    if config.get("head_dim") is not None:
        head_size = _integer(config, "head_dim", path, MOST_HEAD_SIZE)
    else:
        head_size = _integer(config, "hidden_size", path, 10**6) // query_heads
    if query_heads % kv_heads or not 0 < head_size <= MOST_HEAD_SIZE:
        raise ValueError(
            f"model = {path}: {query_heads} heads, {kv_heads} kv heads and a head size of"
            f" {head_size} do not fit each other"
        )
    layers = [
        LayerSizes(query_heads, kv_heads, head_size, window)
        for window in _windows(config, path)
    ]
    return tuple(layers), dtype if dtype in DTYPES else None


def _windows(config: dict[str, Any], path: Path) -> list[int | None]:
    """Return the windows of a model's layers; None is a layer without one."""
    if not config.get("sliding_window") or config.get("use_sliding_window") is False:
        return [None]
    window = _integer(config, "sliding_window", path, 2**31 - 1)
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        is_mixed = len(set(kinds)) > 1
        has_window = "sliding_attention" in kinds
    else:
        is_mixed, has_window = bool(config.get("sliding_window_pattern")), True
    if not has_window:
        return [None]
    return [None, window] if is_mixed else [window]


def _integer(
    config: dict[str, Any], name: str, path: Path, most: int = MOST_HEADS
) -> int:
    value = config.get(name)
    if type(value) is not int or not 1 <= value <= most:
        raise ValueError(
            f"model = {path} has {name} = {value!r}: expected an integer from 1 to {most}"
        )
    return value
