"""Triton's interpreter with less repeated preparation.

The interpreter replaces the builtins of `triton.language` at every launch, and again at every call
of one jit function by another. It lists all members of modules and classes to find them, which took
a third of the time of the laws on the kernels. The list does not change, so it is made once.
"""

from typing import Any

from triton.runtime import interpreter


def list_builtins_once() -> None:
    """Let the interpreter list the builtins of each module and class once per process."""
    if not hasattr(interpreter, "_LangPatchScope"):
        return  # another version of Triton, which may replace them in another way
    replace_builtins = interpreter._patch_builtin
    replacements: dict[Any, list[tuple[str, Any]]] = {}

    def replace(package: Any, builder: Any, scope: Any) -> None:
        if package not in replacements:
            earlier = len(scope._changes)
            replace_builtins(package, builder, scope)
            names = [name for _, name, _ in scope._changes[earlier:]]
            replacements[package] = [(name, getattr(package, name)) for name in names]
        # they are replaced and restored together, so the first one tells about all
        elif any(
            getattr(package, name) is not each
            for name, each in replacements[package][:1]
        ):
            for name, each in replacements[package]:
                scope.set_attr(package, name, each)

    interpreter._patch_builtin = replace
