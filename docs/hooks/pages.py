"""Macros of the documentation: examples, pictures, code and tables made from the project's files.

A line `{{ name }}` or `{{ name("argument") }}` of a page is replaced by the Markdown that the
function of that name returns at build time.
"""

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import backend_table
import bench_table
import block_map
import block_size_table
import browser_python
import engine_page
import error_examples
import family_table
import figures
import fit_table
import format_table
import gpu_runs
import ladder_table
import latent_table
import law_table
import model_table
import mutant_table
import operator_table
import option_table
import parallel_model
import serving_table
import side_by_side as twins
import source_files
import verdict_table
import version_table
from bugs.page import bug_index, bug_page
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pagetwin import examples, reference
from pagetwin.contract import operations
from pagetwin.tools import palette
from pagetwin.tools.replay import settings, step

ROOT = Path(__file__).parents[2]
BLOCK_MAP_DATA = "js/block_map_data.js"
PAGE_SCRIPTS = {
    "block_map.md": (BLOCK_MAP_DATA, "js/block_map.js"),
    "ideas/engine.md": (engine_page.ENGINE_DATA, "js/block_map.js"),
    "index.md": ("js/fit.js",),
    "puzzles.md": ("js/puzzles.js",),
}
CALL = re.compile(r'^( *)\{\{ (\w+)(?:\("([^"]*)"\))? \}\}$', re.M)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the palette, and the pictures that are drawn from records of runs."""
    files.append(File.generated(config, "css/palette.css", content=palette.css()))
    for name, content in bench_table.bench_plots().items():
        files.append(File.generated(config, f"pictures/{name}", content=content))
    for name, content in source_files.source_pages().items():
        files.append(File.generated(config, name, content=content))
    recordings = block_map.block_map_data()
    files.append(File.generated(config, BLOCK_MAP_DATA, content=recordings))
    run = engine_page.engine_data()
    files.append(File.generated(config, engine_page.ENGINE_DATA, content=run))
    for name, file in browser_python.python_files().items():
        files.append(File.generated(config, name, content=file))
    return files


def on_page_content(html: str, page: Page, **kwargs: Any) -> str:
    """Load a page's own scripts on it, and on no other; the course's links lead to lines."""
    if page.file.src_uri == "course.md":
        html = source_files.with_lines(html)
    if not page.file.src_uri.startswith("files/"):
        html = source_files.without_line_ids(html)
    names = PAGE_SCRIPTS.get(page.file.src_uri, ())
    up = "../" * page.url.count("/")
    return html + "".join(f'\n<script src="{up}{name}"></script>' for name in names)


COUNTED = ' data-md-component="source"'
"""What lets the theme ask the host of the repository for its stars."""


def on_post_page(output: str, page: Page, **kwargs: Any) -> str:
    """Leave the link to the repository as it is: pages load nothing from the network."""
    return output.replace(COUNTED, "")


def on_post_template(output_content: str, **kwargs: Any) -> str:
    """Do the same for 404.html, which is a template and not a page."""
    return output_content.replace(COUNTED, "")


def on_page_markdown(markdown: str, page: Page, **kwargs: Any) -> str:
    """Replace every macro call in a page. An unknown name ends the build.

    The pages about bugs have no macros; all of their parts are put together here.
    """
    folder, _, name = page.file.src_uri.rpartition("/")
    if folder == "bugs" and name != "index.md":
        return bug_page(name.removesuffix(".md"), block_map.recordings())
    if page.file.src_uri == "course.md":
        markdown = source_files.linked_course(markdown)
    if "{{ code(" in markdown or page.file.src_uri == "block_map.md":
        # two columns of code take the place of the table of contents
        page.meta.setdefault("hide", ["toc"])

    def replaced(found: re.Match[str]) -> str:
        indent, name, argument = found.groups()
        shown = MACROS[name](*([argument] if argument is not None else []))
        # a call in a folded block is indented, and so is its result
        return textwrap.indent(shown, indent)

    if call := re.search(r"^ *\{\{.*", CALL.sub("", markdown), re.M):
        raise ValueError(f"{page.file.src_uri}: {call[0]}: expected a call of a macro")
    return CALL.sub(replaced, markdown)


def picture(name: str) -> str:
    """Return the picture of that name."""
    return figures.figure(name)


def summary(concept: str) -> str:
    """Return the first line of a concept."""
    return f"{operations.concept(concept).summary}\n{{: .summary }}"


def module_words(argument: str) -> str:
    """Return a module's docstring after its first line.

    Args:
        argument: Path of the module, such as "shared/contract/layouts.py".

    Raises:
        FileNotFoundError: The module does not exist.
    """
    path = ROOT / argument
    if not path.exists():
        raise FileNotFoundError(f"module_words({argument!r}): {path} does not exist")
    words = ast.get_docstring(ast.parse(path.read_text())) or ""
    return words.partition("\n\n")[2]


def reference_words(concept: str) -> str:
    """Return the docstring of a concept's reference file after its first line."""
    return _words_of(concept, "reference")


