// Global and shared memory: the check hooks, asynchronous copies, cached loads and stores, fences.
#pragma once

using moesaic_emulate_site = ::moesaic_emulate::Site;

// Device helpers call this before a load or store of global memory.
inline void moesaic_emulate_access(const void* address, unsigned bytes, unsigned align, bool write,
                                   moesaic_emulate_site site = moesaic_emulate_site::here()) {
    ::moesaic_emulate::check_access(address, bytes, align, write, site);
}

// Device helpers call this before PTX would take an address of shared memory.
inline void moesaic_emulate_shared_access(const void* address, unsigned bytes, unsigned align,
                                          moesaic_emulate_site site = moesaic_emulate_site::here()) {
    ::moesaic_emulate::check_shared(address, bytes, align, site);
}

// For portable bodies that find a use which the instruction does not allow.
[[noreturn]] inline void moesaic_emulate_fail(const char* message,
                                              moesaic_emulate_site site = moesaic_emulate_site::here()) {
    ::moesaic_emulate::fail(message, site);
}

// PTX `cp.async`, `cp.async.commit_group` and `cp.async.wait_group` for helpers that wrap them.
inline void moesaic_emulate_copy_async(void* shared, const void* global, unsigned bytes, bool valid,
                                       moesaic_emulate_site site = moesaic_emulate_site::here()) {
    ::moesaic_emulate::copy_async(shared, global, bytes, valid, site);
}
inline void moesaic_emulate_copy_commit() { ::moesaic_emulate::copy_commit(); }
inline void moesaic_emulate_copy_wait(unsigned groups_left,
                                      moesaic_emulate_site site = moesaic_emulate_site::here()) {
    ::moesaic_emulate::copy_wait(groups_left, site);
}

// PTX `mbarrier` and `cp.async.bulk.tensor` for helpers that wrap them.
inline void moesaic_emulate_mbarrier_init(void* barrier, unsigned arrivals,
                                          moesaic_emulate_site site = moesaic_emulate_site::here()) {
    ::moesaic_emulate::mbarrier_init(barrier, arrivals, site);
}
inline void moesaic_emulate_mbarrier_arrive(void* barrier, unsigned bytes,
                                            moesaic_emulate_site site = moesaic_emulate_site::here()) {
    ::moesaic_emulate::mbarrier_arrive(barrier, bytes, site);
}
inline void moesaic_emulate_mbarrier_arrive_after_copies(void* barrier,
                                                         moesaic_emulate_site site = moesaic_emulate_site::here()) {
    ::moesaic_emulate::mbarrier_arrive_after_copies(barrier, site);
}
inline void moesaic_emulate_mbarrier_wait(void* barrier, unsigned parity,
                                          moesaic_emulate_site site = moesaic_emulate_site::here()) {
    ::moesaic_emulate::mbarrier_wait(barrier, parity, site);
}
inline void moesaic_emulate_mbarrier_arrive_in(void* barrier, unsigned rank,
                                               moesaic_emulate_site site = moesaic_emulate_site::here()) {
    ::moesaic_emulate::mbarrier_arrive_in(barrier, rank, site);
}
inline void moesaic_emulate_mbarrier_store_in(void* barrier, void* address, const void* value, unsigned bytes,
                                              unsigned rank,
                                              moesaic_emulate_site site = moesaic_emulate_site::here()) {
    ::moesaic_emulate::mbarrier_store_in(barrier, address, value, bytes, rank, site);
}
inline void moesaic_emulate_copy_box(void* shared, const void* global, unsigned rows, unsigned line_bytes,
                                     long long row_bytes, int valid_rows, int valid_bytes, void* barrier,
                                     moesaic_emulate_site site = moesaic_emulate_site::here()) {
    ::moesaic_emulate::copy_box(shared, global, rows, line_bytes, row_bytes, valid_rows, valid_bytes, barrier, site);
}
inline void moesaic_emulate_copy_box_in(void* shared, const void* global, unsigned rows, unsigned line_bytes,
                                        long long row_bytes, int valid_rows, int valid_bytes, void* barrier,
                                        unsigned rank, moesaic_emulate_site site = moesaic_emulate_site::here()) {
    ::moesaic_emulate::copy_box_in(shared, global, rows, line_bytes, row_bytes, valid_rows, valid_bytes, barrier, rank,
                                   site);
}
inline void moesaic_emulate_store_box(const void* shared, void* global, unsigned line_bytes, long long row_bytes,
                                      int valid_rows, int valid_bytes,
                                      moesaic_emulate_site site = moesaic_emulate_site::here()) {
    ::moesaic_emulate::store_box(shared, global, line_bytes, row_bytes, valid_rows, valid_bytes, site);
}
inline void moesaic_emulate_store_commit() { ::moesaic_emulate::store_commit(); }
inline void moesaic_emulate_store_wait(unsigned groups_left,
                                       moesaic_emulate_site site = moesaic_emulate_site::here()) {
    ::moesaic_emulate::store_wait(groups_left, site);
}

