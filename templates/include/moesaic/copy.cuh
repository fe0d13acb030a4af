// Copies from global to shared memory that a thread starts and waits for later, in groups (sm_80 and newer).
//
// A wait makes a thread's own copies visible to that thread; a barrier after it makes them visible to the others, and
// says that the buffer which the next copies go to has been read:
//
//   copy_async<16>(...); copy_commit();     // once for each stage that is fetched ahead
//   copy_wait<kStages - 2>(); __syncthreads(); copy_async<16>(...); copy_commit(); /* read the oldest stage */
//
// Commit in every step, with or without copies: then the number of groups left never depends on the step.
// PTX ISA, "Data Movement and Conversion Instructions: cp.async".
#pragma once

#include "moesaic/base.cuh"

namespace moesaic {

// Where copies go that lie at known distances from each other: one address for all of them, which the compiler does not take
// apart again into one for each.
struct CopyPlace {
#ifdef MOESAIC_EMULATE
  unsigned char* start;
  explicit CopyPlace(void* shared) : start(static_cast<unsigned char*>(shared)) {}
#else
  unsigned start;
  __device__ __forceinline__ explicit CopyPlace(void* shared)
      : start(kept(static_cast<unsigned>(__cvta_generic_to_shared(shared)))) {}
#endif
};

// kBytes from `global` to shared memory, `bytes` after `to`, both aligned to kBytes; zeros if not `valid`, and then `global`
// is not read. .cg leaves the L1 cache alone and exists for 16 bytes only.
template <int kBytes>
__device__ __forceinline__ void copy_async(CopyPlace to, int bytes, const void* global, bool valid) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async moves 4, 8 or 16 bytes");
#ifdef MOESAIC_EMULATE
  moesaic_emulate_copy_async(to.start + bytes, global, kBytes, valid);
#else
  const int source_bytes = valid ? kBytes : 0;  // what is missing to kBytes is filled with zeros
  if constexpr (kBytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :: "r"(to.start + bytes), "l"(global), "r"(source_bytes) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
                 :: "r"(to.start + bytes), "l"(global), "n"(kBytes), "r"(source_bytes) : "memory");
  }
#endif
}
template <int kBytes>
__device__ __forceinline__ void copy_async(void* shared, const void* global, bool valid) {
  copy_async<kBytes>(CopyPlace(shared), 0, global, valid);
}

// Closes the group of the copies that this thread started since its last commit. A group may be empty.
__device__ __forceinline__ void copy_commit() {
#ifdef MOESAIC_EMULATE
  moesaic_emulate_copy_commit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits for all groups of this thread but the kGroupsLeft committed last. Copies without a commit are not waited for.
template <int kGroupsLeft>
__device__ __forceinline__ void copy_wait() {
  static_assert(kGroupsLeft >= 0, "a pipeline of one stage cannot wait before its first copy");
#ifdef MOESAIC_EMULATE
  moesaic_emulate_copy_wait(kGroupsLeft);
#else
  asm volatile("cp.async.wait_group %0;" :: "n"(kGroupsLeft) : "memory");
#endif
}

}  // namespace moesaic
