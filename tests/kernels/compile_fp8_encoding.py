"""Where the code for sm_90 takes the registers from that it merges FP8 numbers with.

    PYTHONPATH=tests python tests/kernels/compile_fp8_encoding.py

The chip encodes two numbers, and merges them with two others. Where a thread had two elements, the
assemblers of triton 3.6 and 3.7 merged them with a register that nothing had written: the second
code was garbage. The output is one JSON object per program: the elements of a thread, and for each
merge the instruction that wrote the register.
"""

import os

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import json
import re

import triton
from quantise import quantise_kernel
from support.compile_kernels import dump
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

THREADS = 128


def find_sources(code: str) -> list[str]:
    """Return which instruction wrote the register that each encoding merges with; RZ is zero."""
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?);", code)
    found = []
    for index, line in enumerate(lines):
        if "F2FP.SATFINITE.E" not in line:
            continue
        merged = line.split(",")[-1].strip().removesuffix(".reuse")
        writers = [
            before
            for before in lines[:index]
            if re.search(rf"\b{merged}\b", before.split(",")[0])
        ]
        found.append(merged if merged == "RZ" else writers[-1].split()[0])
    return found


def main() -> None:
    """Compile programs of one to eight elements per thread, for both dtypes."""
    names = quantise_kernel.arg_names
    types = {"size": "i32", "codes": "*u8"}
    for is_e5m2 in (False, True):
        for elements in (1, 2, 4, 8):
            constants = {
                "IS_E5M2": is_e5m2,
                "NATIVE": True,
                "IS_NUMBER": False,
                "SIZE": elements * THREADS,
            }
            signature = {
                name: "constexpr" if name in constants else types.get(name, "*fp32")
                for name in names
            }
            compiled = triton.compile(
                ASTSource(
                    fn=quantise_kernel,
                    signature=signature,
                    constexprs={
                        (names.index(name),): value for name, value in constants.items()
                    },
                    attrs={},
                ),
                target=GPUTarget("cuda", 90, 32),
                options={"num_warps": THREADS // 32},
            )
            sources = find_sources(dump(compiled.asm["cubin"], "-sass"))
            print(json.dumps({"elements": elements, "merged with": sources}))


if __name__ == "__main__":
    main()
