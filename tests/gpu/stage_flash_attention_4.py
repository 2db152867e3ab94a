"""Compile FlashAttention-4 for Hopper out of vLLM's wheel, on a machine without a GPU.

    pip install torch nvidia-cutlass-dsl quack-kernels apache-tvm-ffi nvidia-cuda-runtime einops
    python tests/gpu/stage_flash_attention_4.py vllm-0.33.0-....whl FOLDER

FOLDER then holds vllm/vllm_flash_attn/flash_attention_4.so, which PAGETWIN_FA4 names to
`pagetwin bench`: one function per form, about 100 KB each. It needs the package apache-tvm-ffi, and
a torch of CUDA 13. A form takes about 8 seconds. gcc links them.
"""

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
import types
import warnings
import zipfile
from pathlib import Path
from typing import Any

SOURCES = "vllm/vllm_flash_attn/cute/"
LIBRARY = "vllm/vllm_flash_attn/flash_attention_4.so"
FORMS = (
    "fwd_bf16_k128_v128_g4_causal_paged",
    "fwd_bf16_k128_v128_g4_causal_paged_split",
    "combine_bf16_v128_h32",
    "fwd_bf16_k64_v64_g8_causal_paged",
    "fwd_bf16_k128_v128_g1_causal_paged",
    "fwd_bf16_k128_v128_g8_causal_paged",
    "fwd_bf16_k128_v128_g4_local_paged",
    "fwd_bf16_k64_v64_g1_full_paged",
    "fwd_bf16_k64_v64_g1_full_ragged",
    "fwd_bf16_k64_v64_g8_local_paged_sinks",
    "fwd_bf16_k64_v64_g8_causal_paged_sinks",
    "fwd_bf16_k96_v96_g1_causal_paged",
    "fwd_bf16_k192_v128_g1_causal_paged",
    "fwd_bf16_k256_v256_g2_causal_paged",
    "fwd_bf16_k256_v256_g2_causal_paged_cap30",
    "fwd_bf16_k256_v256_g2_causal_paged_cap50",
    "fwd_fp16_k128_v128_g4_causal_paged",
)
"""Forms that the standard and the extended suite need, named as `bench.libraries` calls them."""
FORWARD = re.compile(
    r"fwd_(?P<dtype>bf16|fp16)_k(?P<k>\d+)_v(?P<v>\d+)_g(?P<group>\d+)"
    r"_(?P<mask>full|causal|local)_(?P<keys>paged|ragged)(?P<sinks>_sinks)?"
    r"(?:_cap(?P<cap>[\d.]+))?(?P<split>_split)?"
)
COMBINE = re.compile(r"combine_(?P<dtype>bf16|fp16)_v(?P<v>\d+)_h(?P<heads>\d+)")
KV_HEADS, MULTIPROCESSORS = 4, "132"
RAISE_CUDA_ERROR = """
#include <stdio.h>
typedef void (*Raise)(const char *kind, const char **parts, int count);
void CuteDSLRT_TVMFFISetRaisedCudaError(Raise raise, int code) {
  char number[32];
  const char *parts[] = {"CUDA error ", number};
  snprintf(number, sizeof number, "%d", code);
  if (raise) raise("RuntimeError", parts, 2);
}
"""
"""What the compiled functions call after an error. CUTLASS has it only in a library of 44 MB."""


def parse_form(name: str) -> dict[str, Any]:
    """Return what a form is compiled for, from its name.

    Raises:
        ValueError: The name has another pattern.
    """
    found = FORWARD.fullmatch(name) or COMBINE.fullmatch(name)
    if found is None:
        raise ValueError(f"form = {name!r}: expected a name as in FORMS")
    return {
        part: int(value) if value and value.isdigit() else value
        for part, value in found.groupdict().items()
    }


