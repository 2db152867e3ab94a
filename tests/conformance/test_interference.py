"""The guard around the calls of a judged kernel: what it notes, and that it opens again."""

import gc
import inspect
import logging
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Event, Thread
from types import FunctionType, ModuleType
from typing import Any
from unittest import SkipTest

import pytest
import torch
from hypothesis.errors import UnsatisfiedAssumption
from pagetwin.conformance.base.judged_call import InterferenceError
from pagetwin.conformance.base.results import Status
from pagetwin.conformance.base.support import OutsideSupport, Support
from pagetwin.conformance.candidates.candidate import Candidate
from pagetwin.conformance.candidates.fatal import Fatal
from pagetwin.conformance.candidates.guard import global_modes
from pagetwin.conformance.candidates.guard.global_modes import (
    Mode,
    read_modes,
    restore_modes,
)
from pagetwin.conformance.candidates.guard.interference import (
    GUARD,
    expect_no_threads,
    guarded,
    is_foreign,
    own_endings,
)
from pagetwin.conformance.candidates.guard.namespaces import Namespaces
from pagetwin.conformance.cases.batches import BatchPlan, build
from pagetwin.conformance.checks import dense, expect
from pagetwin.conformance.checks.expect import Disagreement
from pagetwin.conformance.oracles import brute_force
from pagetwin.conformance.running.trial import OutOfTimeError
from pagetwin.contract import budgets
from pagetwin.contract.operations import load_implementation
from pagetwin.reference.attention import paged
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

REFERENCE = load_implementation("reference")
ATTENTION = "paged_attention"


@pytest.fixture(autouse=True)
def watching(guarded_calls: None) -> Iterator[None]:
    """Guard the calls of this file, and leave nothing noted."""
    GUARD.start()
    GUARD.hook()
    yield
    GUARD.expect_unchanged()


def arguments() -> dict[str, Any]:
    return build(BatchPlan((1,), (3,)), torch.device("cpu")).arguments()


def said(kernel: Callable[..., Any], *given: Any, operation: str = ATTENTION) -> str:
    """Return what the guard says about a call; empty if nothing."""
    try:
        guarded(operation, kernel)(*given)
    except Disagreement as error:
        assert (error.what, error.right) == (
            "the call",
            "a result that is computed from the arguments",
        )
        return error.found
    return ""


def test_a_call_that_computes_returns_its_result_and_its_error() -> None:
    assert guarded(ATTENTION, lambda number: number + 1)(3) == 4
    with pytest.raises(KeyError):
        guarded(ATTENTION, lambda: {}["missing"])()


def test_the_reference_of_the_operation_is_closed_and_open_again() -> None:
    given = arguments()
    options = given.pop("scale", None)
    kernel = lambda: REFERENCE.paged_attention(**given, scale=options)  # noqa: E731
    assert "it called paged_attention of the suite" in said(kernel)
    assert isinstance(kernel(), torch.Tensor)


def test_a_wrapped_reference_is_closed_too() -> None:
    given = arguments()
    right: Any = REFERENCE.paged_attention
    inner = inspect.unwrap(right)
    assert inner is not right and isinstance(inner, FunctionType)
    assert "of the suite" in said(lambda: inner(**given))


def test_the_reference_of_another_operation_is_open() -> None:
    assert said(lambda: REFERENCE.blocks_needed(5, 4)) == ""
    words = said(lambda: REFERENCE.blocks_needed(5, 4), operation="blocks_needed")
    assert "it called blocks_needed of the suite" in words


def exact() -> Any:
    """Ask an oracle for the result of one query over three keys."""
    return dense.attend(build(BatchPlan((1,), (3,)), torch.device("cpu")))


def test_oracles_are_closed_and_open_again() -> None:
    assert "it called attend of the suite" in said(exact)
    assert exact() is not None
    words = said(lambda: brute_force.attend_by_hand([], {"causal": True}, 0))
    assert "it called attend_by_hand of the suite" in words


def test_an_error_that_a_kernel_catches_is_noted_all_the_same() -> None:
    raised: list[InterferenceError] = []

    def kernel() -> None:
        try:
            exact()
        except InterferenceError as error:
            raised.append(error)

    assert "it called attend of the suite" in said(kernel)
    assert "inside of the call that it judges" in str(raised[0])
    # what was noted in one call is not said of the next one
    assert said(lambda: None) == ""


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("kernel", "event"),
    [
        (lambda: sys._getframe(1), "sys._getframe"),
        (lambda: inspect.currentframe(), "sys._getframe"),
        (lambda: inspect.stack(), "sys._getframe"),
        (lambda: traceback.extract_stack(), "sys._getframe"),
        (lambda: gc.get_objects(), "gc.get_objects"),
        (lambda: gc.get_referrers(GUARD), "gc.get_referrers"),
        (lambda: sys._current_frames(), "sys._current_frames"),
        (lambda: logging.currentframe(), "sys._getframe"),
        (lambda: sys.setprofile(None), "sys.setprofile"),
        (lambda: sys.settrace(sys.gettrace()), "sys.settrace"),
    ],
)
def test_reads_of_frames_and_objects_are_noted_inside_alone(
    kernel: Callable[[], Any], event: str
) -> None:
    kernel()
    assert f"it called {event}" in said(kernel)
    assert said(lambda: None) == ""


