"""What a compiled kernel holds, read from its PTX, TTIR and binary without a device.

Accesses are attributed to kernel arguments by following registers: a pointer argument is loaded once from the
parameter space and reaches every access through integer instructions, so "how wide is x read, and how often" is a
question about text. A value that was loaded from memory carries no pointer on.
"""

import re
import subprocess
import tempfile
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triton import knobs

TYPE_BYTES = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2, "i64": 8, "i32": 4, "i8": 1, "i1": 1}


@dataclass(frozen=True)
class Access:
    """One load or store of a thread through one pointer argument."""

    argument: str
    kind: str  # load | store
    bits: int


@dataclass(frozen=True)
class Resources:
    """What a kernel takes of a multiprocessor; a golden line."""

    registers: int
    spilled: int  # bytes of local memory for CUDA, registers for AMD
    shared: int  # bytes, as Triton counts them
    barriers: int

    def line(self) -> str:
        return f"registers {self.registers} spilled {self.spilled} shared {self.shared} barriers {self.barriers}"


_PARAMETER = re.compile(r"ld\.param\.[bu]64\s+(%rd\d+),\s*\[\w+_param_(\d+)\]")
_ACCESS = re.compile(r"\b(ld|st)\.(?:relaxed\.\w+\.|volatile\.)?global([.\w:]*)\s+([^;]*);")
_ASYNC = re.compile(r"\bcp\.async\.c[ag]\.shared\.global\s+\[[^\]]*\],\s*\[\s*(%rd\d+)[^\]]*\],\s*(0x\w+|\d+)")
_ASSIGNED = re.compile(r"^\s*(?:@!?%p\d+\s+)?(?!st\.|bra|bar)[\w.]+\s+(%rd\d+),\s*([^;]*);", re.MULTILINE)
_REGISTER = re.compile(r"%rd\d+")
_NARROW = re.compile(r"\.v(\d)\b")
_WIDTH = re.compile(r"\.[busf](\d+)\b")


def ptx_accesses(ptx: str, arguments: list[str]) -> list[Access]:
    """Returns the global accesses of one kernel, by the pointer argument each goes through.

    `arguments` are the names of the kernel's run-time arguments in order, constexprs left out. An access that no
    argument reaches has the argument "?".
    """
    pointers: dict[str, set[str]] = defaultdict(set)
    uses: list[tuple[str, list[str]]] = []
    for register, index in _PARAMETER.findall(ptx):
        if int(index) < len(arguments):
            pointers[register].add(arguments[int(index)])
    for register, sources in _ASSIGNED.findall(ptx):
        # Only what is computed from registers; a loaded value is data, and its address is none of its own.
        uses.append((register, [] if "[" in sources else _REGISTER.findall(sources)))
    changed = True
    while changed:
        changed = False
        for register, sources in uses:
            found = set().union(*(pointers[source] for source in sources)) - pointers[register]
            if found:
                pointers[register] |= found
                changed = True
    accesses = []
    for kind, modifiers, operands in _ACCESS.findall(ptx):
        address = re.search(r"\[\s*(%rd\d+)", operands)
        assert address is not None, operands
        count, width = _NARROW.search(modifiers), _WIDTH.search(modifiers)
        assert width is not None, modifiers
        bits = int(width.group(1)) * (int(count.group(1)) if count else 1)
        accesses.append(Access(_one(pointers[address.group(1)]), "load" if kind == "ld" else "store", bits))
    for register, size in _ASYNC.findall(ptx):
        accesses.append(Access(_one(pointers[register]), "load", 8 * int(size, 0)))
    return accesses


def _one(names: set[str]) -> str:
    return next(iter(names)) if len(names) == 1 else "?" + "|".join(sorted(names))


def resources(compiled: Any, target: Any) -> Resources:
    """Returns registers, spills, shared memory and barriers of a compiled kernel.

    For CUDA from the cubin (`cuobjdump`, which comes with Triton); for AMD from the assembler text.
    """
    shared = int(compiled.metadata.shared)
    if target.backend == "hip":
        text = compiled.asm["amdgcn"]
        registers, spilled, scalar = (
            int(re.search(rf"\.{name}:\s+(\d+)", text).group(1))  # type: ignore[union-attr]
            for name in ("vgpr_count", "vgpr_spill_count", "sgpr_spill_count")
        )
        return Resources(registers, spilled + scalar, shared, len(re.findall(r"^\s*s_barrier\b", text, re.MULTILINE)))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage = _cuobjdump("-res-usage", file.name)
    match = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert match is not None, usage
    barriers = len(re.findall(r"\bbar(?:rier)?\.(?:cta\.)?(?:red\S*\.)?sync\b", compiled.asm["ptx"]))
    return Resources(int(match.group(1)), int(match.group(2)) + int(match.group(3)), shared, barriers)


