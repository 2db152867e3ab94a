"""Does the suite itself do what it says: try, catch, shrink, report, go on?

The laws have tests of their own. Here they are judged by what happens around them: kernels that
crash, hang, are missing or reject, and what is reported of it.
"""

import json
import re
import subprocess
import sys
import textwrap
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import strategies as st
from pagetwin.conformance import (
    Status,
    Support,
    check_implementation,
    reproduce,
)
from pagetwin.conformance.base.results import Result
from pagetwin.conformance.candidates import preflight
from pagetwin.conformance.candidates.candidate import (
    Candidate,
    OutsideSupport,
    load_candidate,
)
from pagetwin.conformance.candidates.fitting import fit_case
from pagetwin.conformance.cases.batches import LAYOUTS, BatchPlan
from pagetwin.conformance.cases.choice_calls import build_call
from pagetwin.conformance.cases.option_pairs import PLAIN, draw_choice
from pagetwin.conformance.checks.expect import Disagreement
from pagetwin.conformance.laws.histories import TOLD, histories
from pagetwin.conformance.laws.law import Law
from pagetwin.conformance.laws.machine import KINDS, Machine
from pagetwin.conformance.reports.report import Report
from pagetwin.conformance.running.trial import (
    find_law,
    make_case,
    make_setting,
    try_law,
)
from pagetwin.conformance.running.worker import Job, Worker
from pagetwin.contract.attention_options import pack_options
from pagetwin.tools.cli import DISAGREE, USER_ERROR, app
from typer.testing import CliRunner

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
ADAPTERS = ROOT / "docs" / "adapters"
SLOTS = "every new token gets the slot of its block table row"
HISTORY = "a cache is right after any sequence of operations"

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
ENDS_THE_PROCESS = """
import os

def compute_slot_mapping_batch(query_lens, computed, rows, block_size):
    os._exit(7)
"""
ENDS_THE_PROCESS_IN_A_DRY_RUN = """
import os
from pagetwin.reference.cache.slot_mapping import compute_slot_mapping_start_idx

def compute_slot_mapping(is_profile_run, *arguments):
    os._exit(7)
"""
READS_ADDRESS_ZERO = """
import ctypes

def compute_slot_mapping_batch(query_lens, computed, rows, block_size):
    ctypes.string_at(0)
"""
HANGS = """
import time

def compute_slot_mapping_batch(query_lens, computed, rows, block_size):
    time.sleep(100)
"""
DIES_WHEN_IMPORTED = "import os\nos._exit(3)\n"


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    """Return a function that writes a module into the current folder and returns its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.syspath_prepend(tmp_path)
    written = []

    def write(source: str) -> str:
        name = f"kernels_{tmp_path.name}_{len(written)}".replace("-", "_")
        (tmp_path / f"{name}.py").write_text(source)
        written.append(name)
        return name

    yield write
    for name in written:
        sys.modules.pop(name, None)


def check(*words: object):
    return CliRunner().invoke(app, ["check", *map(str, words), "--device", "cpu"])


def only_result(report: Report) -> Result:
    (result,) = report.results
    return result


def test_a_wrong_answer_comes_with_a_small_input_and_both_answers(kernels):
    report = check_implementation(
        kernels(OFF_BY_ONE), only=SLOTS, examples=60, device="cpu"
    )
    result = only_result(report)
    assert result.status == Status.BROKEN and not report.ok
    assert (result.what, result.where) == ("slots", "at [4]")
    assert int(result.found) == int(result.right) + 1
    assert make_case(find_law(SLOTS), result.case).block_size == 3


def test_the_program_that_is_shown_shows_the_failure_again(kernels, tmp_path):
    name = kernels(OFF_BY_ONE)
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
@pytest.mark.parametrize(
    ("source", "words"),
    [
        (ENDS_THE_PROCESS, "the process ended with code 7"),
        (
            READS_ADDRESS_ZERO,
            "Segmentation fault, at line 5 of {name}.py, in compute_slot_mapping_batch",
        ),
    ],
    ids=["ends the process", "reads address 0"],
)
def test_a_crash_is_the_failure_of_one_law_and_names_the_input(kernels, source, words):
    name = kernels(source)
    worker = Worker(name, "cpu")
    try:
        first = worker.try_law(Job(SLOTS, examples=3), "slots")
        again = worker.try_law(Job(SLOTS, case=first.case), "slots")
        other = worker.try_law(Job(HISTORY), "histories")
    finally:
        worker.stop()
    assert first.status == again.status == Status.CRASHED
    words = words.format(name=name)
    assert words in first.message and words in again.message
    assert first.cases == 1 and make_case(find_law(SLOTS), first.case)
    assert other.status == Status.MISSING and "StepBuffers" in other.reason


@pytest.mark.slow
def test_a_kernel_that_hangs_longer_than_a_law_may_take_is_stopped(kernels):
    report = check_implementation(
        kernels(HANGS), only=SLOTS, device="cpu", seconds_of_a_law=1
    )
    result = only_result(report)
    assert result.status == Status.UNFINISHED and result.case
    assert result.reason.startswith("0 cases held in ") and report.ok


def test_a_module_that_dies_when_it_is_imported_is_an_import_error(kernels):
    with pytest.raises(ImportError, match=r"cannot be imported: .*code 3"):
        check_implementation(kernels(DIES_WHEN_IMPORTED), only="slots", device="cpu")


@pytest.mark.long
def test_workers_share_the_laws_out_and_a_crash_takes_only_one_down(kernels):
    name = kernels(OFF_BY_ONE + ENDS_THE_PROCESS_IN_A_DRY_RUN)
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
    assert [replace(each, seconds=0) for each in one] == [
        replace(each, seconds=0) for each in two
    ]
    assert len(told) == len(one) + len(two)
    assert all(each in told for each in (*one, *two))
    ends = {each.status for each in two}
    assert {Status.CRASHED, Status.BROKEN, Status.HELD, Status.MISSING} <= ends


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"workers": 0}, "workers = 0: expected at least 1"),
        ({"workers": 100_000}, "workers = 100000: expected at most"),
        ({"workers": 2, "isolated": False}, "expected 1, which is this process"),
        ({"examples": 0}, "examples = 0: expected at least 1"),
    ],
)
def test_numbers_out_of_range_are_rejected(options, words):
    with pytest.raises(ValueError, match=words):
        check_implementation("reference", only=SLOTS, device="cpu", **options)


def test_what_is_printed_does_not_disturb(kernels):
    name = kernels(
        "print('hello')\n"
        + RIGHT
        + "def compute_slot_mapping_batch(*a):\n    print(1)\n    return right(*a)\n"
    )
    assert check_implementation(name, only=SLOTS, examples=3, device="cpu").ok


def test_a_failure_that_does_not_come_back_says_so(kernels):
    name = kernels(
        RIGHT
        + textwrap.dedent(
            """
            calls = []

            def compute_slot_mapping_batch(*arguments):
                calls.append(1)
                return right(*arguments) + (len(calls) == 3)
            """
        )
    )
    setting = make_setting(load_candidate(name), "cpu")
    law = Law("a law", "area", (), st.integers(0, 50), lambda s, c: once(c))
    seen = []

    def once(case):
        seen.append(case)
        if len(seen) == 5:
            raise Disagreement("answer", "as a whole", case, 0)

    result = try_law(law, setting, 0, 20)
    assert result.status == Status.BROKEN
    assert "did not break the law" in result.message


def test_a_known_failure_is_fine_until_it_holds(kernels):
    name = kernels(OFF_BY_ONE)
    known = {SLOTS: "blocks of 3"}
    options = {"only": SLOTS, "examples": 60, "device": "cpu", "isolated": False}
    report = check_implementation(name, known_failures=known, **options)
    result = only_result(report)
    assert report.ok and result.status == Status.KNOWN
    assert result.reason == "blocks of 3" and result.case
    report = check_implementation("reference", known_failures=known, **options)
    assert not report.ok and only_result(report).status == Status.UNEXPECTED
    with pytest.raises(ValueError, match="expected sentences of laws"):
        check_implementation("reference", known_failures={"no law": "-"})


def test_a_report_is_json_and_markdown(kernels):
    report = check_implementation(
        kernels(OFF_BY_ONE),
        only=SLOTS,
        examples=60,
        device="cpu",
        isolated=False,
    )
    words = json.loads(report.to_json())
    assert words["ok"] is False and words["counts"] == {"broken": 1}
    assert words["settings"] == {"seed": 0, "examples": 60}
    assert words["results"][0]["case"] == only_result(report).case
    page = report.to_markdown()
    assert f"| {SLOTS} | slots | broken |" in page
    assert "## 1 law broken: slots is wrong" in page and "```python" in page
    assert only_result(report).right in page


@pytest.mark.long
def test_the_command_ends_with_0_only_if_all_is_well(kernels, tmp_path):
    good = check("reference", "--only", SLOTS, "--examples", 3)
    assert good.exit_code == 0, good.output
    assert "reference on cpu: 1 held." in good.output
    name = kernels(OFF_BY_ONE)
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


def test_a_file_elsewhere_is_a_module_too(kernels, tmp_path):
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
def test_what_the_user_can_fix_is_one_sentence(kernels, words, sentence):
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
    kernels, source, words
):
    """Such an adapter once took the seconds in which two processes import torch and all laws."""
    name = kernels(source)
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


@pytest.mark.parametrize("source", ["import torch\nimport nothere", "def f(:"])
def test_what_the_source_alone_shows_needs_no_process(kernels, source, monkeypatch):
    """A process that imports torch took a second and a half."""
    monkeypatch.setattr(preflight.subprocess, "Popen", None)
    with pytest.raises(ImportError, match=r"cannot be imported: .*line [12]\)"):
        preflight.check_can_run(kernels(source), "cpu")


def test_a_package_that_an_earlier_import_provides_is_not_missing(kernels):
    first = kernels("import sys\nsys.modules['nothere'] = sys")
    name = kernels(f"import {first}\nimport nothere\ndef paged_attention(): pass")
    preflight.check_can_run(name, "cpu")


def test_a_kernel_that_needs_a_gpu_is_not_reported_as_broken(kernels):
    """Every law was reported as broken."""
    name = kernels(
        "def paged_attention(*arguments, **options):\n"
        "    raise RuntimeError('Expected all tensors on CUDA')\n"
    )
    result = check(name, "--only", "attention", "--examples", 2)
    assert result.exit_code == USER_ERROR, result.output
    assert f"device = 'cpu': {name} needs a GPU" in result.output
    assert len(result.output.strip().splitlines()) == 1


# what a report shows

READS_PAST_THE_END = """
from pagetwin.contract.attention_options import DEFAULT_OPTIONS
from pagetwin.reference.attention.paged import paged_attention as right

