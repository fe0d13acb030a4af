// The check of accesses to global memory.
#include <cstdio>

#include "state.h"

namespace moesaic_emulate {

namespace {

bool within(const Buffer& buffer, std::uint64_t address, unsigned bytes) {
    return address >= buffer.address && address - buffer.address <= buffer.bytes &&
           bytes <= buffer.bytes - (address - buffer.address);
}

bool in_range(const void* begin, std::size_t size, std::uint64_t address) {
    return address - reinterpret_cast<std::uintptr_t>(begin) < size;
}

// Shared and local memory, and the kernel library's own constants: generic pointers may lead there.
bool is_not_global(const Worker& worker, std::uint64_t address) {
    const Grid& grid = *worker.grid;
    return in_range(worker.static_shared, worker.static_shared_bytes, address) ||
           in_range(worker.view.dynamic_shared, worker.view.dynamic_shared_bytes, address) ||
           in_range(worker.stacks.base, worker.stacks.count * kStackBytes, address) ||
           (address >= grid.code_begin && address < grid.code_end);
}

// "3 bytes behind the end of 'weights' (4096 bytes)" for the registered buffer next to an address.
void describe_place(const LaunchRequest& request, std::uint64_t address, char* text, std::size_t size) {
    const Buffer* nearest = nullptr;
    std::uint64_t distance = ~0ULL;
    for (std::uint32_t i = 0; i < request.buffer_count; ++i) {
        const Buffer& buffer = request.buffers[i];
        const std::uint64_t end = buffer.address + buffer.bytes;
        const std::uint64_t gap = address < buffer.address ? buffer.address - address
                                  : address >= end         ? address - end
                                                           : 0;
        if (gap < distance) {
            distance = gap;
            nearest = &buffer;
        }
    }
    if (nearest == nullptr) {
        snprintf(text, size, "no buffer is registered");
    } else if (address < nearest->address) {
        snprintf(text, size, "%llu bytes before the start of '%s' (%llu bytes)",
                 static_cast<unsigned long long>(distance), nearest->name,
                 static_cast<unsigned long long>(nearest->bytes));
    } else {
        snprintf(text, size, "byte %llu of '%s' (%llu bytes)",
                 static_cast<unsigned long long>(address - nearest->address), nearest->name,
                 static_cast<unsigned long long>(nearest->bytes));
    }
}

}  // namespace

void check_access(const void* pointer, unsigned bytes, unsigned align, bool write, Site site) {
    check_global(pointer, bytes, align, write, site);
    yield_lane(false);
}

void check_global(const void* pointer, unsigned bytes, unsigned align, bool write, Site site) {
    Worker& worker = this_worker();
    const auto address = reinterpret_cast<std::uint64_t>(pointer);
    const LaunchRequest& request = *worker.grid->request;
    const char* const verb = write ? "write" : "read";

    if (align != 0 && address % align != 0) {
        char place[200];
        char message[400];
        describe_place(request, address, place, sizeof place);
        snprintf(message, sizeof message, "misaligned %s of %u bytes at address 0x%llx: expected a multiple of %u (%s)",
                 verb, bytes, static_cast<unsigned long long>(address), align, place);
        report_lane(worker, message, &site, nullptr, __builtin_frame_address(0));
    }
    const Buffer*& last = write ? worker.last_write : worker.last_read;
    if (request.buffer_count == 0 || (last != nullptr && within(*last, address, bytes))) return;

    const Buffer* read_only = nullptr;
    for (std::uint32_t i = 0; i < request.buffer_count; ++i) {
        const Buffer& buffer = request.buffers[i];
        if (!within(buffer, address, bytes)) continue;
        if (!write || buffer.writable != 0) {
            last = &buffer;
            return;
        }
        read_only = &buffer;
    }
    if (read_only == nullptr && is_not_global(worker, address)) return;

    char message[400];
    if (read_only != nullptr) {
        snprintf(message, sizeof message, "write of %u bytes at byte %llu of '%s', which is read-only", bytes,
                 static_cast<unsigned long long>(address - read_only->address), read_only->name);
    } else {
        char place[200];
        describe_place(request, address, place, sizeof place);
        snprintf(message, sizeof message, "out of bounds: %s of %u bytes at %s", verb, bytes, place);
    }
    report_lane(worker, message, &site, nullptr, __builtin_frame_address(0));
}

void check_shared(const void* pointer, unsigned bytes, unsigned align, Site site) {
    Worker& worker = this_worker();
    const auto address = reinterpret_cast<std::uint64_t>(pointer);
    const auto within_block = [&](const unsigned char* begin, std::size_t size) {
        return in_range(begin, size, address) && bytes <= size - (address - reinterpret_cast<std::uintptr_t>(begin));
    };
    char message[200];
    if (!within_block(worker.static_shared, worker.static_shared_bytes) &&
        !within_block(worker.view.dynamic_shared, worker.view.dynamic_shared_bytes)) {
        snprintf(message, sizeof message, "%u bytes at address 0x%llx do not lie in the block's shared memory", bytes,
                 static_cast<unsigned long long>(address));
    } else if (address % align != 0) {
        snprintf(message, sizeof message, "misaligned access to %u bytes of shared memory at address 0x%llx: expected "
                 "a multiple of %u", bytes, static_cast<unsigned long long>(address), align);
    } else {
        return;
    }
    report_lane(worker, message, &site, nullptr, __builtin_frame_address(0));
}

void fail(const char* message, Site site) {
    report_lane(this_worker(), message, &site, nullptr, __builtin_frame_address(0));
}

}  // namespace moesaic_emulate