def raised() -> KeyError:
    """Return an error with a traceback."""
    try:
        raise KeyError
    except KeyError as error:
        return error


def read_own_frame() -> None:
    own: list[Any] = []
    own.append(generator.gi_frame for generator in own)
    next(own[0])


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (lambda: raised().__traceback__.tb_frame, "tb_frame"),
        (lambda: list(traceback.walk_tb(raised().__traceback__)), "tb_frame"),
        (lambda: inspect.getinnerframes(raised().__traceback__), "tb_frame"),
        (read_own_frame, "gi_frame"),
    ],
)
def test_frames_of_errors_and_of_generators_are_noted(
    kernel: Callable[[], Any], name: str
) -> None:
    kernel()
    assert f"it read {name}" in said(kernel)


def test_a_kernel_may_log_an_error(caplog: pytest.LogCaptureFixture) -> None:
    def kernel() -> str:
        logging.getLogger("kernel").warning("slow path")
        try:
            raise KeyError("plan")
        except KeyError:
            logging.getLogger("kernel").exception("no plan")
            return traceback.format_exc()

    assert said(kernel) == ""
    assert "slow path" in caplog.text and "KeyError" in caplog.text


def enter_function_mode() -> None:
    class Changing(TorchFunctionMode):
        """A mode in which every comparison could be another one."""

    Changing().__enter__()


def enter_dispatch_mode() -> None:
    class Changing(TorchDispatchMode):
        """A mode in which every operator could be another one."""

    Changing().__enter__()


def allow_tf32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True


def benchmark_convolutions() -> None:
    torch.backends.cudnn.benchmark = True


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (lambda: torch.set_grad_enabled(False), "grad mode"),
        (lambda: torch.set_default_dtype(torch.float64), "the default dtype"),
        (lambda: torch.set_default_device("meta"), "the default device"),
        (lambda: torch.set_num_threads(torch.get_num_threads() + 1), "threads"),
        (lambda: torch.autocast("cpu").__enter__(), "autocast"),
        (lambda: torch.use_deterministic_algorithms(True), "deterministic"),
        (lambda: torch.set_flush_denormal(True), "denormal"),
        (lambda: torch.manual_seed(3), "the seed"),
        (lambda: torch.set_float32_matmul_precision("high"), "precision"),
        (allow_tf32, "precision of matrix products"),
        (benchmark_convolutions, "cuDNN"),
        (lambda: threading.setprofile(print), "profile function of threads"),
        (enter_function_mode, "torch function modes"),
        (enter_dispatch_mode, "torch dispatch modes"),
    ],
)
def test_global_modes_that_a_call_leaves_are_named_and_restored(
    kernel: Callable[[], Any], name: str
) -> None:
    before = read_modes()
    with pytest.raises(Disagreement, match=f"it left .*{name}.* changed"):
        guarded(ATTENTION, kernel)()
    assert read_modes() == before
    assert torch.ones(2, device="cpu").dtype == torch.float32


def test_a_gpu_that_is_first_used_by_a_call_and_a_mode_without_a_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Seeds:
        """The generator of a GPU."""

        def initial_seed(self) -> int:
            return 5

    def fail() -> str:
        raise RuntimeError("TF32 was set by old and by new names")

    before = read_modes()
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "default_generators", (Seeds(),))
        assert restore_modes(before) == ""
    unknown = Mode("a mode", fail, print)
    with monkeypatch.context() as patch:
        patch.setattr(global_modes, "MODES", (unknown,))
        assert restore_modes(read_modes()) == ""
        assert restore_modes([3]) == "a mode"


def test_modes_may_be_set_inside_of_a_call_and_numbers_drawn() -> None:
    def kernel() -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu"), torch.device("meta"):
            torch.rand(4)
        return torch.rand(4)

    assert guarded(ATTENTION, kernel)().shape == (4,)


def test_a_profile_function_from_before_a_call_stays() -> None:
    seen: list[str] = []

    def profile(frame: Any, event: str, arg: Any) -> None:
        seen.append(event)

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        assert guarded(ATTENTION, lambda: 3)() == 3
        assert sys.getprofile() is profile
    finally:
        sys.setprofile(before)
    assert "call" in seen


