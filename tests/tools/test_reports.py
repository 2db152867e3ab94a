"""Files of a report: JSON, Markdown, JUnit XML and the HTML pages of `check` and `replay`."""

import json
import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from functools import wraps
from itertools import pairwise
from typing import Any

import pytest
import torch
from matplotlib.axes import Axes
from pagetwin.conformance.base.results import SEVERITIES, Result, Status
from pagetwin.conformance.candidates.candidate import Candidate, Support, load_candidate
from pagetwin.conformance.cases.option_pairs import PLAIN
from pagetwin.conformance.cases.options import Call
from pagetwin.conformance.cases.signatures import (
    SMALL,
    VERSION,
    SignedBatch,
    draw_signature,
)
from pagetwin.conformance.checks.pictures import Failure, picture_of
from pagetwin.conformance.reports.page import draw_blocks, draw_tile, render_page
from pagetwin.conformance.reports.report import Report
from pagetwin.conformance.running.trial import find_law, make_setting, try_case
from pagetwin.tools.replay.figures import summarize
from pagetwin.tools.replay.pictures import draw_occupancy
from pagetwin.tools.replay.report import render_report
from pagetwin.tools.replay.run import Replay
from small_replays import small

PAGED = "paged attention is right for every batch of a signature"


def failing_report() -> Report:
    """Return a report with each status, and with one picture."""
    law = find_law(PAGED)
    reference = load_candidate("reference").operations["paged_attention"]

    @wraps(reference)
    def early(*args: Any, **given: Any) -> Any:
        given["seq_lens"] = given["seq_lens"] - (given["seq_lens"] == 33).int()
        return reference(*args, **given)

    candidate = Candidate("mine", {"paged_attention": early}, Support())
    setting = make_setting(candidate, "cpu")
    batch = SignedBatch(
        draw_signature(0, SMALL), (1, 0, 1), (20, 5, 33), (-1, -1, 32), seed=1,
        version=VERSION,
    )  # fmt: skip
    plain = replace(batch.signature, choice=dict(PLAIN), kv_heads=2)
    batch = replace(batch, signature=plain)
    broken = try_case(law, setting, repr(batch), lambda case, held: None)
    assert broken.status == Status.BROKEN
    results = [
        Result("law & <held>", "area", Status.HELD, cases=3, seconds=0.5),
        Result("law slightly wrong", "area", Status.BROKEN, case="1", what="output",
               where="at token 0, 1.5 times the row's budget", found="1.0", right="1.1"),
        Result("law undeclared", "area", Status.OUTSIDE, reason="dtype"),
        Result("law missing", "area", Status.MISSING, reason="no merge"),
        Result("law crashed", "area", Status.CRASHED, case="2",
               message="the process ended with code -11\x00: \x1b[31mdump"),
        broken,
    ]  # fmt: skip
    return Report("mine", "cpu", tuple(results), {"seed": 0})


def test_junit_parses_and_counts_every_outcome() -> None:
    report = failing_report()
    suite = ElementTree.fromstring(report.to_junit())
    cases = suite.findall("testcase")
    assert suite.attrib["tests"] == str(len(cases)) == "6"
    for name, tag, count in (
        ("failures", "failure", 2),
        ("errors", "error", 2),
        ("skipped", "skipped", 1),
    ):
        assert suite.attrib[name] == str(count)
        assert sum(case.find(tag) is not None for case in cases) == count
    assert cases[0].attrib["name"] == "law & <held>"
    text = cases[5].findtext("failure")
    assert text is not None and "reproduce(" in text


def test_symptoms_come_by_severity_each_with_one_reproduction() -> None:
    report = failing_report()
    severities = [SEVERITIES[symptom.severity] for symptom in report.symptoms()]
    assert severities == [
        "ends the process",
        "wrong result",
        "result above its error budget",
        "operation is missing",
    ]
    assert json.loads(report.to_json())["severities"] == severities
    assert report.to_markdown().count("from pagetwin.conformance import reproduce") == 3


