// Boxes of a matrix, brought into shared memory by the copy engine (TMA, sm_90): one thread asks, and the bytes are counted
// by an mbarrier. Lines of 128 bytes land swizzled, as wgmma reads them.
//
// What a box covers beyond the matrix is filled with zeros, and counted. Its first column is a multiple of 8, 16 bytes; for
// any other the engine stops the kernel, with an illegal instruction.
// PTX ISA, "Data Movement and Conversion Instructions: cp.async.bulk.tensor"; "Tensor Swizzling Modes".
#pragma once

#include "moesaic/mbarrier.cuh"
#include "moesaic/tensor_map.cuh"

namespace moesaic {

#ifdef MOESAIC_EMULATE
// A box in memory: the first element, lines and bytes of a line, and how many of them the matrix has.
struct EmulatedBox {
  const unsigned char* first;
  int lines, line_bytes, rows, bytes;

  EmulatedBox(const TensorMap& map, int column, int row, int matrix)
      : first(map.address + matrix * map.matrix_bytes + row * map.row_bytes + column * 2ll),
        lines(static_cast<int>(map.box_rows)),
        line_bytes(static_cast<int>(map.box_columns * 2)),
        rows(static_cast<int>(at_most(map.rows - row, map.box_rows))),
        bytes(static_cast<int>(at_most(map.columns - column, map.box_columns) * 2)) {
    if (column % 8 != 0) moesaic_emulate_fail("a box begins at a column that is no multiple of 8");
    if (matrix >= map.matrices) rows = 0;
  }
  // Of a map of rows.
  static EmulatedBox of_rows(const TensorMap& map, int column, int first_row, int count) {
    EmulatedBox box(map, column, first_row, 0);
    box.rows = static_cast<int>(at_most(count, map.box_rows));
    if (map.matrices != 0 || count < 0) moesaic_emulate_fail("rows of a map of matrices, or fewer than none");
    if (first_row + static_cast<long long>(count) > map.rows) box.rows = 0;
    return box;
  }
};
#endif

// One lane of a warp, all of which call it. What that lane hands to the copy engine has to be in registers of the warp; the
// compiler knows here that there is one lane, and else goes over all of them in a loop for each box.
// PTX ISA, "Parallel Synchronization and Communication Instructions: elect.sync".
__device__ __forceinline__ bool elect_lane() {
#ifdef MOESAIC_EMULATE
  return threadIdx.x % 32 == 0;
#else
  unsigned elected;
  asm volatile("{.reg .pred is; elect.sync _|is, 0xffffffff; selp.u32 %0, 1, 0, is;}" : "=r"(elected));
  return elected != 0;
#endif
}

// The box whose first element is (column, row) of a matrix, to `shared`, aligned to 1024 bytes.
__device__ __forceinline__ void copy_box(void* shared, const TensorMap& map, int column, int row, int matrix,
                                         Mbarrier* barrier) {
#ifdef MOESAIC_EMULATE
  const EmulatedBox box(map, column, row, matrix);
  moesaic_emulate_copy_box(shared, box.first, box.lines, box.line_bytes, map.row_bytes, box.rows, box.bytes, barrier);
#else
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3, %4}], [%5];"
               :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))), "l"(&map), "r"(column), "r"(row),
                  "r"(matrix), "r"(static_cast<unsigned>(__cvta_generic_to_shared(barrier)))
               : "memory");
#endif
}

// The box of rows `first_row` to `first_row` + `count` - 1 of a map of rows, with zeros after them.
__device__ __forceinline__ void copy_rows(void* shared, const TensorMap& map, int column, int first_row, int count,
                                          Mbarrier* barrier) {
#ifdef MOESAIC_EMULATE
  const EmulatedBox box = EmulatedBox::of_rows(map, column, first_row, count);
  moesaic_emulate_copy_box(shared, box.first, box.lines, box.line_bytes, map.row_bytes, box.rows, box.bytes, barrier);
#else
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
               "[%0], [%1, {%2, %3, %4, %5}], [%6];"
               :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))), "l"(&map), "r"(column),
                  "r"(kRunEnd - count), "r"(first_row + count), "r"(kRunEnd),
                  "r"(static_cast<unsigned>(__cvta_generic_to_shared(barrier)))
               : "memory");
#endif
}

