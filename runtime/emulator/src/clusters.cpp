// The barrier of a cluster, and its blocks' shared memory as they see each other's.
#include <cstdio>

#include "state.h"

namespace moesaic_emulate {

void release_cluster(Cluster& cluster) {
    if (cluster.arrived == 0 || cluster.arrived != cluster.alive) return;
    cluster.arrived = 0;
    cluster.phase += 1;
    for (unsigned b = 0; b < cluster.size; ++b) {
        Worker& worker = *cluster.blocks[b];
        for (unsigned w = 0; w < worker.warp_count; ++w) {
            Warp& warp = worker.warps[w];
            unsigned released = 0;
            for (unsigned lanes = warp.alive; lanes != 0; lanes &= lanes - 1) {
                const unsigned index = static_cast<unsigned>(__builtin_ctz(lanes));
                Lane& lane = warp.lanes[index];
                if (lane.state != LaneState::AtClusterBarrier) continue;
                lane.state = LaneState::Ready;
                released |= 1u << index;
            }
            make_ready(warp, released);
        }
    }
}

void cluster_arrive(Site site) {
    Lane& lane = this_lane();
    Cluster& cluster = *this_worker().cluster;
    if (lane.arrived) fail("a second arrival at the barrier of the cluster, without a wait between", site);
    lane.arrived = true;
    lane.cluster_phase = cluster.phase;
    lane.site = site;
    cluster.arrived += 1;
    release_cluster(cluster);
    yield_lane(false);
}

void cluster_wait(Site site) {
    Lane& lane = this_lane();
    Worker& worker = this_worker();
    if (!lane.arrived) fail("a wait at the barrier of the cluster without an arrival before", site);
    lane.arrived = false;
    if (lane.cluster_phase != worker.cluster->phase) return yield_lane(false);
    lane.state = LaneState::AtClusterBarrier;
    lane.site = site;
    lane.frame = __builtin_frame_address(0);
    dispatch(worker);
}

Worker& block_of_cluster(unsigned rank, Site site) {
    Worker& worker = this_worker();
    const Cluster& cluster = *worker.cluster;
    char message[160];
    if (rank >= cluster.size) {
        snprintf(message, sizeof message, "block %u of a cluster of %u", rank, cluster.size);
        fail(message, site);
    }
    Worker& other = *cluster.blocks[rank];
    if (other.alive == 0) {
        snprintf(message, sizeof message, "shared memory of block %u of the cluster, which has ended", rank);
        fail(message, site);
    }
    return other;
}

const void* in_block_of_cluster(const void* address, unsigned bytes, unsigned rank, Site site) {
    check_shared(address, bytes, bytes, site);
    const Worker& worker = this_worker();
    const Worker& other = block_of_cluster(rank, site);
    if (&other == &worker) return address;
    const auto* at = static_cast<const unsigned char*>(address);
    const auto offset = static_cast<std::size_t>(at - worker.view.dynamic_shared);
    if (at >= worker.view.dynamic_shared && offset < worker.view.dynamic_shared_bytes) {
        return other.view.dynamic_shared + offset;
    }
    return other.own_static_shared.get() + (at - worker.static_shared);
}

std::uintptr_t address_at_home(const Worker& worker, const void* address) {
    const auto* at = static_cast<const unsigned char*>(address);
    const unsigned char* const kept = worker.own_static_shared.get();
    const bool away = kept != nullptr && at >= kept && at < kept + worker.static_shared_bytes;
    return reinterpret_cast<std::uintptr_t>(away ? worker.static_shared + (at - kept) : at);
}

}  // namespace moesaic_emulate
