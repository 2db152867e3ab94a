"""The published site: its addresses are right, and its pages load nothing from another host."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SITE_URL = "https://example.org/pagetwin/"
REPO_URL = "https://github.com/example/pagetwin"
TAG = re.compile(r"<(?:script|img|link|iframe|source|video|audio|embed)\b[^>]*>")
ADDRESS = re.compile(r"""(?:src|href)=["']?((?:https?:)?//[^"'\s>]+)""")
CSS = re.compile(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""")
# the theme's script asks the host of a repository for its stars, if a link to it has this
COUNTED = 'data-md-component="source"'
HOOK = "from pages import on_post_page, on_post_template\n"


def loaded_addresses(html: str) -> list[str]:
    """Return the addresses with a host that a browser loads to show a page, its styles included.

    A canonical address names the page itself, and is not loaded.
    """
    tags = [tag for tag in TAG.findall(html) if 'rel="canonical"' not in tag]
    return [found for tag in tags for found in ADDRESS.findall(tag)] + CSS.findall(html)


def canonical_address(html: str) -> str | None:
    found = re.search(r'<link rel="canonical" href="([^"]+)">', html)
    return found[1] if found else None


@pytest.mark.parametrize(
    "html",
    [
        '<script src="https://example.org/a.js"></script>',
        '<link rel="stylesheet" href="//example.org/a.css">',
        "<img alt='' src='http://example.org/a.png'>",
        "<style>@import 'https://example.org/a.css'</style>",
        '<p style="background: url(https://example.org/a.png)">',
    ],
)
def test_what_a_page_loads_from_another_host_is_found(html: str) -> None:
    (found,) = loaded_addresses(html)
    assert "//example.org/a." in found


def test_a_link_and_the_address_of_the_page_itself_are_not_loaded() -> None:
    html = '<link rel="canonical" href="https://example.org/"><a href="https://a.org">'
    assert loaded_addresses(html) == []


@pytest.mark.site
def test_a_page_needs_no_network(site: Path) -> None:
    """It failed where SITE_URL is set, as when the site is published: on canonical addresses."""
    for page in site.rglob("*.html"):
        html = page.read_text(encoding="utf-8")
        assert not loaded_addresses(html), page
        assert COUNTED not in html, page
    for style in site.rglob("*.css"):
        assert not CSS.findall(style.read_text(encoding="utf-8")), style


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the folder of a site of two pages that is built as it is published."""
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    pytest.importorskip("material", reason="the docs extra is not installed")
    from mkdocs.commands.build import build
    from mkdocs.config import load_config

    pages = tmp_path / "docs"
    (pages / "folder").mkdir(parents=True)
    (pages / "index.md").write_text("# Start\n", encoding="utf-8")
    (pages / "folder" / "page.md").write_text("# Page\n", encoding="utf-8")
    hook = tmp_path / "hook.py"
    hook.write_text(HOOK, encoding="utf-8")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "hooks"))
    config = load_config(
        str(ROOT / "mkdocs.yml"),
        docs_dir=str(pages),
        site_dir=str(tmp_path / "site"),
        site_url=SITE_URL,
        repo_url=REPO_URL,
        hooks=[str(hook)],
        plugins=[],
        nav=["index.md", "folder/page.md"],
        not_in_nav="",
    )
    build(config)
    return tmp_path / "site"


@pytest.mark.site
def test_the_published_site_has_its_addresses_and_asks_no_other_host(
    published: Path,
) -> None:
    """The page for a wrong address asked the host of the repository for its stars."""
    found = {}
    for path in published.rglob("*.html"):
        html = path.read_text(encoding="utf-8")
        assert f'href="{REPO_URL}"' in html
        assert COUNTED not in html, path
        assert not loaded_addresses(html), path
        found[path.relative_to(published).as_posix()] = canonical_address(html)
    assert found == {
        "index.html": SITE_URL,
        "folder/page/index.html": f"{SITE_URL}folder/page/",
        "404.html": None,
    }
    # any address may be wrong, so its links begin at the root of the host
    wrong = (published / "404.html").read_text(encoding="utf-8")
    assert re.findall(r'<script src="(/pagetwin/)[^"]*bundle', wrong)


def test_the_workflow_builds_with_the_variables_that_the_site_reads() -> None:
    workflow = (ROOT / ".github/workflows/pages.yml").read_text(encoding="utf-8")
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    read = re.findall(r"!ENV \[(\w+), ", config)
    assert read == ["SITE_URL", "REPO_URL"]
    for name in read:
        assert re.search(rf"^ +{name}: https://", workflow, re.M)
    assert re.search(r"run: make docs$", workflow, re.M)
    assert re.search(r"path: site/$", workflow, re.M)
