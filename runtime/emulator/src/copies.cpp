// Asynchronous copies from global to shared memory, in groups (PTX `cp.async`).
//
// A GPU reads and writes at any time between the start of a copy and the wait for it. Here both ends are made visible:
// the destination is poisoned at the start, which shows whoever still reads what it held, and is written at the wait,
// which shows whoever reads too early. A source or destination that changed in between is a report.
#include <sys/mman.h>

#include <cstdio>
#include <cstring>

#include "state.h"

namespace moesaic_emulate {

namespace {

constexpr std::size_t kPoolBytes = kMaxPendingCopies * sizeof(PendingCopy);

std::uint32_t take_entry(Worker& worker, Site site) {
    if (worker.copies == nullptr) {
        void* memory =
            mmap(nullptr, kPoolBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (memory == MAP_FAILED) fail("not enough memory for the emulator's list of copies in flight", site);
        worker.copies = static_cast<PendingCopy*>(memory);
    }
    if (worker.free_copy != kNoCopy) {
        const std::uint32_t entry = worker.free_copy;
        worker.free_copy = worker.copies[entry].next;
        return entry;
    }
    if (worker.copies_used == kMaxPendingCopies) {
        fail("more copies in flight than shared memory has words: is a wait missing?", site);
    }
    return worker.copies_used++;
}

void finish(const PendingCopy& copy, Site site) {
    const char* changed = nullptr;
    if (!is_poison(copy.shared, copy.bytes)) {
        changed = "its destination was written meanwhile, or is that of another copy in flight";
    } else if (copy.valid && std::memcmp(copy.data, copy.global, copy.bytes) != 0) {
        changed = "its source was written meanwhile";
    }
    if (changed != nullptr) {
        char message[200];
        snprintf(message, sizeof message, "an asynchronous copy of %u bytes that this wait covers: %s", copy.bytes,
                 changed);
        fail(message, site);
    }
    std::memcpy(copy.shared, copy.data, copy.bytes);
}

}  // namespace

void forget_copies(Worker& worker) {
    for (unsigned t = 0; t < worker.thread_count; ++t) {
        worker.lanes[t].first_copy = worker.lanes[t].last_copy = kNoCopy;
        worker.lanes[t].copy_groups = 0;
        worker.lanes[t].store_groups = 0;
    }
    worker.copies_used = 0;
    worker.free_copy = kNoCopy;
}

void release_copies(Worker& worker) {
    if (worker.copies != nullptr) munmap(worker.copies, kPoolBytes);
    worker.copies = nullptr;
}

void copy_async(void* shared, const void* global, unsigned bytes, bool valid, Site site) {
    if (bytes != 4 && bytes != 8 && bytes != 16) fail("an asynchronous copy moves 4, 8 or 16 bytes", site);
    check_shared(shared, bytes, bytes, site);
    if (valid) check_access(global, bytes, bytes, false, site);

    Worker& worker = this_worker();
    Lane& lane = this_lane();
    const std::uint32_t entry = take_entry(worker, site);
    PendingCopy& copy = worker.copies[entry];
    copy = {static_cast<unsigned char*>(shared), static_cast<const unsigned char*>(global), bytes, lane.copy_groups,
            kNoCopy, valid, {}};
    if (valid) std::memcpy(copy.data, global, bytes);
    poison(copy.shared, bytes);
    if (lane.first_copy == kNoCopy) {
        lane.first_copy = entry;
    } else {
        worker.copies[lane.last_copy].next = entry;
    }
    lane.last_copy = entry;
}

void copy_commit() { this_lane().copy_groups += 1; }

void copy_wait(unsigned groups_left, Site site) {
    Lane& lane = this_lane();
    finish_copies(lane, lane.copy_groups > groups_left ? lane.copy_groups - groups_left : 0, site);
}

void finish_copies(Lane& lane, std::uint32_t end, Site site) {
    Worker& worker = this_worker();
    while (lane.first_copy != kNoCopy && worker.copies[lane.first_copy].group < end) {
        const std::uint32_t entry = lane.first_copy;
        finish(worker.copies[entry], site);
        lane.first_copy = worker.copies[entry].next;
        worker.copies[entry].next = worker.free_copy;
        worker.free_copy = entry;
    }
}

}  // namespace moesaic_emulate