def import_sources(folder: Path) -> Any:
    """Return FlashAttention-4's module, without the rest of vLLM."""
    os.environ |= {
        "FLASH_ATTENTION_ARCH": "sm_90a",
        "CUTE_DSL_ARCH": "sm_90a",
        "FLASH_ATTENTION_NUM_SMS": MULTIPROCESSORS,
    }
    # its structures of None need no protocol of CUTLASS
    warnings.filterwarnings("ignore", "Argument aux_data")
    for name in ("vllm", "vllm.vllm_flash_attn"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")))]
        sys.modules[name] = package
    return importlib.import_module("vllm.vllm_flash_attn.cute.interface")


def compile_forward(module: Any, form: dict[str, Any]) -> Any:
    """Return the compiled attention of a form. Its tensors are stand-ins of any lengths."""
    import torch

    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[form["dtype"]]
    heads, some = KV_HEADS * form["group"], 64
    make = module._make_compile_only_tensor_spec

    def numbers(*shape: int) -> Any:
        return make(shape, torch.int32, 4)

    if form["keys"] == "paged":
        tokens: tuple[int, ...] = (some, 16)
        batch = {"page_table": numbers(some, some), "seqused_k": numbers(some)}
    else:
        tokens, batch = (some,), {"cu_seqlens_k": numbers(some + 1)}
    if form["mask"] == "local":
        batch |= {"window_size_left": some, "window_size_right": 0}
    if form["sinks"]:
        batch["learnable_sink"] = make((heads,), torch.bfloat16, 4)
    module._flash_attn_fwd.compile_cache.clear()
    module._flash_attn_fwd(
        make((some, heads, form["k"]), dtype),
        make((*tokens, KV_HEADS, form["k"]), dtype),
        make((*tokens, KV_HEADS, form["v"]), dtype),
        out=make((some, heads, form["v"]), dtype),
        cu_seqlens_q=numbers(some + 1),
        max_seqlen_q=1,
        max_seqlen_k=4096,
        softmax_scale=0.1,
        causal=form["mask"] == "causal",
        softcap=None if form["cap"] is None else float(form["cap"]),
        num_splits=2 if form["split"] else 1,
        compile_only=True,
        **batch,
    )
    (found,) = module._flash_attn_fwd.compile_cache.cache.values()
    return found


def compile_combine(module: Any, form: dict[str, Any]) -> Any:
    """Return the compiled kernel that merges up to 32 splits of packed queries."""
    cutlass = importlib.import_module("cutlass")
    dtype = {"bf16": cutlass.BFloat16, "fp16": cutlass.Float16}[form["dtype"]]
    columns = 64 if form["v"] <= 64 else 128
    rows = 16 if columns == 64 else 8
    return module._compile_fwd_combine(
        90, dtype, cutlass.Float32, form["v"], form["heads"], rows, columns, 5,
        True, False, None, False, False, False, None,
    )  # fmt: skip


def package_folder(name: str) -> Path:
    """Return the folder of an installed package, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit(
            f"{name} is not installed: the docstring names what to install"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def link(objects: list[Path], folder: Path, out: Path) -> None:
    """Link compiled forms into one library that calls CUDA's runtime and apache-tvm-ffi."""
    source, exported = folder / "raise.c", folder / "exported"
    source.write_text(RAISE_CUDA_ERROR)
    exported.write_text("{ global: __tvm_ffi_*; local: *; };\n")
    runtimes = sorted(
        package_folder("nvidia_cutlass_dsl").rglob("libcuda_dialect_runtime_static.a")
    )
    cuda = sorted(package_folder("nvidia").rglob("libcudart.so.13"))
    if not runtimes or not cuda:
        missing = "CUTLASS' static runtime" if not runtimes else "libcudart.so.13"
        raise SystemExit(
            f"{missing} is not installed: the docstring names the packages"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    command = ["gcc", "-shared", "-fPIC", "-s", "-o", out, *objects, source]
    command += [
        "-Wl,--gc-sections",
        "-Wl,-Bsymbolic",
        f"-Wl,--version-script={exported}",
    ]
    command += [runtimes[-1], cuda[-1], f"-L{package_folder('tvm_ffi') / 'lib'}"]
    subprocess.run([*map(str, command), "-ltvm_ffi"], check=True)


def main() -> None:
    """Compile and link the forms."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--forms", nargs="+", default=FORMS, help="names as in FORMS")
    asked = parser.parse_args()
    named = re.match(r"vllm-([^-]+)-", asked.wheel.name)
    if named is None:
        raise SystemExit(f"{asked.wheel.name}: expected a wheel of vLLM")
    forms = {name: parse_form(name) for name in asked.forms}
    with tempfile.TemporaryDirectory() as temporary:
        folder, objects = Path(temporary), []
        with zipfile.ZipFile(asked.wheel) as wheel:
            names = [name for name in wheel.namelist() if name.startswith(SOURCES)]
            wheel.extractall(folder, names)
        module = import_sources(folder)
        for name, form in forms.items():
            began = time.monotonic()
            make = compile_combine if "heads" in form else compile_forward
            objects.append(folder / f"{name}.o")
            make(module, form).export_to_c(
                object_file_path=str(objects[-1]), function_name=name
            )
            print(f"{name}: {time.monotonic() - began:.1f} s", flush=True)
        link(objects, folder, asked.folder / LIBRARY)
    start = asked.folder / "vllm/__init__.py"
    if not start.exists():
        start.write_text(f"__version__ = {named[1]!r}\n")
    print(f"{asked.folder / LIBRARY}: {len(objects)} forms of vLLM {named[1]}")


if __name__ == "__main__":
    main()
