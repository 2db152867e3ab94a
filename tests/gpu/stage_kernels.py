"""Take vLLM's Triton kernels out of its wheel, for a machine on which vLLM is not installed.

    python tests/gpu/stage_kernels.py vllm-0.25.1-....whl FOLDER

FOLDER then holds a package `vllm` with the unchanged files of the kernels, a few hundred KiB. What
they import from the rest of vLLM (logger, platform, environment variables) is replaced by modules
of a few lines. With FOLDER on PYTHONPATH the adapters of these kernels can be imported.
"""

import argparse
import re
import zipfile
from pathlib import Path

OPS = "vllm/v1/attention/ops/"
KERNELS = (
    "triton_unified_attention.py",
    "triton_attention_helpers.py",
    "triton_reshape_and_cache_flash.py",
    "triton_merge_attn_states.py",
)
LATER = (
    "int4_per_token_head.py",
    "triton_decode_attention.py",
    "xpu_mla_sparse.py",
    "rocm_aiter_mla_sparse.py",
)
"""Kernels that some versions do not have."""
STAND_INS = {
    "vllm/__init__.py": "__version__ = {version!r}\n",
    "vllm/envs.py": "VLLM_BATCH_INVARIANT = False\n",
    "vllm/logger.py": """
from logging import getLogger


def init_logger(name):
    logger = getLogger(name)
    logger.debug_once = logger.debug
    return logger
""",
    "vllm/utils/math_utils.py": """
def largest_power_of_2_divisor(number):
    return number & -number
""",
    "vllm/platforms.py": """
import torch


class Cuda:
    def fp8_dtype(self):
        return torch.float8_e4m3fn

    def has_device_capability(self, least):
        major, minor = torch.cuda.get_device_capability()
        return 10 * major + minor >= least

    def is_device_capability_family(self, family):
        return torch.cuda.is_available() and (
            torch.cuda.get_device_capability()[0] == family // 10
        )

    def is_cuda(self):
        return torch.cuda.is_available()

    def is_rocm(self):
        return False

    is_xpu = is_rocm


current_platform = Cuda()
""",
    "vllm/triton_utils.py": """
import math

import triton
import triton.language as tl

LOG2E = 1 / math.log(2)
LOGE2 = math.log(2)
""",
    "vllm/compilation/breakable_cudagraph.py": """
def eager_break_during_capture(function):
    return function
""",
    "vllm/config.py": """
CUDAGraphMode = None


def get_current_vllm_config():
    raise RuntimeError("this package has kernels of vLLM only")
""",
    "vllm/forward_context.py": """
def get_forward_context():
    raise RuntimeError("this package has kernels of vLLM only")
""",
    "vllm/v1/attention/backends/mla/indexer.py": "DeepseekV32IndexerMetadata = None\n",
    "vllm/v1/attention/ops/common.py": "pack_seq_triton = unpack_seq_triton = None\n",
    "vllm/v1/worker/workspace.py": """
import torch

_device = None


def init_workspace_manager(device):
    global _device
    _device = device


def is_workspace_manager_initialized():
    return _device is not None


class Workspace:
    def get_simultaneous(self, *wanted):
        return [
            torch.empty(shape, dtype=dtype, device=_device) for shape, dtype in wanted
        ]


def current_workspace_manager():
    return Workspace()
""",
    "vllm/utils/torch_utils.py": """
LayerNameType = str


def direct_register_custom_op(**_operator):
    pass


def is_quantized_kv_cache(kv_cache_dtype):
    return kv_cache_dtype.startswith("fp8") or kv_cache_dtype.endswith("per_token_head")
""",
    "vllm/model_executor/layers/quantization/utils/quant_utils.py": """
import torch

FP8_DTYPE = torch.float8_e4m3fn


def get_fp8_min_max():
    found = torch.finfo(FP8_DTYPE)
    return found.min, found.max
""",
    "vllm/v1/kv_cache_interface.py": """
from enum import IntEnum

from vllm.utils.torch_utils import is_quantized_kv_cache


class KVQuantMode(IntEnum):
    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4
    NVFP4 = 5
""",
}
"""Modules that replace those of vLLM which the kernels import."""
LIBRARIES = (
    "vllm/_flashmla_C.abi3.so",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so",
)
"""FlashMLA and FlashAttention-3, which need nothing else of vLLM."""


def main() -> None:
    """Write the package."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--libraries", action="store_true", help="FlashMLA and FlashAttention-3 too"
    )
    asked = parser.parse_args()
    named = re.match(r"vllm-([^-]+)-", asked.wheel.name)
    if named is None:
        raise SystemExit(f"{asked.wheel.name}: expected a wheel of vLLM")
    files = {
        name: text.replace("{version!r}", repr(named[1])).lstrip("\n")
        for name, text in STAND_INS.items()
    }
    with zipfile.ZipFile(asked.wheel) as wheel:
        later = [kernel for kernel in LATER if OPS + kernel in wheel.namelist()]
        files |= {
            OPS + kernel: wheel.read(OPS + kernel).decode()
            for kernel in (*KERNELS, *later)
        }
        if asked.libraries:
            wheel.extractall(asked.folder, LIBRARIES)
    for name, text in files.items():
        path = asked.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        for parent in path.parents:
            if parent == asked.folder:
                break
            (parent / "__init__.py").touch()
    print(f"{asked.folder}: {len(files)} files of vLLM {named[1]}")


if __name__ == "__main__":
    main()
