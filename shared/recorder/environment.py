"""The recorder that the environment asks for."""

from .recorder import Recorder
from .reports import LOGGER
from .settings import settings_from_environment


def recorder_from_environment(
    implementation: str = "", fp8_steps: int = 0
) -> Recorder | None:
    """Return a recorder if PAGETWIN_RECORD is set, otherwise None.

    If the settings are wrong or the folder cannot be used, one sentence is logged and None is
    returned, so the engine runs without a recorder.

    Args:
        implementation, fp8_steps: as in `Recorder`.
    """
    try:
        settings = settings_from_environment()
        if settings is None:
            return None
        return Recorder(settings, implementation, fp8_steps)
    except (OSError, ValueError) as error:
        LOGGER.error("flight recorder: nothing is recorded: %s", error)
        return None
