"""How rows are dealt to programs: tile sizes, warps and grids by width. Figures for sm_90; no Triton is needed here.

A 16-byte access needs 8 bf16 or 4 fp32 neighbours in one thread, and registers bound a tile from above: 16 numbers a
thread serve both. Narrow rows share a tile. Beyond what registers hold in the backward pass the inputs are read twice
("reread"), and for LayerNorm beyond that the gradients of the weights get a kernel of their own ("split").

All of it depends on the width, the number of rows, the device and the `Demand` alone, so that results are the same from
run to run. Up to width 8192 a row's bits do not depend on whether it is measured; above, statistics need registers
that other warps or a kernel more for the weights must make room for, and sums are formed in another order. One pass
spills registers under any of these tilings: forward that of Pre-Norm's sum with LayerNorm on a measured step, in rows
of 16384 (40 bytes a thread in half precision, 48 in fp32).
"""

from dataclasses import dataclass
from functools import cache

import torch

from normscale.ops.spec import Kind

WIDEST = 16_384
WIDEST_PLAIN = 8_192
WIDEST_REREAD = 12_288  # LayerNorm; RMSNorm has one reduction less and gets to WIDEST
WIDEST_ALPHA = 4_096  # a gradient of alpha beside those of gain and bias

_PER_THREAD = 16
_WARP = 32


@dataclass(frozen=True)
class Tiling:
    """A tile of `rows` x `block` numbers, the warps that hold it, and the number of programs that share the tiles.

    `registers` is a bound for the compiler where it would otherwise spill a few to fit more programs on a
    multiprocessor.
    """

    block: int
    rows: int
    warps: int
    programs: int
    reread: bool = False
    registers: int | None = None


@dataclass(frozen=True)
class Demand:
    """What bears on the registers of a pass: the norm, the widest dtype in bytes, and what it does beside the norm.

    `stream`: the sum is written, or its gradient comes in too. `vector`: alpha is one number a column.
    """

    kind: Kind
    itemsize: int
    stream: bool = False
    vector: bool = False
    dropout: bool = False
    handle: bool = False
    measured: bool = False


def forward_tiling(n_rows: int, width: int, device: torch.device, demand: Demand) -> Tiling:
    """Returns the tiling of the forward kernel; with statistics the programs are as many as fit on the device."""
    block, rows, warps = _tile(width, 2048)
    programs = -(-n_rows // rows)
    if demand.measured:
        warps = min(warps, 16)
        programs = min(programs, _resident(device, warps))
    registers = None
    if warps <= 4:
        registers = 255 if demand.measured else 80
    elif block > WIDEST_PLAIN:
        registers = None if demand.measured else 64
    elif block == WIDEST_PLAIN and (demand.vector or (demand.itemsize > 2) + demand.stream + demand.measured > 1):
        registers = 128
    return Tiling(block, rows, warps, programs, registers=registers)


def backward_tiling(n_rows: int, width: int, device: torch.device, demand: Demand, sums: bool) -> Tiling:
    """Returns the tiling of the backward kernel; `sums`: it makes partial sums for the weights too.

    Partial rows are 8 * D bytes written and read again for each program, against 4 passes over the activation: one
    program for 40 rows keeps them below 5 % of the traffic.
    """
    block, rows, warps = _tile(width, 4096)
    reread = width > WIDEST_PLAIN
    registers = None
    if demand.itemsize > 2 and rows > 1:
        rows //= 2  # as many bytes on their way as in half precision, in half the registers
        registers = 128
    if reread:
        # 16 warps have 128 registers a thread, which the sums over rows need; a sum less to hold, 32 warps have enough.
        warps = 32 if demand.vector and demand.itemsize > 2 and width > WIDEST_REREAD else 16
        registers = 128 if demand.stream and not (demand.measured and demand.itemsize > 2) else None
    tiles = -(-n_rows // rows)
    if sums and not is_split(width, demand):
        programs = min(tiles, 2 * processors(device), max(1, n_rows // 40))
    else:
        programs = min(tiles, _resident(device, warps))
    return Tiling(block, rows, warps, programs, reread, registers)


def is_split(width: int, demand: Demand) -> bool:
    """Tells whether the gradients of the weights have their own kernel: where one kernel for all would spill."""
    if width <= WIDEST_PLAIN:
        return False
    if demand.kind == "layernorm" and width > WIDEST_REREAD:
        return True
    beside = demand.stream or demand.dropout or demand.handle or demand.measured or demand.vector
    return demand.itemsize > 2 or beside


def is_folded(width: int, demand: Demand) -> bool:
    """Tells whether a handle's gradient is added to dy before the kernel, which would spill with both."""
    return demand.handle and demand.itemsize > 2 and width > WIDEST_PLAIN


def is_scaled_after(width: int, demand: Demand) -> bool:
    """Tells whether the residual's gradient is multiplied by a vector alpha after the kernel, which would spill."""
    return demand.vector and demand.kind == "layernorm" and demand.itemsize > 2 and width > WIDEST_REREAD


def weights_tiling(n_rows: int, width: int, device: torch.device) -> Tiling:
    """Returns the tiling of the kernel for the weights' gradients: `programs` share the rows of each column tile."""
    block, rows = 128, 32
    shares = 16 * processors(device) // -(-width // block)
    return Tiling(block, rows, 4, max(1, min(-(-n_rows // rows), shares, n_rows // 40)))


def processors(device: torch.device) -> int:
    """Returns the number of multiprocessors of `device`; of an H200 where it is no GPU of this machine."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 132
    return _processors(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _processors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def _tile(width: int, numbers: int) -> tuple[int, int, int]:
    """Returns block, rows and warps of a tile of at least `numbers` numbers."""
    block = max(16, 1 << (width - 1).bit_length())
    rows = max(1, min(64, numbers // block))
    return block, rows, max(1, min(32, block * rows // (_PER_THREAD * _WARP)))


def _resident(device: torch.device, warps: int) -> int:
    """Returns how many programs of so many warps fill half of the threads that the device can hold."""
    return processors(device) * max(1, 32 // warps)