def optimized_words(concept: str) -> str:
    """Return the docstring of a concept's optimized file after its first line."""
    return _words_of(concept, "optimized")


def _words_of(concept: str, twin: str) -> str:
    return module_words(operations.concept(concept).path(twin))


def example(concept: str) -> str:
    """Return the worked examples of a concept: title, call, explanation."""
    parts = []
    for shown in examples.examples_of(concept):
        parts.append(f"### `{shown.operation}`: {_lower(shown.title)}")
        parts.append(f"```pycon\n{shown.code.rstrip()}\n```")
        parts.append("\n".join(_story_step(step) for step in shown.story))
    return "\n\n".join(parts)


def _story_step(step: examples.StoryStep) -> str:
    words = f"*{step.step}:* " if step.step else ""
    return (
        f"1.  {words}{_plain(step.text)}\n\n    `{step.expression}` is `{step.value}`\n"
    )


def _plain(text: str) -> str:
    return text.replace("*", r"\*").replace("_", r"\_")


def _lower(title: str) -> str:
    return title.rstrip(".")


def contract(concept: str) -> str:
    """Return the contract of each operation: the reference's docstrings."""
    topic = operations.concept(concept)
    return "\n\n".join(
        f"::: pagetwin.reference.{topic.module}.{name}\n    options:\n      heading_level: 3\n"
        "      show_docstring_examples: false"
        for name in topic.operations
    )


def code(concept: str) -> str:
    """Return both files of a concept, step by step."""
    return twins.side_by_side(operations.concept(concept))


def concept_table() -> str:
    """Return the concepts in reading order, each with its first line."""
    lines = ["| concept | content | lines |", "|---|---|---:|"]
    for concept in operations.CONCEPTS:
        path = ROOT / concept.path("reference")
        count = len(path.read_text().splitlines())
        lines.append(
            f"| [{concept.name}](concepts/{concept.name}.md) | {concept.summary} | {count} |"
        )
    return "\n".join(lines)


def api_table() -> str:
    """Return the public operations, by subject, each with a link to its contract."""
    parts = []
    for concept in operations.CONCEPTS:
        if not concept.operations:
            continue
        page = f"concepts/{concept.name}.md"
        parts.append(f"## [{concept.summary.partition(':')[0]}]({page})")
        lines = []
        for name in concept.operations:
            words = inspect.getdoc(getattr(reference, name)) or ""
            first = words.partition("\n\n")[0].replace("\n", " ")
            lines.append(
                f"| [`{name}`]({page}#pagetwin.reference.{concept.module}.{name}) | {first} |"
            )
        parts.append("\n".join(["| operation | result |", "|---|---|", *lines]))
    return "\n\n".join(parts)


def feature_table() -> str:
    """Return one row per operation: reference, optimized twin, tests, example, page."""
    tests = {
        path: path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))
    }
    shown = {worked.operation for worked in examples.EXAMPLES}
    lines = [
        "| operation | reference | optimized | tested in | example | page |",
        "|---|---|---|---|---|---|",
    ]
    for concept in operations.CONCEPTS:
        ours, theirs = (
            _public(ROOT / concept.path(twin)) for twin in ("reference", "optimized")
        )
        for name in concept.operations or ("forward",):
            laws = [
                f"`{path.name}`"
                for path, text in tests.items()
                if path.name not in ("test_examples.py", "test_docs.py")
                and re.search(rf"\b{name}\b", text)
            ]
            lines.append(
                f"| `{name}` | {_mark(name in ours)} | {_mark(name in theirs)}"
                f" | {', '.join(laws) or '-'} | {_mark(name in shown)}"
                f" | [{concept.name}](concepts/{concept.name}.md) |"
            )
    return "\n".join(lines)


