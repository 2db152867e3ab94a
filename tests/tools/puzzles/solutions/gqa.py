import torch
from torch import Tensor


def gqa(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    group = query.shape[1] // key.shape[1]
    key = key.repeat_interleave(group, 1)
    value = value.repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    weights = scores.softmax(2)
    return torch.einsum("hqk,khd->qhd", weights, value)