def paged_attention(
    query, key_cache, value_cache, block_table, query_start_loc, seq_lens,
    max_query_len, max_seq_len, options=DEFAULT_OPTIONS, out=None, **given
):
    partly_filled = seq_lens % key_cache.shape[1] != 0
    return right(
        query, key_cache, value_cache, block_table, query_start_loc,
        seq_lens + partly_filled, max_query_len, max_seq_len + 1,
        options=options, out=out, **given
    )
"""
LEAVES_AN_ELEMENT = """
from pagetwin.contract.attention_options import DEFAULT_OPTIONS
from pagetwin.reference.attention.paged import paged_attention as right

def paged_attention(*arguments, options=DEFAULT_OPTIONS, out=None, **given):
    result = right(*arguments, options=options, **given)
    if out is None:
        return result
    out[..., 1:] = result[..., 1:]
    return out
"""
ATTENDS = "every new token attends to its sequence up to itself"


@pytest.mark.parametrize(
    ("source", "cause"),
    [
        (
            READS_PAST_THE_END,
            r"contains the poison of slot 5 of block \d+ in key_cache: position 21 of"
            r" request 1, which is past its seq_len = 21",
        ),
        (LEAVES_AN_ELEMENT, "the output of token 0 is not written everywhere"),
    ],
    ids=["reads past the end", "leaves an element"],
)
def test_a_nan_is_explained_by_the_slot_that_it_comes_from(kernels, source, cause):
    """The report said "found nan", and nothing about where it came from."""
    case = "BatchPlan((1, 1), (32, 21), block_size=16)"
    with pytest.raises(Disagreement, match=cause):
        reproduce(kernels(source), ATTENDS, case, device="cpu")


@pytest.mark.slow
def test_laws_that_fail_alike_have_one_program(kernels, tmp_path):
    page = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    source = re.search(r"```python\n(import torch\n.*?)```", page, re.DOTALL)[1]
    bug = "seq_len -= seq_len % 16 == 1"
    assert bug in source
    source = source.replace(bug, "pass").replace(
        "[:seq_len]", "[: seq_len + (seq_len % 5 == 0)]"
    )
    name = kernels(source)
    words = ("--only", "attention ", "--examples", 10, "--json", "r.json")
    result = check(name, *words, "--markdown", "r.md")
    assert result.exit_code == DISAGREE, result.output
    report = json.loads((tmp_path / "r.json").read_text())
    broken = [each["law"] for each in report["results"] if each["status"] == "broken"]
    symptoms = report["symptoms"]
    assert sorted(law for laws in symptoms for law in laws) == sorted(broken)
    assert len(symptoms) < len(broken) and len(symptoms[0]) > 2
    page = (tmp_path / "r.md").read_text()
    for text in (result.output, page):
        assert text.count("from pagetwin.conformance import reproduce") == len(symptoms)
        assert "contains the poison of slot" in text
        assert re.search(r"The three laws to look at first", text)
    first = report["laws_to_look_at_first"]
    assert len(first) == 3
    last = result.output.strip().splitlines()[-3:]
    for number, (law, line) in enumerate(zip(first, last, strict=True), 1):
        assert line.startswith(f"  {number}. {law}: ")


def test_symptoms_differ_in_the_failure_and_not_in_its_numbers():
    def broken(law: str, case: str, **failure: str) -> Result:
        return Result(law, "area", Status.BROKEN, case=case, **failure)

    report = Report(
        "mine",
        "cpu",
        (
            Result("held", "area", Status.HELD),
            broken("a", "12345", what="out[3]", where="at [1]", found="1.5", right="2"),
            broken(
                "b", "123", what="out[40]", where="at [2]", found="3", right="-7e-3"
            ),
            broken("c", "1", what="out[3]", where="at [1]", found="nan", right="2"),
            broken("d", "12", message="ValueError: head_size = 24"),
            broken("e", "1", message="ValueError: head_size = 8"),
            Result("f", "area", Status.MISSING, reason="mine has no copy_blocks"),
            Result("g", "area", Status.MISSING, reason="mine has no copy_blocks"),
        ),
    )
    found = [[each.law for each in one.results] for one in report.symptoms()]
    assert found == [["b", "a"], ["c"], ["e", "d"], ["f", "g"]]
    assert [each.title for each in report.symptoms()] == [
        "2 laws broken: out[#] is wrong",
        "1 law broken: out[#] is nan instead of a number",
        "2 laws broken: ValueError: head_size = #",
        "2 laws missing: mine has no copy_blocks",
    ]
    assert [each.law for each in report.laws_to_look_at_first()] == ["b", "c", "e"]
    alone = Report("mine", "cpu", report.results[:3])
    assert [each.law for each in alone.laws_to_look_at_first()] == ["b", "a"]
    assert "## The two laws to look at first" in alone.to_markdown()
    assert Report("mine", "cpu", report.results[:1]).laws_to_look_at_first() == []


# what a module declares


def declared(source: str, support: Support) -> Candidate:
    names: dict = {}
    exec(source, names)
    return Candidate("mine", {"paged_attention": names["paged_attention"]}, support)


REJECTS_ALL = "def paged_attention(*a, **k): raise NotImplementedError('no')"
TAKES_LITTLE = """
def paged_attention(query, key_cache, value_cache, block_table, query_start_loc,
                    seq_lens, max_query_len, max_seq_len):
    return query
