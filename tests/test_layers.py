"""Who may import whom, and what importing hashtap must not load."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
HASHTAP = ROOT / "capture" / "hashtap"
KERNELS = ROOT / "kernels" / "hashtap_kernels"

# A module may import those of its own and of lower layers.
LAYERS = [
    {"errors", "logs", "config", "identity", "spans", "ring", "ring_memory", "estimate", "forecast", "model_config"},
    {"directory", "facts", "header", "frame", "codec", "exponents", "restored", "shard", "block_file", "shard_file"},
    {"flight", "donors", "ledger", "arrival", "shard_sequence", "writer", "checks", "report", "verify"}
    | {
        "recompute",
        "salvage",
        "recover",
        "index_cache",
        "set_aside",
        "sharing",
        "catalog",
        "collate",
        "datasets",
        "capture",
        "reader",
        "together",
        "loaded_tokenizer",
        "chat",
        "sample_rows",
        "sample_fields",
        "samples",
        "manifest",
        "order",
        "live",
        "quarantine",
        "progress",
        "show",
    },
    {"writer_messages", "writer_process", "writer_child", "unwritten", "told_passes", "writers"}
    | {"transport", "staging", "session", "watch", "client", "open_files", "sealed", "lead", "tally", "extract"},
    {"epoch", "layers", "final_states", "targets", "releases", "modes"}
    | {"rank", "handshake", "requests", "routes", "sglang_seam"},
    {"trainers", "bench"},
    {"plugin", "cli"},
    {"__main__"},
]
PACKAGES = {"trainers", "bench"}
MODULES = sorted([*HASHTAP.glob("*.py"), *(path for name in PACKAGES for path in HASHTAP.glob(f"{name}/*.py"))])
SOURCES = sorted([*MODULES, *KERNELS.glob("*.py")])
# Trainers' packages, which only an adapter in trainers/ may import.
HOSTS = {"speculators", "hs_connectors", "modelopt", "specforge", "angelslim"}


def imported(path: Path) -> set[str]:
    """Dotted names of the modules that a file imports anywhere."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno} imports relatively"
            names.add(str(node.module))
            if node.module in ("hashtap", "hashtap_kernels"):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_every_module_has_a_layer() -> None:
    known = set.union(*LAYERS) | {"__init__"}
    assert {path.stem for path in HASHTAP.glob("*.py")} | PACKAGES == known


def test_every_module_stands_in_the_architecture() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    named = {path.stem for path in SOURCES} - {"__init__", "__main__"}
    assert {name for name in named if f"`{name}`" not in text} == set()


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_imports_point_down(path: Path) -> None:
    level = {name: number for number, layer in enumerate(LAYERS) for name in layer}
    mine = level.get(path.stem if path.parent == HASHTAP else path.parent.name, len(LAYERS))
    for name in imported(path):
        module = name.removeprefix("hashtap.").partition(".")[0]
        if name.startswith("hashtap.") and module in level:
            assert level[module] <= mine, f"{path.stem} imports {module}, which stands above it"


def test_kernels_never_import_hashtap() -> None:
    for path in KERNELS.glob("*.py"):
        assert not {name for name in imported(path) if name.split(".")[0] == "hashtap"}, path.name


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_hosts_are_imported_in_one_place(path: Path) -> None:
    tops = {name.split(".")[0] for name in imported(path)}
    if path.stem != "sglang_seam":
        assert "sglang" not in tops
    if path.parent != KERNELS:
        assert "triton" not in tops
    if path.parent.name != "trainers":
        assert not tops & HOSTS
    if path.stem != "config":
        used = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
        assert not {"environ", "getenv"} & used, "only config reads the environment"


def test_nothing_shadows_the_kernels_that_sglang_imports() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


@pytest.mark.parametrize("package", ["hashtap", "hashtap_kernels", "hashtap.plugin", "hashtap.verify"])
def test_importing_loads_nothing_heavy(package: str) -> None:
    code = f"import sys, {package}; print(sorted({{'torch', 'triton', 'sglang', 'transformers'}} & set(sys.modules)))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "[]"