def test_the_picture_names_the_lost_key() -> None:
    broken = failing_report().results[-1]
    picture = broken.details["picture"]
    assert picture["finding"].startswith("The result equals attention without key")
    assert "the last key of the sequence" in picture["finding"]
    lost = picture["tile"]["keys"][0]
    row = picture["tile"]["visible"][picture["query"] - picture["tile"]["first_query"]]
    assert row[lost - picture["tile"]["first_key"]] == "#"
    block, slot = picture["blocks"]["keys"][0]
    req = picture["request"]
    assert picture["blocks"]["rows"][req][lost // 16] == block and slot == lost % 16
    json.dumps(picture, allow_nan=False)


def test_a_failure_with_64_bit_addresses_has_a_picture() -> None:
    """The call kept the rows of its former block table, and drawing it ended the process."""
    law = find_law("addresses of attention have 64 bits")
    right = load_candidate("reference").operations["paged_attention"]

    @wraps(right)
    def early(*args: Any, **given: Any) -> Any:
        return right(*args, **given | {"seq_lens": given["seq_lens"] - 1})

    setting = make_setting(
        Candidate("mine", {"paged_attention": early}, Support()), "cpu"
    )
    case = "FarAttention(what='pages', query_len=1)"
    broken = try_case(law, setting, case, lambda case, held: None)
    assert broken.status == Status.BROKEN
    picture = broken.details["picture"]
    assert picture["blocks"]["rows"] == [[2, 1, 0]]
    assert picture["blocks"]["keys"] == [[0, 0]] and picture["tile"]["keys"] == [32]


def test_the_page_is_one_file_without_scripts() -> None:
    page = render_page(failing_report())
    assert len(re.findall(r"<section id=", page)) == 4
    assert page.count("<svg") == 3
    assert not re.search(r"<script|src=|href=|@import|url\(", page)
    assert "law &amp; &lt;held&gt;" in page and "prefers-color-scheme: dark" in page


def test_a_call_whose_blocks_hold_a_part_of_the_keys_has_no_picture() -> None:
    """A rank's rows are shorter than its sequences; the report was lost for that."""
    tensors = {"query": torch.zeros(1, 1, 8), "key_cache": torch.zeros(2, 4, 1, 8)}
    call = Call(
        "paged_attention", tensors, torch.float32, None, False, (1,), (9,), [[0]]
    )
    answer: Any = None
    assert picture_of(Failure(call, torch.zeros(1, 1, 8), answer, token=0)) == {}


def test_the_page_has_what_the_markdown_has_about_laws_without_a_verdict() -> None:
    """The page had no notes, and no reason why laws are undeclared or not finished."""
    held = Result(
        "law held", "area", Status.HELD, details={"note": "one case was <slow>"}
    )
    late = Result("law late", "area", Status.UNFINISHED, reason="2 cases held")
    tried = Result("law tried", "area", Status.BROKEN, cases=1, reason="off by one")
    page = render_page(
        replace(
            failing_report(),
            results=(*failing_report().results, held, late),
            outside=(tried,),
        )
    )
    assert "<li>law held: one case was &lt;slow&gt;</li>" in page
    assert "<li>law late: 2 cases held</li>" in page
    assert "<li>1: dtype</li>" in page
    assert "<li>wrong: law tried: off by one</li>" in page
    plain = render_page(Report("mine", "cpu", (Result("law", "area", Status.HELD),)))
    assert "<ul>" not in plain


def test_every_section_of_the_page_names_its_laws() -> None:
    """A failure of a single law was shown without the sentence of the law."""
    report = failing_report()
    sections = render_page(report).split("<section id=")[1:]
    for section, symptom in zip(sections, report.symptoms(), strict=True):
        for result in symptom.results:
            assert f"<li>{result.law}</li>" in section


def labels_of(svg: str) -> list[tuple[float, float, str]]:
    """Return x, y and text of each label of a picture."""
    found = re.findall(r'<text x="([\d.]+)" y="([\d.]+)">(.*?)</text>', svg)
    return [(float(x), float(y), text) for x, y, text in found]


@pytest.mark.parametrize("reqs", [1, 9, 300])
@pytest.mark.parametrize("first_block", [0, 98_000])
def test_labels_of_the_block_map_do_not_overlap(reqs: int, first_block: int) -> None:
    """Blocks that many requests share had labels wider than themselves."""
    shown = list(range(first_block, first_block + 40))
    blocks = {
        "block_size": 16,
        "num_blocks": 40,
        "shown": shown,
        "rows": [[shown[0], shown[1], shown[-1]] for _ in range(reqs)],
        "keys": [[shown[1], 3]],
    }
    labels = labels_of(draw_blocks({"blocks": blocks, "request": 0}))
    assert len(labels) == 40
    for (x, y, text), (next_x, next_y, _) in pairwise(labels):
        # no digit of an 11 px font is wider than 7 units
        assert next_y > y or x + 7 * len(text) <= next_x
        assert x + 7 * len(text) <= 680


@pytest.mark.parametrize("query", range(1, 6))
def test_labels_of_the_failing_tile_do_not_overlap(query: int) -> None:
    """With 128 keys a row is 5 units high, and the labels of rows 2 apart overlapped."""
    tile = {"visible": ["#" * 128] * 32, "first_query": 0, "first_key": 0, "keys": []}
    picture = {"tile": tile, "query": query, "request": 0, "blocks": None}
    rows = [
        label for label in labels_of(draw_tile(picture)) if label[2].startswith("q ")
    ]
    assert f"q {query}" in [text for *_, text in rows]
    for (_, y, _), (_, next_y, _) in pairwise(rows):
        assert next_y - y >= 11


@pytest.mark.extended
def test_a_preemption_is_drawn_at_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are numbered from 1, and the triangles were drawn one step too early."""
    drawn: list[list[int]] = []
    scatter = Axes.scatter

    def watched(self: Axes, x: Any, *rest: Any, **given: Any) -> Any:
        drawn.append(list(x))
        return scatter(self, x, *rest, **given)

    monkeypatch.setattr(Axes, "scatter", watched)
    records = list(Replay(small(), with_holders=True).steps())
    preempted = [record.step for record in records if record.preempted]
    assert preempted
    draw_occupancy(records)
    assert drawn == [preempted]


@pytest.mark.extended
def test_pictures_of_a_replay_keep_a_readable_width_and_can_be_scrolled() -> None:
    """On a screen of 390 px the pictures were as wide as the page, and their text 3 px high."""
    replay = Replay(small(), with_holders=True)
    records = list(replay.steps())
    page = render_report(summarize(replay, records, 1.0), records)
    assert (
        page.count("<img") == page.count('<div class="scroll" tabindex="0"><img') == 5
    )
    assert "prompt tokens of " in page and "tokens: of" not in page
