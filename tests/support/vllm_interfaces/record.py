"""Record the interface of vLLM's attention backends, release by release, from its wheels.

    python tests/support/vllm_interfaces/record.py             every minor release from 0.25 on
    python tests/support/vllm_interfaces/record.py 0.34.0      that release

Nothing is installed. A wheel is a zip file: the script reads its directory and a few Python files
by HTTP range requests, about 10 MB of 250 to 340 MB, and parses them with `ast`. One JSON file per
release is written beside this script. `tests/integrations/test_vllm_contract.py` compares the
plugin with them.
"""

import ast
import io
import json
import re
import sys
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
INDEX = "https://pypi.org/simple/vllm/"
OLDEST = (0, 25)
CHUNK = 1 << 20

BACKEND = "vllm.v1.attention.backend"
LATENT = "vllm.model_executor.layers.attention.mla_attention"
CONFIG = "vllm.config"
# the classes whose members are recorded, by module; of an enum its members
CLASSES: dict[str, tuple[str, ...]] = {
    BACKEND: (
        "AttentionType",
        "MultipleOf",
        "AttentionBackend",
        "AttentionMetadata",
        "CommonAttentionMetadata",
        "AttentionCGSupport",
        "AttentionMetadataBuilder",
        "AttentionImplBase",
        "AttentionImpl",
        "MLAAttentionImpl",
    ),
    LATENT: (
        "QueryLenSupport",
        "MLACommonBackend",
        "MLACommonDecodeMetadata",
        "MLACommonMetadata",
        "MLACommonMetadataBuilder",
        "MLACommonBaseImpl",
        "MLACommonImpl",
    ),
    "vllm.v1.attention.backends.registry": ("AttentionBackendEnum",),
    "vllm.v1.kv_cache_interface": ("KVCacheLayout",),
    "vllm.platforms.cpu": ("CpuPlatform",),
    f"{CONFIG}.compilation": ("CompilationConfig",),
    f"{CONFIG}.model": ("ModelConfig",),
    f"{CONFIG}.parallel": ("ParallelConfig",),
    f"{CONFIG}.scheduler": ("SchedulerConfig",),
    f"{CONFIG}.speculative": ("SpeculativeConfig",),
    f"{CONFIG}.vllm": ("VllmConfig",),
}
# of these classes and modules, names are enough
NAMES_ALONE = ("vllm.config", "vllm.v1.attention.backends.registry")
# further modules whose public names are recorded
MODULES = (
    "vllm.config",
    "vllm.distributed.parallel_state",
    "vllm.envs",
    "vllm.platforms",
    "vllm.v1.attention.backends.utils",
    "vllm.model_executor.layers.quantization.utils.quant_utils",
)
# the methods whose calls are recorded, and where vLLM calls them
HOOKS = {
    "build_for_cudagraph_capture",
    "build_for_drafting",
    "customize_spec",
    "do_kv_cache_update",
    "forward_mha",
    "forward_mqa",
    "fused_output_quant_supported",
    "get_builder_cls",
    "get_cudagraph_support",
    "get_impl_cls",
    "get_kv_cache_shape",
    "get_kv_cache_stride_order",
    "get_supported_kernel_block_sizes",
    "process_weights_after_loading",
    "supported_kv_cache_layouts",
    "supports_combination",
    "update_block_table",
    "use_cascade_attention",
    "validate_configuration",
}
CALLERS = (
    "vllm/v1/worker/",
    "vllm/v1/attention/selector.py",
    "vllm/v1/attention/backend.py",
    "vllm/v1/spec_decode/",
    "vllm/platforms/",
    "vllm/model_executor/layers/attention/",
)


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


