"""Compile the kernels for GPUs that are not here, and count what matters in their machine code.

Run as a program (Triton must not be interpreting): ``python codegen.py CASE...`` prints one JSON object a line, with
CASE as TARGET:KERNEL:LAYERS:HIDDEN, KERNEL one of raw, planes, restore. With ":narrow" behind it the promise is taken
away that source rows lie on multiples of 16 bytes: the checks must notice.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hashtap_kernels import gather, restore
from hashtap_kernels.gather_kernel import gather_kernel
from hashtap_kernels.layout import Geometry, Payload
from hashtap_kernels.restore_kernel import restore_kernel

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "sm_120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TYPES = {"control": "*i64", "table": "*u8", "exponents": "*u8", "rests": "*u8", "rows": "i32"}


def compiled(case: str) -> dict[str, Any]:
    target, name, layers, hidden, *mutation = case.split(":")
    if name == "restore":
        kernel, constants = restore_kernel, restore.compile_constants(int(layers), int(hidden))
    else:
        payload = Payload.PLANES if name == "planes" else Payload.RAW
        kernel = gather_kernel
        constants = gather.compile_constants(Geometry(int(layers), int(hidden)), payload)
    if mutation:
        constants["SOURCE_ALIGN"] = 8
    types = TYPES | {"out": "*bf16" if name == "restore" else "*u8"}
    signature = {arg: "constexpr" if arg in constants else types[arg] for arg in kernel.arg_names}
    attributes = {(i,): [["tt.divisibility", 16]] for i, arg in enumerate(kernel.arg_names) if signature[arg][0] == "*"}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    binary = triton.compile(source, target=TARGETS[target], options={"num_warps": gather.NUM_WARPS})
    return {"case": case} | (amd(binary.asm["amdgcn"]) if target.startswith("gfx") else nvidia(binary.asm["cubin"]))


def nvidia(cubin: bytes) -> dict[str, int]:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass = output_of("nvdisasm", "-c", file.name)
        usage = output_of("cuobjdump", "-res-usage", file.name)
    registers, stack = map(int, re.findall(r"REG:(\d+) STACK:(\d+)", usage)[0])
    accesses = [(kind, ".128" in width) for kind, width in re.findall(r"\b(LDG|STG)([.\w]*)", sass)]
    spills = len(re.findall(r"\b(?:LDL|STL)\b", sass))
    return {**counts(accesses), "spills": spills, "stack_bytes": stack, "registers": registers}


def amd(assembly: str) -> dict[str, int]:
    found = re.findall(r"\b(?:global|buffer|flat)_(load|store)_(\w+)", assembly)
    accesses = [({"load": "LDG", "store": "STG"}[kind], width.startswith("dwordx4")) for kind, width in found]
    return {
        **counts(accesses),
        "spills": sum(int(n) for n in re.findall(r"\.[sv]gpr_spill_count:\s*(\d+)", assembly)),
        "stack_bytes": int(re.findall(r"\.private_segment_fixed_size:\s*(\d+)", assembly)[0]),
        "registers": int(re.findall(r"\.vgpr_count:\s*(\d+)", assembly)[0]),
    }


def counts(accesses: list[tuple[str, bool]]) -> dict[str, int]:
    """Loads and stores of 16 bytes and of less, and the median run of 16-byte loads between two stores."""
    kinds = {("LDG", True): "L", ("LDG", False): "l", ("STG", True): "S", ("STG", False): "s"}
    word = "".join(kinds[access] for access in accesses)
    runs = sorted(len(run) for run in re.findall("L+", word.replace("l", "")))
    return {
        "wide_loads": word.count("L"),
        "other_loads": word.count("l"),
        "wide_stores": word.count("S"),
        "other_stores": word.count("s"),
        "loads_in_flight": runs[len(runs) // 2] if runs else 0,
    }


def output_of(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    for case in sys.argv[1:]:
        print(json.dumps(compiled(case)), flush=True)
