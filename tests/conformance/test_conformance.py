"""Does the suite itself do what it says: try, catch, shrink, report, go on?

The laws have tests of their own. Here they are judged by what happens around them: kernels that
crash, hang, are missing or reject, and what is reported of it.
"""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from pagetwin.conformance import Status, check_implementation
from pagetwin.conformance.base.results import Result
from pagetwin.conformance.candidates.candidate import load_candidate
from pagetwin.conformance.cases.batches import LAYOUTS
from pagetwin.conformance.laws.histories import TOLD, histories
from pagetwin.conformance.laws.machine import KINDS, Machine
from pagetwin.conformance.reports.report import Report
from pagetwin.conformance.running.trial import (
    find_law,
    make_case,
    make_setting,
    try_law,
)
from pagetwin.tools.cli import DISAGREE, USER_ERROR, app
from typer.testing import CliRunner

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
ADAPTERS = ROOT / "docs" / "adapters"
SLOTS = "every new token gets the slot of its block table row"

RIGHT = """
from pagetwin.reference.cache.slot_mapping import compute_slot_mapping_batch as right
"""
OFF_BY_ONE = (
    RIGHT
    + """
def compute_slot_mapping_batch(query_lens, computed, rows, block_size):
    slots = right(query_lens, computed, rows, block_size)
    if block_size == 3 and len(slots) > 4:
        slots[4] += 1
    return slots
"""
)
ENDS_THE_PROCESS_IN_A_DRY_RUN = """
import os
from pagetwin.reference.cache.slot_mapping import compute_slot_mapping_start_idx

def compute_slot_mapping(is_profile_run, *arguments):
    os._exit(7)
"""


def check(*words: object):
    return CliRunner().invoke(app, ["check", *map(str, words), "--device", "cpu"])


def only_result(report: Report) -> Result:
    (result,) = report.results
    return result


def test_a_wrong_answer_comes_with_a_small_input_and_both_answers(write_module):
    report = check_implementation(
        write_module(OFF_BY_ONE), only=SLOTS, examples=60, device="cpu"
    )
    result = only_result(report)
    assert result.status == Status.BROKEN and not report.ok
    assert (result.what, result.where) == ("slots", "at [4]")
    assert int(result.found) == int(result.right) + 1
    assert make_case(find_law(SLOTS), result.case).block_size == 3


def test_the_program_that_is_shown_shows_the_failure_again(write_module, tmp_path):
    name = write_module(OFF_BY_ONE)
    report = check_implementation(
        name, only=SLOTS, examples=60, device="cpu", isolated=False
    )
    program = tmp_path / "again.py"
    program.write_text(report.reproducer(only_result(report)))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True)
    assert done.returncode == 1
    result = only_result(report)
    assert f"Disagreement: slots, at [4]: {result.found}" in done.stderr


@pytest.mark.long
def test_workers_share_the_laws_out_and_a_crash_takes_only_one_down(write_module):
    name = write_module(OFF_BY_ONE + ENDS_THE_PROCESS_IN_A_DRY_RUN)
    told = []
    one, two = (
        check_implementation(
            name,
            only="slot",
            examples=60,
            device="cpu",
            workers=workers,
            on_result=told.append,
        ).results
        for workers in (1, 2)
    )
    assert [replace(result, seconds=0) for result in one] == [
        replace(result, seconds=0) for result in two
    ]
    assert len(told) == len(one) + len(two)
    assert all(result in told for result in (*one, *two))
    ends = {result.status for result in two}
    assert {Status.CRASHED, Status.BROKEN, Status.HELD, Status.MISSING} <= ends


def test_what_is_printed_does_not_disturb(write_module):
    name = write_module(
        "print('hello')\n"
        + RIGHT
        + "def compute_slot_mapping_batch(*a):\n    print(1)\n    return right(*a)\n"
    )
    assert check_implementation(name, only=SLOTS, examples=3, device="cpu").ok