def _public(path: Path) -> set[str]:
    functions = twins.functions_of(path)
    again = twins.re_exported(path)
    return (
        again
        | {function.name for function in functions}
        | {function.owner for function in functions}
    )


def _mark(there: bool) -> str:
    return "yes" if there else "-"


def shape_table() -> str:
    """Return the shape aliases: name, kind of element, axes."""
    lines = ["| name | elements | axes |", "|---|---|---|"]
    for node in ast.parse((ROOT / "shared/contract/shapes.py").read_text()).body:
        if not isinstance(node, ast.Assign):
            continue
        found = re.fullmatch(r"(\w+) = (\w+)\[Tensor, '(.*)'\]", ast.unparse(node))
        if found is None:
            raise ValueError(
                f"shared/contract/shapes.py: {ast.unparse(node)} is not an alias"
            )
        elements = found[2].lower().replace("float", "any float")
        lines.append(
            f"| `{found[1]}` | {elements} | `[{', '.join(found[3].split())}]` |"
        )
    return "\n".join(lines)


def replay_laws() -> str:
    """Return the laws that the replay checks at every step, as a list."""
    return "\n".join(f"- {law.value.strip(chr(39))}" for law in step.ReplayLaw)


def replay_defaults() -> str:
    """Return the default settings of a replay, per device."""
    names = [field.name for field in fields(settings.ReplaySettings)]
    lines = ["| | CPU | CUDA |", "|---|---|---|"]
    for name in names:
        values = [
            getattr(settings.DEFAULTS[device], name) for device in ("cpu", "cuda")
        ]
        shown = [_setting(value) for value in values]
        lines.append(f"| `{name}` | {shown[0]} | {shown[1]} |")
    return "\n".join(lines)


def _setting(value: object) -> str:
    if value is None:
        share = settings.CACHE_SHARE
        return f"{share:.0%} of the blocks that the trace would use at most"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, float) and 0 < value < 1:
        return f"1/{1 / value:g}"
    return f"{value:,g}" if isinstance(value, (int, float)) else str(value)


MACROS: dict[str, Callable[..., str]] = {
    macro.__name__: macro
    for macro in (
        picture,
        summary,
        module_words,
        reference_words,
        optimized_words,
        example,
        contract,
        code,
        concept_table,
        api_table,
        feature_table,
        shape_table,
        replay_laws,
        replay_defaults,
        gpu_runs.gpu_records,
        gpu_runs.latest_gpu_runs,
        backend_table.backend_differences,
        backend_table.backend_table,
        backend_table.latent_backend_table,
        bench_table.bench_table,
        bench_table.bench_plot,
        bench_table.bench_kinds,
        bench_table.bench_workloads,
        bench_table.bench_extended,
        bench_table.bench_extended_workloads,
        bench_table.bench_published,
        format_table.cache_format_table,
        format_table.format_figure,
        format_table.format_peers_table,
        format_table.format_times_table,
        law_table.law_table,
        mutant_table.mutant_table,
        ladder_table.ladder_run,
        ladder_table.ladder_table,
        ladder_table.ladder_tried,
        ladder_table.ladder_resources,
        ladder_table.ladder_rung,
        latent_table.latent_paths_table,
        law_table.adapter,
        law_table.definition_table,
        law_table.solution,
        law_table.count_of,
        engine_page.engine_code,
        engine_page.engine_run,
        family_table.family_table,
        family_table.real_weights_table,
        error_examples.error_examples,
        fit_table.fit_table,
        model_table.model_sizes,
        option_table.option_arguments,
        option_table.option_runs,
        option_table.option_table,
        option_table.option_pairs,
        operator_table.operator_table,
        block_size_table.block_size_table,
        browser_python.puzzle_editor,
        bug_index,
        parallel_model.parallel_collectives,
        parallel_model.parallel_decodes,
        parallel_model.parallel_limits,
        parallel_model.parallel_model,
        parallel_model.parallel_times,
        parallel_model.parallel_times_4,
        serving_table.clean_runs,
        serving_table.cpu_versions_table,
        serving_table.equality_table,
        serving_table.latency_table,
        serving_table.planted_table,
        serving_table.ranks_table,
        serving_table.recorded_table,
        serving_table.serving_table,
        verdict_table.verdict_details,
        verdict_table.verdict_table,
        version_table.version_table,
    )
}
