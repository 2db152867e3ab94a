"""Laws of attention on batches that share a signature, as `pagetwin fuzz` draws them.

The result of one batch is judged key by key in float64. `harness/screening.py` tries hundreds of
batches of a signature with a batched oracle, and comes back to these laws for those it finds wrong.
"""

from ..generators.signatures import Signature as Signature  # in what a report shows
from ..generators.signatures import SignedBatch, signed_batches
from ..generators.signed_calls import build_signed
from ..harness.calling import expect_right, run_call
from ..harness.law import Setting, law


def expect_right_batch(setting: Setting, batch: SignedBatch) -> None:
    call = build_signed(batch, setting.device).call
    expect_right(setting, call, run_call(setting, call))


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
