"""The kernels run in Triton's interpreter here, on CPU tensors.

Triton chooses it when a kernel is defined, so the choice must stand at its first import; around that, and while these
tests run, the environment says so, and nowhere else.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

if "triton" in sys.modules:
    raise RuntimeError("triton was imported before tests/kernels: its interpreter can no longer be chosen")
with pytest.MonkeyPatch.context() as environment:
    environment.setenv("TRITON_INTERPRET", "1")
    import hashtap_kernels.gather
    import hashtap_kernels.restore  # noqa: F401


@pytest.fixture(autouse=True, scope="module")
def _interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        yield
