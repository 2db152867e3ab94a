"""Table of the head sizes of model families, and of the kernels of their prefills on Hopper."""

from collections import defaultdict

import torch
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.kernels.sm90.common.planes import find_planes
from pagetwin.optimized.runtime.attention_call import AttentionCall
from pagetwin.tools.bench.models import CHECKPOINTS, FAMILIES, ModelShape

SHOWN = 3
"""Names of a row."""


def runs_on_hopper(shape: ModelShape) -> bool:
    """Return whether `sm90 prefill` computes a shape, with its window and from a cache."""
    dtype = torch.bfloat16
    query, key, value, out = (
        torch.empty(*sizes, size, dtype=dtype, device="meta")
        for sizes, size in (
            ((8, 2 * shape.group), shape.key_size),
            ((9, 16, 2), shape.key_size),
            ((9, 16, 2), shape.value_size),
            ((8, 2 * shape.group), shape.value_size),
        )
    )
    numbers = torch.empty(2, 2, dtype=torch.int32, device="meta")
    call = AttentionCall(
        query, key, value, numbers, numbers[0], numbers[0, 1:], 8, 8, 0.1, out, None,
        AttentionOptions(causal=True, sliding_window=shape.window or None),
    )  # fmt: skip
    return find_planes(call) is not None


def model_sizes() -> str:
    """Return one row per pair of head sizes: groups, windows, families, and the kernel."""
    rows: dict[tuple[int, int], list[ModelShape]] = defaultdict(list)
    for shape in (*CHECKPOINTS, *FAMILIES):
        rows[shape.key_size, shape.value_size].append(shape)
    lines = [
        "| keys, values | query heads per KV head | windows | models | prefill on Hopper |",
        "|---|---|---|---|---|",
    ]
    for (key_size, value_size), shapes in sorted(rows.items()):
        groups = sorted({shape.group for shape in shapes})
        windows = sorted({shape.window for shape in shapes} - {0})
        names = [name for shape in shapes for name in shape.names]
        names = list(dict.fromkeys(names))
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        kernel = "sm90" if all(map(runs_on_hopper, shapes)) else "portable"
        cells = (
            f"{key_size}, {value_size}" if key_size != value_size else str(key_size),
            ", ".join(map(str, groups)),
            ", ".join(f"{window:,}" for window in windows),
            ", ".join(names[:SHOWN]) + more,
            f"`{kernel} prefill`",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
