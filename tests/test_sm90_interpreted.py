"""The kernels for Hopper, run on the CPU role by role (gluon_interpreter).

A GPU shows whether results are right; these tests also fail where a kernel is right by luck: shared
memory that is read before it is waited for, or overwritten while a product or copy reads it. They
do not replace the tests on a GPU: registers, layouts and the compiler are not interpreted.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import TWINS, Twin
from gluon_interpreter import interpret_gluon
from hopper import CASES, check, launch, make_batch, pretend_hopper
from pagetwin.conformance.oracles.dense import same_bits

@pytest.mark.parametrize("name", CASES)
def test_every_row_is_within_its_error_budget(
    name: str, reference: Twin, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pretend_hopper(monkeypatch):
        check(CASES[name], reference)