def test_reads_of_frames_by_a_library_are_not_noted() -> None:
    import collections

    assert said(lambda: collections.namedtuple("Pair", "a b")) == ""


def test_a_function_that_was_replaced_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def equal(one: Any, other: Any) -> bool:
        return True

    for owner, name in (
        (torch, "equal"),
        (torch.Tensor, "item"),
        (expect, "expect_same"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, equal)
            with pytest.raises(Disagreement, match=f"it replaced .*{name}"):
                GUARD.expect_unchanged()
            assert getattr(owner, name) is not equal  # it is back
        GUARD.expect_unchanged()


COMPILES = """
import torch
from pagetwin.conformance.candidates.guard.interference import GUARD

GUARD.start()
torch.compile(lambda row: torch.where(row > 0, row, -row).max(), backend="eager")(torch.ones(3))
GUARD.expect_unchanged()
"""


@pytest.mark.extended
def test_a_kernel_that_is_compiled_replaces_nothing() -> None:
    """Its import changed torch.manual_seed, which was said of any kernel that imports it first."""
    done = subprocess.run(
        [sys.executable, "-c", COMPILES], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_copy_of_a_function_is_not_the_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = expect.expect_same
    copy = FunctionType(own.__code__, {}, own.__name__)
    with monkeypatch.context() as patch:
        patch.setattr(expect, "expect_same", copy)
        with pytest.raises(Disagreement, match="it replaced"):
            GUARD.expect_unchanged()


def change_constant() -> None:
    budgets.FACTOR = 1e9


def change_defaults() -> None:
    budgets.judge_rows.__kwdefaults__ = {"weight_error": 1e9}


def change_defaults_in_place() -> None:
    budgets.row_budgets.__kwdefaults__["weight_error"] = 1e9


def change_class() -> None:
    budgets.Verdict.ok = property(lambda self: True)  # type: ignore[assignment, method-assign]


def change_property() -> None:
    own: Any = vars(budgets.Verdict)["ok"]
    own.fget.__code__ = (lambda self: True).__code__


def hide_builtin() -> None:
    budgets.float = lambda number: 0.0  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        (change_constant, "FACTOR"),
        (change_defaults, "judge_rows.__kwdefaults__"),
        (change_defaults_in_place, "row_budgets.__kwdefaults__"),
        (change_class, "Verdict.ok"),
        (change_property, "Verdict.ok.__code__"),
        (hide_builtin, "float"),
    ],
)
def test_what_judges_is_restored_after_the_call_that_changed_it(
    kernel: Callable[[], Any], name: str
) -> None:
    right = torch.ones(1, 2)
    with pytest.raises(Disagreement, match=f"it replaced pagetwin.*{name}"):
        guarded(ATTENTION, kernel)()
    GUARD.expect_unchanged()
    assert not budgets.judge_rows(right + 1, right, right, torch.float32).ok


@pytest.mark.parametrize(
    "error",
    [
        OutsideSupport("dtype"),
        UnsatisfiedAssumption(),
        OutOfTimeError(),
        Fatal(Status.HELD, "1", "no error"),
        SkipTest("later"),
    ],
)
def test_a_kernel_must_not_end_a_case(error: BaseException) -> None:
    def kernel() -> None:
        raise error

    with pytest.raises(Disagreement, match=f"it raised {type(error).__name__}"):
        guarded(ATTENTION, kernel)()


def test_a_class_of_a_candidate_must_not_end_a_case() -> None:
    with pytest.raises(Disagreement, match="it raised OutsideSupport"), own_endings():
        raise OutsideSupport("blocks")
    with pytest.raises(OutsideSupport), own_endings():
        assert Candidate("own", {}, Support(operations=[ATTENTION])).append_blocks
    with pytest.raises(KeyError), own_endings():
        raise KeyError("plan")


def test_a_disagreement_of_an_adapter_is_passed_on() -> None:
    def kernel() -> None:
        raise Disagreement("a value", "as a whole", 1, 2)

    with pytest.raises(Disagreement, match="a value"):
        guarded(ATTENTION, kernel)()


def test_an_output_keeps_its_memory_and_a_result_its_methods() -> None:
    out = torch.zeros(4)

    def repoint(out: torch.Tensor) -> torch.Tensor:
        out.data = torch.ones(4)
        return out

    def transpose(out: torch.Tensor) -> torch.Tensor:
        return out.set_(out.untyped_storage(), 0, (2, 2), (1, 2))

    def hide(out: torch.Tensor) -> tuple[torch.Tensor, None]:
        found = out.clone()
        found.cpu = out.cpu  # type: ignore[method-assign]
        return found, None

    for kernel, words in (
        (repoint, "it gave out other memory"),
        (transpose, "it gave out other memory"),
        (hide, "it gave a result its own cpu"),
    ):
        with pytest.raises(Disagreement, match=words):
            guarded(ATTENTION, kernel)(out=out)
    with pytest.raises(Disagreement, match="it gave argument 0 other memory"):
        guarded(ATTENTION, repoint)(out)
    marked = torch.zeros(4)
    marked.comment = "written by a compiler"  # type: ignore[attr-defined]
    assert guarded(ATTENTION, torch.Tensor.add_)(marked, 1) is marked


