// Barriers in shared memory that count arrivals and bytes (PTX `mbarrier`), and what arrives at them by itself: copies
// of lanes (`cp.async.mbarrier.arrive.noinc`) and boxes of the copy engine. Boxes that it takes away.
//
// What arrives by itself does so as late as it can: when somebody waits for the barrier. Until then the destination holds
// poison, which shows whoever reads without waiting.
#include <cstdio>
#include <cstring>

#include "state.h"

namespace moesaic_emulate {

namespace {

// What the 8 bytes of a barrier hold here.
struct Barrier {
    std::uint16_t expected;
    std::uint16_t pending;
    std::int32_t bytes : 31;
    std::uint32_t phase : 1;
};
static_assert(sizeof(Barrier) == 8, "an mbarrier is a word of 64 bits");

Barrier& barrier_at(void* address, Site site) {
    check_shared(address, 8, 8, site);
    Barrier& barrier = *static_cast<Barrier*>(address);
    if (is_poison(static_cast<const unsigned char*>(address), 8)) fail("an mbarrier that nobody has set up", site);
    return barrier;
}

// What lies at the same place in block `rank` of the cluster.
unsigned char* there(const void* address, unsigned bytes, unsigned rank, Site site) {
    return static_cast<unsigned char*>(const_cast<void*>(in_block_of_cluster(address, bytes, rank, site)));
}
Barrier& barrier_there(const void* address, unsigned rank, Site site) {
    unsigned char* const at = there(address, 8, rank, site);
    if (is_poison(at, 8)) fail("an mbarrier of another block that nobody has set up", site);
    return *reinterpret_cast<Barrier*>(at);
}

// Ends the phase if nothing is left of it, and lets those go on who wait for that.
void complete(Worker& worker, Barrier& barrier) {
    if (barrier.pending != 0 || barrier.bytes != 0) return;
    barrier.pending = barrier.expected;
    barrier.phase ^= 1u;
    const std::uintptr_t at = address_at_home(worker, &barrier);
    for (unsigned w = 0; w < worker.warp_count; ++w) {
        Warp& warp = worker.warps[w];
        unsigned released = 0;
        for (unsigned lanes = warp.alive; lanes != 0; lanes &= lanes - 1) {
            const unsigned index = static_cast<unsigned>(__builtin_ctz(lanes));
            Lane& lane = warp.lanes[index];
            if (lane.state != LaneState::AtMbarrier || lane.value != at) continue;
            if (lane.mask == barrier.phase) continue;
            lane.state = LaneState::Ready;
            released |= 1u << index;
        }
        make_ready(warp, released);
    }
}

void arrive(Worker& worker, Barrier& barrier, Site site) {
    if (barrier.pending == 0) fail("more arrivals at an mbarrier than its phase was set up for", site);
    barrier.pending -= 1;
    complete(worker, barrier);
}

void fill(const PendingBox& box, Site site) {
    for (unsigned line = 0; line < box.rows; ++line) {
        unsigned char* const to = box.shared + line * box.line_bytes;
        if (!is_poison(to, box.line_bytes)) {
            fail("a box of the copy engine: its destination was written meanwhile, or is that of another copy", site);
        }
        for (unsigned at = 0; at < box.line_bytes; at += 16) {
            unsigned char* const chunk = to + (at ^ (line % 8 * 16));
            const int valid = static_cast<int>(line) < box.valid_rows ? box.valid_bytes - static_cast<int>(at) : 0;
            const std::size_t bytes = valid <= 0 ? 0 : valid < 16 ? static_cast<std::size_t>(valid) : 16;
            if (bytes != 0) {
                const unsigned char* const from = box.global + line * box.row_bytes + at;
                check_global(from, static_cast<unsigned>(bytes), 2, false, site);
                std::memcpy(chunk, from, bytes);
            }
            std::memset(chunk + bytes, 0, 16 - bytes);
        }
    }
}

// Has everything arrive that is under way to a barrier.
void arrive_by_itself(Worker& worker, Barrier& barrier) {
    for (unsigned i = 0; i < worker.arrival_count;) {
        const PendingArrival arrival = worker.arrivals[i];
        if (arrival.barrier != &barrier) {
            ++i;
            continue;
        }
        worker.arrivals[i] = worker.arrivals[--worker.arrival_count];
        if (arrival.lane != nullptr) {
            finish_copies(*arrival.lane, arrival.group + 1, arrival.site);
            arrive(worker, barrier, arrival.site);
        } else {
            fill(arrival.box, arrival.site);
            barrier.bytes = barrier.bytes - static_cast<std::int32_t>(arrival.box.rows * arrival.box.line_bytes);
            complete(worker, barrier);
        }
    }
}

bool somebody_waits(const Worker& worker, const Barrier& barrier) {
    const std::uintptr_t at = address_at_home(worker, &barrier);
    for (unsigned t = 0; t < worker.thread_count; ++t) {
        const Lane& lane = worker.lanes[t];
        if (lane.state == LaneState::AtMbarrier && lane.value == at) return true;
    }
    return false;
}

void remember(Worker& worker, const PendingArrival& arrival, Site site) {
    if (worker.arrival_count == kMaxArrivals) {
        fail("more arrivals under way than the emulator keeps: is a wait missing?", site);
    }
    worker.arrivals[worker.arrival_count++] = arrival;
}

void check_box(const void* shared, unsigned rows, unsigned line_bytes, Site site) {
    if (line_bytes != 128) fail("a box with the 128-byte swizzle has lines of 128 bytes", site);
    check_shared(shared, rows * line_bytes, 1024, site);
}

void ask_for(Worker& worker, Barrier& barrier, const PendingBox& box, Site site) {
    poison(box.shared, static_cast<std::size_t>(box.rows) * box.line_bytes);
    remember(worker, {&barrier, nullptr, 0, box, site}, site);
    if (somebody_waits(worker, barrier)) arrive_by_itself(worker, barrier);
}

}  // namespace

void mbarrier_init(void* address, unsigned arrivals, Site site) {
    check_shared(address, 8, 8, site);
    if (arrivals == 0 || arrivals > 0xFFFF) fail("an mbarrier expects 1 to 65535 arrivals here", site);
    *static_cast<Barrier*>(address) = {static_cast<std::uint16_t>(arrivals), static_cast<std::uint16_t>(arrivals), 0, 0};
}

void mbarrier_arrive(void* address, unsigned bytes, Site site) {
    Barrier& barrier = barrier_at(address, site);
    barrier.bytes = barrier.bytes + static_cast<std::int32_t>(bytes);
    arrive(this_worker(), barrier, site);
    yield_lane(false);
}

void mbarrier_arrive_in(void* address, unsigned rank, Site site) {
    arrive(block_of_cluster(rank, site), barrier_there(address, rank, site), site);
    yield_lane(false);
}

void mbarrier_store_in(void* address, void* to, const void* value, unsigned bytes, unsigned rank, Site site) {
    Barrier& barrier = barrier_there(address, rank, site);
    std::memcpy(there(to, bytes, rank, site), value, bytes);
    barrier.bytes = barrier.bytes - static_cast<std::int32_t>(bytes);
    complete(block_of_cluster(rank, site), barrier);
    yield_lane(false);
}

void mbarrier_arrive_after_copies(void* address, Site site) {
    Worker& worker = this_worker();
    Barrier& barrier = barrier_at(address, site);
    Lane& lane = this_lane();
    remember(worker, {&barrier, &lane, lane.copy_groups, {}, site}, site);
    copy_commit();
    if (somebody_waits(worker, barrier)) arrive_by_itself(worker, barrier);
    yield_lane(false);
}

void mbarrier_wait(void* address, unsigned parity, Site site) {
    Worker& worker = this_worker();
    Barrier& barrier = barrier_at(address, site);
    Lane& lane = this_lane();
    if (parity > 1) fail("the parity of a phase is 0 or 1", site);
    if (barrier.phase == parity) arrive_by_itself(worker, barrier);
    if (barrier.phase != parity) return yield_lane(false);
    lane.state = LaneState::AtMbarrier;
    lane.value = reinterpret_cast<std::uintptr_t>(&barrier);
    lane.mask = parity;
    lane.site = site;
    lane.frame = __builtin_frame_address(0);
    dispatch(worker);
}

void copy_box(void* shared, const void* global, unsigned rows, unsigned line_bytes, long long row_bytes, int valid_rows,
              int valid_bytes, void* address, Site site) {
    check_box(shared, rows, line_bytes, site);
    ask_for(this_worker(), barrier_at(address, site),
            {static_cast<unsigned char*>(shared), static_cast<const unsigned char*>(global), rows, line_bytes, row_bytes,
             valid_rows, valid_bytes},
            site);
}

void copy_box_in(void* shared, const void* global, unsigned rows, unsigned line_bytes, long long row_bytes, int valid_rows,
                 int valid_bytes, void* address, unsigned rank, Site site) {
    check_box(shared, rows, line_bytes, site);
    ask_for(block_of_cluster(rank, site), barrier_there(address, rank, site),
            {there(shared, 1, rank, site), static_cast<const unsigned char*>(global), rows, line_bytes, row_bytes,
             valid_rows, valid_bytes},
            site);
}

// A box leaves as late as it can: when its lane waits for it. Whoever writes to its place before shows.
void store_box(const void* shared, void* global, unsigned line_bytes, long long row_bytes, int valid_rows, int valid_bytes,
               Site site) {
    Worker& worker = this_worker();
    if (line_bytes != 128 && line_bytes != 64) fail("a swizzled box has lines of 64 or 128 bytes", site);
    check_shared(shared, line_bytes, 8 * line_bytes, site);
    if (worker.store_count == kMaxStores) fail("more boxes leave than the emulator keeps: is a wait missing?", site);
    worker.stores[worker.store_count++] = {&this_lane(), this_lane().store_groups, static_cast<const unsigned char*>(shared),
                                           static_cast<unsigned char*>(global), line_bytes, row_bytes, valid_rows,
                                           valid_bytes, site};
}

void store_commit() { this_lane().store_groups += 1; }

void store_wait(unsigned groups_left, Site) {
    Worker& worker = this_worker();
    Lane& lane = this_lane();
    const std::uint32_t end = lane.store_groups > groups_left ? lane.store_groups - groups_left : 0;
    unsigned kept = 0;
    for (unsigned i = 0; i < worker.store_count; ++i) {
        const PendingStore store = worker.stores[i];
        if (store.lane != &lane || store.group >= end) {
            worker.stores[kept++] = store;
            continue;
        }
        for (int line = 0; line < store.valid_rows; ++line) {
            const int swizzle = store.line_bytes == 128 ? line % 8 * 16 : line / 2 % 4 * 16;
            for (int at = 0; at < store.valid_bytes; at += 16) {
                const unsigned bytes = static_cast<unsigned>(store.valid_bytes - at < 16 ? store.valid_bytes - at : 16);
                unsigned char* const to = store.global + line * store.row_bytes + at;
                check_global(to, bytes, 2, true, store.site);
                std::memcpy(to, store.shared + line * static_cast<int>(store.line_bytes) + (at ^ swizzle), bytes);
            }
        }
    }
    worker.store_count = kept;
}

bool has_stores(const Worker& worker, const Lane& lane) {
    for (unsigned i = 0; i < worker.store_count; ++i) {
        if (worker.stores[i].lane == &lane) return true;
    }
    return false;
}

const PendingArrival* box_under_way(const Worker& worker) {
    for (unsigned i = 0; i < worker.arrival_count; ++i) {
        if (worker.arrivals[i].lane == nullptr) return &worker.arrivals[i];
    }
    return nullptr;
}

}  // namespace moesaic_emulate
