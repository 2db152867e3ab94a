"""The site in a browser: accessible in light and dark, nothing cut, and what can be used works."""

import json
import queue
import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from functools import partial
from html import unescape
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
AXE = find_spec("axe_core_python")
PAGES = (
    "",
    "block_map",
    "benchmark",
    "course",
    "options",
    "puzzles",
    "concepts/paged_attention",
    "bugs",
    "bugs/last-block-missing",
    "bugs/mask-of-minus-ten-thousand",
)
# what the theme's own markup breaks, on every page of every site
THEME_RULES = ("aria-dialog-name", "landmark-unique")

pytestmark = [
    pytest.mark.site,
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed"),
    pytest.mark.skipif(AXE is None, reason="axe-core-python is not installed"),
]

RUN_AXE = """
<script src="/_axe.js"></script>
<script>
addEventListener("load", () => setTimeout(async () => {
  for (const each of document.querySelectorAll("details")) each.open = true;
  const found = await axe.run(document, {
    resultTypes: ["violations"],
    rules: Object.fromEntries(%s.map((name) => [name, { enabled: false }])),
  });
  const wide = [...document.querySelectorAll(".md-content *")].filter((each) =>
    each.getBoundingClientRect().right > innerWidth + 1 && !each.closest(
      "pre, code, .md-typeset__scrollwrap, .drawing, .highlight, .md-typeset__table"));
  const report = document.createElement("pre");
  report.id = "report";
  report.textContent = JSON.stringify({
    scheme: document.body.getAttribute("data-md-color-scheme"),
    wide: wide.slice(0, 5).map((each) => each.outerHTML.slice(0, 120)),
    violations: found.violations.map((each) => ({
      rule: each.id, what: each.help, count: each.nodes.length,
      where: each.nodes.slice(0, 3).map((node) => node.html.slice(0, 160)),
    })),
  });
  document.body.append(report);
}, 300));
</script>
"""


REPORTS: queue.Queue[Any] = queue.Queue()
"""What pages sent to `/_report`."""


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        """Print nothing."""

    def do_POST(self) -> None:
        """Keep what a page reports."""
        REPORTS.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
        self.send_response(204)
        self.end_headers()


@pytest.fixture(scope="module")
def address(
    site: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Path, str]]:
    """Serve a copy of the site, and return its folder and address."""
    folder = tmp_path_factory.mktemp("served") / "site"
    shutil.copytree(site, folder)
    assert AXE is not None and AXE.origin is not None
    shutil.copy(Path(AXE.origin).with_name("axe.min.js"), folder / "_axe.js")
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=folder))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield folder, f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def dom(url: str, width: int = 1440, is_dark: bool = False) -> str:
    """Return the page's document after its scripts have run."""
    assert CHROMIUM is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    options += [f"--window-size={width},1000", "--virtual-time-budget=15000"]
    if is_dark:
        options += ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"]
    done = subprocess.run(
        [CHROMIUM, *options, url],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout


def examine(folder: Path, address: str, page: str, width: int, dark: bool) -> Any:
    """Return what axe and the width check found on a page."""
    name = f"_checked-{width}-{dark}.html"
    html = (folder / page / "index.html").read_text(encoding="utf-8")
    script = RUN_AXE % json.dumps(THEME_RULES)
    (folder / page / name).write_text(html.replace("</body>", script + "</body>"))
    shown = dom(f"{address}/{page}/{name}".replace("//_", "/_"), width, dark)
    found = re.search(r'<pre id="report">(.*?)</pre>', shown, re.S)
    assert found is not None, "the page did not finish"
    return json.loads(unescape(found[1]))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page or "index")
@pytest.mark.parametrize(
    ("width", "dark"), [(1440, False), (390, True)], ids=["light-wide", "dark-narrow"]
)
def test_a_page_is_accessible_and_nothing_is_cut(
    address: tuple[Path, str], page: str, width: int, dark: bool
) -> None:
    found = examine(*address, page, width, dark)
    assert found["scheme"] == ("slate" if dark else "default")
    assert not found["violations"], json.dumps(found["violations"], indent=1)
    assert not found["wide"]


def status(document: str) -> str:
    """Return the line of the block map that describes the step."""
    found = re.search(r'class="bm-status"[^>]*>(.*?)</p>', document)
    assert found is not None
    return unescape(found[1])


def test_a_link_to_the_block_map_shows_its_step(address: tuple[Path, str]) -> None:
    document = dom(f"{address[1]}/block_map/#size=4&caching=0&step=9&request=2")
    assert status(document).startswith("Step 9 of ")
    assert "of 128 blocks held" in status(document)
    assert re.search(r"slot_mapping of this step: <code>\d", document)
    assert 'aria-pressed="true"' in document


def test_a_link_with_nonsense_shows_the_first_step(address: tuple[Path, str]) -> None:
    document = dom(f"{address[1]}/block_map/#size=7&step=x")
    assert status(document).startswith("Step 0 of ")


