"""Compile the Hopper prefill kernel without such a chip, and print what the assembler made of it.

    python tests/compile_prefill_sm90.py [NUMBER ...]

Launches are recorded instead of made, so what is compiled is what would be launched. One JSON
object a line: the case, registers, bytes spilled, the assembler's complaints, shared memory, and of
each main loop how many instructions of some kinds it holds. Numbers pick cases; without, all are
compiled.
"""

import os

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)

import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.optimized.kernels.sm90 import host
from pagetwin.optimized.kernels.sm90.kernel import prefill_kernel
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.int64: "i64",
}
# dtype, head size, block size (0: keys without a table), causal, log-sum-exp
BF16, FP16 = torch.bfloat16, torch.float16
CASES = [
    (BF16, 128, 16, True, True),
    (BF16, 64, 16, True, False),
    (FP16, 128, 0, False, False),
    (FP16, 64, 48, False, True),
    # the above are for every day
    (BF16, 128, 16, True, False),
    (BF16, 128, 0, False, True),
    (BF16, 128, 256, False, False),
    (BF16, 64, 0, False, False),
    (BF16, 64, 0, True, True),
    (FP16, 128, 16, True, True),
    (FP16, 128, 32, True, False),
    (FP16, 64, 16, True, False),
    (FP16, 64, 0, False, True),
]
EVERY_DAY = 4
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
COUNTED = ("HGMMA", "MUFU", "PRMT", "BAR", "LDL", "STL")
Case = tuple[torch.dtype, int, int, bool, bool]


def record(case: Case) -> dict[str, Any]:
    """Return the arguments that one call's kernel is launched with."""
    dtype, head_size, block_size, causal, has_lse = case
    launches: list[dict[str, Any]] = []

    def keep(self: GluonJITFunction[Any], *args: Any, **options: Any) -> None:
        launches.append(dict(zip(self.arg_names, args, strict=True)))

    properties = SimpleNamespace(multi_processor_count=132, major=9, minor=0)
    torch.cuda.get_device_properties = lambda device=None: properties
    GluonJITFunction.run = keep
    query = torch.zeros(256, 8, head_size, dtype=dtype)
    starts = torch.tensor([0, 100, 256], dtype=torch.int32)
    keys = torch.zeros(512, 2, head_size, dtype=dtype)
    table, lengths = None, torch.tensor([0, 256, 512], dtype=torch.int32)
    if block_size:
        keys = torch.zeros(4, block_size, 2, head_size, dtype=dtype)
        table = torch.zeros(2, 2, dtype=torch.int32)
        lengths = torch.tensor([block_size, 2 * block_size], dtype=torch.int32)
    lse = torch.zeros(8, 256) if has_lse else None
    options = AttentionOptions(causal=causal)
    plan = host.plan(query, keys, keys, table, query, options)
    host.launch(
        plan, query, keys, keys, table, starts, lengths, 156, 16, 0.1, query, lse
    )
    return launches[0]


def compile_case(values: dict[str, Any]) -> Any:
    """Compile one recorded launch as triton would."""
    kernel = prefill_kernel
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    for parameter in kernel.params:
        name, value = parameter.name, values[parameter.name]
        if parameter.is_constexpr or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, TensorDescriptor):
            box, layout = list(value.block_shape), value.layout
            signature[name] = f"tensordesc<{NAMES[value.base.dtype]}{box},{layout!r}>"
        elif isinstance(value, torch.Tensor):
            signature[name] = f"*{NAMES[value.dtype]}"
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
    return triton.compile(
        GluonASTSource(fn=kernel, signature=signature, constexprs=constants),
        target=GPUTarget("cuda", 90, 32),
        options={"num_warps": 4},
    )


def assemble(ptx: str) -> dict[str, Any]:
    """Return what the assembler says of registers and spills, and what it complains of."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.ptx"
        file.write_text(ptx)
        tool, made = str(TOOLS / "ptxas"), str(file.with_suffix(".cubin"))
        said = subprocess.run(
            [tool, "-v", "--gpu-name", "sm_90a", str(file), "-o", made],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    stores, loads = re.findall(r"(\d+) bytes spill (?:stores|loads)", said)[:2]
    return {
        "registers": int(re.findall(r"Used (\d+) registers", said)[0]),
        "spilled": int(stores),
        "reloaded": int(loads),
        # C7508 to C7519: registers not moved, products not overlapped
        "complaints": re.findall(r"\(C75\d\d\)[^\n]*", said),
    }


def main_loops(cubin: bytes) -> Iterator[dict[str, int]]:
    """Return the instructions of each stretch of code that multiplies and exponentiates.

    A stretch runs from label to label. One that holds products and a tile's exponentials is the
    heart of a loop over tiles of keys.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        text = subprocess.run(
            [str(TOOLS / "nvdisasm"), "-c", str(file)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    for stretch in re.split(r"^\.L_x_\d+:$", text, flags=re.M):
        in_order = re.findall(
            r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+ )?([A-Z0-9]+)", stretch, re.M
        )
        found = Counter(in_order)
        if found["HGMMA"] and found["MUFU"] > 50:
            behind = "".join(in_order).rpartition("BAR")[0]
            yield {
                "instructions": found.total(),
                **{each: found[each] for each in COUNTED},
                # exponentials that the next group's turn waits for
                "MUFU before BAR": behind.count("MUFU"),
            }


def main(numbers: list[int]) -> None:
    """Compile the cases of these numbers."""
    for case in [CASES[number] for number in numbers]:
        dtype, head_size, block_size, causal, has_lse = case
        begin = time.perf_counter()
        compiled = compile_case(record(case))
        line = {
            "case": f"{NAMES[dtype]} {head_size}, blocks of {block_size}"
            + (", causal" if causal else "")
            + (", log-sum-exp" if has_lse else ""),
            **assemble(compiled.asm["ptx"]),
            "shared": compiled.metadata.shared,
            "loops": list(main_loops(compiled.asm["cubin"])),
            "seconds": round(time.perf_counter() - begin, 1),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main([int(each) for each in sys.argv[1:]] or list(range(len(CASES))))
