"""Triton's interpreter with less repeated work per operation.

The interpreter replaces the builtins of `triton.language` at every launch and at every call of one
jit function by another, makes a type object for every result, and computes every product and sum of
integers a second time, as tensors of its own, to find overflows. On small tensors this takes more
than half of the time. Here builtins are replaced once per launch, types are kept, and overflows are
found by one operation of numpy. What a kernel computes, and which errors it raises, stays the same.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.language import core, semantic
from triton.runtime import interpreter

NEEDED = (
    (interpreter, "_patch_lang"),
    (interpreter, "_patch_builtin"),
    (interpreter, "_get_np_dtype"),
    (interpreter, "_LangPatchScope"),
    (semantic.TritonSemantic, "binary_op_sanitize_overflow_impl"),
)
"""Private names of Triton that are replaced or used. Another version may lack them."""
OPERATIONS = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def speed_up() -> bool:
    """Replace the slow parts of the interpreter in this process, once.

    Returns:
        False if kernels are compiled, or if this version of Triton has other parts; nothing is
        replaced then.
    """
    if not triton.knobs.runtime.interpret:
        return False
    if not all(hasattr(owner, name) for owner, name in NEEDED):
        return False
    if not hasattr(interpreter._patch_lang, "replaced"):
        _replace_builtins_once()
        _keep_dtypes()
        _keep_types()
        semantic.TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
    return True


def _check_overflow(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
    """Raise if the result of an operation on integers does not fit their type."""
    kind = lhs.type.scalar
    if kind.int_bitwidth >= 64 or not self.builder.options.sanitize_overflow:
        return
    name = binary_op.__name__
    found = OPERATIONS[name](lhs.handle.data, rhs.handle.data, dtype=np.int64)
    fits = not found.size or (
        found.min() >= kind.get_int_min_value()
        and found.max() <= kind.get_int_max_value()
    )
    assert fits, f"int{kind.int_bitwidth} overflow detected for operation {name}"


class _Nothing:
    """The scope of a call inside of a launch: nothing has to be restored."""

    def restore(self) -> None:
        """Do nothing."""


def _replace_builtins_once() -> None:
    """Replace the builtins when a launch begins, and list those of each module once."""
    patch_lang, patch_builtin = interpreter._patch_lang, interpreter._patch_builtin
    members: dict[Any, list[tuple[str, Any]]] = {}
    both = SimpleNamespace(__globals__={"tl": tl, "core": core})
    is_launched = False

    def replace_builtin(package: Any, builder: Any, scope: Any) -> None:
        if package not in members:
            earlier = len(scope._changes)
            patch_builtin(package, builder, scope)
            names = [name for _, name, _ in scope._changes[earlier:]]
            members[package] = [(name, getattr(package, name)) for name in names]
            return
        for name, member in members[package]:
            scope.set_attr(package, name, member)

    def replace(function: Any) -> Any:
        nonlocal is_launched
        if is_launched:
            return _Nothing()
        scope = patch_lang(both)
        restore, is_launched = scope.restore, True

        def restored() -> None:
            nonlocal is_launched
            restore()
            is_launched = False

        scope.restore = restored
        return scope

    replace.replaced = True  # type: ignore[attr-defined]
    interpreter._patch_builtin = replace_builtin
    interpreter._patch_lang = replace


def _keep_dtypes() -> None:
    """Keep the numpy dtype of each type."""
    find = interpreter._get_np_dtype
    kept: dict[str, np.dtype[Any]] = {}

    def find_once(kind: Any) -> np.dtype[Any]:
        element = kind.element_ty if isinstance(kind, tl.block_type) else kind
        if isinstance(element, tl.pointer_type):
            return np.dtype(np.uint64)
        if element.name not in kept:
            kept[element.name] = find(element)
        return kept[element.name]

    interpreter._get_np_dtype = find_once


def _keep_types() -> None:
    """Keep the attributes of block types, and the shapes of tensors."""
    make_block = core.block_type.__init__
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def make_block_once(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(
            size.value if isinstance(size, core.constexpr) else size for size in shape
        )
        key = (id(element_ty), sizes)
        known = blocks.get(key)
        if known is None or known["element_ty"] is not element_ty:
            make_block(self, element_ty, shape)
            blocks[key] = dict(self.__dict__)
        else:
            self.__dict__.update(known)

    def make_tensor(self: Any, handle: Any, type: Any) -> None:
        self.handle, self.type, self.dtype = handle, type, type.scalar
        sizes = tuple(type.shape) if type.is_block() else ()
        known = shapes.get(sizes)
        if known is None:
            numbers = [core.constexpr(size) for size in sizes]
            count = core.constexpr(int(np.prod(sizes, dtype=np.int64)))
            known = shapes[sizes] = (count, core.tuple(numbers))
        self.numel, self.shape = known

    core.block_type.__init__ = make_block_once
    core.tensor.__init__ = make_tensor