def test_the_block_map_plays_steps_and_reacts_to_keys_and_clicks(
    address: tuple[Path, str],
) -> None:
    folder, url = address
    script = """<script>
    addEventListener("load", () => setTimeout(() => {
      const press = (key) =>
        document.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
      press("ArrowRight"); press("ArrowRight"); press("ArrowLeft");
      const said = [document.querySelector(".bm-status").textContent];
      document.querySelector(".bm-request").click();
      said.push(document.querySelector(".bm-detail").textContent);
      document.querySelector(".bm-block.written").click();
      said.push(document.querySelector(".bm-detail").textContent);
      document.querySelector(".bm-main").click();
      setTimeout(() => {
        said.push(document.querySelector(".bm-status").textContent, location.hash);
        const report = document.createElement("pre");
        report.id = "report"; report.textContent = JSON.stringify(said);
        document.body.append(report);
      }, 1700);
    }, 300));
    </script>"""
    html = (folder / "block_map" / "index.html").read_text(encoding="utf-8")
    (folder / "block_map" / "_played.html").write_text(
        html.replace("</body>", script + "</body>")
    )
    found = re.search(
        r'<pre id="report">(.*?)</pre>', dom(f"{url}/block_map/_played.html"), re.S
    )
    assert found is not None
    first, request, block, last, link = json.loads(unescape(found[1]))
    assert first.startswith("Step 1 of ")
    assert request.startswith("Request 0") and "Block-table row" in request
    assert block.startswith("Block ") and "positions" in block
    assert last.startswith("Step 4 of ") and "step=4" in link


CHECK_ANSWERS = """<script>
addEventListener("load", () => setTimeout(async () => {
  const find = (name) => document.querySelector(`.py-${name}`);
  const wait = (time) => new Promise((resolve) => setTimeout(resolve, time));
  const said = [];
  for (const answer of %s) {
    if (answer) find("text").value = answer;
    find("result").dataset.state = "";
    const began = performance.now();
    find("check").click();
    while (find("check").disabled) await wait(50);
    said.push([find("result").textContent, performance.now() - began]);
  }
  fetch("/_report", { method: "POST", body: JSON.stringify(said) });
}, 300));
</script>"""
SLOTS = """def slot_mapping(block_table, context_len, seq_len, start_idx, block_size):
    return [
        block_table[p // block_size] * block_size + p % block_size if p >= start_idx else -1
        for p in range(context_len, seq_len)
    ]
"""


def test_puzzles_are_checked_in_the_page_without_another_host(
    address: tuple[Path, str],
) -> None:
    folder, url = address
    if not (folder / "python/pyodide.asm.wasm").exists():
        pytest.skip("the site was built without a network, so it has no Python")
    answers = ["", SLOTS, SLOTS.replace(" + p % block_size", ""), "while True: pass"]
    script = CHECK_ANSWERS % json.dumps(answers)
    html = (folder / "puzzles/index.html").read_text(encoding="utf-8")
    (folder / "puzzles/_checked.html").write_text(
        html.replace("</body>", f"{script}</body>")
    )
    assert CHROMIUM is not None
    options = ["--headless=new", "--no-sandbox", "--disable-gpu"]
    # every other host is unknown
    options += ["--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
    browser = subprocess.Popen(
        [CHROMIUM, *options, f"{url}/puzzles/_checked.html"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        said = REPORTS.get(timeout=240)
    finally:
        browser.kill()
        browser.wait()
    template, right, without_offset, endless = said
    assert template[0] == "not started"
    assert right[0] == "solved"
    assert without_offset[0].startswith("wrong\ninput  block_table = [3]")
    assert "All tokens of a block get the same slot" in without_offset[0]
    assert "took more than 5 seconds and was stopped" in endless[0]
    assert max(right[1], without_offset[1]) < 5000


def test_the_python_of_the_site_is_small(address: tuple[Path, str]) -> None:
    files = (address[0] / "python").iterdir()
    assert sum(file.stat().st_size for file in files) < 15_000_000


def test_the_slider_of_the_first_page_computes_how_many_requests_fit(
    address: tuple[Path, str],
) -> None:
    folder, url = address
    script = """<script>
    addEventListener("load", () => {
      const slider = document.querySelector("#fit-tokens");
      const lines = () =>
        [...document.querySelectorAll(".fit-line b")].map((each) => each.textContent);
      const said = [slider.value, ...lines()];
      slider.value = 500;
      slider.dispatchEvent(new Event("input"));
      said.push(document.querySelector(".fit output").textContent, ...lines());
      const report = document.createElement("pre");
      report.id = "report"; report.textContent = JSON.stringify(said);
      document.body.append(report);
    });
    </script>"""
    html = (folder / "index.html").read_text(encoding="utf-8")
    (folder / "_moved.html").write_text(html.replace("</body>", script + "</body>"))
    found = re.search(r'<pre id="report">(.*?)</pre>', dom(f"{url}/_moved.html"), re.S)
    assert found is not None
    # 327,680 slots; 20,480 blocks; 73 blocks each, then 32
    assert json.loads(unescape(found[1])) == [
        "1156",
        "76 requests fit",
        "280 requests fit",
        "500",
        "76 requests fit",
        "640 requests fit",
    ]


@pytest.mark.parametrize("words", ["GQA", "prefix caching", "install"])
def test_the_search_index_has(address: tuple[Path, str], words: str) -> None:
    index = json.loads((address[0] / "search" / "search_index.json").read_text())
    titles = [entry["title"] for entry in index["docs"]]
    assert any(words.lower() in title.lower() for title in titles)
