"""The staged package of vLLM's kernels: what it takes from a wheel, and what it replaces."""

import ast
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "gpu"))

from stage_kernels import (
    KERNELS,
    LATER,
    LIBRARIES,
    OPS,
    STAND_INS,
)

IMPORTS = {
    "xpu_mla_sparse.py": "from vllm.triton_utils import LOG2E, LOGE2, tl, triton\n",
    "rocm_aiter_mla_sparse.py": """
from vllm import envs
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import CUDAGraphMode, get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.triton_utils import tl, triton
from vllm.utils.torch_utils import LayerNameType, direct_register_custom_op
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadata
from vllm.v1.attention.ops.common import pack_seq_triton, unpack_seq_triton
from vllm.v1.worker.workspace import current_workspace_manager

DTYPE = current_platform.fp8_dtype()


@eager_break_during_capture
def score():
    return current_workspace_manager().get_simultaneous(((2, 3), DTYPE))


direct_register_custom_op(op_name="score", op_func=score)
""",
}
"""What two kernels of vLLM 0.33 import, as its files say."""


def stage(tmp_path: Path, kernels: dict[str, str]) -> Path:
    """Stage a wheel of some kernels, and return the folder."""
    wheel, folder = tmp_path / "vllm-0.33.0-cp38.whl", tmp_path / "staged"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in (dict.fromkeys(KERNELS, "") | kernels).items():
            archive.writestr(OPS + name, text)
        for name in LIBRARIES:
            archive.writestr(name, b"operators")
    script = sys.modules["stage_kernels"].__file__
    command = [sys.executable, str(script), str(wheel), str(folder), "--libraries"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def test_kernels_are_staged_unchanged_with_what_they_import(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    folder = stage(tmp_path, IMPORTS)
    for name, text in IMPORTS.items():
        assert name in LATER
        assert (folder / OPS / name).read_text() == text
    assert all((folder / name).read_bytes() == b"operators" for name in LIBRARIES)
    program = """
import torch
from vllm.v1.attention.ops import rocm_aiter_mla_sparse as indexer, xpu_mla_sparse as mla
from vllm.v1.worker import workspace
assert abs(mla.LOG2E * mla.LOGE2 - 1) < 1e-12
assert not workspace.is_workspace_manager_initialized()
workspace.init_workspace_manager(torch.device("cpu"))
assert workspace.is_workspace_manager_initialized()
(found,) = indexer.score()
assert found.shape == (2, 3) and found.dtype == torch.float8_e4m3fn
import vllm
assert vllm.__version__ == "0.33.0"
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=folder)


def test_a_wheel_without_later_kernels_is_staged_without_them(tmp_path: Path) -> None:
    folder = stage(tmp_path, {})
    staged = {path.name for path in (folder / OPS).glob("*.py")}
    assert set(KERNELS) <= staged and not set(LATER) & staged


@pytest.mark.parametrize("name", STAND_INS)
def test_a_replaced_module_is_python(name: str) -> None:
    ast.parse(STAND_INS[name].replace("{version!r}", "'0.33.0'"))
