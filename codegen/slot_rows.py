"""Elementwise ops and sums of rows, of slots or tokens, that no product has at hand.

A warp has a row at a time. Dead rows get zeros.
"""

from __future__ import annotations

from moesaic.codegen.epilogue import TILE_NAMES, Epilogue
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.lines import STORAGE, Line, fused_ops
from moesaic.codegen.parameters import Parameters
from moesaic.codegen.render import banner, indented, render
from moesaic.ir.core import Block, Value, columns_of
from moesaic.ir.ops import slot
from moesaic.ir.ops.launch import Kernel

_BYTES_OF_A_LANE = 32


def generate(op: Kernel) -> GeneratedKernel:
    """CUDA of one kernel over rows of slots.

    Raises:
        UnsupportedError: the region holds something the template family has no form for; names the op.
    """
    parameters = Parameters(op, TILE_NAMES)
    region = parameters.region
    threads = int(op.configuration["threads"])
    # Of tokens, all rows are in use.
    of_tokens = all(v.type.leading != slot.SLOTS for v in region.terminator.operands)
    place, leading = ("token", "T") if of_tokens else ("slot", slot.SLOTS)
    values = [*region.arguments, *(r for o in region.ops for r in o.results)]
    rows = [v for v in values if v.type.rank == 2 and v.type.leading == leading]
    halves = any(isinstance(o, slot.Split | slot.Join) for o in region.ops)
    columns = max(columns_of(v) for v in rows) // (2 if halves else 1)
    size = max(v.type.dtype.bytes for v in rows)
    vector = next(n for n in (8, 4, 2, 1) if n * size <= _BYTES_OF_A_LANE and (columns % n == 0 or n == 1))
    parameters.taken |= {"lane", "slots"}
    dead: list[str] = []
    live = None if of_tokens else _live(region)
    if of_tokens:
        count = parameters.tokens()
    elif live is None:  # numbers computed from numbers, garbage from garbage
        count = parameters.rows("slots", next(i for i, a in enumerate(region.arguments) if a.type.leading == leading))
    else:
        count = parameters.rows("slots", parameters.index(live))
        dead = _dead(parameters, parameters.pointer(parameters.index(live)))
    epilogue = Epilogue(parameters, columns, vector, None, place)
    epilogue.emit([])
    body = [
        "const int lane = threadIdx.x % 32;",
        "constexpr int i = 0;  // a warp has one row at a time",
        "const long long first = static_cast<long long>(blockIdx.x) * kRows + threadIdx.x / 32;",
        f"for (long long {place} = first; {place} < {count}; {place} += static_cast<long long>(gridDim.x) * kRows) {{",
        *indented(dead, 2),
        *indented(_expert(parameters), 2),
        *(f"  float {name}[1] = {{}};" for name, _ in epilogue.sums),
        *indented(epilogue.for_row, 2),
    ]
    if epilogue.row_stores:
        body += ["  if (lane == 0) {", *indented(epilogue.row_stores, 4), "  }"]
    if epilogue.loads or epilogue.lines:
        body += [
            "  for (int column = lane * kVector; column < kColumns; column += 32 * kVector) {",
            *indented(epilogue.loads, 4),
            "#pragma unroll",
            "    for (int v = 0; v < kVector; ++v) {",
            *indented(epilogue.lines, 6),
            "    }",
            *indented(epilogue.stores, 4),
            "  }",
        ]
    for name, value in epilogue.sums:
        body += [
            "#pragma unroll",
            "  for (int lanes = 16; lanes > 0; lanes /= 2) {",
            f"    {name}[i] += __shfl_xor_sync(0xffffffffu, {name}[i], lanes);",
            "  }",
            f"  if (lane == 0) moesaic::store_one({epilogue.sum_pointer(value)} + {place}, {name}[i]);",
        ]
    experts = _experts(region)
    source = render(
        "over_tiles.cu.j2",
        {
            "banner": banner(op, f"what is elementwise over rows of {place}s, a warp a row"),
            "symbol": op.symbol,
            "early": op.early,
            "headers": ["epilogue.cuh", "experts.cuh"],
            "bounds": "",
            "constants": [
                Line("kThreads", str(threads)),
                *([Line("kExperts", str(experts))] if experts else []),
                Line("kColumns", str(columns), why="of each half" if halves else ""),
                Line("kVector", str(vector), why="neighbouring columns of a thread"),
                Line("kRows", "kThreads / 32"),
            ],
            "aliases": [],
            "tile_bytes": 0,
            "cluster": 1,
            "parameters": parameters.lines,
            "body": indented([*body, "}"], 2),
        },
    )
    return GeneratedKernel(
        op.symbol, source, tuple(parameters.arguments), threads, 1, "device", ops=fused_ops(region, epilogue.name)
    )


def _live(region: Block) -> Value | None:
    """What says which slots are in use, if anything does: tokens or picks of slots, which are -1 where one is not."""
    for inner in region.ops:
        if isinstance(inner, slot.Gather | slot.ExpertRows):
            return inner.tokens
        if isinstance(inner, slot.OfPick):
            return inner.picks
    return None


def _dead(parameters: Parameters, live: str) -> list[str]:
    """Zeros in every result of a row that is not in use."""
    lines = [f"if (moesaic::load_one({live} + slot) < 0) {{"]
    for number, value in enumerate(parameters.region.terminator.operands):
        index = parameters.op.reads + number
        element = STORAGE[value.type.dtype]
        columns = columns_of(value)
        zero = f"moesaic::from_float<{element}>(0.0f)"
        where = f"{parameters.pointer(index)} + slot * {columns}LL"
        lines.append(f"  for (int c = lane; c < {columns}; c += 32) moesaic::store_one({where} + c, {zero});")
    return [*lines, "  continue;", "}"]


def _expert(parameters: Parameters) -> list[str]:
    for op in parameters.region.ops:
        if isinstance(op, slot.ExpertRows):
            offsets = parameters.pointer(parameters.index(op.offsets))
            return [f"const int expert = moesaic::expert_of_slot<kExperts>({offsets}, slot);"]
    return []


def _experts(region: Block) -> int:
    for op in region.ops:
        if isinstance(op, slot.ExpertRows):
            experts = op.x.type.shape[0]
            assert isinstance(experts, int)
            return experts
    return 0
