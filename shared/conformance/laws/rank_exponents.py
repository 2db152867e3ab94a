"""Laws of a parallel step whose scores are so large that their exponentials overflow."""

import torch

from ..candidates.calls.calling import expect_right
from ..candidates.setting import Setting
from .dcp_attention import Dealt
from .law import law
from .parallel_step import Shared, run_all, whole_call

# the largest score is on the other rank in the second request
LARGE = [
    Shared(
        Dealt((1, 2), (9, 20), 2, 2, needles=(4, 17), group=2, padding=padding),
        exchange,
        order=padding,
    )
    for padding in (0, 1)
    for exchange in ("all_to_all", "reduce_scatter")
]


@law("DecodeContextParallel", cases=LARGE)
def ranks_combine_log_sum_exps_whose_exponentials_overflow(
    setting: Setting, shared: Shared
) -> None:
    """Log-sum-exps are near 1200: their exponentials are infinite in float64 too."""
    whole = whole_call(shared.dealt, setting.device)
    whole = whole.changed(scale=50 * whole.query.shape[-1] ** -0.5)
    found = run_all(setting, shared, whole)
    out = torch.cat([answer.out for answer in found], dim=1)
    lse = torch.cat([answer.lse for answer in found])
    expect_right(setting, whole, (out, lse), is_joined=True)
