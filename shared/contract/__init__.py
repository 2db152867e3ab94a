"""The contract of both twins: operations, shapes, kinds, specs, metadata classes, budgets."""

import sys

_package = sys.modules[__name__.partition(".")[0]]
# both twins import the contract, so no operation of such a mixture can be used
if _package.__name__ == "pagetwin" and _package.__file__ is None:
    raise ImportError(
        f"{_package.__name__} was found as a folder in {[*_package.__path__]}, and not as the"
        " installed package: a checkout of that name next to the script, or in the current"
        " folder, comes first. Start Python in another folder, or move the script"
    )
