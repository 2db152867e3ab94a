"""Public names stay, with their signatures; a release is prepared from a tag."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from structure.public_names import FILE, public_names

ROOT = Path(__file__).parents[2]
FILES = (
    "README.md",
    "CHANGELOG.md",
    "shared/package/__init__.py",
    ".github/release.py",
)


def test_public_names_and_signatures_are_those_that_were_promised():
    kept = FILE.read_text(encoding="utf-8").splitlines()
    changed = sorted(set(kept) ^ set(public_names()))
    assert not changed, (
        "these names or signatures changed; docs/public.md says what that needs, and"
        f" public_names.py --write keeps the new ones: {changed}"
    )


@pytest.fixture
def checkout(tmp_path):
    """Return a copy of what a release changes, whose changelog has a section 0.1.0."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    changes = tmp_path / "CHANGELOG.md"
    text = changes.read_text().replace(
        "## [Unreleased]", "## [Unreleased]\n\n## [0.1.0]"
    )
    changes.write_text(text)
    return tmp_path


def released(checkout, *arguments):
    return subprocess.run(
        [sys.executable, str(checkout / ".github/release.py"), *arguments],
        capture_output=True,
        text=True,
    )


def test_a_release_has_the_version_of_its_tag_and_absolute_links(checkout):
    done = released(checkout, "v0.1.0", "owner/name")
    assert (done.returncode, done.stdout) == (0, "0.1.0\n"), done.stderr
    assert '__version__ = "0.1.0"' in (checkout / FILES[2]).read_text()
    links = re.findall(r"\]\(([^)]+)\)", (checkout / "README.md").read_text())
    assert len(links) > 10
    assert all(link.startswith("https://") for link in links)
    assert "https://github.com/owner/name/blob/v0.1.0/docs/install.md" in links


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["v0.2.0", "owner/name"], "the version is 0.1.0.dev0, expected 0.2.0.dev0"),
        (["0.1.0", "owner/name"], "expected a tag such as v0.1.0"),
        (["v0.1.0rc1", "owner/name"], "no section [0.1.0rc1]"),
        (["v0.1.0", "name"], "expected OWNER/NAME"),
        (["v0.1.0"], "expected a tag and OWNER/NAME, not ['v0.1.0']"),
    ],
)
def test_a_tag_that_fits_nothing_changes_nothing(checkout, arguments, words):
    before = [(checkout / name).read_bytes() for name in FILES]
    done = released(checkout, *arguments)
    assert done.returncode == 2
    assert words in done.stderr and len(done.stderr.splitlines()) == 1
    assert [(checkout / name).read_bytes() for name in FILES] == before