def _cuobjdump(*arguments: str) -> str:
    return subprocess.run(
        [knobs.nvidia.cuobjdump.path, *arguments], check=True, capture_output=True, text=True, timeout=60
    ).stdout


def has_fp64(compiled: Any) -> bool:
    """Tells whether any value in the kernel is a double."""
    return bool(re.search(r"\bf64\b|xf64\b", compiled.asm["ttir"])) or ".f64" in compiled.asm.get("ptx", "")


def has_atomics(compiled: Any) -> bool:
    """Tells whether the kernel updates memory atomically, which makes the order of a sum a matter of chance."""
    if "tt.atomic" in compiled.asm["ttir"]:
        return True
    text = compiled.asm.get("ptx") or compiled.asm["amdgcn"]
    return bool(re.search(r"\b(atom|red)\.(?!async)|\b(?:global|buffer|flat)_atomic", text))


def amd_widths(amdgcn: str) -> dict[int, int]:
    """Returns how many global loads and stores of each width, in bits, an AMD kernel has."""
    bits = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32, "ubyte": 8, "sbyte": 8, "byte": 8}
    widths: dict[int, int] = defaultdict(int)
    for name in re.findall(r"^\s*(?:buffer|global|flat)_(?:load|store)_(\w+)", amdgcn, re.MULTILINE):
        widths[bits.get(name, 16)] += 1
    return dict(widths)


_VALUE = re.compile(r"^\s*(%[\w#]+)(?::\d+)? = (.*?)(?: loc\(.*)?$", re.MULTILINE)
_NAME = re.compile(r"%[\w#]+")


def narrow_row_multiplies(ttir: str, stride: int, pointers: tuple[str, ...]) -> list[str]:
    """Returns the 32-bit products of a TTIR kernel that stand where a row times its stride belongs.

    From every address reached from an argument in `pointers` the offset is followed back to the first 64-bit product.
    A 32-bit product met on the way overflows from 2^31 elements on if a factor is the constant `stride` or an
    argument. A tile's index times its rows stands behind the 64-bit product, and a column tile's start has neither
    factor.
    """
    values = dict(_VALUE.findall(ttir))
    header = next(line for line in ttir.splitlines() if "tt.func public" in line)
    arguments = set(re.findall(r"(%\w+): i(?:32|64)", header))
    waiting, bad, seen = [], [], set()
    for text in values.values():
        if text.startswith("tt.addptr"):
            base, offset = _NAME.findall(text)[:2]
            if _base(values, base) in pointers:
                waiting.append(offset)
    while waiting:
        name = waiting.pop()
        text = values.get(name, "")
        if name in seen or text.startswith(("tt.load", "scf.", "tt.reduce")):
            continue
        seen.add(name)
        factors = _NAME.findall(text)
        if text.startswith("arith.muli"):
            if "i64" in text.rsplit(":", 1)[1]:
                continue
            if any(_is_stride(values, arguments, factor, stride) for factor in factors):
                bad.append(f"{name} = {text}")
        waiting.extend(factors)
    return bad


def _base(values: dict[str, str], name: str) -> str:
    """Returns the argument that a pointer was made of."""
    while name in values:
        name = _NAME.findall(values[name])[0]
    return name.removeprefix("%")


def _is_stride(values: dict[str, str], arguments: set[str], name: str, stride: int) -> bool:
    text = values.get(name, "")
    if text.startswith("arith.constant"):
        return re.search(rf"constant (?:dense<)?{stride}>? :", text) is not None
    if text.startswith(("tt.splat", "arith.ext")):
        return _is_stride(values, arguments, _NAME.findall(text)[0], stride)
    return name in arguments


def wide_row_multiplies(ttir: str) -> int:
    """Returns how many 64-bit products a TTIR kernel has."""
    return len(re.findall(r"arith\.muli .*i64", ttir))
