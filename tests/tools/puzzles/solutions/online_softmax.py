from collections.abc import Iterator

import torch
from torch import Tensor


def online_softmax(
    tiles: Iterator[tuple[Tensor, Tensor]], rows: int, head_size: int
) -> tuple[Tensor, Tensor]:
    m_i = torch.full((rows,), -torch.inf)
    l_i = torch.zeros(rows)
    acc = torch.zeros(rows, head_size)
    for scores, values in tiles:
        m_new = torch.maximum(m_i, scores.amax(1))
        base = torch.where(m_new == -torch.inf, 0.0, m_new)
        p = torch.exp(scores - base[:, None])
        alpha = torch.exp(m_i - base)
        l_i = l_i * alpha + p.sum(1)
        acc = acc * alpha[:, None] + p @ values
        m_i = m_new
    output = torch.where(l_i[:, None] == 0, 0.0, acc / l_i[:, None])
    lse = m_i + torch.log(l_i)
    return output, lse
