"""Compilation of the Hopper decode kernel for codes on any machine, with the assembler's report.

    PYTHONPATH=tests python tests/support/compile_fp8_decode_sm90.py [NUMBER ...]

As compile_kernels.py: public operations run on host tensors, and launches are recorded instead of
made. The output is one JSON object per line: the case, registers, bytes spilled, shared memory, and
instructions of the loop over keys.
"""

import os

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import json
import re
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from pagetwin.contract.cache_formats import TENSOR_SCALE_DTYPES, find_format
from pagetwin.optimized.kernels.sm90.code_decode import family
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

from support import compile_kernels
from support.compile_prefill_sm90 import BF16, FP16, NAMES, compile_source

E4M3, E5M2 = TENSOR_SCALE_DTYPES
COUNTED = ("HMMA", "LDG", "LDS", "STS", "BAR", "LDL", "STL")


class Case(NamedTuple):
    """A call signature.

    Args:
        dtype: of the queries.
        cache_dtype, head_size: of the keys and values.
        query_len, reqs, key_len: of the batch.
        options: besides the scales.
    """

    dtype: torch.dtype
    cache_dtype: torch.dtype
    head_size: int
    query_len: int
    reqs: int
    key_len: int
    options: Mapping[str, Any]

    def __str__(self) -> str:
        words = [
            NAMES[self.dtype],
            str(self.cache_dtype).removeprefix("torch.").removeprefix("float8_"),
        ]
        words += [str(self.head_size), f"{self.reqs} x {self.query_len}"]
        return " ".join(words + [name for name in self.options])


CASES = [
    Case(BF16, E4M3, 128, 1, 64, 4096, {}),
    Case(FP16, E5M2, 64, 4, 64, 512, {"sliding_window": 100, "sinks": True}),
    Case(BF16, E4M3, 128, 4, 300, 512, {"logits_soft_cap": 30.0}),
    Case(BF16, torch.int8, 128, 1, 64, 4096, {}),
    Case(BF16, torch.uint8, 128, 1, 64, 4096, {}),
    # the cases above are compiled in every test run
    Case(BF16, E5M2, 128, 1, 64, 4096, {"attention_chunk_size": 300}),
    Case(BF16, E4M3, 64, 1, 64, 4096, {}),
    Case(FP16, torch.int8, 64, 4, 64, 512, {"sliding_window": 100, "sinks": True}),
    Case(FP16, torch.uint8, 64, 4, 64, 512, {"logits_soft_cap": 30.0}),
]
EVERY_DAY = 5


def record(case: Case) -> tuple[Any, dict[str, Any], dict[str, int]]:
    """Return the kernel that one call launches, its arguments and its launch options."""
    launches: list[Any] = []
    compile_kernels.pretend(90, launches)
    family.is_hopper = lambda device: True  # type: ignore[assignment]
    GluonJITFunction.run = compile_kernels.JITFunction.run
    options = {"sinks": torch.ones(32)} if "sinks" in case.options else {}
    scales: dict[str, Any] = {"k_scale": torch.ones(8), "v_scale": 0.5}
    if case.cache_dtype not in TENSOR_SCALE_DTYPES:
        blocks = -(-case.key_len // 16)
        form = find_format(case.cache_dtype, torch.ones(blocks, 16, 8))
        scales = compile_kernels.measured_scales(form, blocks)
    compile_kernels.run_attention(
        case.query_len,
        case.key_len,
        case.head_size,
        case.dtype,
        case.reqs,
        cache_dtype=case.cache_dtype,
        **scales,
        **{**case.options, **options},
    )
    (launch,) = launches
    assert launch[0] is family.code_decode_kernel, launch[0]
    return launch  # type: ignore[no-any-return]


def count_in_loop(cubin: bytes) -> dict[str, int]:
    """Return how many instructions of some kinds the loop over keys has."""
    loop: Counter[str] = Counter()
    for body in compile_kernels.loops_with_products(cubin):
        words = [re.sub(r"^@!?U?P\d+ ", "", line) for line in body]
        loop += Counter(re.split(r"[ .]", line)[0] for line in words)
    return {"instructions": loop.total(), **{name: loop[name] for name in COUNTED}}


def main(numbers: list[int]) -> None:
    """Compile the cases of these numbers."""
    for case in [CASES[number] for number in numbers]:
        kernel, values, options = record(case)
        signature, constants, attributes = compile_kernels.specialize_launch(
            kernel, values
        )
        source = GluonASTSource(
            fn=kernel, signature=signature, constexprs=constants, attrs=attributes
        )
        compiled, report = compile_source(source, options["num_warps"])
        line = {
            "case": str(case),
            **report,
            "shared": compiled.metadata.shared,
            "loop": count_in_loop(compiled.asm["cubin"]),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main([int(number) for number in sys.argv[1:]] or list(range(len(CASES))))