@pytest.mark.long
def test_the_command_ends_with_0_only_if_all_is_well(write_module, tmp_path):
    good = check("reference", "--only", SLOTS, "--examples", 3)
    assert good.exit_code == 0, good.output
    assert "reference on cpu: 1 held." in good.output
    name = write_module(OFF_BY_ONE)
    words = [name, "--only", SLOTS, "--examples", 60]
    bad = check(*words, "--json", "r.json", "--markdown", "r.md")
    assert bad.exit_code == DISAGREE
    result = json.loads((tmp_path / "r.json").read_text())["results"][0]
    for part in (SLOTS, "slots, at [4]", result["found"], result["right"]):
        assert part in bad.output
    assert f"input {result['case']}" in bad.output
    assert "from pagetwin.conformance import reproduce" in bad.output
    assert "## " in (tmp_path / "r.md").read_text()
    known = check(*words, "--known", f"{SLOTS}=blocks of 3")
    assert known.exit_code == 0, known.output
    assert "1 known failure" in known.output
    missing = check(name, "--only", "slots on the device")
    assert missing.exit_code == DISAGREE
    assert f"{name} has no compute_slot_mapping_device" in missing.output


def test_a_file_elsewhere_is_a_module_too(write_module, tmp_path):
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "my_far_kernels.py").write_text(OFF_BY_ONE)
    result = check("far/my_far_kernels.py", "--only", SLOTS, "--examples", 60)
    assert result.exit_code == DISAGREE, result.output
    assert "slots, at [4]" in result.output


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["nothing_here"], "module nothing_here does not exist here"),
        (["nothing_here.py"], "the file does not exist"),
        (["json"], "json has none of the operations"),
        (["reference", "--only", "no such words"], "no law contains it; areas are"),
        (["reference", "--known", "a law"], "expected LAW=REASON"),
        (["reference", "--known", "a law=why"], "expected sentences of laws"),
        (["reference", "--examples", "0"], "examples = 0"),
        (["reference", "--case-seconds", "0"], "case_seconds = 0"),
        (["reference", "--json", "no/folder.json"], "no/folder.json"),
        (["reference", "--json", "."], "json = . is a folder"),
    ],
)
def test_what_the_user_can_fix_is_one_sentence(write_module, words, sentence):
    result = check(*words)
    assert result.exit_code == USER_ERROR, result.output
    assert sentence in result.output
    assert "Traceback" not in result.output
    assert len(result.output.strip().splitlines()) == 1


CANNOT_RUN = {
    "import nothere": "line 1): install nothere, or correct the import",
    "import torch\nraise RuntimeError('no GPU here')": "no GPU here (line 2)",
    "def f(:": "SyntaxError",
    "from pagetwin.conformance import Support\n"
    "SUPPORT = Support(dtypes=['bf16'])\n"
    "def paged_attention(): pass": "SUPPORT.dtypes has 'bf16': expected names of torch",
    "from pagetwin.conformance import Support\n"
    "SUPPORT = Support(operations=['paged_atention'])\n"
    "def paged_attention(): pass": "such as 'paged_attention'",
}


