"""Flight recorder: checks the bookkeeping and the results of a running engine.

At each step the recorder checks the step's metadata by laws. In sampled steps it also compares the
cache with what was written to it, and recomputes some rows of attention with the reference. The
first disagreement of each law is described in one sentence and stored as a file, which
`pagetwin reproduce FILE` checks again without the engine.

    PAGETWIN_RECORD=/var/tmp/pagetwin python my_engine.py
"""

from .environment import recorder_from_environment as recorder_from_environment
from .findings import Corruption as Corruption
from .findings import CorruptionFound as CorruptionFound
from .recorder import Recorder as Recorder
from .settings import RecorderSettings as RecorderSettings
from .wrappers.backend import record_backend as record_backend
from .wrappers.operations import RecordedOperations as RecordedOperations
