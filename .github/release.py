"""Prepares a checkout for a release: the version of its tag, and links that work on any page.

    python .github/release.py v0.1.0 OWNER/NAME

The tag has to be the version of `shared/package/__init__.py` without `.dev0`, or a pre-release of
it such as v0.1.0rc1, and CHANGELOG.md needs a section of that version. Relative links of README.md
then point to the tag on GitHub, because a package index shows README.md without the other files.
Nothing is written if something is wrong.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
TAG = re.compile(r"v((\d+\.\d+\.\d+)(?:(?:a|b|rc)\d+)?)")
LINK = re.compile(r"(!?)(\[[^\]]*\])\((?!https?:|#)([^)\s]+)\)")


def absolute_links(text: str, repository: str, tag: str) -> str:
    """Return Markdown whose relative links and pictures are those of a tag on GitHub."""

    def address(found: re.Match[str]) -> str:
        picture, words, path = found.groups()
        if picture:
            start = f"https://raw.githubusercontent.com/{repository}/{tag}"
        else:
            start = f"https://github.com/{repository}/blob/{tag}"
        return f"{picture}{words}({start}/{path})"

    return LINK.sub(address, text)


def prepare(root: Path, tag: str, repository: str) -> str:
    """Write the version and the links of a release, and return the version.

    Args:
        root: The checkout.
        tag: Such as v0.1.0.
        repository: OWNER/NAME on GitHub.

    Raises:
        ValueError: The tag is none of the version, or something is missing. Nothing is written.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise ValueError(f"{repository!r}: expected OWNER/NAME")
    named = TAG.fullmatch(tag)
    if named is None:
        raise ValueError(f"{tag!r}: expected a tag such as v0.1.0 or v0.1.0rc1")
    version, base = named.groups()
    package = root / "shared/package/__init__.py"
    source = package.read_text(encoding="utf-8")
    present = VERSION.search(source)
    if present is None or present[1] != f"{base}.dev0":
        found = None if present is None else present[1]
        raise ValueError(f"{tag}: the version is {found}, expected {base}.dev0")
    changes = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    if f"## [{version}]" not in changes:
        raise ValueError(f"{tag}: CHANGELOG.md has no section [{version}]")
    readme = root / "README.md"
    text = readme.read_text(encoding="utf-8")
    for path in (found[3] for found in LINK.finditer(text)):
        if not (root / path.partition("#")[0]).exists():
            raise ValueError(f"README.md links to {path}, which does not exist")
    package.write_text(VERSION.sub(f'__version__ = "{version}"', source), "utf-8")
    readme.write_text(absolute_links(text, repository, tag), "utf-8")
    return version


def main(arguments: list[str]) -> int:
    """Prepare the checkout, and return the exit code: 2 with one sentence if it cannot be done."""
    try:
        if len(arguments) != 2:
            raise ValueError(f"expected a tag and OWNER/NAME, not {arguments}")
        tag, repository = arguments
        print(prepare(ROOT, tag, repository))
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