def wheels() -> dict[str, str]:
    """Return the URL of each release's wheel for Linux on x86-64."""
    request = urllib.request.Request(
        INDEX, headers={"Accept": "application/vnd.pypi.simple.v1+json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        files = json.load(answer)["files"]
    found = {}
    for file in files:
        named = re.fullmatch(r"vllm-(\d+\.\d+\.\d+)-.*x86_64\.whl", file["filename"])
        if named and not file.get("yanked"):
            found[named[1]] = file["url"]
    return found


def newest_of_each_minor(versions: list[str]) -> list[str]:
    """Return the newest patch release of each minor release from the oldest supported one on."""
    newest: dict[tuple[int, ...], tuple[int, ...]] = {}
    for version in versions:
        number = tuple(map(int, version.split(".")))
        if number[:2] >= OLDEST:
            newest[number[:2]] = max(number, newest.get(number[:2], number))
    return [".".join(map(str, version)) for version in sorted(newest.values())]


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


def calls(tree: ast.Module) -> dict[str, list[list[Any]]]:
    """Return the forms in which hooks are called: positional arguments and keywords.

    A call with a starred argument is left out: its form is not in the source.
    """
    found: dict[str, set[tuple[int, tuple[str, ...]]]] = {}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(
            isinstance(argument, ast.Starred) for argument in node.args
        ):
            continue
        named = node.func
        name = named.attr if isinstance(named, ast.Attribute) else None
        if isinstance(named, ast.Name) and named.id == "impl_cls":
            name = "impl_cls"
        of_impl = name == "forward" and ast.unparse(named).endswith(".impl.forward")
        if name in HOOKS or name == "impl_cls" or of_impl:
            keywords = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
            found.setdefault(name, set()).add((len(node.args), keywords))
    return {
        name: sorted([n, list(k)] for n, k in found[name]) for name in sorted(found)
    }


def returned(tree: ast.Module, name: str, method: str) -> str | None:
    """Return the source text of the last value that a method of a class returns."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            for statement in node.body:
                if isinstance(statement, ast.FunctionDef) and statement.name == method:
                    last = [
                        x for x in ast.walk(statement) if isinstance(x, ast.Return)
                    ][-1]
                    return last.value and ast.unparse(last.value)
    return None


# --- one release


def record(version: str, wheel: zipfile.ZipFile) -> dict[str, Any]:
    """Return what is recorded of a release."""
    names = set(wheel.namelist())

    def parse(module: str) -> ast.Module:
        path = module.replace(".", "/")
        path = f"{path}/__init__.py" if f"{path}/__init__.py" in names else f"{path}.py"
        return ast.parse(wheel.read(path))

    metadata = wheel.read(f"vllm-{version}.dist-info/METADATA").decode()
    modules: dict[str, Any] = {}
    for module in sorted({*CLASSES, *MODULES}):
        tree = parse(module)
        nodes = {x.name: x for x in tree.body if isinstance(x, ast.ClassDef)}
        described = {
            name: describe_class(nodes[name])
            for name in CLASSES.get(module, ())
            if name in nodes
        }
        if module.startswith(NAMES_ALONE):
            for interface in described.values():
                interface["attributes"] = dict.fromkeys(interface["attributes"])
                interface["methods"] = {
                    name: {"kind": method["kind"], "parameters": []}
                    for name, method in interface["methods"].items()
                }
        modules[module] = {"names": public_names(tree), "classes": described}
    flash = parse("vllm.v1.attention.backends.flash_attn")
    shape = returned(flash, "FlashAttentionBackend", "get_kv_cache_shape")
    plugins = ast.unparse(parse("vllm.plugins"))
    return {
        "vllm": version,
        "torch": re.findall(r"^Requires-Dist: torch==(\S+)$", metadata, re.M)[0],
        "python": re.findall(r"^Requires-Python: (.+)$", metadata, re.M)[0],
        "plugin_group": re.findall(r"DEFAULT_PLUGINS_GROUP = '(.+)'", plugins)[0],
        "flash_attn_cache_shape": shape,
        "modules": modules,
        "calls": dict(caller_calls(wheel)),
    }


def caller_calls(wheel: zipfile.ZipFile) -> Iterator[tuple[str, Any]]:
    """Yield the calls of hooks in each file of vLLM that has some."""
    for name in sorted(wheel.namelist()):
        if name.startswith(CALLERS) and name.endswith(".py"):
            found = calls(ast.parse(wheel.read(name)))
            if found:
                yield name, found


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


def main() -> None:
    """Write a file per release."""
    urls = wheels()
    for version in sys.argv[1:] or newest_of_each_minor(list(urls)):
        if version not in urls:
            raise SystemExit(f"vllm {version}: expected one of {', '.join(urls)}")
        file = RangeFile(urls[version])
        with zipfile.ZipFile(io.BufferedReader(file, 1 << 16)) as wheel:
            facts = record(version, wheel)
        target = HERE / f"{version}.json"
        target.write_text(as_text(facts), encoding="utf-8")
        print(f"{target.name}: read {len(file.chunks)} of {file.size / CHUNK:.0f} MiB")


if __name__ == "__main__":
    main()