@pytest.fixture
def no_copies() -> Iterator[None]:
    """Forget the copies that a test loads."""
    yield
    GUARD.start()


def load_source(name: str) -> None:
    text = Path(paged.__file__).read_text(encoding="utf-8")
    exec(compile(text, name, "exec"), {"__package__": paged.__package__})


@pytest.mark.usefixtures("no_copies")
def test_a_copy_of_the_reference_or_of_an_oracle_is_found() -> None:
    own: Any = inspect.unwrap(paged.paged_attention)
    for load in (
        lambda: load_source("kernel.py"),
        lambda: load_source(paged.__file__),
        lambda: FunctionType(own.__code__.replace(co_name="attend"), {}),
        lambda: FunctionType(brute_force.attend_by_hand.__code__, {}),
    ):
        GUARD.start()
        assert said(lambda: None) == ""
        load()
        with pytest.raises(Disagreement, match="it loaded a copy of"):
            guarded(ATTENTION, lambda: None)()
        # it may be used for an operation of another kind
        assert said(lambda: None, operation="blocks_needed") == ""


def test_equal_functions_of_the_package_and_short_ones_are_not_copies() -> None:
    load_source(expect.__file__)
    exec("def size(tensor):\n    return tensor.shape[0]\n")
    assert said(lambda: None) == ""


def test_names_that_an_import_adds_are_accepted() -> None:
    own = ModuleType("pagetwin.own")
    own.__dict__["constant"] = 3
    names = Namespaces([own], "pagetwin")
    for name, value in (
        ("part", ModuleType("pagetwin.own.part")),
        ("__warningregistry__", {}),
    ):
        setattr(own, name, value)
        assert names.restore_changed() == "" and names.restore_all() == ""
    own.__dict__["part"] = ModuleType("another")
    assert names.restore_all() == "pagetwin.own.part"
    own.__dict__["other"] = ModuleType("another")
    assert names.restore_changed() == "pagetwin.own.other"


def test_twins_are_not_guarded_and_a_variable_turns_the_guard_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PAGETWIN_GUARD_CALLS", raising=False)
    GUARD.start()
    assert GUARD.guards("my_kernels")
    assert not GUARD.guards("pagetwin.reference") and not GUARD.guards("optimized")
    monkeypatch.setenv("PAGETWIN_GUARD_CALLS", "0")
    assert GUARD.guards("my_kernels")  # as it was when the adapter was imported
    GUARD.start()
    assert not GUARD.guards("my_kernels")
    monkeypatch.delenv("PAGETWIN_GUARD_CALLS")
    GUARD.start()


def test_files_of_the_package_and_of_libraries_are_not_foreign(tmp_path: Path) -> None:
    for own in (inspect.__file__, torch.__file__, expect.__file__, pytest.__file__):
        assert not is_foreign(own)
    assert not is_foreign("<frozen importlib._bootstrap>")
    assert not is_foreign("/usr/lib/site-packages/triton/a.py")
    assert is_foreign(str(tmp_path / "kernel.py")) and is_foreign("<string>")


def test_a_thread_that_runs_on_is_named_and_one_of_a_library_is_not() -> None:
    begun, end = Event(), Event()

    def burn() -> None:
        begun.set()
        end.wait()

    others = [Thread(target=end.wait), Thread(target=burn)]
    others[0].start()
    expect_no_threads()
    others[1].start()
    begun.wait()
    try:
        with pytest.raises(Disagreement, match="it left a thread running, in burn"):
            expect_no_threads()
    finally:
        end.set()
        for thread in others:
            thread.join()


def test_a_package_that_pip_has_put_into_another_folder_is_not_the_kernels(
    tmp_path: Path,
) -> None:
    """`pip install --target`: a class that a library defined in a call looked like a cheat."""
    (tmp_path / "installed" / "library-1.0.dist-info").mkdir(parents=True)
    (tmp_path / "own").mkdir()
    folders = [str(tmp_path / name) for name in ("installed", "own")]
    code = (
        "import sys\n"
        "from pagetwin.conformance.candidates.guard.interference import is_foreign\n"
        f"sys.exit(is_foreign({folders[0]!r} + '/library.py')"
        f" + 2 * is_foreign({folders[1]!r} + '/kernel.py'))"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*folders, *sys.path])}
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=False)
    assert done.returncode == 2