@pytest.mark.parametrize(("source", "words"), CANNOT_RUN.items())
def test_an_adapter_that_cannot_run_is_reported_before_torch_is_imported(
    write_module, source, words
):
    """Such an adapter once took the seconds in which two processes import torch and all laws."""
    name = write_module(source)
    script = (
        "import sys\nfrom pagetwin.tools.cli import app\n"
        f"try:\n    app(['check', {name!r}])\n"
        "except SystemExit as ended:\n"
        "    assert 'torch' not in sys.modules\n    raise\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == USER_ERROR, done.stderr
    assert words in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


# histories


def test_histories_reach_every_action_and_end_with_requests():
    kinds, layouts, forked = set(), set(), 0
    setting = make_setting(load_candidate("reference"), "cpu")

    class Watched(Machine):
        def compare(self, action):
            nonlocal forked
            forked += any(count > 1 for count in self.pool.owners)
            kinds.add(action.kind)

    from hypothesis import HealthCheck, given, seed, settings

    @seed(3)
    @settings(
        max_examples=60,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(histories())
    def watch(history):
        layouts.add(history.layout)
        machine = Watched(setting, history)
        machine.run()
        owned = [block for sequence in machine.sequences for block in sequence.blocks]
        assert len(owned) == sum(machine.pool.owners) + sum(machine.host_pool.owners)

    watch()
    assert kinds == set(KINDS) and forked > 20
    assert layouts == set(LAYOUTS)
    assert all(
        eval(repr(history), vars(sys.modules[Machine.__module__])) for history in TOLD
    )


# pytest

TESTS_OF_ONES_OWN = """
from functools import partial
from pagetwin.conformance import parametrize_with_laws

MINE, NARROW, SLOTS = {name!r}, {narrow!r}, {slots!r}
on_laws = partial(parametrize_with_laws, only=SLOTS, examples=60, device="cpu")

@on_laws(MINE)
def test_broken(law):
    law()

@on_laws(MINE, known_failures={{SLOTS: "blocks of 3"}})
def test_known(law):
    law()

@on_laws("reference", known_failures={{SLOTS: "it was"}})
def test_fixed(law):
    law()

@on_laws("reference")
def test_held(law):
    assert law().cases >= 60  # and those that are always tried

@on_laws(MINE, only="slots on the device")
def test_missing(law):
    law()

@on_laws(NARROW, only="slots on the device")
def test_undeclared(law):
    law()
"""
NARROW = (
    RIGHT
    + """
from pagetwin.conformance import Support

SUPPORT = Support(operations=["compute_slot_mapping_batch"])
compute_slot_mapping_batch = right
"""
)


@pytest.mark.slow
def test_each_law_is_a_test_of_a_project_of_ones_own(write_module, tmp_path):
    name, narrow = write_module(OFF_BY_ONE), write_module(NARROW)
    file = tmp_path / "test_mine.py"
    file.write_text(TESTS_OF_ONES_OWN.format(name=name, narrow=narrow, slots=SLOTS))
    words = [sys.executable, "-m", "pytest", "-q", "-rA", "-p", "no:cacheprovider"]
    done = subprocess.run([*words, file], capture_output=True, text=True, cwd=tmp_path)
    output = done.stdout
    assert done.returncode == 1, output
    assert f"FAILED test_mine.py::test_broken[{SLOTS}]" in output
    assert "slots, at [4]" in output and "reproduce(" in output
    assert f"XFAIL test_mine.py::test_known[{SLOTS}] - blocks of 3" in output
    assert f"FAILED test_mine.py::test_fixed[{SLOTS}]" in output
    assert "known failure that holds" in output and "it was" in output
    assert f"PASSED test_mine.py::test_held[{SLOTS}]" in output
    assert "FAILED test_mine.py::test_missing[slots on the device" in output
    assert f"{name} has no compute_slot_mapping_device" in output
    assert "SKIPPED" in output and "which is not declared" in output
    assert "FAILED test_mine.py::test_undeclared" not in output
    assert "worker.py" not in output  # no traceback of ours


# adapters


@pytest.mark.parametrize(
    "name",
    [
        "torch_sdpa",
        pytest.param("flex_paged", marks=pytest.mark.slow),
        pytest.param("xformers_split_k", marks=pytest.mark.slow),
    ],
)
def test_an_adapter_that_runs_here_answers_what_it_declares(name, request):
    if name == "xformers_split_k":
        request.getfixturevalue("xformers")
    candidate = load_candidate(str(ADAPTERS / f"{name}.py"))
    assert candidate.missing(candidate.support.operations) == []
    setting = make_setting(candidate, "cpu")
    laws = [
        find_law("every new token attends to its sequence up to itself"),
        find_law("paged attention is right under any options"),
        find_law("large heads odd blocks and long rows are right"),
    ]
    results = [try_law(law, setting, 0, 8) for law in laws]
    assert [result for result in results if not result.ok] == []
    # a case that is rejected as drawn is fitted; half of the bounds exceed the truth
    assert all(result.cases > result.skipped for result in results)
    assert sum(result.cases - result.skipped for result in results) >= 20


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("flashinfer_paged", "flashinfer"),
        ("flashinfer_decode", "flashinfer"),
        ("flashinfer_latent", "flashinfer"),
        ("flashinfer_xqa", "flashinfer"),
        ("cudnn_paged", "flashinfer"),
        ("flash_attention_paged", "flash_attn"),
        ("flash_attention_3_paged", "vllm"),
        ("vllm_unified", "vllm"),
        ("vllm_formats", "vllm"),
        ("vllm_spans", "vllm"),
    ],
)
def test_an_adapter_without_its_library_says_what_it_needs(name, library, monkeypatch):
    for module in [
        module_name
        for module_name in sys.modules
        if module_name.split(".")[0] == library
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delenv("PAGETWIN_FA3", raising=False)
    result = CliRunner().invoke(app, ["check", str(ADAPTERS / f"{name}.py")])
    assert result.exit_code == USER_ERROR
    assert "this adapter needs" in result.output and "pip install" in result.output
