// Barriers in shared memory that count arrivals and bytes (mbarrier, sm_90): how warps that fetch and warps that multiply
// wait for each other, without stopping the block.
//
// A barrier goes through phases. A phase is over when as many arrivals as `mbarrier_init` said have come, and all bytes
// that were announced. `mbarrier_wait(barrier, parity)` returns once the phase of that parity is over; phases are 0, 1,
// 0, ... from the first on, and before the first one that of parity 1 counts as over.
// PTX ISA, "Parallel Synchronization and Communication Instructions: mbarrier".
#pragma once

#include "moesaic/base.cuh"

namespace moesaic {

using Mbarrier = unsigned long long;  // 8 bytes of shared memory, opaque

// By one thread; `mbarrier_ready`, by the same, and a barrier of the block come before anyone's use.
__device__ __forceinline__ void mbarrier_init(Mbarrier* barrier, int arrivals) {
#ifdef MOESAIC_EMULATE
  moesaic_emulate_mbarrier_init(barrier, arrivals);
#else
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
               :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(barrier))), "r"(arrivals) : "memory");
#endif
}
__device__ __forceinline__ void mbarrier_ready() {
#ifndef MOESAIC_EMULATE
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// One arrival, and `bytes` more that the phase waits for.
__device__ __forceinline__ void mbarrier_arrive_and_expect(Mbarrier* barrier, int bytes) {
#ifdef MOESAIC_EMULATE
  moesaic_emulate_mbarrier_arrive(barrier, bytes);
#else
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(barrier))), "r"(bytes) : "memory");
#endif
}

// An arrival once all copies that this thread has started by `copy_async` are there. One of those that were counted.
__device__ __forceinline__ void mbarrier_arrive_after_copies(Mbarrier* barrier) {
#ifdef MOESAIC_EMULATE
  moesaic_emulate_mbarrier_arrive_after_copies(barrier);
#else
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];"
               :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(barrier))) : "memory");
#endif
}

// An arrival at the barrier that lies at the same place in block `rank` of the cluster. Without .release.cluster, which
// would wait for all of the thread's memory traffic: whoever arrives has only read.
__device__ __forceinline__ void mbarrier_arrive_in(Mbarrier* barrier, int rank) {
#ifdef MOESAIC_EMULATE
  moesaic_emulate_mbarrier_arrive_in(barrier, rank);
#else
  asm volatile("{.reg .b32 there; mapa.shared::cluster.u32 there, %0, %1;\n"
               "mbarrier.arrive.shared::cluster.b64 _, [there];}"
               :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(barrier))), "r"(rank) : "memory");
#endif
}

// 16 bytes for the place of that address in block `rank` of the cluster. They count for the barrier of that place there, whose
// phase waits for as many: an arrival there announces them, before or after.
// PTX ISA, "Data Movement and Conversion Instructions: st.async".
template <typename T>
__device__ __forceinline__ void mbarrier_store_in(Mbarrier* barrier, T* address, const T& value, int rank) {
  static_assert(sizeof(T) == 16, "four registers");
#ifdef MOESAIC_EMULATE
  moesaic_emulate_mbarrier_store_in(barrier, address, &value, sizeof(T), rank);
#else
  unsigned words[4];
  memcpy(words, &value, sizeof(words));
  asm volatile("{.reg .b32 there, barrier;\n"
               "mapa.shared::cluster.u32 there, %0, %6; mapa.shared::cluster.u32 barrier, %1, %6;\n"
               "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [there], {%2, %3, %4, %5}, [barrier];}"
               :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(address))),
                  "r"(static_cast<unsigned>(__cvta_generic_to_shared(barrier))), "r"(words[0]), "r"(words[1]),
                  "r"(words[2]), "r"(words[3]), "r"(rank)
               : "memory");
#endif
}

__device__ __forceinline__ void mbarrier_wait(Mbarrier* barrier, unsigned parity) {
#ifdef MOESAIC_EMULATE
  moesaic_emulate_mbarrier_wait(barrier, parity);
#else
  asm volatile("{.reg .pred over;\n"
               "again: mbarrier.try_wait.parity.shared::cta.b64 over, [%0], %1;\n"
               "@over bra done;\n"
               "bra again;\n"
               "done: }"
               :: "r"(static_cast<unsigned>(__cvta_generic_to_shared(barrier))), "r"(parity) : "memory");
#endif
}

}  // namespace moesaic
