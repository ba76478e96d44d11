"""Which SGLang is installed, and whether it has what hashtap relies on.

The tables of :mod:`hashtap.targets` are compared with the *sources* of an SGLang, without importing it, so that a
renamed function or field is found before a model is loaded, and by a test.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import TypeGuard

from hashtap.errors import SetupError
from hashtap.logs import log
from hashtap.targets import SINCE, TARGETS, TESTED_VERSIONS, Hook

__all__ = [
    "Signatures",
    "check_sglang",
    "classes_with_setter",
    "installed_sglang",
    "lacking",
    "predates",
    "read_signatures",
]

SETTER = "set_eagle3_layers_to_capture"

Signatures = Mapping[str, list[str] | None]
"""Of each target, by its dotted path: a function's parameters, or those of the names asked for that a class or module
has. None where there is no such function or class."""


def installed_sglang() -> tuple[str, Path]:
    """Version and source folder of the installed SGLang, without importing it.

    Raises:
        SetupError: when it is not installed.
    """
    spec = find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise SetupError("SGLang is not installed in this environment: hashtap captures from a running SGLang")
    try:
        found = version("sglang")
    except PackageNotFoundError:
        found = "unknown"
    return found, Path(spec.submodule_search_locations[0])


def check_sglang(found: str, root: Path) -> None:
    """Refuse an SGLang that lacks one of hashtap's targets, and warn of one that was never tested.

    Args:
        found: its version.
        root: the folder of the package ``sglang``.

    Raises:
        SetupError: naming version and targets.
    """
    tested = ", ".join(TESTED_VERSIONS)
    if missing := lacking(found, read_signatures(root)):
        raise SetupError(
            f"SGLang {found} lacks {', '.join(missing)}, which hashtap needs: install one of SGLang {tested}, or a "
            f"hashtap that knows {found}"
        )
    if found not in TESTED_VERSIONS:
        log.warning(
            "SGLang %s was never tested with this hashtap, which knows %s. All that hashtap hooks and reads is there, "
            "so it goes on: run `hashtap verify` on what it captures",
            found,
            tested,
        )


def lacking(found: str, signatures: Signatures) -> list[str]:
    """The targets that SGLang ``found`` should have and lacks, as dotted paths, parameters in parentheses.

    Args:
        found: its version; one that is not known must have all.
        signatures: what it has.
    """
    missing: list[str] = []
    for target in TARGETS:
        there = signatures[target.path]
        missing += [target.path] if there is None else target.missing_in(there)
    return [path for path in missing if path not in SINCE or not predates(found, SINCE[path])]


def predates(found: str, release: str) -> bool:
    """Whether ``found`` is a release between the oldest tested one and ``release``; others must have everything."""
    return _numbers(TESTED_VERSIONS[0]) <= _numbers(found) < _numbers(release)


def read_signatures(root: Path) -> Signatures:
    """What the SGLang sources under ``root`` have of each target."""
    modules = {module: _parse(root, module) for module in {target.module for target in TARGETS}}
    signatures: dict[str, list[str] | None] = {}
    for target in TARGETS:
        node = _find(modules[target.module], target.function if isinstance(target, Hook) else target.owner)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            arguments = node.args
            signatures[target.path] = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        elif isinstance(node, ast.Module | ast.ClassDef):
            signatures[target.path] = sorted(set(_names_in(node)) & set(target.names))
        else:
            signatures[target.path] = None
    return signatures


def classes_with_setter(root: Path) -> list[str]:
    """Model classes of the SGLang under ``root`` that can be told which layers to capture, sorted."""
    classes = set()
    for path in sorted((root / "srt" / "models").glob("*.py")):
        text = path.read_text()
        if SETTER in text:
            for node in ast.parse(text).body:
                if isinstance(node, ast.ClassDef) and "For" in node.name and _find(node, SETTER):
                    classes.add(node.name)
    return sorted(classes)


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", release)[:3]))


def _parse(root: Path, module: str) -> ast.Module:
    path = root.joinpath(*module.split(".")[1:])
    file = path.with_suffix(".py") if path.with_suffix(".py").is_file() else path / "__init__.py"
    return ast.parse(file.read_text() if file.is_file() else "")


def _find(tree: ast.Module | ast.ClassDef, path: str) -> ast.AST | None:
    """The class or function ``path`` ("Class.method") in ``tree``; the tree itself for an empty path."""
    found: ast.AST | None = tree
    for name in filter(None, path.split(".")):
        body = getattr(found, "body", [])
        found = next((node for node in body if getattr(node, "name", None) == name), None)
    return found


def _names_in(owner: ast.Module | ast.ClassDef) -> Iterator[str]:
    """Names that a module or a class body binds or imports, and attributes of ``self`` that a class's methods set."""
    nodes: list[ast.AST] = list(owner.body)
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
            if isinstance(owner, ast.ClassDef):
                yield from (part.attr for part in ast.walk(node) if _sets_own_attribute(part))
            continue
        if isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        nodes += ast.iter_child_nodes(node)


def _sets_own_attribute(node: ast.AST) -> TypeGuard[ast.Attribute]:
    return (
        isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    )
