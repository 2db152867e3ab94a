"""The Gluon interpreter on kernels of shared/examples/gluon, and the command `pagetwin interpret`.

Each planted mistake is one change of a kernel, which the command reports at the right line.
"""

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from pagetwin.gluon_interpreter import (
    KernelOutcome,
    Launch,
    interpret_gluon,
    interpret_launches,
)
from pagetwin.gluon_interpreter.shared_memory import tile_order
from pagetwin.tools.cli import app
from pagetwin.tools.interpret_command import load_launches
from support.compiler_process import json_lines
from triton.experimental.gluon import language as gl
from typer.testing import CliRunner

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "shared/examples/gluon"
FILES = sorted(path.stem for path in KERNELS.glob("*.py") if path.stem != "__init__")


class Mistake(NamedTuple):
    """One change of a kernel, and what is reported.

    Args:
        file: of `shared/examples/gluon`.
        old, new: text that is found once, and what replaces it.
        kind: of the fault.
        line: text of the line that is reported, in the changed file.
        other: Optional. Text of a further line. If None, there need not be one.
    """

    file: str
    old: str
    new: str
    kind: str
    line: str
    other: str | None = None


MISTAKES = {
    "no mask of a load": Mistake(
        "vector_scale", "source + offsets, mask=offsets < size", "source + offsets",
        "out of bounds", "x = gl.load",
    ),
    "two programs store to the same elements": Mistake(
        "vector_scale", "gl.program_id(0) * BLOCK +", "gl.program_id(0) // 2 * BLOCK +",
        "race", "gl.store(target",
    ),
    "no wait for a box": Mistake(
        "box_scale", "    mbarrier.wait(loaded, 0)\n", "",
        "missing wait", "x = tile.load",
    ),
    "a wait for the phase before": Mistake(
        "box_scale", "mbarrier.wait(loaded, 0)", "mbarrier.wait(loaded, 1)",
        "deadlock", "mbarrier.wait(",
    ),
    "no fence before a store": Mistake(
        "box_scale", "    fence_async_shared()\n", "",
        "missing fence", "    async_store(",
    ),
    "no wait for a store": Mistake(
        "box_scale", "    tma.store_wait(0)\n", "",
        "missing wait", "    async_store(",
    ),
    "fewer bytes are expected than are loaded": Mistake(
        "box_scale", "source.block_type.nbytes)", "source.block_type.nbytes // 2)",
        "deadlock", "mbarrier.wait(",
    ),
    "an mbarrier is not initialized": Mistake(
        "box_scale", "    mbarrier.init(loaded, count=1)\n", "",
        "uninitialized read", "mbarrier.expect(",
    ),
    "a box of another shape": Mistake(
        "box_scale", "source.dtype, box,", "source.dtype, [box[0] // 2, box[1]],",
        "wrong use", "    async_load(",
    ),
    "the first row is not copied": Mistake(
        "double_buffer", "    copy(buffers.index(0), source + column)\n", "",
        "uninitialized read", "total += ",
    ),
    "a wait for one row too few": Mistake(
        "double_buffer", "async_copy.wait_group(1)", "async_copy.wait_group(2)",
        "missing wait", "total += ",
    ),
    "a buffer too few": Mistake(
        "double_buffer", "(row + 1) % 2", "(row + 1) % 3",
        "out of bounds", "copy(buffers.index((row",
    ),
    "the wrong phase of empty buffers": Mistake(
        "ring", "(tile // STAGES & 1) ^ 1", "tile // STAGES & 1",
        "deadlock", "mbarrier.wait(full", "mbarrier.wait(empty",
    ),
    "a buffer is given back before it is read": Mistake(
        "ring",
        "        total += buffers.index(stage).load(layout)  # [ROWS, COLUMNS]\n"
        "        mbarrier.arrive(empty.index(stage), count=1)\n",
        "        mbarrier.arrive(empty.index(stage), count=1)\n"
        "        total += buffers.index(stage).load(layout)  # [ROWS, COLUMNS]\n",
        "race", "        async_load(", "total += ",
    ),
    "no wait for a full buffer": Mistake(
        "ring", "        mbarrier.wait(full.index(stage), tile // STAGES & 1)\n", "",
        "missing wait", "total += ",
    ),
    "an operand is loaded again before its product has ended": Mistake(
        "tile_product",
        "        acc = warpgroup_mma_wait(0, deps=[acc])\n",
        "    acc = warpgroup_mma_wait(0, deps=[acc])\n",
        "race", "    acc = warpgroup_mma_wait", "acc = warpgroup_mma(",
    ),
    "an accumulator is used while its product is in flight": Mistake(
        "tile_product", "        acc = warpgroup_mma_wait(0, deps=[acc])\n", "        acc += 1.0\n",
        "missing wait", "acc += 1.0",
    ),
    "a tile of the product is left out": Mistake(
        "tile_product", "range(num_tiles)", "range(num_tiles - 1)",
        "wrong result", "assert torch.equal",
    ),
}  # fmt: skip


