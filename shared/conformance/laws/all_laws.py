"""All laws: every file of this folder is imported, in the order of its name."""

import importlib
import pkgutil

from .. import laws
from ..harness.law import LAWS

for _file in sorted(each.name for each in pkgutil.iter_modules(laws.__path__)):
    if _file != "all_laws":
        importlib.import_module(f"{laws.__name__}.{_file}")

ALL_LAWS = tuple(LAWS)