"""


def arguments(**changes):
    call = build_call(PLAIN | changes, 0, torch.device("cpu"))
    return call.arguments


def test_a_rejection_is_one_only_outside_of_what_is_declared():
    candidate = declared(REJECTS_ALL, Support(head_sizes=[16], options=["causal"]))
    with pytest.raises(OutsideSupport, match="head size 24"):
        candidate.paged_attention(**pack_options(**arguments(head_size="24")))
    with pytest.raises(OutsideSupport, match="option sinks"):
        candidate.paged_attention(**pack_options(**arguments(sinks="sinks")))
    with pytest.raises(OutsideSupport, match="option value_head_size"):
        candidate.paged_attention(**pack_options(**arguments(value_head_size="other")))
    with pytest.raises(NotImplementedError, match="no") as raised:
        candidate.paged_attention(**arguments())
    assert not isinstance(raised.value, OutsideSupport)


def test_an_option_that_is_off_need_not_be_known():
    candidate = declared(TAKES_LITTLE, Support(options=[]))
    given = arguments()
    assert given["causal"] is True
    assert (
        candidate.paged_attention(lse=None, **pack_options(**given)) is given["query"]
    )
    with pytest.raises(OutsideSupport, match="option sliding_window"):
        candidate.paged_attention(**pack_options(**given, sliding_window=3))


def test_a_case_is_brought_inside_of_what_is_declared():
    support = Support(
        dtypes=["float16"],
        block_sizes=[32],
        head_sizes=[64, 128],
        query_lens=range(2),
        options=["sinks"],
    )
    plan = BatchPlan((3, 0), (9, 4), head_size=16, dtype=torch.float32, scale=0.5)
    fitted = fit_case((plan, 3), support)[0]
    assert fitted == replace(
        plan,
        query_lens=(1, 0),
        block_size=32,
        head_size=fitted.head_size,
        dtype=torch.float16,
        scale=None,
    )
    assert fitted.head_size in (64, 128)
    assert fit_case(fitted, support) is fitted
    from random import Random

    for seed in range(40):
        choice = draw_choice(Random(seed), [("operation", "paged_attention")])
        fitted = fit_case(choice, support)
        assert fit_case(fitted, support) == fitted
        call = build_call(fitted, seed, torch.device("cpu"))
        # a bound that exceeds the declared lengths is lowered when the call is made
        call = call.changed(max_query_len=max(call.query_lens))
        taken = declared("def paged_attention(*a, **k): return 1", support)
        given = {"lse": 1} if call.wants_lse else {}
        assert call.query.dtype == torch.float16
        assert taken.paged_attention(**pack_options(**call.arguments, **given)) == 1
        assert not {"alibi_slopes", "k_scale", "tree_mask"} & set(call.arguments)


def test_a_law_all_of_whose_cases_are_rejected_is_listed_and_not_held(kernels):
    def reject(setting, case):
        raise OutsideSupport("dtype float32")

    law = Law("a law", "area", (), [1, 2], reject)
    setting = make_setting(load_candidate("reference"), "cpu")
    result = try_law(law, setting, 0, 5)
    assert result.status == Status.OUTSIDE and result.ok
    assert (result.cases, result.skipped, result.reason) == (2, 2, "dtype float32")
    name = kernels(
        "from pagetwin.conformance import Support\n"
        "SUPPORT = Support(operations=['compute_slot_mapping_batch'])\n" + OFF_BY_ONE
    )
    setting = make_setting(load_candidate(name), "cpu")
    result = try_law(find_law(HISTORY), setting, 0, 5)
    assert result.status == Status.OUTSIDE and "not declared" in result.reason


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
        owned = [block for each in machine.sequences for block in each.blocks]
        assert len(owned) == sum(machine.pool.owners) + sum(machine.host_pool.owners)

    watch()
    assert kinds == set(KINDS) and forked > 20
    assert layouts == set(LAYOUTS)
    assert all(eval(repr(each), vars(sys.modules[Machine.__module__])) for each in TOLD)


# pytest

TESTS_OF_ONES_OWN = """
from functools import partial
from pagetwin.conformance import parametrize_with_laws

