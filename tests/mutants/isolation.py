"""Settings of a process that tries mutants; torch and triton read them when they are imported."""

import os


def isolate() -> None:
    """Choose the interpreter, no GPU and one thread, for this process and those it starts."""
    # a mutant writes where it likes, and must not do so on a GPU
    os.environ["TRITON_INTERPRET"] = "1"
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    # a changed twin is a twin, which may call the reference
    os.environ["PAGETWIN_GUARD_CALLS"] = "0"
    # a process is forked for each mutant, and threads do not survive that
    for library in ("OMP", "OPENBLAS", "MKL"):
        os.environ[f"{library}_NUM_THREADS"] = "1"
