"""Reads wheels without installing them, and describes their modules, classes and calls as data."""

import ast
import io
import json
import re
import urllib.request
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

CHUNK = 1 << 20


class RangeFile(io.RawIOBase):
    """A file on a server that is read by range requests, one per MiB and only once."""

    def __init__(self, url: str) -> None:
        self.url, self.at, self.chunks = url, 0, {}
        self.size = int(self._request(0, 0)[1].split("/")[1])

    def _request(self, first: int, last: int) -> tuple[bytes, str]:
        request = urllib.request.Request(
            self.url, headers={"Range": f"bytes={first}-{last}"}
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            if answer.status != 206:
                raise OSError(f"{self.url}: the server does not answer range requests")
            return answer.read(), answer.headers["Content-Range"]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = 0) -> int:
        self.at = offset + (0, self.at, self.size)[whence]
        return self.at

    def readinto(self, buffer: Any) -> int:
        if self.at >= self.size:
            return 0
        number, offset = divmod(self.at, CHUNK)
        if number not in self.chunks:
            first = number * CHUNK
            last = min(self.size, first + CHUNK) - 1
            self.chunks[number] = self._request(first, last)[0]
        found = self.chunks[number][offset : offset + len(buffer)]
        buffer[: len(found)] = found
        self.at += len(found)
        return len(found)


def wheels(package: str) -> dict[str, str]:
    """Return the URL of each release's wheel for Linux on x86-64."""
    request = urllib.request.Request(
        f"https://pypi.org/simple/{package}/",
        headers={"Accept": "application/vnd.pypi.simple.v1+json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        files = json.load(answer)["files"]
    found = {}
    for file in files:
        named = re.fullmatch(
            rf"{package}-(\d+\.\d+\.\d+)-.*x86_64\.whl", file["filename"]
        )
        if named and not file.get("yanked"):
            found[named[1]] = file["url"]
    return found


def write_records(
    package: str,
    folder: Path,
    given: Sequence[str],
    choose: Callable[[list[str]], list[str]],
    record: Callable[[str, zipfile.ZipFile], dict[str, Any]],
) -> None:
    """Write a file per release.

    Args:
        package: name of the package.
        folder: where the files are written.
        given: versions, or paths of wheels. If empty, `choose` chooses among all versions.
        choose: from all versions, those that are recorded.
        record: from a version and its wheel, what is recorded.
    """
    paths = {Path(text).name.split("-")[1]: text for text in given if ".whl" in text}
    urls = {} if paths and len(paths) == len(given) else wheels(package)
    for version in paths or given or choose(list(urls)):
        if version in paths:
            with zipfile.ZipFile(paths[version]) as wheel:
                facts = record(version, wheel)
            said = "read"
        elif version in urls:
            file = RangeFile(urls[version])
            with zipfile.ZipFile(io.BufferedReader(file, 1 << 16)) as wheel:
                facts = record(version, wheel)
            said = f"read {len(file.chunks)} of {file.size / CHUNK:.0f} MiB"
        else:
            raise SystemExit(f"{package} {version}: expected one of {', '.join(urls)}")
        target = folder / f"{version}.json"
        target.write_text(as_text(facts), encoding="utf-8")
        print(f"{target.name}: {said}")


def parse(wheel: zipfile.ZipFile, module: str) -> ast.Module:
    """Return the syntax tree of a module of a wheel."""
    path = module.replace(".", "/")
    if f"{path}/__init__.py" in wheel.NameToInfo:
        path = f"{path}/__init__"
    return ast.parse(wheel.read(f"{path}.py"))


def requirement(wheel: zipfile.ZipFile, pattern: str) -> str:
    """Return what a pattern finds first in the metadata of a wheel."""
    (name,) = (x for x in wheel.namelist() if x.endswith(".dist-info/METADATA"))
    return re.findall(pattern, wheel.read(name).decode(), re.M)[0]


# --- what is recorded of a module


def parameters(node: ast.FunctionDef) -> list[list[Any]]:
    """Return name, kind and default (source text or None) of each parameter."""
    args = node.args
    plain = [*args.posonlyargs, *args.args]
    defaults = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    found = [
        [argument.arg, "plain", default and ast.unparse(default)]
        for argument, default in zip(plain, defaults, strict=True)
    ]
    if args.vararg:
        found.append([args.vararg.arg, "args", None])
    for argument, default in zip(args.kwonlyargs, args.kw_defaults, strict=True):
        found.append([argument.arg, "keyword", default and ast.unparse(default)])
    if args.kwarg:
        found.append([args.kwarg.arg, "kwargs", None])
    return found


def describe_method(node: ast.FunctionDef) -> dict[str, Any]:
    """Return kind and parameters of a method."""
    marks = {ast.unparse(decorator).split("(")[0] for decorator in node.decorator_list}
    kinds = {"staticmethod": "static", "classmethod": "class", "property": "property"}
    kind = next((kinds[mark] for mark in sorted(marks) if mark in kinds), "instance")
    found: dict[str, Any] = {"kind": kind, "parameters": parameters(node)}
    if "abstractmethod" in marks:
        found["abstract"] = True
    return found


def describe_class(node: ast.ClassDef) -> dict[str, Any]:
    """Return bases, attributes (with the source text of their values) and methods of a class."""
    attributes: dict[str, Any] = {}
    methods: dict[str, Any] = {}
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(
            statement.target, ast.Name
        ):
            attributes[statement.target.id] = statement.value and ast.unparse(
                statement.value
            )
        elif isinstance(statement, ast.Assign) and isinstance(
            statement.targets[0], ast.Name
        ):
            attributes[statement.targets[0].id] = ast.unparse(statement.value)
        elif isinstance(statement, ast.FunctionDef):
            methods[statement.name] = describe_method(statement)
    marks = [ast.unparse(decorator).split("(")[0] for decorator in node.decorator_list]
    return {
        "bases": [ast.unparse(base).split("[")[0] for base in node.bases],
        "is_dataclass": "dataclass" in marks,
        "attributes": attributes,
        "methods": methods,
    }


def public_names(tree: ast.Module) -> list[str]:
    """Return the names that a module defines or imports at its top level."""
    names: set[str] = set()
    for statement in tree.body:
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
            names.add(statement.name)
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            names |= {alias.asname or alias.name for alias in statement.names}
        elif isinstance(statement, ast.Assign):
            names |= {x.id for x in statement.targets if isinstance(x, ast.Name)}
        elif isinstance(statement, ast.AnnAssign) and isinstance(
            statement.target, ast.Name
        ):
            names.add(statement.target.id)
        elif isinstance(statement, ast.If):
            # names under TYPE_CHECKING, such as the variables of vllm.envs
            names |= set(public_names(ast.Module(body=statement.body, type_ignores=[])))
    return sorted(names)


def as_text(facts: dict[str, Any]) -> str:
    """Return JSON with a line per class, module and caller, so that a diff shows what changed."""
    lines: list[str] = []

    def add(value: Any, depth: int, head: str, tail: str) -> None:
        if depth < 5 and isinstance(value, dict) and value:
            lines.append(head + "{")
            for number, (name, inner) in enumerate(value.items(), 1):
                comma = "," if number < len(value) else ""
                add(
                    inner, depth + 1, " " * (depth + 1) + json.dumps(name) + ": ", comma
                )
            lines.append(" " * depth + "}" + tail)
        else:
            lines.append(head + json.dumps(value) + tail)

    add(facts, 0, "", "")
    return "\n".join(lines) + "\n"
