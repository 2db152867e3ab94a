"""Options of attention: what is declared, validated and drawn for each.

Every file of this folder is one option and has its name. It defines `OPTION`.
"""

from ...contract.option_files import import_option_files
from ..option import Option

OPTIONS: dict[str, Option] = {
    name: file.OPTION for name, file in import_option_files(__name__, __path__).items()
}
"""Options by name, in the order of `AttentionOptions`, in which they are validated and drawn."""
