"""The preflight: what cannot run is one sentence, before anything slow is imported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pagetwin.conformance.candidates import preflight
from pagetwin.conformance.candidates.preflight import (
    _check_exists,
    _check_source,
    _load,
    check_can_run,
    choose_device,
)

SLOTS = "def compute_slot_mapping_batch(*arguments):\n    return []\n"


# devices


@pytest.mark.parametrize("device", ["gpu", "cuda:", "cuda:x", "cpu:0", "CPU", ""])
def test_other_words_than_those_of_a_device_are_rejected(device: str) -> None:
    with pytest.raises(ValueError, match="expected cpu or cuda"):
        choose_device(device)


def test_the_device_is_cuda_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device(None) == choose_device("cpu") == "cpu"
    with pytest.raises(ValueError, match="no GPU is usable here"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert (choose_device(None), choose_device("cpu")) == ("cuda", "cpu")
    assert choose_device("cuda:1") == "cuda:1"
    with pytest.raises(ValueError, match="a visible GPU: cuda:0 to cuda:1"):
        choose_device("cuda:2")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=r"a visible GPU: cuda:0$"):
        choose_device("cuda:1")


# names


def test_a_name_that_is_not_a_module_is_rejected(write_module: Any) -> None:
    name = write_module(SLOTS)
    for right in ("reference", "optimized", name, f"{name}.py", "json.decoder"):
        _check_exists(right)
    Path("folder/inner").mkdir(parents=True)
    _check_exists("folder")
    for wrong, words in (
        ("missing.py", "the file does not exist"),
        ("no_such_kernels.inner", "module no_such_kernels does not exist here"),
        ("a-b", "is neither a module nor a .py file"),
        ("folder/inner", "is a folder"),
    ):
        with pytest.raises(ModuleNotFoundError, match=words):
            _check_exists(wrong)
    Path("plain").write_text("")
    with pytest.raises(ModuleNotFoundError, match="is neither a module"):
        _check_exists("plain")
    with pytest.raises(FileNotFoundError):
        _check_exists("missing.json")


# sources


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(:\n", "SyntaxError"),
        ("import no_such_library\n", "No module named 'no_such_library' .line 1."),
        ("import torch\nfrom no_such_library import x\n", "line 2"),
    ],
)
def test_a_source_that_cannot_be_imported_is_named_with_its_line(
    text: str, words: str, write_module: Any
) -> None:
    name = write_module(text)
    for given in (name, f"{name}.py"):
        with pytest.raises(ImportError, match=words):
            _check_source(given)


@pytest.mark.parametrize(
    "text",
    [
        "import torch, json\n",
        "import own_helpers\n",
        "import own_folder\n",
        "from . import others\n",
        "import sys\nsys.path.append('x')\nimport no_such_library\n",
        # another package may change where further ones are found
        "import pytest\nimport no_such_library\n",
        "x = 1\nimport no_such_library\n",
    ],
)
def test_a_source_that_may_be_imported_is_not_rejected(
    text: str, write_module: Any
) -> None:
    Path("own_helpers.py").write_text("")
    Path("own_folder").mkdir()
    _check_source(write_module(text))
    _check_source("not_a_file")


def test_what_the_source_alone_shows_needs_no_process(
    write_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that imports torch took a second and a half."""
    monkeypatch.setattr(preflight.subprocess, "Popen", None)
    for text in ("import torch\nimport no_such_library\n", "def f(:\n"):
        with pytest.raises(ImportError, match=r"cannot be imported: .*line [12]\)"):
            check_can_run(write_module(text), "cpu")


# the import


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ("1 / 0\n", ImportError, r"ZeroDivisionError: division by zero \(line 1\)"),
        ("\nraise ValueError('bad')\n", ValueError, r"ValueError: bad \(line 2\)"),
        ("x = 1\nimport no_such_library\n", ImportError, "install no_such_library"),
        ("", ValueError, "has none of the operations"),
        (
            "from pagetwin.conformance import Support\nSUPPORT = 3\n" + SLOTS,
            ValueError,
            "expected a pagetwin.conformance.Support",
        ),
    ],
)
def test_an_import_that_fails_has_its_error_and_line(
    text: str, error: type[Exception], words: str, write_module: Any
) -> None:
    with pytest.raises(error, match=words):
        _load(write_module(text), "cpu")


@pytest.mark.parametrize(
    ("support", "words"),
    [
        ("operations=['compute_slots']", "operations has 'compute_slots'"),
        (
            "dtypes=['float23']",
            "dtypes has 'float23': expected names of torch dtypes, such as",
        ),
        ("cache_dtypes=['int4x']", "cache_dtypes has 'int4x'"),
        (
            "options=['sinks'], tensor_dtypes={'sinks': ['half16']}",
            "tensor_dtypes has 'half16'",
        ),
        ("options=['sliding']", "options has 'sliding': .*such as 'sliding_window'"),
        ("devices=['sm_90']", "device = 'cpu': .* does not support"),
    ],
)
def test_a_support_with_unknown_names_is_rejected(
    support: str, words: str, write_module: Any
) -> None:
    text = f"from pagetwin.conformance import Support\nSUPPORT = Support({support})\n{SLOTS}"
    with pytest.raises(ValueError, match=words):
        _load(write_module(text), "cpu")


def test_a_support_with_known_names_is_right(write_module: Any) -> None:
    _load(
        write_module(
            "from pagetwin.conformance import Support\n"
            "SUPPORT = Support(operations=['compute_slot_mapping_batch', 'BACKENDS'],"
            " dtypes=['float32'], options=['scale', 'out', 'lse', 'value_head_size'],"
            f" devices=['cpu'])\n{SLOTS}"
        ),
        "cpu",
    )


def test_the_line_of_an_error_is_one_of_the_implementation(write_module: Any) -> None:
    helper = write_module("def fail():\n\n\n    raise KeyError('x')\n")
    own = write_module(f"import {helper}\n{helper}.fail()\n")
    with pytest.raises(ImportError, match=r"KeyError: 'x' \(line 2\)"):
        _load(own, "cpu")


@pytest.mark.extended
def test_an_import_in_a_process_of_its_own(write_module: Any) -> None:
    check_can_run(write_module(SLOTS), "cpu")
    with pytest.raises(ValueError, match="has none of the operations"):
        check_can_run(write_module("x = 1\n"), "cpu")
    with pytest.raises(ImportError, match="ZeroDivisionError"):
        check_can_run(write_module("1 / 0\n"), "cpu")
    first = write_module("import sys\nsys.modules['no_such_library'] = sys\n")
    check_can_run(
        write_module(f"import {first}\nimport no_such_library\n{SLOTS}"), "cpu"
    )
    dies = write_module("import os\nprint('last words')\nos.abort()\n")
    with pytest.raises(ImportError, match="the process ended with code -6: last words"):
        check_can_run(dies, "cpu")


def test_an_import_that_does_not_end_is_ended(
    write_module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "SECONDS", 0.5)
    with pytest.raises(ImportError, match="the process ended with code -9"):
        check_can_run(write_module("import time\ntime.sleep(60)\n"), None)
