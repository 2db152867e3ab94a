"""The first page and its pictures: short, without code, computed, and legible for every reader."""

import importlib
import math
import re
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from pagetwin.tools import palette

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGE = (DOCS / "index.md").read_text(encoding="utf-8")
SERIES = ["memory_use", "index", "one_step", "paged_attention"]
FIGURES = sorted(
    path.stem
    for path in (DOCS / "hooks/figures").glob("*.py")
    if path.stem not in ("__init__", "drawing")
)
SCHEMES = {"light": palette.LIGHT, "dark": palette.DARK}
# Machado, Oliveira and Fernandes, "A Physiologically-based Model for Simulation of Color Vision
# Deficiency", 2009: complete lack of one kind of cones, in linear RGB
VISION = {
    "normal": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
    "tritanopia": (
        (1.255528, -0.076749, -0.178779),
        (-0.078411, 0.930809, 0.147602),
        (0.004733, 0.691367, 0.303900),
    ),
}


@pytest.fixture(scope="module")
def hooks() -> Any:
    """Return a function that imports a module of the site's hooks."""
    sys.path.insert(0, str(DOCS / "hooks"))
    yield importlib.import_module
    sys.path.pop(0)


def linear(colour: str) -> list[float]:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in parts
    ]


def lab(colour: str, vision: str) -> tuple[float, float, float]:
    """Return a colour in CIELAB, as it looks with that vision."""
    own = linear(colour)
    red, green, blue = (
        min(1.0, max(0.0, sum(a * b for a, b in zip(row, own, strict=True))))
        for row in VISION[vision]
    )
    white = (0.9505, 1.0, 1.089)
    xyz = (
        0.4124 * red + 0.3576 * green + 0.1805 * blue,
        0.2126 * red + 0.7152 * green + 0.0722 * blue,
        0.0193 * red + 0.1192 * green + 0.9505 * blue,
    )
    x, y, z = (
        t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116
        for t in (part / whole for part, whole in zip(xyz, white, strict=True))
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def contrast(one: str, other: str) -> float:
    low, high = sorted(
        0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in (linear(one), linear(other))
    )
    return (high + 0.05) / (low + 0.05)


def visible_words(text: str) -> list[str]:
    """Return the words of a page without its macros and the targets of its links."""
    text = re.sub(r"^\{\{.*\}\}$", "", text, flags=re.M)
    return re.sub(r"\]\([^)]*\)", "]", text).split()


def test_the_first_page_has_at_most_900_words() -> None:
    assert len(visible_words(PAGE)) <= 900


def test_the_first_page_shows_the_series_in_order_and_no_code() -> None:
    assert re.findall(r'picture\("(\w+)"\)', PAGE) == SERIES
    assert "```" not in PAGE
    assert "`" not in PAGE


def test_the_page_says_what_pagetwin_is_and_ends_with_links_to_learn_and_to_use() -> (
    None
):
    explanation, _, last = PAGE.partition("## Where to go from here")
    first, _, explanation = explanation.partition("\n\nA language model")
    assert first.startswith("# Paged attention in five minutes\n\npagetwin is ")
    assert not re.search(r"\b(twins?|laws?|pagetwin|our)\b", explanation, re.I)
    learn, use = last.split("To use it:")
    for name in ("block_map", "puzzles", "bugs/index", "ideas/engine", "course"):
        assert f"({name}.md)" in learn
    for name in ("conformance", "integrations/vllm", "recorder"):
        assert f"({name}.md)" in use
    assert len(re.findall(r"^- \*\*", last, re.M)) == 6


def test_figures_of_the_first_page_follow_from_its_stated_numbers(hooks: Any) -> None:
    table = hooks("fit_table")
    slots, longest, mean = table.fit()
    page = " ".join(PAGE.split())
    assert table.BYTES_PER_TOKEN == 128 * 1024
    assert f"40 GiB has {slots:,} slots" in page
    reserved = table.requests_that_fit(slots, longest, 1)
    assert f"{slots:,} // {longest:,} = {reserved} requests" in page
    blocks, held = slots // table.BLOCK_SIZE, -(-mean // table.BLOCK_SIZE)
    paged = table.requests_that_fit(slots, mean, table.BLOCK_SIZE)
    assert f"there are {blocks:,} blocks" in page
    assert f"a request has {mean:,} tokens on average: {held} blocks" in page
    assert f"{blocks:,} // {held} = {paged} requests" in page
    assert f"| **{mean:,}** | **{held}** | **{reserved}** | **{paged}** |" in (
        table.fit_table()
    )
    memory_use = hooks("figures.memory_use")
    shares = memory_use.ways_to_reserve(memory_use.read_trace("azure"))
    assert f"{100 * (1 - shares[-1][1]):.1f} % in the first picture" in page


def test_the_time_that_paging_costs_is_in_the_record(hooks: Any) -> None:
    run = hooks("page_data").bench_runs("bench")[0]
    speeds = run["ceilings"]
    page = " ".join(PAGE.split())
    ordered, paged = speeds["read_gb_per_s"], speeds["read_pages_gb_per_s"]
    assert (
        f"{ordered:,.0f} GB/s in order and {paged:,.0f} GB/s through a table, 16 tokens"
        in page
    )
    assert run["machine"]["device"] == "NVIDIA H200" and "an H200 reads" in page
    assert f"([{run['machine']['date'][:10]}](benchmark.md))" in page


def test_the_picture_of_attention_says_that_its_weights_are_rounded(hooks: Any) -> None:
    """The sum of the printed products is 29.5 where the output is 29.72."""
    for drawn in drawings(hooks, "paged_attention"):
        assert "Weights are shown with two digits" in drawn.caption


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("vision", VISION)
def test_colours_that_tell_things_apart_differ_for_every_vision(
    scheme: str, vision: str
) -> None:
    colours = SCHEMES[scheme]
    for end, least in (("", 12), ("-line", 12)):
        for one, other in combinations(("a", "b", "new", "off"), 2):
            pair = [lab(colours[name + end], vision) for name in (one, other)]
            assert math.dist(*pair) >= least, (one + end, other + end)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_text_and_outlines_of_figures_have_contrast(scheme: str) -> None:
    colours = SCHEMES[scheme]
    for kind in ("a", "b", "new", "off"):
        assert contrast(colours["ink"], colours[kind]) >= 4.5
        if kind != "off":
            assert contrast(colours[f"{kind}-line"], colours["page"]) >= 3
    assert contrast(colours["used-ink"], colours["used"]) >= 4.5
    assert contrast(colours["faint"], colours["page"]) >= 4.5


def test_both_schemes_define_the_same_colours() -> None:
    assert palette.LIGHT.keys() == palette.DARK.keys()


@pytest.mark.parametrize("vision", VISION)
def test_requests_differ_for_every_vision(vision: str) -> None:
    for one, other in combinations(palette.REQUESTS, 2):
        assert math.dist(lab(one, vision), lab(other, vision)) >= 12, (one, other)


def test_requests_that_run_in_one_step_have_different_colours(hooks: Any) -> None:
    recording = hooks("block_map").record(16, True)
    colours = recording["colours"]
    for step in recording["steps"]:
        shown = [colours[request["id"]] for request in step["running"]]
        assert len(set(shown)) == len(shown)
        assert all(colour < len(palette.REQUESTS) for colour in shown)


@pytest.mark.parametrize("color", palette.REQUESTS)
def test_the_name_of_a_request_has_contrast_on_its_colour(color: str) -> None:
    assert contrast(color, palette.LIGHT["ink"]) >= 3


def test_colours_are_defined_in_the_palette_and_nowhere_else() -> None:
    """Code and syntax colours of the theme are its own; a picture takes every colour from here."""
    files = [
        *(DOCS / "hooks").rglob("*.py"),
        *(DOCS / "js").glob("*.js"),
        ROOT / "shared/tools/bench/plot.py",
        ROOT / "shared/tools/replay/pictures.py",
    ]
    for path in files:
        assert not re.search(r"#[0-9a-f]{6}\b", path.read_text(encoding="utf-8")), path
    styles = (DOCS / "css/pagetwin.css").read_text(encoding="utf-8")
    for name in re.findall(r"(--[\w-]+): #", styles):
        assert name.startswith("--md-"), name


def drawings(hooks: Any, name: str) -> list[Any]:
    module = hooks(f"figures.{name}")
    names = [draw for draw in ("draw", "draw_narrow") if hasattr(module, draw)]
    return [getattr(module, draw)() for draw in names]


@pytest.mark.parametrize("name", FIGURES)
def test_no_box_of_a_figure_is_cut(hooks: Any, name: str) -> None:
    box = re.compile(
        r'<rect x="([\d.]+)" y="([\d.]+)" width="([\d.]+)" height="([\d.]+)"'
    )
    for drawn in drawings(hooks, name):
        for x, y, w, h in (map(float, it) for it in box.findall("".join(drawn.parts))):
            assert x + w <= drawn.width and y + h <= drawn.height, (x, y, w, h)


@pytest.mark.parametrize("name", SERIES)
def test_a_picture_of_the_series_fits_a_phone_and_is_described(
    hooks: Any, name: str
) -> None:
    wide, narrow = drawings(hooks, name)
    assert wide.width == 760 and narrow.width == 340
    for drawn in (wide, narrow):
        assert drawn.alt != drawn.caption and len(drawn.alt.split()) >= 12
