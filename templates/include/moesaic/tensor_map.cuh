// A tensor map: what the copy engine is told of an operand, to find boxes of it by their coordinates (sm_90 and newer).
//
// A kernel takes it as `const __grid_constant__ moesaic::TensorMap name` and hands on its address. It has three
// dimensions, the fastest first: columns, rows, matrices. See `TensorMap` in codegen/kernel.py.
// PTX ISA, "Tensors: Tensor-map".
#pragma once

#include "moesaic/base.cuh"

namespace moesaic {

#ifdef MOESAIC_EMULATE
// In the open, what the driver's object says; `_EmulatedKernel` of runtime/execute.py packs the same fields.
struct TensorMap {
  const unsigned char* address;
  long long columns, rows, matrices;    // elements of a row, rows of a matrix, matrices
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
