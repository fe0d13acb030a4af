// A tensor map: what the copy engine is told of an operand, to find boxes of it by their coordinates (sm_90 and newer).
//
// A kernel takes it as `const __grid_constant__ moesaic::TensorMap name` and hands on its address. See `TensorMap` in
// codegen/kernel.py. Of matrices it has three dimensions, the fastest first: columns, rows, matrices.
//
// Of an operand whose number of rows a launch says, such as slots, kernels want runs: an expert's rows, and no other's, though
// a box has as many as it has. What lies outside of a dimension the copy engine leaves out, so every run has to end where one
// does. A map of rows has four:
//
//   column
//   r   0 to kRunEnd - 1, a row apart
//   m   0 to the number of rows, a row apart, too
//   w   2^34 bytes less a row apart; kRunEnd = 2^30 of these are kRunEnd rows less, for an address has 64 bits
//
// The box of `count` rows from row f on begins at r = kRunEnd - count, m = f + count, w = kRunEnd. That is row f, and what the
// box has more than the run is past the last r. Triton's descriptors of ragged tensors (triton/tools/ragged_tma.py) count on the
// same wrapping.
// PTX ISA, "Tensors: Tensor-map".
#pragma once

#include "moesaic/base.cuh"

namespace moesaic {

constexpr int kRunEnd = 1 << 30;

#ifdef MOESAIC_EMULATE
// In the open, what the driver's object says; `_EmulatedKernel` of runtime/execute.py packs the same fields.
struct TensorMap {
  const unsigned char* address;
  long long columns, rows, matrices;    // elements of a row, rows of a matrix, matrices; 0: of rows
  long long row_bytes, matrix_bytes;    // distances
  long long box_columns, box_rows;
  long long unused[8];
};
#else
struct alignas(64) TensorMap {
  unsigned char opaque[128];  // the driver encodes it
};
#endif
static_assert(sizeof(TensorMap) == 128, "the size of CUtensorMap");

}  // namespace moesaic
