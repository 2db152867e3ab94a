"""Caches of codes on a GPU: attention of every kernel over each layout."""

from dataclasses import replace

import pytest
import torch
from pagetwin.conformance.cases.batches import BatchPlan
from pagetwin.conformance.cases.options import paged_call
from pagetwin.conformance.checks.coded_caches import APART, CODED, PAGES, coded_call
from pagetwin.contract.cache_formats import CacheFormat
from pagetwin.contract.operations import load_implementation

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="runs compiled kernels"),
]

ORDERS = (APART, *PAGES)
BATCHES = {
    "few decodes": BatchPlan((1, 1), (1500, 37), head_size=128, group=4),
    "decodes": BatchPlan((1,) * 40, (97, 33, 1, 64) * 10, head_size=128, group=4),
    "short decodes": BatchPlan((1,) * 200, (5, 16, 17, 30) * 50, head_size=64),
    "append": BatchPlan((5, 16, 1), (900, 1025, 65), head_size=128, group=4),
    "prefill": BatchPlan((200, 130), (200, 300), head_size=128, group=4),
    "head size 80": BatchPlan((3, 70), (400, 70), head_size=80, group=1),
    "head size 256": BatchPlan((1, 40), (300, 140), head_size=256, block_size=24),
}


@pytest.mark.parametrize("form", CODED, ids=lambda form: form.name)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", BATCHES)
def test_attention_over_codes_is_right_on_a_gpu(
    name: str, dtype: torch.dtype, order: str, form: CacheFormat
) -> None:
    check_attention(name, dtype, order, form)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["few decodes", "append", "prefill"])
def test_batch_invariant_attention_over_codes_is_right_on_a_gpu(
    name: str, order: str
) -> None:
    """These are the kernels with fixed splits of the keys."""
    check_attention(name, torch.bfloat16, order, CODED[0], batch_invariant=True)


def check_attention(
    name: str, dtype: torch.dtype, order: str, form: CacheFormat, **options: bool
) -> None:
    plan = replace(BATCHES[name], dtype=dtype, seed=7)
    needles = [(req, keys - 1) for req, keys in enumerate(plan.kv_lens)]
    call = paged_call(plan, torch.device("cuda"), needles, **options)
    call = coded_call(call, form, plan.seed, order)
    out, lse = call.run(load_implementation("optimized"))
    call.assert_right(out, lse, load_implementation("reference"))
