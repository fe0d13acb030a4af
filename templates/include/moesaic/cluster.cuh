// Clusters (sm_90): blocks that run at the same time, have a barrier of their own, and read each other's shared memory.
// PTX ISA, "Parallel Synchronization and Communication Instructions: barrier.cluster" and "State Spaces: shared".
#pragma once

#include "moesaic/base.cuh"

namespace moesaic {

// The two halves of a barrier of all threads of a cluster. What a thread did before its arrival is seen by every thread
// after its wait.
__device__ __forceinline__ void cluster_arrive() {
#ifdef MOESAIC_EMULATE
  moesaic_emulate_cluster_arrive();
#else
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
// The arrival of a thread that has written nothing since for others to see, for which the other one waits hundreds of
// clocks: that its block runs, and has shared memory to be written; or that it has read what others have, and used it,
// which they wait for, since their shared memory ends with them.
__device__ __forceinline__ void cluster_arrive_relaxed() {
#ifdef MOESAIC_EMULATE
  moesaic_emulate_cluster_arrive();
#else
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
__device__ __forceinline__ void cluster_wait() {
#ifdef MOESAIC_EMULATE
  moesaic_emulate_cluster_wait();
#else
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// Arrival and wait, with the meaning of __syncthreads.
__device__ __forceinline__ void sync_cluster() {
  cluster_arrive();
  cluster_wait();
}

// What lies at the same place in the shared memory of block `rank` of the cluster.
// PTX ISA, "Data Movement and Conversion Instructions: mapa, ld".
__device__ __forceinline__ int load_from_block(const int* address, int rank) {
#ifdef MOESAIC_EMULATE
  return *static_cast<const int*>(moesaic_emulate_in_block(address, sizeof(int), rank));
#else
  int value;
  asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %1, %2;\n"
               "ld.shared::cluster.s32 %0, [there];}"
               : "=r"(value)
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(address))), "r"(rank)
               : "memory");
  return value;
#endif
}

// The same place in that block gets a value. The block must run, and not have ended.
// PTX ISA, "Data Movement and Conversion Instructions: mapa, st".
template <typename T>
__device__ __forceinline__ void store_to_block(T* address, T value, int rank) {
  static_assert(sizeof(T) == 4, "a register");
#ifdef MOESAIC_EMULATE
  *static_cast<T*>(const_cast<void*>(moesaic_emulate_in_block(address, sizeof(T), rank))) = value;
#else
  unsigned bits;
  memcpy(&bits, &value, sizeof(T));
  asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %2;\n"
               "st.shared::cluster.u32 [there], %1;}" ::"r"(static_cast<unsigned>(__cvta_generic_to_shared(address))),
               "r"(bits), "r"(rank)
               : "memory");
#endif
}

// A pointer into the first block of the cluster, to the place of `here` in this one.
template <typename T>
struct InFirstBlock {
  T* here;
  __device__ __forceinline__ InFirstBlock operator+(long long distance) const { return {here + distance}; }
};
template <typename T>
__device__ __forceinline__ void store_one(InFirstBlock<T> address, T value) {
  store_to_block(address.here, value, 0);
}

}  // namespace moesaic
