// Barriers of blocks and clusters, and dynamic shared memory.
#pragma once

inline void __syncthreads(moesaic_emulate_site site = moesaic_emulate_site::here()) {
    ::moesaic_emulate::block_barrier(::moesaic_emulate::BlockOperation::Sync, 0, 0, 0, site);
}
inline int __syncthreads_count(int predicate, moesaic_emulate_site site = moesaic_emulate_site::here()) {
    return ::moesaic_emulate::block_barrier(::moesaic_emulate::BlockOperation::Count, 0, 0, predicate, site);
}
inline int __syncthreads_and(int predicate, moesaic_emulate_site site = moesaic_emulate_site::here()) {
    return ::moesaic_emulate::block_barrier(::moesaic_emulate::BlockOperation::And, 0, 0, predicate, site);
}
inline int __syncthreads_or(int predicate, moesaic_emulate_site site = moesaic_emulate_site::here()) {
    return ::moesaic_emulate::block_barrier(::moesaic_emulate::BlockOperation::Or, 0, 0, predicate, site);
}

// PTX `bar.sync id, threads` for helpers that wrap it: id 1 to 15, threads a multiple of the warp size.
inline void moesaic_emulate_named_barrier(unsigned id, unsigned threads,
                                          moesaic_emulate_site site = moesaic_emulate_site::here()) {
    ::moesaic_emulate::block_barrier(::moesaic_emulate::BlockOperation::Named, id, threads, 0, site);
}

// PTX `barrier.cluster` and `mapa` for helpers that wrap them.
inline void moesaic_emulate_cluster_arrive(moesaic_emulate_site site = moesaic_emulate_site::here()) {
    ::moesaic_emulate::cluster_arrive(site);
}
inline void moesaic_emulate_cluster_wait(moesaic_emulate_site site = moesaic_emulate_site::here()) {
    ::moesaic_emulate::cluster_wait(site);
}
inline const void* moesaic_emulate_in_block(const void* address, unsigned bytes, int rank,
                                            moesaic_emulate_site site = moesaic_emulate_site::here()) {
    return ::moesaic_emulate::in_block_of_cluster(address, bytes, static_cast<unsigned>(rank), site);
}

// `type* name` at the start of the block's dynamic shared memory. Right behind its end, rounded up to 16 bytes, lies
// a page that may not be touched.
#define MOESAIC_DYNAMIC_SHARED(type, name) \
    type* const name = reinterpret_cast<type*>(::moesaic_emulate::current_lane->block->dynamic_shared)