// PTX `wgmma.mma_async` for helpers that wrap it.
using moesaic_emulate_matrix = ::moesaic_emulate::SwizzledMatrix;
inline unsigned long long moesaic_emulate_multiply(const moesaic_emulate_matrix& left,
                                                   const moesaic_emulate_matrix& right, int columns, bool half,
                                                   float* sums,
                                                   moesaic_emulate_site site = moesaic_emulate_site::here()) {
    return ::moesaic_emulate::multiply_swizzled(left, right, columns, half, sums, site);
}
inline unsigned long long moesaic_emulate_multiplied(const moesaic_emulate_matrix& left,
                                                     const moesaic_emulate_matrix& right, int columns) {
    return ::moesaic_emulate::digest_of_swizzled(left, right, columns);
}

// Loads and stores with a cache hint: the hint has no meaning here.
#define MOESAIC_EMULATE_LOAD(name)                                                          \
    template <class T>                                                                      \
    inline T name(const T* address, moesaic_emulate_site site = moesaic_emulate_site::here()) {     \
        ::moesaic_emulate::check_access(address, sizeof(T), alignof(T), false, site);       \
        return *address;                                                                    \
    }
MOESAIC_EMULATE_LOAD(__ldg)
MOESAIC_EMULATE_LOAD(__ldca)
MOESAIC_EMULATE_LOAD(__ldcg)
MOESAIC_EMULATE_LOAD(__ldcs)
MOESAIC_EMULATE_LOAD(__ldcv)
MOESAIC_EMULATE_LOAD(__ldlu)
#undef MOESAIC_EMULATE_LOAD

#define MOESAIC_EMULATE_STORE(name)                                                                 \
    template <class T, class V>                                                                     \
    inline void name(T* address, const V& value, moesaic_emulate_site site = moesaic_emulate_site::here()) { \
        ::moesaic_emulate::check_access(address, sizeof(T), alignof(T), true, site);                \
        *address = static_cast<T>(value);                                                           \
    }
MOESAIC_EMULATE_STORE(__stwb)
MOESAIC_EMULATE_STORE(__stcg)
MOESAIC_EMULATE_STORE(__stcs)
MOESAIC_EMULATE_STORE(__stwt)
#undef MOESAIC_EMULATE_STORE

// Blocks really run on several OS threads, so a fence is a fence; it is also a point where lanes may interleave.
inline void __threadfence() {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    ::moesaic_emulate::yield_lane(false);
}
inline void __threadfence_block() { __threadfence(); }
inline void __threadfence_system() { __threadfence(); }

// A lane that polls must let the others run.
inline void __nanosleep(unsigned) { ::moesaic_emulate::yield_lane(true); }

inline size_t __cvta_generic_to_global(const void* address) { return reinterpret_cast<size_t>(address); }
inline size_t __cvta_generic_to_shared(const void* address) { return reinterpret_cast<size_t>(address); }
