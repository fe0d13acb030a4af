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
