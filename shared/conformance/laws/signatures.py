"""Laws of attention on batches that share a signature, as `pagetwin fuzz` draws them.

The result of one batch is judged key by key in float64. `running/screening.py` tries hundreds of
batches of a signature with a batched oracle, and comes back to these laws for those it finds wrong.
"""

from ..candidates.calls.calling import expect_right
from ..candidates.calls.rank_calls import run_signed
from ..candidates.setting import Setting
from ..cases.rank_signatures import signed_rank_batches
from ..cases.ranks import GATHER, RING, STEP
from ..cases.ranks import RankLayout as RankLayout  # in what a report shows
from ..cases.signatures import Signature as Signature  # in what a report shows
from ..cases.signatures import SignedBatch, signed_batches
from ..cases.signed_calls import build_signed
from ..cases.views import Views as Views  # in what a report shows
from .law import law


def expect_right_batch(setting: Setting, batch: SignedBatch) -> None:
    built = build_signed(batch, setting.device)
    found, ranks = run_signed(setting, batch, built), batch.signature.ranks
    is_joined = ranks is not None and ranks.is_joined
    expect_right(setting, built.call, found, is_joined=is_joined)


@law("paged_attention", cases=signed_batches())
def paged_attention_is_right_for_every_batch_of_a_signature(
    setting: Setting, batch: SignedBatch
) -> None:
    """Lengths, tables, needles and poison differ; sizes, dtypes and options are the same."""
    expect_right_batch(setting, batch)


@law("encoder_attention", cases=signed_batches("encoder_attention"))
def encoder_attention_is_right_for_every_batch_of_a_signature(
    setting: Setting, batch: SignedBatch
) -> None:
    expect_right_batch(setting, batch)


@law(STEP, cases=signed_rank_batches(STEP))
def a_parallel_step_is_right_for_every_batch_of_a_signature(
    setting: Setting, batch: SignedBatch
) -> None:
    """Each rank writes the new tokens that it stores, and no other slot changes."""
    expect_right_batch(setting, batch)


@law(GATHER, cases=signed_rank_batches(GATHER))
def a_prefill_on_several_ranks_is_right_for_every_batch_of_a_signature(
    setting: Setting, batch: SignedBatch
) -> None:
    expect_right_batch(setting, batch)


@law(RING, cases=signed_rank_batches(RING))
def a_ring_prefill_is_right_for_every_batch_of_a_signature(
    setting: Setting, batch: SignedBatch
) -> None:
    expect_right_batch(setting, batch)
