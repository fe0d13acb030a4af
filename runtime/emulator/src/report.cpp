// Reports: what went wrong, in which block and lane, in which line.
//
// A position is written as «file:line|offset,offset,...»: the line that the compiler recorded at the call, then the
// return addresses that lead there, relative to the kernel library, innermost first. Python turns the offsets into
// the kernel's own lines where helpers lie between.
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "state.h"

namespace moesaic_emulate {

namespace {

class Text {
public:
    Text(char* buffer, std::size_t bytes) : buffer_(buffer), bytes_(bytes) {
        if (bytes_ != 0) buffer_[0] = 0;
    }
    __attribute__((format(printf, 2, 3))) void add(const char* format, ...) {
        if (used_ + 1 >= bytes_) return;
        va_list arguments;
        va_start(arguments, format);
        const int written = vsnprintf(buffer_ + used_, bytes_ - used_, format, arguments);
        va_end(arguments);
        if (written > 0) used_ += static_cast<std::size_t>(written);
        if (used_ >= bytes_) used_ = bytes_ - 1;
    }

private:
    char* buffer_;
    std::size_t bytes_;
    std::size_t used_ = 0;
};

void add_place(Text& text, const Worker& worker, const Site* site, void* pc, void* frame) {
    const Grid& grid = *worker.grid;
    text.add("\xC2\xAB%s:%d|", site != nullptr ? site->file : "", site != nullptr ? site->line : 0);
    const auto add_offset = [&](std::uintptr_t address) {
        if (address >= grid.code_begin && address < grid.code_end) {
            text.add("%llx,", static_cast<unsigned long long>(address - grid.code_begin));
        }
    };
    if (pc != nullptr) add_offset(reinterpret_cast<std::uintptr_t>(pc));
    // Frame pointers are kept in both libraries: [frame] is the caller's frame, [frame + 8] the return address.
    const auto low = reinterpret_cast<std::uintptr_t>(worker.stacks.base);
    const auto high = low + worker.stacks.count * kStackBytes;
    auto at = reinterpret_cast<std::uintptr_t>(frame);
    for (int depth = 0; depth < 24 && at >= low && at + 16 <= high && at % 8 == 0; ++depth) {
        const auto* words = reinterpret_cast<const std::uintptr_t*>(at);
        if ((at - low) % kStackBytes < kGuardBytes) break;
        if (words[1] != 0) add_offset(words[1] - 1);
        if (words[0] <= at) break;
        at = words[0];
    }
    text.add("\xC2\xBB");
}

// First of the lanes that fail ends the grid; the report of any other is dropped.
bool claim(Worker& worker) {
    worker.failing = true;
    worker.grid->stop.store(true, std::memory_order_relaxed);
    return !worker.grid->reported.exchange(true);
}

void add_header(Text& text, const Worker& worker) {
    const Index3& block = worker.view.block_index;
    text.add("kernel '%s', block (%u, %u, %u)", worker.grid->kernel->name, block.x, block.y, block.z);
}

// "0-15, 20"
void add_lanes(Text& text, unsigned lanes) {
    const char* separator = "";
    for (unsigned lane = 0; lane < kWarpSize; ++lane) {
        if ((lanes >> lane & 1u) == 0) continue;
        unsigned last = lane;
        while (last + 1 < kWarpSize && (lanes >> (last + 1) & 1u) != 0) ++last;
        text.add(last == lane ? "%s%u" : "%s%u-%u", separator, lane, last);
        separator = ", ";
        lane = last;
    }
}

bool wait_alike(const Lane& a, const Lane& b) {
    if (a.state != b.state || a.site.line != b.site.line || std::strcmp(a.site.file, b.site.file) != 0) return false;
    if (a.state == LaneState::AtBlockBarrier) return a.mask == b.mask && a.block_operation == b.block_operation;
    if (a.state == LaneState::AtMbarrier) return a.mask == b.mask && a.value == b.value;
    if (a.state == LaneState::AtClusterBarrier) return true;
    return a.mask == b.mask && a.warp_operation == b.warp_operation;
}

void add_waiting(Text& text, const Worker& worker, const Warp& warp, const Lane& lane, unsigned lanes) {
    text.add("\n  warp %u, lanes ", warp.index);
    add_lanes(text, lanes);
    if (lane.state == LaneState::AtBlockBarrier) {
        text.add(": wait at %s", name_of(lane.block_operation));
        if (lane.mask != 0) {
            text.add(" %u (%u of %u threads arrived)", lane.mask, worker.barriers[lane.mask].arrived,
                     worker.barriers[lane.mask].expected);
        } else {
            text.add(" (%u of %u threads arrived)", worker.barriers[0].arrived, worker.alive);
        }
    } else if (lane.state == LaneState::AtWarpOperation) {
        text.add(": wait at %s with mask 0x%08x for lanes ", name_of(lane.warp_operation), lane.mask);
        add_lanes(text, lane.mask & warp.alive & ~lanes);
    } else if (lane.state == LaneState::AtMbarrier) {
        text.add(": wait at an mbarrier for its phase of parity %u", lane.mask);
    } else if (lane.state == LaneState::AtClusterBarrier) {
        text.add(": wait at the barrier of the cluster (%u of %u threads arrived)", worker.cluster->arrived,
                 worker.cluster->alive);
    } else {
        text.add(": state %u", static_cast<unsigned>(lane.state));
    }
    text.add(" ");
    add_place(text, worker, &lane.site, nullptr, lane.frame);
}

}  // namespace

void report_lane(Worker& worker, const char* message, const Site* site, void* pc, void* frame) {
    if (claim(worker)) {
        Text text(worker.grid->request->message, worker.grid->request->message_bytes);
        add_header(text, worker);
        if (current_lane != nullptr) {
            const Lane& lane = this_lane();
            const Index3& thread = lane.view.thread_index;
            text.add(", thread (%u, %u, %u) (warp %u, lane %u)", thread.x, thread.y, thread.z, lane.warp->index,
                     lane.index);
        }
        text.add(" ");
        add_place(text, worker, site, pc, frame);
        text.add(": %s", message);
    }
    leave_cluster(*worker.cluster);
}

void report_deadlock(Worker& worker) {
    if (claim(worker)) {
        Text text(worker.grid->request->message, worker.grid->request->message_bytes);
        add_header(text, worker);
        text.add(": deadlock: %u of %u threads alive, none can go on", worker.alive, worker.thread_count);
        unsigned shown = 0;
        for (unsigned w = 0; w < worker.warp_count && shown < 24; ++w) {
            const Warp& warp = worker.warps[w];
            unsigned left = warp.alive;
            while (left != 0 && shown < 24) {
                const Lane& lane = warp.lanes[__builtin_ctz(left)];
                unsigned alike = 0;
                for (unsigned i = 0; i < kWarpSize; ++i) {
                    if ((left >> i & 1u) != 0 && wait_alike(lane, warp.lanes[i])) alike |= 1u << i;
                }
                add_waiting(text, worker, warp, lane, alike);
                left &= ~alike;
                ++shown;
            }
        }
        if (shown == 24) text.add("\n  ...");
    }
    leave_cluster(*worker.cluster);
}

}  // namespace moesaic_emulate
