"""``__all__`` names what a module defines for others, all of it and nothing else."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = [
    path
    for package in (
        ROOT / "capture" / "hashtap",
        ROOT / "capture" / "hashtap" / "bench",
        ROOT / "capture" / "hashtap" / "trainers",
        ROOT / "kernels" / "hashtap_kernels",
    )
    for path in sorted(package.glob("*.py"))
    if path.stem not in ("__init__", "__main__")
]


def defined(tree: ast.Module) -> set[str]:
    """Public names of functions and classes that a module defines at its top."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return {node.name for node in tree.body if isinstance(node, kinds) and not node.name.startswith("_")}


def exported(tree: ast.Module) -> list[str]:
    """The names that a module lists in ``__all__``."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and [getattr(target, "id", "") for target in node.targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    raise AssertionError("no __all__")


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}.{path.stem}")
def test_all_is_complete(path: Path) -> None:
    tree = ast.parse(path.read_text())
    names = exported(tree)
    assert len(names) == len(set(names))
    bound = {name.id for node in ast.walk(tree) for name in ast.walk(node) if isinstance(name, ast.Name)}
    assert defined(tree) <= set(names), "public, but not in __all__"
    assert set(names) <= bound | defined(tree), "in __all__, but not defined"
