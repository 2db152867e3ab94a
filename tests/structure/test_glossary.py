"""The glossary: what it explains, and that nothing in it is of no use."""

import dataclasses
import re
from pathlib import Path

from pagetwin.contract.attention_options import AttentionOptions
from pagetwin.contract.layouts import KVCacheLayout
from support.source_tree import modules

DOCS = Path(__file__).parents[2] / "docs"
GLOSSARY = (DOCS / "glossary.md").read_text(encoding="utf-8")
TERMS = re.findall(r"^\*\*(.+?) - ", GLOSSARY, re.M)


def test_the_glossary_explains_every_option_of_attention() -> None:
    glossary = GLOSSARY.replace("-", " ").replace("_", " ").lower()
    options = [
        field.name.replace("_", " ") for field in dataclasses.fields(AttentionOptions)
    ]
    assert not [name for name in options if name not in glossary]


def test_the_glossary_explains_abbreviations_of_the_pages() -> None:
    """Those of attention and GPUs; names of chips, conferences and units are not explained."""
    other = {
        "AMD",
        "BART",
        "CI",
        "CPU",
        "EMNLP",
        "EPYC",
        "FMA",
        "GB",
        "KB",
        "MB",
        "NCCL",
    }
    other |= {"OSDI", "PTX", "SOSP", "TFLOP", "TRITON", "XFORMERS"}
    other |= {layout.name for layout in KVCacheLayout}
    unknown = set()
    for folder in ("concepts", "ideas", "ladder", "howto"):
        for path in (DOCS / folder).glob("*.md"):
            text = re.sub(
                r"```.*?```|`[^`]*`|\{\{.*?\}\}|\]\([^)]*\)",
                "",
                path.read_text(),
                flags=re.S,
            )
            unknown |= {
                (word, path.name)
                for word in re.findall(r"(?<![\w-])[A-Z]{2,}\b(?![-/])", text)
                if word not in other and not re.search(rf"\b{word}\b", GLOSSARY)
            }
    assert not unknown


def names_of(term: str) -> set[str]:
    """Return the names of an entry: that before a bracket, and those in it."""
    return {name for name in re.split(r"\*\*|[(),`]", term) if name.strip()}


def test_every_term_of_the_glossary_is_used_elsewhere() -> None:
    files = [path for path in DOCS.rglob("*.md") if path.name != "glossary.md"]
    words = "\n".join(
        path.read_text() for path in [*files, *modules().values()]
    ).lower()
    for term in TERMS:
        assert any(name.strip().lower() in words for name in names_of(term)), term


def test_no_term_of_the_glossary_is_explained_twice_and_each_that_it_refers_to_is() -> (
    None
):
    assert len(set(TERMS)) == len(TERMS)
    names = {name.strip() for term in TERMS for name in names_of(term)}
    assert {*re.findall(r"\bsee \*(.+?)\*", GLOSSARY)} <= names