MINE, NARROW, SLOTS = {name!r}, {narrow!r}, {slots!r}
tested = partial(parametrize_with_laws, only=SLOTS, examples=60, device="cpu")

@tested(MINE)
def test_broken(law):
    law()

@tested(MINE, known_failures={{SLOTS: "blocks of 3"}})
def test_known(law):
    law()

@tested("reference", known_failures={{SLOTS: "it was"}})
def test_fixed(law):
    law()

@tested("reference")
def test_held(law):
    assert law().cases == 60

@tested(MINE, only="slots on the device")
def test_missing(law):
    law()

@tested(NARROW, only="slots on the device")
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
def test_each_law_is_a_test_of_a_project_of_ones_own(kernels, tmp_path):
    name, narrow = kernels(OFF_BY_ONE), kernels(NARROW)
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
    assert [each for each in results if not each.ok] == []
    # a case that is rejected as drawn is fitted; half of the bounds exceed the truth
    assert all(each.cases > each.skipped for each in results)
    assert sum(each.cases - each.skipped for each in results) >= 20


@pytest.mark.parametrize(
    ("name", "library"),
    [
        ("flashinfer_paged", "flashinfer"),
        ("flash_attention_paged", "flash_attn"),
        ("flash_attention_3_paged", "vllm"),
        ("vllm_unified", "vllm"),
    ],
)
def test_an_adapter_without_its_library_says_what_it_needs(name, library, monkeypatch):
    for module in [each for each in sys.modules if each.split(".")[0] == library]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delenv("PAGETWIN_FA3", raising=False)
    result = CliRunner().invoke(app, ["check", str(ADAPTERS / f"{name}.py")])
    assert result.exit_code == USER_ERROR
    assert "this adapter needs" in result.output and "pip install" in result.output


def test_a_result_survives_the_way_from_process_to_process():
    result = Result("a law", "area", Status.BROKEN, cases=3, case="Step()", what="x")
    words = json.loads(json.dumps(asdict(result) | {"status": result.status.value}))
    assert Result(**{**words, "status": Status(words["status"])}) == result
    with pytest.raises(ValueError, match="law = 'none'"):
        reproduce("reference", "none", "0")
