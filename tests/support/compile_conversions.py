"""Compile the conversion of codes for Hopper's prefill, and print what each case uses as JSON.

PYTHONPATH=tests python tests/support/compile_conversions.py int4_per_token_head 16 128
"""

import os

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import json
import sys

import torch
from pagetwin.conformance.cases.batches import BatchPlan
from pagetwin.conformance.cases.options import paged_call
from pagetwin.conformance.checks.coded_caches import coded_call
from pagetwin.contract.cache_formats import FORMATS
from pagetwin.optimized.kernels.sm90.code_prefill import family

from support.compile_kernels import compile_launch, pretend
from support.hopper_codes import to_family


def main(name: str, sizes: list[int]) -> None:
    """Compile the conversions of one format with some head sizes."""
    for size in sizes:
        plan = BatchPlan((9,), (40,), head_size=size, dtype=torch.bfloat16)
        call = coded_call(paged_call(plan, torch.device("cpu")), FORMATS[name], 0)
        made, _, _ = to_family(call, has_lse=False)
        launches: list[tuple] = []
        pretend(90, launches)
        family.plan(made).convert(made, 1)
        for kernel, values, options in launches:
            used = compile_launch(kernel, values, options, 90)
            del used["cubin"]
            print(json.dumps({"kernel": kernel.__name__, "head_size": size} | used))


if __name__ == "__main__":
    main(sys.argv[1], [int(size) for size in sys.argv[2:]])