// Either to both blocks of a pair, at the same place in either's shared memory, counted by either's own barrier.
__device__ __forceinline__ void copy_box_to_pair(void* shared, const TensorMap& map, int column, int row, int matrix,
                                                 Mbarrier* barrier) {
#ifdef MOESAIC_EMULATE
  const EmulatedBox box(map, column, row, matrix);
  for (int rank = 0; rank < 2; ++rank) {
    moesaic_emulate_copy_box_in(shared, box.first, box.lines, box.line_bytes, map.row_bytes, box.rows, box.bytes, barrier, rank);
  }
#else
  asm volatile("cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%2, %3, %4}], [%5], %6;"
               :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))), "l"(&map), "r"(column), "r"(row),
                  "r"(matrix), "r"(static_cast<unsigned>(__cvta_generic_to_shared(barrier))),
                  "h"(static_cast<unsigned short>(3))
               : "memory");
#endif
}

__device__ __forceinline__ void copy_rows_to_pair(void* shared, const TensorMap& map, int column, int first_row, int count,
                                                  Mbarrier* barrier) {
#ifdef MOESAIC_EMULATE
  const EmulatedBox box = EmulatedBox::of_rows(map, column, first_row, count);
  for (int rank = 0; rank < 2; ++rank) {
    moesaic_emulate_copy_box_in(shared, box.first, box.lines, box.line_bytes, map.row_bytes, box.rows, box.bytes, barrier, rank);
  }
#else
  asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;"
               :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(shared))), "l"(&map), "r"(column),
                  "r"(kRunEnd - count), "r"(first_row + count), "r"(kRunEnd),
                  "r"(static_cast<unsigned>(__cvta_generic_to_shared(barrier))), "h"(static_cast<unsigned short>(3))
               : "memory");
#endif
}

// A box from `shared` to the matrix; what lies outside of it is not written. In groups of the thread: until
// `stored_wait<kGroupsLeft>` returns, `shared` may not change, and no thread with a group left may end. What other threads
// have written to `shared` needs `shared_to_async_proxy` by each, and a barrier, before.
__device__ __forceinline__ void store_box(const void* shared, const TensorMap& map, int column, int row, int matrix) {
#ifdef MOESAIC_EMULATE
  const EmulatedBox box(map, column, row, matrix);
  moesaic_emulate_store_box(shared, const_cast<unsigned char*>(box.first), box.line_bytes, map.row_bytes, box.rows, box.bytes);
#else
  asm volatile("cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3}], [%4];"
               :: "l"(&map), "r"(column), "r"(row), "r"(matrix),
                  "r"(static_cast<unsigned>(__cvta_generic_to_shared(shared)))
               : "memory");
#endif
}
// The same of rows `first_row` to `first_row` + `count` - 1 of a map of rows; no other is written.
__device__ __forceinline__ void store_box_of_rows(const void* shared, const TensorMap& map, int column, int first_row,
                                                  int count) {
#ifdef MOESAIC_EMULATE
  const EmulatedBox box = EmulatedBox::of_rows(map, column, first_row, count);
  moesaic_emulate_store_box(shared, const_cast<unsigned char*>(box.first), box.line_bytes, map.row_bytes, box.rows, box.bytes);
#else
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group [%0, {%1, %2, %3, %4}], [%5];"
               :: "l"(&map), "r"(column), "r"(kRunEnd - count), "r"(first_row + count), "r"(kRunEnd),
                  "r"(static_cast<unsigned>(__cvta_generic_to_shared(shared)))
               : "memory");
#endif
}
__device__ __forceinline__ void stored_commit() {
#ifdef MOESAIC_EMULATE
  moesaic_emulate_store_commit();
#else
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#endif
}
template <int kGroupsLeft>
__device__ __forceinline__ void stored_wait() {
#ifdef MOESAIC_EMULATE
  moesaic_emulate_store_wait(kGroupsLeft);
#else
  asm volatile("cp.async.bulk.wait_group.read %0;" :: "n"(kGroupsLeft) : "memory");
#endif
}

// What this thread has written to shared memory becomes visible to tensor cores and the copy engine, after a barrier.
__device__ __forceinline__ void shared_to_async_proxy() {
#ifndef MOESAIC_EMULATE
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// The barrier of a warpgroup, or of so many threads; each number 1 to 15 is one of its own.
template <int kThreads>
__device__ __forceinline__ void sync_threads(int number) {
#ifdef MOESAIC_EMULATE
  moesaic_emulate_named_barrier(number, kThreads);
#else
  asm volatile("bar.sync %0, %1;" :: "r"(number), "n"(kThreads) : "memory");
#endif
}

}  // namespace moesaic
