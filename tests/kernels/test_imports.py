"""Reading needs NumPy only; the reference needs torch; only the kernel needs triton."""

import subprocess
import sys

import pytest

import hashtap_kernels


def loaded_by(statement: str) -> set[str]:
    code = f"{statement}\nimport sys; print(*({{'torch', 'triton', 'hashtap'}} & set(sys.modules)))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(
    "module", ["hashtap_kernels", *(f"hashtap_kernels.{m}" for m in ("layout", "plan", "proof", "planes"))]
)
def test_pure_modules_load_neither_torch_nor_triton(module: str) -> None:
    assert loaded_by(f"import {module}") == set()


def test_the_reference_loads_no_triton() -> None:
    assert loaded_by("from hashtap_kernels import gather_reference") == {"torch"}


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'scatter'"):
        hashtap_kernels.scatter  # noqa: B018