def interpret(*words: object) -> Any:
    return CliRunner().invoke(app, ["interpret", *map(str, words)])


def line_of(path: Path, text: str) -> int:
    """Return the number of the one line that contains a text."""
    lines = path.read_text(encoding="utf-8").splitlines()
    (found,) = [number for number, line in enumerate(lines, 1) if text in line]
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("file", FILES)
def test_a_right_kernel_has_no_fault_in_any_order(file: str) -> None:
    result = interpret(KERNELS / f"{file}.py", "--seeds", 12)
    assert result.exit_code == 0, result.output
    assert result.output == f"{file}_kernel: no fault in 12 orders\n"


@pytest.mark.compile
def test_the_examples_are_kernels_that_compile_for_hopper() -> None:
    lines = json_lines(Path(__file__).with_name("compile_gluon_examples.py"))
    assert [line["file"] for line in lines] == FILES
    for line in lines:
        assert line["spilled"] == 0 and not line["warnings"], line


@pytest.mark.sample(6)
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_reported_at_its_line(name: str, tmp_path: Path) -> None:
    mistake = MISTAKES[name]
    text = (KERNELS / f"{mistake.file}.py").read_text(encoding="utf-8")
    assert text.count(mistake.old) == 1
    path = tmp_path / f"{mistake.file}.py"
    path.write_text(text.replace(mistake.old, mistake.new), encoding="utf-8")
    result = interpret(path)
    assert result.exit_code == 1, result.output
    first, _, place, *rest = result.output.splitlines()
    assert first == f"{mistake.file}_kernel: {mistake.kind}", result.output
    assert place.startswith(f"  {path}:{line_of(path, mistake.line)}  role "), place
    assert "  order: seed " in rest[-1], result.output
    if mistake.other is not None:
        other = f"  {path}:{line_of(path, mistake.other)}  "
        assert any(line.startswith(other) for line in rest), result.output


def test_a_fault_says_which_order_of_the_roles_shows_it(tmp_path: Path) -> None:
    mistake = MISTAKES["a buffer is given back before it is read"]
    text = (KERNELS / "ring.py").read_text(encoding="utf-8")
    path = tmp_path / "ring.py"
    path.write_text(text.replace(mistake.old, mistake.new), encoding="utf-8")
    launches = load_launches(path)
    (found,) = interpret_launches(launches)
    fault = found.fault
    assert fault is not None and fault.kind == "race" and fault.program == (0, 0, 0)
    # the producer, and the consumer's load before
    assert (fault.role, fault.others[0][0]) == (1, "role 0 loads")
    assert fault.order[-1] == (1, fault.place)
    assert (0, fault.others[0][1]) in fault.order
    assert f"{fault.place.line}" in fault.turns().rpartition("role 1: ")[2]
    # the same seed shows the same order
    (again,) = interpret_launches(launches)
    assert again.fault == fault


def test_a_fault_in_one_kernel_leaves_the_others_to_be_tried() -> None:
    right = load_launches(KERNELS / "vector_scale.py")
    kernel, grid, arguments = next(iter(right()))

    def launches() -> Iterator[Any]:
        yield Launch(kernel, grid, (*arguments[:2], 1001, 256))
        yield from right()

    wrong, good = interpret_launches(launches, seeds=4)
    assert wrong.fault is not None and wrong.fault.kind == "out of bounds"
    assert wrong.orders == 0 and good == KernelOutcome("vector_scale_kernel", 4, None)


