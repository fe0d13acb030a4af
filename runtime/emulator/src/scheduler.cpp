// Which lane runs next. Lanes give up the processor only inside collectives and barriers (and, under a seeded order,
// now and then at atomics and checked accesses), so everything here is plain single-threaded code.
#include <cstring>

#include "state.h"

namespace moesaic_emulate {

__thread LaneView* current_lane = nullptr;
__thread Worker* current_worker = nullptr;

namespace {

constexpr std::uint64_t kPoison = 0x7FFD7FFD7FFD7FFDULL;

// One of the set bits of `bits`, by the worker's order.
unsigned choose(Worker& worker, std::uint32_t bits) {
    if (worker.order == Order::Forward) return static_cast<unsigned>(__builtin_ctz(bits));
    if (worker.order == Order::Reverse) return 31u - static_cast<unsigned>(__builtin_clz(bits));
    const unsigned turn = next_random(worker) & 31u;
    const std::uint32_t turned = turn == 0 ? bits : (bits >> turn) | (bits << (32u - turn));
    return (static_cast<unsigned>(__builtin_ctz(turned)) + turn) & 31u;
}

// Lanes at __activemask move on once no other lane of their warp can: those at the same line count as converged.
void release_active_mask(Warp& warp) {
    const Site site = warp.lanes[__builtin_ctz(warp.at_active_mask)].site;
    unsigned together = 0;
    for (unsigned lanes = warp.at_active_mask; lanes != 0; lanes &= lanes - 1) {
        const unsigned lane = static_cast<unsigned>(__builtin_ctz(lanes));
        const Site& other = warp.lanes[lane].site;
        if (other.line == site.line && std::strcmp(other.file, site.file) == 0) together |= 1u << lane;
    }
    for (unsigned lanes = together; lanes != 0; lanes &= lanes - 1) {
        warp.lanes[__builtin_ctz(lanes)].result = together;
    }
    warp.at_active_mask &= ~together;
    make_ready(warp, together);
}

// Marks a ready lane as the running one.
Lane* take(Worker& worker, Warp& warp, unsigned lane) {
    warp.ready &= ~(1u << lane);
    if (warp.ready == 0) worker.ready_warps &= ~(1u << warp.index);
    worker.current_warp = &warp;
    return &warp.lanes[lane];
}

Lane* pick(Worker& worker) {
    Warp* warp = worker.current_warp;
    if (warp->ready == 0 && warp->at_active_mask != 0) release_active_mask(*warp);
    // Staying in a warp keeps its stacks warm in the cache. A seeded order leaves it at times, to mix warps.
    const bool leave = warp->ready == 0 || (worker.order == Order::Seeded && (next_random(worker) & 7u) == 0);
    if (leave) {
        if (worker.ready_warps == 0) return nullptr;
        warp = &worker.warps[choose(worker, worker.ready_warps)];
    }
    return take(worker, *warp, choose(worker, warp->ready));
}

// Has the lanes of another block of the cluster run from now on.
void enter_block(Worker& worker) {
    Worker& left = this_worker();
    if (&left == &worker) return;
    std::memcpy(left.own_static_shared.get(), left.static_shared, left.static_shared_bytes);
    std::memcpy(worker.static_shared, worker.own_static_shared.get(), worker.static_shared_bytes);
    current_worker = &worker;
}

// A lane of any block of the cluster. Blocks run until they wait; a seeded order leaves them at times.
Lane* pick_of_cluster(Worker& worker) {
    Cluster& cluster = *worker.cluster;
    const bool leave = worker.order == Order::Seeded && (next_random(worker) & 31u) == 0;
    if (!leave) {
        Lane* const own = pick(worker);
        if (own != nullptr) return own;
    }
    const unsigned turn = worker.order == Order::Seeded ? next_random(worker) % cluster.size : 0;
    for (unsigned i = 0; i < cluster.size; ++i) {
        const unsigned place = (i + turn) % cluster.size;
        Worker& other = *cluster.blocks[worker.order == Order::Reverse ? cluster.size - 1 - place : place];
        Lane* const lane = pick(other);
        if (lane == nullptr) continue;
        enter_block(other);
        return lane;
    }
    return nullptr;
}

// The next lane that can go on, round and round: a fixed order would let two lanes that poll starve the third.
Lane* pick_after(Worker& worker, const Lane& lane) {
    const auto above = [](unsigned bits, unsigned index) { return bits & ~((2u << index) - 1u); };
    Warp* warp = lane.warp;
    unsigned lanes = above(warp->ready, lane.index);
    if (lanes == 0) {
        if (worker.ready_warps == 0) return nullptr;
        const unsigned later = above(worker.ready_warps, warp->index);
        warp = &worker.warps[__builtin_ctz(later != 0 ? later : worker.ready_warps)];
        lanes = warp->ready;
    }
    return take(worker, *warp, static_cast<unsigned>(__builtin_ctz(lanes)));
}

// The first function of every lane's stack.
void run_lane() {
    Worker& worker = this_worker();
    worker.grid->kernel->run(worker.grid->request->arguments);

    Lane& lane = this_lane();
    Warp& warp = *lane.warp;
    if (has_stores(worker, lane)) {
        report_lane(worker, "a thread ends that has not waited for a box it sent from shared memory", nullptr, nullptr,
                    nullptr);
    }
    if (lane.arrived) {
        report_lane(worker, "a thread ends that has arrived at the barrier of the cluster and not waited", &lane.site,
                    nullptr, nullptr);
    }
    Cluster& cluster = *worker.cluster;
    lane.state = LaneState::Exited;
    warp.alive &= ~(1u << lane.index);
    worker.alive -= 1;
    cluster.alive -= 1;
    release_after_exit(worker, warp);
    release_cluster(cluster);
    if (worker.alive == 0) {
        // Another block's shared memory may lie there when it comes.
        if (const PendingArrival* box = box_under_way(worker)) {
            report_lane(worker, "a box of the copy engine is under way, and the block has ended", &box->site, nullptr,
                        nullptr);
        }
        if (cluster.alive == 0) leave_cluster(cluster);
    }
    dispatch(worker);
    __builtin_unreachable();
}

void set_up_block(Worker& worker, std::uint64_t linear_block) {
    const LaunchRequest& request = *worker.grid->request;
    worker.view.block_index = {static_cast<unsigned>(linear_block % request.grid.x),
                               static_cast<unsigned>(linear_block / request.grid.x % request.grid.y),
                               static_cast<unsigned>(linear_block / request.grid.x / request.grid.y)};
    // Seeded by the block, not by the worker: a schedule does not depend on how many workers there are.
    worker.random = static_cast<std::uint64_t>(request.order) * 0x9E3779B97F4A7C15ULL +
                    (linear_block + 1) * 0xBF58476D1CE4E5B9ULL;
    if (worker.random == 0) worker.random = 1;

    worker.alive = worker.thread_count;
    worker.ready_warps = 0;
    std::memset(worker.barriers, 0, sizeof worker.barriers);
    forget_copies(worker);
    worker.arrival_count = 0;
    worker.store_count = 0;
    unsigned thread = 0;
    for (unsigned w = 0; w < worker.warp_count; ++w) {
        Warp& warp = worker.warps[w];
        const unsigned lanes = worker.thread_count - thread < kWarpSize ? worker.thread_count - thread : kWarpSize;
        warp.alive = lanes == kWarpSize ? ~0u : (1u << lanes) - 1u;
        warp.ready = 0;
        warp.at_active_mask = 0;
        warp.barrier_count = 0;
        for (unsigned i = 0; i < lanes; ++i, ++thread) {
            warp.lanes[i].state = LaneState::Ready;
            warp.lanes[i].arrived = false;
            context_prepare(warp.lanes[i].context, worker.stacks.stack(thread), run_lane);
        }
        make_ready(warp, warp.alive);
    }
    poison(worker.own_static_shared ? worker.own_static_shared.get() : worker.static_shared, worker.static_shared_bytes);
    poison(worker.view.dynamic_shared, worker.view.dynamic_shared_bytes);
    worker.current_warp = &worker.warps[choose(worker, worker.ready_warps)];
}

}  // namespace

void poison(unsigned char* memory, std::size_t bytes) {
    std::size_t at = 0;
    for (; at + 8 <= bytes; at += 8) std::memcpy(memory + at, &kPoison, 8);
    std::memcpy(memory + at, &kPoison, bytes - at);
}

bool is_poison(const unsigned char* memory, std::size_t bytes) {
    for (; bytes > 8; memory += 8, bytes -= 8) {
        if (std::memcmp(memory, &kPoison, 8) != 0) return false;
    }
    return std::memcmp(memory, &kPoison, bytes) == 0;
}

void make_ready(Warp& warp, unsigned lanes) {
    if (lanes == 0) return;
    warp.ready |= lanes;
    warp.worker->ready_warps |= 1u << warp.index;
}

void dispatch(Worker& worker) {
    Lane& from = this_lane();
    Lane* next = worker.cluster->size == 1 ? pick(worker) : pick_of_cluster(worker);
    if (next == nullptr) report_deadlock(worker);
    if (next == &from) return;
    current_lane = &next->view;
    context_switch(from.context, next->context);
}

void leave_cluster(Cluster& cluster) {
    Context abandoned;
    current_lane = nullptr;
    context_switch(abandoned, cluster.main);
    __builtin_unreachable();
}

void run_cluster(Cluster& cluster, std::uint64_t number) {
    cluster.alive = cluster.arrived = 0;
    for (unsigned b = 0; b < cluster.size; ++b) {
        Worker& worker = *cluster.blocks[b];
        set_up_block(worker, number * cluster.size + b);
        cluster.alive += worker.alive;
    }
    const Order order = cluster.blocks[0]->order;
    Worker& worker = *cluster.blocks[order == Order::Reverse ? cluster.size - 1 : 0];
    if (worker.own_static_shared) {
        std::memcpy(worker.static_shared, worker.own_static_shared.get(), worker.static_shared_bytes);
    }
    current_worker = &worker;
    Lane* first = pick(worker);
    current_lane = &first->view;
    for (unsigned b = 0; b < cluster.size; ++b) cluster.blocks[b]->in_fiber.store(true, std::memory_order_relaxed);
    context_switch(cluster.main, first->context);
    for (unsigned b = 0; b < cluster.size; ++b) cluster.blocks[b]->in_fiber.store(false, std::memory_order_relaxed);
}

void yield_lane(bool always) {
    Worker& worker = this_worker();
    Lane& lane = this_lane();
    if (worker.order == Order::Seeded) {
        if (!always && (next_random(worker) & 7u) != 0) return;
        make_ready(*lane.warp, 1u << lane.index);
        return dispatch(worker);
    }
    if (!always) return;
    Lane* next = pick_after(worker, lane);
    if (next == nullptr) return;
    make_ready(*lane.warp, 1u << lane.index);
    current_lane = &next->view;
    context_switch(lane.context, next->context);
}

}  // namespace moesaic_emulate
