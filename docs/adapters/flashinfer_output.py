"""FlashInfer's paged attention without its log-sum-exp, to judge the output alone."""

from dataclasses import replace

from flashinfer_paged import SUPPORT as WITH_LSE
from flashinfer_paged import paged_attention as paged_attention

SUPPORT = replace(
    WITH_LSE,
    options={
        name: option for name, option in WITH_LSE.options.items() if name != "lse"
    },
)
