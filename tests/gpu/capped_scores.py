"""Error of FlashAttention-3's scores by soft cap, measured on sequences of one key.

    PAGETWIN_FA3=... python tests/gpu/capped_scores.py

The log-sum-exp of one key is its capped score. Queries and keys have one element that is not 0, so
the product is exact.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "docs" / "adapters"))

COUNT, HEAD_SIZE, BLOCK_SIZE = 4001, 128, 16
CAPS = (None, 0.5, 2.0, 20.0, 50.0, 1000.0)
LARGEST = (1, 4, 30, 300)


def largest_error(largest: float, cap: float | None) -> tuple[float, float]:
    """Return the largest error of a score, absolute and relative to the capped score.

    Args:
        largest: Scores are between this number and its negative.
        cap: Optional. The soft cap. If None, scores are not capped.
    """
    from flash_attention_3_paged import paged_attention

    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16, device="cuda")

    query, key = zeros(COUNT, 1, HEAD_SIZE), zeros(COUNT, BLOCK_SIZE, 1, HEAD_SIZE)
    query[..., 0] = 16
    key[:, 0, 0, 0] = torch.linspace(-largest, largest, COUNT) / 16
    exact = 16 * key[:, 0, 0, 0].double()
    right = exact if cap is None else cap * torch.tanh(exact / cap)
    found = torch.empty(1, COUNT, device="cuda")
    counts = torch.arange(COUNT + 1, dtype=torch.int32, device="cuda")
    paged_attention(
        query,
        key,
        torch.zeros_like(key),
        counts[:-1, None],
        counts,
        torch.ones_like(counts[:-1]),
        1,
        1,
        scale=1.0,
        lse=found,
        logits_soft_cap=cap,
    )
    error = (found[0].double() - right).abs()
    return float(error.max()), float((error / right.abs().clamp_min(1e-3)).max())


if __name__ == "__main__":
    for cap in CAPS:
        for largest in LARGEST:
            error, share = largest_error(largest, cap)
            print(
                f"cap {cap}, scores up to {largest}: {error:.3g}, relative {share:.3g}"
            )
