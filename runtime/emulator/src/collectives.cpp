// Warp collectives, block barriers and __activemask: lanes that meet.
//
// The last lane to arrive computes the results of all: at that moment every lane named by the mask stands still, so no
// slot can be overwritten before it is read, whatever masks the lanes use before and after.
#include <cstdio>
#include <cstring>

#include "state.h"

namespace moesaic_emulate {

namespace {

bool is_shuffle(WarpOperation operation) {
    return operation >= WarpOperation::ShuffleIndex && operation <= WarpOperation::ShuffleXor;
}

[[noreturn]] void fail_at(Lane& lane, const char* message) {
    report_lane(this_worker(), message, &lane.site, nullptr, lane.frame);
}

// Lane whose value `lane` receives; itself where the segment ends (what the device does).
unsigned shuffle_source(const Lane& lane) {
    const unsigned segment = static_cast<unsigned>(lane.width);
    const unsigned first = lane.index & ~(segment - 1u);
    const unsigned last = first + segment - 1u;
    const unsigned operand = lane.operand & (kWarpSize - 1u);
    switch (lane.warp_operation) {
        case WarpOperation::ShuffleIndex: return first | (operand & (segment - 1u));
        case WarpOperation::ShuffleUp: return lane.index >= first + operand ? lane.index - operand : lane.index;
        case WarpOperation::ShuffleDown: return lane.index + operand <= last ? lane.index + operand : lane.index;
        // Earlier segments may be read, later ones not.
        default: return (lane.index ^ operand) <= last ? lane.index ^ operand : lane.index;
    }
}

void shuffle_lanes(Warp& warp, unsigned arrived) {
    for (unsigned lanes = arrived; lanes != 0; lanes &= lanes - 1) {
        Lane& lane = warp.lanes[__builtin_ctz(lanes)];
        const unsigned source = shuffle_source(lane);
        if ((arrived >> source & 1u) == 0) {
            current_lane = &lane.view;  // the report is about the reader, who need not be the last to arrive
            char message[160];
            snprintf(message, sizeof message, "%s reads lane %u, which %s", name_of(lane.warp_operation), source,
                     (lane.mask >> source & 1u) == 0 ? "its mask does not name" : "has exited");
            fail_at(lane, message);
        }
        lane.result = warp.lanes[source].value;
    }
}

void execute_for_warp(Warp& warp, unsigned arrived) {
    const auto request = [&](unsigned lane) {
        return reinterpret_cast<const WholeWarp*>(static_cast<std::uintptr_t>(warp.lanes[lane].value));
    };
    const unsigned first = static_cast<unsigned>(__builtin_ctz(arrived));
    const auto execute = request(first)->execute;
    void* own[kWarpSize];
    for (unsigned i = 0; i < kWarpSize; ++i) {
        const bool here = (arrived >> i & 1u) != 0;
        if (here && request(i)->execute == execute) {
            own[i] = request(i)->own;
            continue;
        }
        Lane& lane = warp.lanes[first];
        current_lane = &lane.view;
        char message[160];
        snprintf(message, sizeof message, "%s meets lane %u, which %s", name_of(lane.warp_operation), i,
                 here ? "is at another one" : "has exited or is beyond the block");
        fail_at(lane, message);
    }
    execute(own);
}

std::uint64_t reduce_lanes(const Warp& warp, unsigned arrived, WarpOperation operation) {
    const auto first = static_cast<std::uint32_t>(warp.lanes[__builtin_ctz(arrived)].value);
    std::uint32_t total = first;
    for (unsigned lanes = arrived & (arrived - 1); lanes != 0; lanes &= lanes - 1) {
        const auto value = static_cast<std::uint32_t>(warp.lanes[__builtin_ctz(lanes)].value);
        const bool less = static_cast<std::int32_t>(value) < static_cast<std::int32_t>(total);
        switch (operation) {
            case WarpOperation::ReduceAddUnsigned:
            case WarpOperation::ReduceAddSigned: total += value; break;
            case WarpOperation::ReduceMinUnsigned: total = value < total ? value : total; break;
            case WarpOperation::ReduceMaxUnsigned: total = value > total ? value : total; break;
            case WarpOperation::ReduceMinSigned: total = less ? value : total; break;
            case WarpOperation::ReduceMaxSigned: total = less ? total : value; break;
            case WarpOperation::ReduceAnd: total &= value; break;
            case WarpOperation::ReduceOr: total |= value; break;
            default: total ^= value; break;
        }
    }
    return total;
}

// Lanes of `arrived` whose value equals `value`.
unsigned matching(const Warp& warp, unsigned arrived, std::uint64_t value) {
    unsigned equal = 0;
    for (unsigned lanes = arrived; lanes != 0; lanes &= lanes - 1) {
        const unsigned lane = static_cast<unsigned>(__builtin_ctz(lanes));
        if (warp.lanes[lane].value == value) equal |= 1u << lane;
    }
    return equal;
}

void compute_results(Warp& warp, unsigned arrived, WarpOperation operation) {
    if (operation == WarpOperation::SyncWarp) return;
    if (is_shuffle(operation)) return shuffle_lanes(warp, arrived);
    if (operation == WarpOperation::WholeWarp) return execute_for_warp(warp, arrived);

    if (operation == WarpOperation::MatchAny) {
        for (unsigned lanes = arrived; lanes != 0; lanes &= lanes - 1) {
            Lane& lane = warp.lanes[__builtin_ctz(lanes)];
            lane.result = matching(warp, arrived, lane.value);
        }
        return;
    }
    std::uint64_t result = 0;
    if (operation == WarpOperation::MatchAll) {
        const unsigned equal = matching(warp, arrived, warp.lanes[__builtin_ctz(arrived)].value);
        result = equal == arrived ? arrived : 0;
    } else if (operation == WarpOperation::Ballot || operation == WarpOperation::Any ||
               operation == WarpOperation::All) {
        const unsigned ballot = matching(warp, arrived, 1);
        result = operation == WarpOperation::Ballot ? ballot
                 : operation == WarpOperation::Any  ? ballot != 0
                                                    : ballot == arrived;
    } else {
        result = reduce_lanes(warp, arrived, operation);
    }
    for (unsigned lanes = arrived; lanes != 0; lanes &= lanes - 1) warp.lanes[__builtin_ctz(lanes)].result = result;
}

bool block_barrier_complete(const Worker& worker, unsigned id) {
    const BlockBarrier& barrier = worker.barriers[id];
    return barrier.arrived != 0 && barrier.arrived == (id == 0 ? worker.alive : barrier.expected);
}

void complete_block_barrier(Worker& worker, unsigned id) {
    BlockBarrier& barrier = worker.barriers[id];
    switch (barrier.operation) {
        case BlockOperation::Count: barrier.result = static_cast<int>(barrier.sum); break;
        case BlockOperation::And: barrier.result = barrier.sum == barrier.arrived; break;
        case BlockOperation::Or: barrier.result = barrier.sum != 0; break;
        default: barrier.result = 0; break;
    }
    for (unsigned w = 0; w < worker.warp_count; ++w) {
        Warp& warp = worker.warps[w];
        unsigned waiting = 0;
        for (unsigned lanes = warp.alive; lanes != 0; lanes &= lanes - 1) {
            const unsigned index = static_cast<unsigned>(__builtin_ctz(lanes));
            Lane& lane = warp.lanes[index];
            if (lane.state != LaneState::AtBlockBarrier || lane.mask != id) continue;
            lane.state = LaneState::Ready;
            lane.result = static_cast<std::uint64_t>(barrier.result);
            waiting |= 1u << index;
        }
        make_ready(warp, waiting);
    }
    barrier.arrived = 0;
    barrier.sum = 0;
}

}  // namespace

const char* name_of(WarpOperation operation) {
    static const char* const names[] = {
        "__syncwarp",        "__shfl_sync",       "__shfl_up_sync",    "__shfl_down_sync",  "__shfl_xor_sync",
        "__ballot_sync",     "__any_sync",        "__all_sync",        "__match_any_sync",  "__match_all_sync",
        "__reduce_add_sync", "__reduce_add_sync", "__reduce_min_sync", "__reduce_min_sync", "__reduce_max_sync",
        "__reduce_max_sync", "__reduce_and_sync", "__reduce_or_sync",  "__reduce_xor_sync",
        "an instruction of the whole warp"};
    return names[static_cast<unsigned>(operation)];
}

const char* name_of(BlockOperation operation) {
    static const char* const names[] = {"__syncthreads", "__syncthreads_count", "__syncthreads_and",
                                        "__syncthreads_or", "named barrier"};
    return names[static_cast<unsigned>(operation)];
}

bool warp_barrier_complete(const Warp& warp, const WarpBarrier& barrier) {
    return (barrier.mask & warp.alive & ~barrier.arrived) == 0;
}

void complete_warp_barrier(Warp& warp, unsigned slot) {
    const WarpBarrier barrier = warp.barriers[slot];
    warp.barriers[slot] = warp.barriers[--warp.barrier_count];
    compute_results(warp, barrier.arrived, barrier.operation);
    for (unsigned lanes = barrier.arrived; lanes != 0; lanes &= lanes - 1) {
        warp.lanes[__builtin_ctz(lanes)].state = LaneState::Ready;
    }
    make_ready(warp, barrier.arrived);
}

void release_after_exit(Worker& worker, Warp& warp) {
    for (unsigned slot = 0; slot < warp.barrier_count;) {
        if (warp.barriers[slot].arrived != 0 && warp_barrier_complete(warp, warp.barriers[slot])) {
            complete_warp_barrier(warp, slot);
        } else {
            ++slot;
        }
    }
    if (block_barrier_complete(worker, 0)) complete_block_barrier(worker, 0);
}

std::uint64_t warp_collective(WarpOperation operation, unsigned mask, std::uint64_t value, unsigned operand, int width,
                              Site site) {
    Lane& lane = this_lane();
    Warp& warp = *lane.warp;
    lane.warp_operation = operation;
    lane.mask = mask;
    lane.value = value;
    lane.operand = operand;
    lane.width = width;
    lane.site = site;
    lane.frame = __builtin_frame_address(0);

    const unsigned self = 1u << lane.index;
    if ((mask & self) == 0) {
        char message[160];
        snprintf(message, sizeof message, "%s with mask 0x%08x, which does not name the calling lane",
                 name_of(operation), mask);
        fail_at(lane, message);
    }
    if (is_shuffle(operation) && (width < 1 || width > static_cast<int>(kWarpSize) || (width & (width - 1)) != 0)) {
        char message[160];
        snprintf(message, sizeof message, "%s with width %d; expected a power of two from 1 to 32", name_of(operation),
                 width);
        fail_at(lane, message);
    }

    unsigned slot = 0;
    while (slot < warp.barrier_count && warp.barriers[slot].mask != mask) ++slot;
    if (slot == warp.barrier_count) warp.barriers[warp.barrier_count++] = {mask, 0, operation};
    WarpBarrier& barrier = warp.barriers[slot];
    if (barrier.operation != operation) {
        char message[200];
        const Lane& other = warp.lanes[__builtin_ctz(barrier.arrived)];
        snprintf(message, sizeof message, "%s with mask 0x%08x meets lane %u of its warp at %s (line %d)",
                 name_of(operation), mask, other.index, name_of(barrier.operation), other.site.line);
        fail_at(lane, message);
    }
    barrier.arrived |= self;
    lane.state = LaneState::AtWarpOperation;
    if (warp_barrier_complete(warp, barrier)) complete_warp_barrier(warp, slot);
    dispatch(*warp.worker);
    return lane.result;
}

void execute_as_one(const WholeWarp& request, Site site) {
    warp_collective(WarpOperation::WholeWarp, ~0u, reinterpret_cast<std::uintptr_t>(&request), 0,
                    static_cast<int>(kWarpSize), site);
}

int block_barrier(BlockOperation operation, unsigned id, unsigned threads, int predicate, Site site) {
    Lane& lane = this_lane();
    Worker& worker = this_worker();
    lane.block_operation = operation;
    lane.mask = id;
    lane.site = site;
    lane.frame = __builtin_frame_address(0);
    if (operation == BlockOperation::Named &&
        (id == 0 || id >= kNamedBarriers || threads == 0 || threads % kWarpSize != 0)) {
        fail_at(lane, "named barrier: expected an id from 1 to 15 and a multiple of 32 threads");
    }

    BlockBarrier& barrier = worker.barriers[id];
    if (barrier.arrived == 0) {
        barrier.operation = operation;
        barrier.expected = threads;
        barrier.site = site;
    }
    const bool same_place = barrier.site.line == site.line && std::strcmp(barrier.site.file, site.file) == 0;
    if (barrier.operation != operation || barrier.expected != threads || (id == 0 && !same_place)) {
        char message[240];
        snprintf(message, sizeof message,
                 "divergent %s: other threads of the block wait at %s in line %d of %s; every thread must reach the "
                 "same one",
                 name_of(operation), name_of(barrier.operation), barrier.site.line, barrier.site.file);
        fail_at(lane, message);
    }
    barrier.arrived += 1;
    barrier.sum += predicate != 0;
    lane.state = LaneState::AtBlockBarrier;
    if (block_barrier_complete(worker, id)) complete_block_barrier(worker, id);
    dispatch(worker);
    return static_cast<int>(lane.result);
}

unsigned active_mask(Site site) {
    Lane& lane = this_lane();
    lane.site = site;
    lane.frame = __builtin_frame_address(0);
    lane.state = LaneState::AtActiveMask;
    lane.warp->at_active_mask |= 1u << lane.index;
    dispatch(*lane.warp->worker);
    lane.state = LaneState::Ready;
    return static_cast<unsigned>(lane.result);
}

}  // namespace moesaic_emulate
