"""Error messages: the names of functions, methods and attributes in them exist."""

import ast
import re
from collections.abc import Iterator

from support.source_tree import modules, tree_of

FOREIGN = {
    "ALL_ATTENTION_FUNCTIONS": "of transformers",
    "GPU": "GPU(s)",
    "cpp_extension": "of torch",
    "kv_cache_layout": "vLLM's setting",
}
NAME = re.compile(r"(?<![\w.\-/])((?:\w+\.)*[a-zA-Z]\w*)(\(?)")


def messages(tree: ast.AST) -> Iterator[str]:
    """Yield the text of every error, with a space in the place of each value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for part in node.exc.args:
                if isinstance(part, ast.JoinedStr):
                    yield "".join(
                        piece.value if isinstance(piece, ast.Constant) else " "
                        for piece in part.values
                    )
                elif isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.value


def names_in(message: str) -> Iterator[str]:
    """Yield what looks like a name: with an underscore, or with a parenthesis after it."""
    for name, call in NAME.findall(message):
        last = name.rpartition(".")[2]
        if call or "_" in last.strip("_"):
            yield last


def names_of(module: str) -> Iterator[str]:
    """Yield a module's name, names that it defines, reads or writes, and strings that are names."""
    yield module.rpartition(".")[2]
    for node in ast.walk(tree_of(module)):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.Attribute(attr=name) | ast.Name(id=name):
                yield name
            case ast.alias(name=name):
                yield name.rpartition(".")[2]
            case ast.Constant(value=str(name)) if name.isidentifier():
                yield name


def test_the_names_in_errors_exist() -> None:
    known = {*FOREIGN}.union(*map(names_of, modules()))
    unknown = {
        (module, name)
        for module in modules()
        for message in messages(tree_of(module))
        for name in names_in(message)
        if name not in known
    }
    assert not unknown


def test_a_name_that_does_not_exist_is_found() -> None:
    source = (
        'raise RuntimeError(f"no request {x}: see has_unfinished_requests, or stop()")'
    )
    (message,) = messages(ast.parse(source))
    assert [*names_in(message)] == ["has_unfinished_requests", "stop"]
