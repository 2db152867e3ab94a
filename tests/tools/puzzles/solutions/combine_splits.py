import torch
from torch import Tensor


def combine_splits(outputs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    largest = lses.amax(0)
    base = torch.where(largest == -torch.inf, 0.0, largest)
    weights = torch.exp(lses - base)
    total = weights.sum(0)
    outputs = torch.where(weights[..., None] > 0, outputs, 0.0)
    summed = (weights[..., None] * outputs).sum(0)
    output = torch.where(total[..., None] > 0, summed / total[..., None], 0.0)
    lse = base + torch.log(total)
    return output, lse
