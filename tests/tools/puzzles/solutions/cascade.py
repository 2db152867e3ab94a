import torch
from torch import Tensor


def cascade(
    query: Tensor,
    prefix_key: Tensor,
    prefix_value: Tensor,
    suffix_key: Tensor,
    suffix_value: Tensor,
    suffix_lens: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    scores = torch.einsum("rhd,khd->rhk", query, prefix_key) * scale
    prefix_lse = scores.logsumexp(2)
    prefix = torch.einsum("rhk,khd->rhd", scores.softmax(2), prefix_value)

    is_padding = torch.arange(suffix_key.shape[1])[None] >= suffix_lens[:, None]
    value = suffix_value.masked_fill(is_padding[..., None, None], 0.0)
    scores = torch.einsum("rhd,rkhd->rhk", query, suffix_key) * scale
    scores = scores.masked_fill(is_padding[:, None], -torch.inf)
    largest = scores.amax(2)
    base = largest.masked_fill(largest == -torch.inf, 0.0)
    weights = torch.exp(scores - base[..., None])
    total = weights.sum(2)
    suffix_lse = base + total.log()
    summed = torch.einsum("rhk,rkhd->rhd", weights, value)
    suffix = summed / total.clamp(min=1.0)[..., None]

    lses = torch.stack([prefix_lse, suffix_lse])
    prefix_share, suffix_share = lses.softmax(0)[..., None]
    lse = lses.logsumexp(0)
    return prefix_share * prefix + suffix_share * suffix, lse
