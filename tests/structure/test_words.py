"""Word list: phrases that readers of the field would have to translate, and their allowed counts.

The allowance in `words_allowed.json` may only shrink. After removing such words, lower it:

    PYTHONPATH=tests python tests/structure/test_words.py
"""

import ast
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).parents[2]
ALLOWANCE = Path(__file__).with_name("words_allowed.json")
FOLDERS = ("reference", "optimized", "shared", "tests", "docs")
PAGES = ("README.md", "CONTRIBUTING.md")

WORDS = {
    r"\b(?:lie|lies|lay|stand|stands|stood) (?:in|on|at|behind|there|beside|between)\b": (
        "is stored at, is at, comes after"
    ),
    r"\bbehind\b": "after, past the end of, before",
    r"\b(?:is|are|was|were) no [a-z]": "is not",
    r"; None:": "Optional. If None, ...",
    r"\b(?:nobody|whoever|somebody)\b": "name what acts, or use the passive",
    r"\bquestions?\b": "q, q_tile, query",
    r"\bfades?\b": "alpha, rescale",
    r"\b(?:in|any|whose|its|claimed) company\b": "batch-invariant",
    r"\brefus(?:e|es|ed|ing|al|als)\b": "raise, reject, validate",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\b(?:sees|sight|sights)\b": "attends to, visible range, masked",
    r"\b(?:hear|hears|heard)\b": "receives, waits for",
    r"\b(?:starts? offsets?|offsets(?:,| and) lengths|offsets of (?:each|the) (?:quer|req))": (
        "starts: an offset is the index of a slot in its block"
    ),
}
"""Pattern, and what to write instead."""
ANY_WORDS = re.compile("|".join(f"(?:{pattern})" for pattern in WORDS), re.I)


def matches(text: str) -> Iterator[tuple[int, str, str]]:
    """Yield line, words found and words to write instead."""
    if not ANY_WORDS.search(text.replace("_", " ")):
        return
    for number, line in enumerate(text.splitlines(), 1):
        # names of functions are sentences too
        words = line.replace("_", " ")
        if not ANY_WORDS.search(words):
            continue
        for pattern, instead in WORDS.items():
            for found in re.finditer(pattern, words, re.I):
                yield number, found.group(), instead


def counts() -> Counter[str]:
    """Return the number of matches in each file that has any."""
    files = [
        path
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in (".py", ".md") and path != Path(__file__)
    ]
    files += [ROOT / page for page in PAGES]
    found = Counter(
        {
            path.relative_to(ROOT).as_posix(): sum(
                1 for _ in matches(path.read_text(encoding="utf-8"))
            )
            for path in files
        }
    )
    return +found


def test_no_file_has_more_of_these_words_than_it_may() -> None:
    allowed = Counter(json.loads(ALLOWANCE.read_text(encoding="utf-8")))
    today = counts()
    lines = []
    for file, extra in (today - allowed).items():
        lines.append(f"{file}: {today[file]}, allowed {allowed[file]}, so {extra} more")
        text = (ROOT / file).read_text(encoding="utf-8")
        lines += [f"  {line}: {found!r}: {to}" for line, found, to in matches(text)]
    left = f"{today.total()} left in {len(today)} files"
    assert not lines, "\n".join([left, *lines])


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("what lies in a slot", 1),
        ("512 is no multiple of 24", 1),
        ("dtype: of the cache; None: the inputs' own", 1),
        ("def a_query_sees_what_nobody_owns():", 2),
        ("Optional. If None, all keys are visible.", 0),
        ("understand the layout behindhand", 0),
        ("[reqs + 1] offsets of each request's queries, with start offsets", 2),
        ("offset 2 of block 5, offsets within a block", 0),
    ],
)
def test_the_patterns_find_what_they_are_for(text: str, count: int) -> None:
    assert len(list(matches(text))) == count


# folders whose variables are still to be named
UNNAMED = ("tests/conformance/",)


def variables_called_each(text: str) -> list[int]:
    """Return the lines of a file on which a variable or an argument is called `each`."""
    # most files have the word in sentences alone, and are not parsed
    if not re.search(r"(?:\b(?:for|as|lambda) |[(,*] *|^ *)each\b", text, re.M):
        return []
    return [
        node.lineno
        for node in ast.walk(ast.parse(text))
        if (isinstance(node, ast.Name) and node.id == "each")
        or (isinstance(node, ast.arg) and node.arg == "each")
    ]


def test_a_variable_says_what_it_holds() -> None:
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(UNNAMED):
                lines = variables_called_each(path.read_text(encoding="utf-8"))
                assert not lines, f"{name}: `each` in lines {lines}"


@pytest.mark.parametrize(
    "text", ["for each in a: pass", "[each for each in a]", "lambda each: 1"]
)
def test_a_variable_called_each_is_found(text: str) -> None:
    assert variables_called_each(text)


def main() -> None:
    """Lower the allowance to what is left."""
    today = counts()
    if ALLOWANCE.exists():
        today &= Counter(json.loads(ALLOWANCE.read_text(encoding="utf-8")))
    ALLOWANCE.write_text(json.dumps(dict(sorted(today.items())), indent=1) + "\n")
    print(f"{today.total()} in {len(today)} files")


if __name__ == "__main__":
    main()
