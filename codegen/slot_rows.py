"""Elementwise ops and sums of rows over slots that no product has at hand: a warp a row."""

from __future__ import annotations

from moesaic.codegen.epilogue import Epilogue, Parameters, columns_of, indented
from moesaic.codegen.kernel import GeneratedKernel
from moesaic.codegen.render import banner, render
from moesaic.codegen.row_program import Line
from moesaic.ir.ops import slot
from moesaic.ir.ops.launch import Kernel

_WARP = 32
_VECTOR_BYTES = 16


def generate(op: Kernel) -> GeneratedKernel:
    """CUDA of one kernel over rows of slots.

    Raises:
        UnsupportedError: the region holds something the template family has no form for; names the op.
    """
    parameters = Parameters(op)
    region = parameters.region
    threads = int(op.configuration["threads"])
    counts, offsets = region.arguments[-2:]
    rows = [
        v for o in region.ops for v in (*o.operands, *o.results) if v.type.rank == 2 and v.type.leading == slot.SLOTS
    ]
    halves = any(isinstance(o, slot.Split | slot.Join) for o in region.ops)
    columns = max(columns_of(v) for v in rows) // (2 if halves else 1)
    size = max(v.type.dtype.bytes for v in rows)
    vector = next(n for n in (8, 4, 2, 1) if n * size <= 2 * _VECTOR_BYTES and (columns % n == 0 or n == 1))
    counts_ptr, offsets_ptr = (parameters.pointer(parameters.index(v)) for v in (counts, offsets))
    parameters.taken |= {"row_tile", "rows", "first_slot"}
    epilogue = Epilogue(parameters, columns, vector, None)
    epilogue.emit([])
    loop = [
        "for (long long n = blockIdx.x; n < first_tile[kExperts]; n += gridDim.x) {",
        "  const int row_tile = static_cast<int>(n);",
        "  const int expert = moesaic::expert_of_tile<kExperts>(first_tile, row_tile);",
        "  const int row = (row_tile - first_tile[expert]) * kTileRows + threadIdx.x / 32;",
        f"  if (row >= moesaic::load_one({counts_ptr} + expert)) continue;",
        f"  const long long slot = moesaic::load_one({offsets_ptr} + expert) + row;",
        "  constexpr int i = 0;  // a thread has one row at a time",
        *(f"  float {name}[1] = {{}};" for name, _ in epilogue.sums),
        *indented(epilogue.for_row, 2),
    ]
    if epilogue.row_stores:
        loop += ["  if (lane == 0) {", *indented(epilogue.row_stores, 4), "  }"]
    if epilogue.loads or epilogue.lines:
        loop += [
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
        loop += [
            "#pragma unroll",
            "  for (int lanes = 16; lanes > 0; lanes /= 2) {",
            f"    {name}[i] += __shfl_xor_sync(0xffffffffu, {name}[i], lanes);",
            "  }",
            f"  if (lane == 0) moesaic::store_one({epilogue.sum_pointer(value)} + slot, {name}[i]);",
        ]
    body = [
        f"__shared__ int first_tile[kExperts + 1 + kThreads / {_WARP}];",
        f"moesaic::count_row_tiles<kExperts, kTileRows, kThreads>({counts_ptr}, first_tile);",
        "const int lane = threadIdx.x % 32;",
        *loop,
        "}",
    ]
    source = render(
        "over_tiles.cu.j2",
        {
            "banner": banner(op, "what is elementwise over rows of slots, a warp a row"),
            "symbol": op.symbol,
            "headers": ["epilogue.cuh", "experts.cuh"],
            "bounds": "",
            "constants": [
                Line("kThreads", str(threads)),
                Line("kExperts", str(counts.type.shape[0])),
                Line("kColumns", str(columns), why="of each half" if halves else ""),
                Line("kVector", str(vector), why="neighbouring columns of a thread"),
                Line("kTileRows", "kThreads / 32"),
            ],
            "aliases": [],
            "parameters": parameters.lines,
            "body": indented(body, 2),
        },
    )
    return GeneratedKernel(op.symbol, source, tuple(parameters.arguments), threads, 1, "device")