def test_a_kernel_is_launched_as_on_a_gpu_in_the_context() -> None:
    kernel, grid, arguments = next(iter(load_launches(KERNELS / "vector_scale.py")()))
    source, target, size, block = arguments
    with interpret_gluon() as interpreted:
        kernel[lambda given: (grid[0], given["BLOCK"] // 256)](
            source, target, size, BLOCK=block, num_warps=8
        )
    assert torch.equal(target, 2 * source)
    assert interpreted.made == ["vector_scale_kernel"]


def test_the_page_shows_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (ROOT / "docs/gluon_interpreter.md").read_text(encoding="utf-8")
    code, output = (
        page.partition(f"```{kind}\n")[2].partition("```\n")[0]
        for kind in ("python", "text")
    )
    monkeypatch.chdir(tmp_path)
    Path("double.py").write_text(code, encoding="utf-8")
    assert interpret("double.py").output == output
    fence = "import fence_async_shared, mbarrier, tma\n"
    code = code.replace("import mbarrier, tma\n", fence)
    code = code.replace(
        "    store(target", "    fence_async_shared()\n    store(target"
    )
    Path("double.py").write_text(code, encoding="utf-8")
    assert f"`{interpret('double.py').output.strip()}`" in page


HEAD = """
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
import torch

@gluon.jit
def kernel(target):
    gl.store(target, gl.load(target))

"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\n", "has no function launches"),
        ("def launches():\n    return []\n", "launches() yields nothing"),
        ("def launches(:\n", "SyntaxError: invalid syntax"),
        ("import nosuch_module\n", "No module named 'nosuch_module'"),
        ("raise SystemExit('not ready')\n", "SystemExit: not ready"),
        ("def launches():\n    yield 3\n", "launches() yields 3: expected (kernel,"),
        (
            "def launches():\n    yield len, (1,), ()\n",
            "len, which is not a Gluon kernel",
        ),
        (HEAD + "def launches():\n    yield kernel, (1,)\n", "no argument target"),
        (
            HEAD + "def launches():\n    yield kernel, (1,), (torch.empty(1), 2)\n",
            "kernel gets 2 arguments: expected at most 1",
        ),
        (
            HEAD.replace("gl.load(target)", "gl.histogram(gl.load(target), 4)")
            + "def launches():\n    yield kernel, (1,), (torch.empty(1),)\n",
            "kernels.py:8: the Gluon interpreter does not know histogram",
        ),
        (
            HEAD + "def launches():\n"
            "    yield kernel, (1,), (torch.empty(1, device='meta'),)\n",
            "a tensor of kernel is on meta: expected cpu",
        ),
    ],
)
def test_a_file_without_a_kernel_that_can_be_run_is_one_sentence(
    text: str, said: str, tmp_path: Path
) -> None:
    path = tmp_path / "kernels.py"
    path.write_text(text, encoding="utf-8")
    result = interpret(path)
    assert result.exit_code == 2, result.output
    assert said in result.output and len(result.output.splitlines()) == 1, result.output


def test_without_triton_the_command_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = interpret(KERNELS / "ring.py")
    assert result.exit_code == 2
    assert result.output == "pagetwin interpret needs triton, which is for Linux\n"


@pytest.mark.extended
def test_the_command_runs_without_a_setting_of_the_interpreter_of_triton() -> None:
    """Gluon functions are the same classes with and without TRITON_INTERPRET."""
    done = subprocess.run(
        [sys.executable, "-m", "pagetwin", "interpret", KERNELS / "ring.py", "--seeds=1"],
        env={"PYTHONPATH": str(ROOT / ".typing"), "PATH": ""},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "ring_kernel: no fault in 1 orders\n")


@pytest.mark.parametrize("width", [32, 64, 128])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_swizzled_tile_has_each_place_once(width: int, transposed: bool) -> None:
    """In 16-byte units that change places within 128 bytes, in as many rows as the width has."""
    layout = gl.NVMMASharedLayout(width, 16, 2, transposed)
    order = tile_order((64, 64), layout, 2)
    assert sorted(order.flatten().tolist()) == list(range(64 * 64))
    rows = order.T if transposed else order
    columns = width // 2
    assert rows[0, :columns].tolist() == list(range(columns))
    # row 128 // width begins the second 128 bytes, where units change places
    assert int(rows[128 // width, 0]) == 64 + 8


def test_a_dependent_launch_begins_after_the_launch_before_it(tmp_path: Path) -> None:
    """`griddepcontrol` by Triton's names: launches run one after another here."""
    text = (KERNELS / "vector_scale.py").read_text(encoding="utf-8")
    load = next(line for line in text.splitlines() if "gl.load(" in line)
    waits = "    tl.extra.cuda.gdc_wait()\n    tl.extra.cuda.gdc_launch_dependents()\n"
    path = tmp_path / "vector_scale.py"
    path.write_text(
        "import triton.language as tl\n" + text.replace(load, waits + load),
        encoding="utf-8",
    )
    assert interpret(path).output == "vector_scale_kernel: no fault in 8 orders\n"


def test_copies_of_elements_arrive_at_an_mbarrier(tmp_path: Path) -> None:
    """In place of a wait of the role that has issued them."""
    text = (KERNELS / "double_buffer.py").read_text(encoding="utf-8")
    changes: list[tuple[str, str]] = [
        ("import async_copy\n", "import async_copy, mbarrier\n"),
        ("    column = gl.arange", "    arrived = mbarrier.allocate_mbarrier()\n"
         "    mbarrier.init(arrived, count=32 * gl.num_warps())\n    column = gl.arange"),
        ("        async_copy.wait_group(1)\n",
         "        async_copy.mbarrier_arrive(arrived, increment_count=False)\n"
         "        mbarrier.wait(arrived, row & 1)\n"),
    ]  # fmt: skip
    for old, new in changes:
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    path = tmp_path / "double_buffer.py"
    path.write_text(text, encoding="utf-8")
    assert interpret(path).output == "double_buffer_kernel: no fault in 8 orders\n"
    wait = "        mbarrier.wait(arrived, row & 1)\n"
    path.write_text(text.replace(wait, ""), encoding="utf-8")
    found: Callable[[], Any] = load_launches(path)
    (outcome,) = interpret_launches(found)
    assert outcome.fault is not None and outcome.fault.kind == "missing wait"
