"""All laws: every file of this folder and of `v0` is imported, in the order of its name."""

import importlib
import pkgutil

from .. import laws
from . import v0
from .law import LAWS

_FILES = [
    (module.name, package.__name__)
    for package in (laws, v0)
    for module in pkgutil.iter_modules(package.__path__)
    if not module.ispkg and module.name != "all_laws"
]
for _file, _package in sorted(_FILES):
    importlib.import_module(f"{_package}.{_file}")

ALL_LAWS = tuple(LAWS)
