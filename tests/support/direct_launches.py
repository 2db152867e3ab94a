"""Compare what repeated calls launch with what Triton launches, on a machine without a GPU.

    PYTHONPATH=tests python tests/support/direct_launches.py FOLDER

FOLDER gets the pretended driver (pretended_driver.c), for which a C compiler is needed. Kernels are
compiled for sm_90 and never run. Tensors are in host memory and report a CUDA device. One JSON
object per line: the case, the launches of a repeated call, whether its kernels, grids, streams and
all bytes of its arguments are those of the same call through Triton, and the same for a call with
addresses that are not multiples of 16.
"""

import os

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)
    # tensors on the host stand for those of a GPU
    os.environ["PAGETWIN_CHECK_VALUES"] = "0"


import ctypes
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor

GPU = torch.device("cuda", 0)
BF16 = torch.bfloat16
SIZES = {"8": 1, "16": 2, "32": 4, "64": 8}
PARAMETER = re.compile(
    r"\.param\s+(?:\.align \d+ )?\.[a-z](\d+)[^\n,\[)]*(?:\[(\d+)\])?"
)


class OnGpu(Tensor):
    """A tensor in host memory that reports a CUDA device."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    device = GPU  # type: ignore[assignment]

    def get_device(self) -> int:
        return 0


def pretend(folder: Path) -> Any:
    """Replace the driver and torch's CUDA functions, and return the driver's library."""
    library = folder / "libcuda.so.1"
    source = Path(__file__).with_name("pretended_driver.c")
    # a library that asks for libcuda.so.1 finds this one by its name
    options = ["-O1", "-shared", "-fPIC", f"-Wl,-soname,{library.name}"]
    subprocess.run(["cc", *options, str(source), "-o", str(library)], check=True)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    driver = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    own: Any = torch._C
    own._cuda_getCurrentRawStream = lambda index: 7
    own._cuda_getDevice = lambda: 0
    own._cuda_isCurrentStreamCapturing = lambda: False
    chip = SimpleNamespace(
        shared_memory_per_block_optin=232448,
        multi_processor_count=132,
        major=9,
        minor=0,
    )
    cuda: Any = torch.cuda
    cuda.get_device_properties = lambda device=None: chip
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.current_device = lambda: 0
    cuda.set_device = lambda device: None
    cuda.synchronize = lambda device=None: None
    cuda.Stream = lambda device=None: SimpleNamespace(synchronize=lambda: None)
    cuda.stream = lambda stream: nullcontext()
    from triton.backends.nvidia.driver import CudaDriver

    active: Any = CudaDriver()
    active.get_current_device = lambda: 0
    active.get_current_stream = lambda index: 7
    active.get_device_capability = lambda device=None: (9, 0)
    triton.runtime.driver.set_active(active)

    def note_arguments(
        module: Any, function: int, name: str, files: dict[str, str], key: str
    ) -> None:
        (ptx,) = (path for path in files.values() if path.endswith(".ptx"))
        entry = Path(ptx).read_text().partition(".entry")[2].partition(")")[0]
        found = [
            SIZES[bits] * int(times or 1) for bits, times in PARAMETER.findall(entry)
        ]
        assert len(found) == entry.count(".param"), entry
        numbers = (ctypes.c_int * len(found))(*found)
        driver.pretended_set_arguments(ctypes.c_uint64(function), len(found), numbers)

    hook: Any = note_arguments
    triton.knobs.runtime.kernel_load_end_hook.add(hook)
    return driver


def read_log(driver: Any) -> bytes:
    """Return what was launched since the last call."""
    size = ctypes.c_int.in_dll(driver, "pretended_log_size")
    found = (ctypes.c_uint8 * size.value).in_dll(driver, "pretended_log")
    size.value = 0
    return bytes(found)


def empty(*shape: int, dtype: torch.dtype = BF16, shift: int = 0) -> Tensor:
    """Return a tensor that begins `shift` elements past a multiple of 16 bytes."""
    size = torch.Size(shape).numel()
    memory = torch.empty(size + shift, dtype=dtype)[shift:]
    return memory.view(shape).as_subclass(OnGpu)


def vector(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32).as_subclass(OnGpu)


def attention(
    twin: Any, query_lens: list[int], shift: int, **options: Any
) -> Callable[[], Any]:
    """Return a call of attention, paged or over ragged keys."""
    from pagetwin.contract.attention_options import AttentionOptions

    tokens, reqs = sum(query_lens), len(query_lens)
    is_paged = options.pop("is_paged", True)
    is_latent, is_fp8 = options.pop("is_latent", False), options.pop("is_fp8", False)
    prefix, block_size = options.pop("prefix", 0), options.pop("block_size", 64)
    starts = [0, *torch.tensor(query_lens).cumsum(0).tolist()]
    if options.get("sinks"):
        options["sinks"] = empty(8, dtype=torch.float32)
    if is_fp8:
        options |= {"k_scale": 0.5, "v_scale": 2.0}
    given = {"options": AttentionOptions(**options)}
    if not is_paged:
        tensors = [empty(tokens, 8, 64, shift=shift) for _ in range(4)]
        batch = (vector(starts), vector(starts), max(query_lens), max(query_lens))
        return lambda: twin.encoder_attention(
            *tensors[:3], *batch, out=tensors[3], **given
        )
    head_size, value_size, kv_heads = (576, 512, 1) if is_latent else (128, 128, 2)
    query = empty(tokens, 8, head_size, shift=shift)
    out = empty(tokens, 8, value_size, shift=shift)
    dtype = torch.float8_e4m3fn if is_fp8 else BF16
    key = empty(20, block_size, kv_heads, head_size, dtype=dtype)
    value = key[..., :512] if is_latent else empty(*key.shape, dtype=dtype)
    table = empty(reqs, 4480 // block_size, dtype=torch.int32)
    lens = (vector([4000] * reqs), max(query_lens), 4000)
    batch = (table, vector(starts), *lens)
    value = value.as_subclass(OnGpu)
    if prefix:
        arguments = (query, key, value, *batch, prefix)
        return lambda: twin.cascade_attention(*arguments, out=out, **given)
    return lambda: twin.paged_attention(query, key, value, *batch, out=out, **given)


def write(twin: Any, shift: int, dtype: torch.dtype, scale: Any) -> Callable[[], Any]:
    """Return a cache write; a scale "tensor" is one number in memory."""
    key, value = (empty(40, 2, 128, shift=shift) for _ in range(2))
    caches = [empty(9, 16, 2, 128, dtype=dtype) for _ in range(2)]
    slots = empty(40, dtype=torch.int64)
    scales = [empty(1, dtype=torch.float32) if scale == "tensor" else scale] * 2
    return lambda: twin.reshape_and_cache(key, value, *caches, slots, *scales)


def cases(twin: Any) -> Iterator[tuple[str, Callable[[int], Callable[[], Any]]]]:
    """Yield the name of a case, and a function that makes a call with tensors of its own."""
    decode, mixed = [1] * 6, [1, 300, 1, 40]
    for name, lens, options in (
        ("decode", decode, {}),
        ("mixed, sinks", mixed, {"sinks": True, "sliding_window": 64}),
        ("batch-invariant", mixed, {"batch_invariant": True}),
        ("encoder", mixed, {"is_paged": False}),
        ("latent", decode, {"is_latent": True}),
        (
            "latent, copied",
            decode,
            {"is_latent": True, "block_size": 1, "causal": False},
        ),
        ("prefill, FP8", [600, 900], {"is_fp8": True}),
        ("prefill alone", [900, 900], {}),
        ("prefill alone, FP8", [900], {"is_fp8": True}),
        ("cascade", decode, {"prefix": 1024}),
        ("cascade, short rests", [1] * 128, {"prefix": 3072}),
    ):
        yield (
            name,
            lambda shift, a=(lens, options): attention(twin, a[0], shift, **a[1]),
        )
    for name, dtype, scale in (
        ("write", BF16, None),
        ("write, FP8", torch.float8_e4m3fn, 2.0),
        ("write, FP8, scales in memory", torch.float8_e4m3fn, "tensor"),
    ):
        yield name, lambda shift, a=(dtype, scale): write(twin, shift, *a)


def main(folder: Path) -> None:
    """Print what this module says."""
    driver = pretend(folder)
    import pagetwin.optimized as twin
    from pagetwin.optimized.dispatch import pipeline
    from pagetwin.optimized.runtime import launcher, workspace
    from pagetwin.optimized.runtime.repeat import repeated_call, writes

    def allocate(device: Any, counters: int, numbers: int) -> tuple[Tensor, Tensor]:
        return torch.zeros(counters, dtype=torch.int32), torch.empty(numbers)

    own: Any = workspace
    own._allocate = allocate
    own.make_kept = lambda make, device: make()
    planned: list[Any] = []
    for module, name in (
        (pipeline, "_attend_anew"),
        (sys.modules[twin.reshape_and_cache.__module__], "check_reshape_and_cache"),
    ):
        before = getattr(module, name)

        def noted(*args: Any, before: Any = before, **named: Any) -> Any:
            planned.append(1)
            return before(*args, **named)

        setattr(module, name, noted)
    modules: tuple[Any, ...] = (launcher, repeated_call, writes)
    own_is_profiled = launcher.is_profiled

    def run(call: Callable[[], Any], by_triton: bool = False) -> tuple[bytes, bool]:
        for module in modules:
            module.is_profiled = (lambda: True) if by_triton else own_is_profiled
        planned.clear()
        call()
        return read_log(driver), not planned

    for name, make in cases(twin):
        for call in (make(0), made := make(0)):
            for _ in range(3):
                found, is_repeated = run(call)
        expected = run(made, by_triton=True)[0]
        shifted = make(1)
        for _ in range(3):
            misaligned, is_misaligned_repeated = run(shifted)
        print(
            json.dumps(
                {
                    "case": name,
                    "bytes": len(found),
                    "is_repeated": is_repeated,
                    "as_triton": found == expected,
                    "is_misaligned_repeated": is_misaligned_repeated,
                    "misaligned_as_triton": misaligned
                    == run(shifted, by_triton=True)[0],
                    "misaligned_kernel_differs": misaligned[:8] != found[:8],
                }
            )
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
