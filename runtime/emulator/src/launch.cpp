// One launch: OS threads take clusters until none is left, a lane fails or the time is over.
#include <link.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "state.h"

namespace moesaic_emulate {

namespace {

constexpr std::size_t kSignalStackBytes = 64 * 1024;
// Of all clusters at once: the guard page of each stack splits a mapping, of which a process has 65530.
constexpr std::uint64_t kMostClusterLanes = 16 * 1024;

// The loaded library that holds `address`: its code and data, and this OS thread's copy of its thread-local block.
struct Library {
    std::uintptr_t address = 0;
    std::uintptr_t begin = 0;
    std::uintptr_t end = 0;
    unsigned char* thread_local_block = nullptr;
    std::size_t thread_local_bytes = 0;
};

int find_library(dl_phdr_info* info, std::size_t, void* data) {
    Library& library = *static_cast<Library*>(data);
    std::uintptr_t begin = ~std::uintptr_t{0};
    std::uintptr_t end = 0;
    std::size_t thread_local_bytes = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& header = info->dlpi_phdr[i];
        if (header.p_type == PT_TLS) thread_local_bytes = header.p_memsz;
        if (header.p_type != PT_LOAD) continue;
        const std::uintptr_t at = info->dlpi_addr + header.p_vaddr;
        begin = at < begin ? at : begin;
        end = at + header.p_memsz > end ? at + header.p_memsz : end;
    }
    if (library.address < begin || library.address >= end) return 0;
    library.begin = begin;
    library.end = end;
    library.thread_local_block = static_cast<unsigned char*>(info->dlpi_tls_data);
    library.thread_local_bytes = thread_local_bytes;
    return 1;
}

Library library_of(const KernelBinding& kernel) {
    kernel.touch_shared();  // the block is made at its first use in a thread
    Library library;
    library.address = reinterpret_cast<std::uintptr_t>(kernel.run);
    dl_iterate_phdr(find_library, &library);
    return library;
}

// Dynamic shared memory of a worker: ends, rounded up to 16 bytes, at a page that faults.
void map_dynamic_shared(Worker& worker, std::size_t bytes) {
    if (bytes == 0) return;
    const std::size_t rounded = (bytes + 15) / 16 * 16;
    const std::size_t pages = (rounded + kGuardBytes - 1) / kGuardBytes * kGuardBytes;
    worker.dynamic_region_bytes = pages + kGuardBytes;
    void* memory =
        mmap(nullptr, worker.dynamic_region_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) {
        worker.dynamic_region_bytes = 0;
        return;
    }
    worker.dynamic_region = static_cast<unsigned char*>(memory);
    mprotect(worker.dynamic_region + pages, kGuardBytes, PROT_NONE);
    worker.view.dynamic_shared = worker.dynamic_region + pages - rounded;
    worker.view.dynamic_shared_bytes = bytes;
}

void set_up_lanes(Worker& worker) {
    const LaunchRequest& request = *worker.grid->request;
    worker.view.block_dim = request.block;
    worker.view.grid_dim = request.grid;
    worker.thread_count = request.block.x * request.block.y * request.block.z;
    worker.warp_count = (worker.thread_count + kWarpSize - 1) / kWarpSize;
    worker.order = request.order == 0 ? Order::Forward : request.order < 0 ? Order::Reverse : Order::Seeded;
    for (unsigned w = 0; w < worker.warp_count; ++w) {
        worker.warps[w].worker = &worker;
        worker.warps[w].lanes = &worker.lanes[w * kWarpSize];
        worker.warps[w].index = w;
    }
    for (unsigned t = 0; t < worker.thread_count; ++t) {
        Lane& lane = worker.lanes[t];
        lane.view.thread_index = {t % request.block.x, t / request.block.x % request.block.y,
                                  t / request.block.x / request.block.y};
        lane.view.block = &worker.view;
        lane.warp = &worker.warps[t / kWarpSize];
        lane.index = t % kWarpSize;
    }
}

std::uint64_t cluster_at(const Grid& grid, std::uint64_t position) {
    if (grid.cluster_order != nullptr) return grid.cluster_order[position];
    return grid.request->order < 0 ? grid.cluster_count - 1 - position : position;
}

void run_clusters(Grid& grid, Cluster& cluster) {
    for (;;) {
        if (grid.stop.load(std::memory_order_relaxed)) return;
        const std::uint64_t position = grid.next_cluster.fetch_add(1, std::memory_order_relaxed);
        if (position >= grid.cluster_count) return;
        run_cluster(cluster, cluster_at(grid, position));
    }
}

void thread_main(Grid& grid, Cluster& cluster) {
    const Library library = library_of(*grid.kernel);
    for (unsigned b = 0; b < cluster.size; ++b) {
        Worker& worker = *cluster.blocks[b];
        worker.static_shared = library.thread_local_block;
        worker.static_shared_bytes = library.thread_local_bytes;
        if (cluster.size > 1) worker.own_static_shared.reset(new unsigned char[library.thread_local_bytes]);
    }

    // Faults are handled on a stack of their own: a lane's may be the very thing that overflowed.
    std::unique_ptr<unsigned char[]> signal_stack(new unsigned char[kSignalStackBytes]);
    stack_t stack{};
    stack.ss_sp = signal_stack.get();
    stack.ss_size = kSignalStackBytes;
    stack_t before{};
    sigaltstack(&stack, &before);

    run_clusters(grid, cluster);
    current_worker = nullptr;
    current_lane = nullptr;
    stack_t off{};
    off.ss_flags = SS_DISABLE;
    sigaltstack(&off, nullptr);
}

// Worker threads must not run the process's own handlers (Python's, say) on a lane's small stack.
void block_signals(sigset_t* before) {
    sigset_t set;
    sigfillset(&set);
    for (const int number : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, timeout_signal()}) sigdelset(&set, number);
    pthread_sigmask(SIG_SETMASK, &set, before);
}

std::vector<std::uint32_t> shuffled(std::uint64_t count, std::uint64_t seed) {
    std::vector<std::uint32_t> order(count);
    for (std::uint64_t i = 0; i < count; ++i) order[i] = static_cast<std::uint32_t>(i);
    std::uint64_t state = seed * 0x9E3779B97F4A7C15ULL + 1;
    for (std::uint64_t i = count; i > 1; --i) {
        state = state * 6364136223846793005ULL + 1442695040888963407ULL;
        std::swap(order[i - 1], order[(state >> 33) % i]);
    }
    return order;
}

int refuse(const LaunchRequest& request, const char* message) {
    snprintf(request.message, request.message_bytes, "%s", message);
    return 1;
}

}  // namespace

int launch(const LaunchRequest& request, const KernelBinding& kernel) {
    Grid grid;
    grid.request = &request;
    grid.kernel = &kernel;
    const unsigned size = request.cluster;
    grid.cluster_count = static_cast<std::uint64_t>(request.grid.x) * request.grid.y * request.grid.z / size;
    const Library library = library_of(kernel);
    grid.code_begin = library.begin;
    grid.code_end = library.end;
    std::vector<std::uint32_t> order;
    if (request.order > 0) {
        order = shuffled(grid.cluster_count, static_cast<std::uint64_t>(request.order));
        grid.cluster_order = order.data();
    }
    install_signal_handlers();

    std::uint64_t thread_count = request.workers < 1 ? 1 : request.workers;
    if (thread_count > grid.cluster_count) thread_count = grid.cluster_count;
    if (size > 1) {
        const std::uint64_t lanes = std::uint64_t{size} * request.block.x * request.block.y * request.block.z;
        thread_count = std::min(thread_count, std::max<std::uint64_t>(1, kMostClusterLanes / lanes));
    }
    std::vector<std::unique_ptr<Cluster>> clusters;
    bool enough_memory = true;
    for (std::uint64_t i = 0; i < thread_count; ++i) {
        clusters.emplace_back(new Cluster);
        Cluster& cluster = *clusters.back();
        cluster.size = size;
        for (unsigned b = 0; b < size; ++b) {
            cluster.blocks[b].reset(new Worker);
            Worker& worker = *cluster.blocks[b];
            worker.grid = &grid;
            worker.cluster = &cluster;
            worker.stacks = acquire_stacks(request.block.x * request.block.y * request.block.z);
            map_dynamic_shared(worker, request.shared_bytes);
            enough_memory = enough_memory && worker.stacks.base != nullptr &&
                            worker.view.dynamic_shared_bytes == request.shared_bytes;
            set_up_lanes(worker);
        }
    }

    if (enough_memory) {
        std::mutex mutex;
        std::condition_variable changed;
        std::uint64_t running = thread_count;
        sigset_t before;
        block_signals(&before);
        std::vector<std::thread> threads;
        std::vector<bool> done(thread_count, false);
        for (std::uint64_t i = 0; i < thread_count; ++i) {
            threads.emplace_back([&, i] {
                thread_main(grid, *clusters[i]);
                std::lock_guard<std::mutex> lock(mutex);
                done[i] = true;
                running -= 1;
                changed.notify_one();
            });
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
        {
            std::unique_lock<std::mutex> lock(mutex);
            const auto all_done = [&] { return running == 0; };
            const auto limit = std::chrono::duration<double>(request.timeout_seconds);
            bool in_time = changed.wait_for(lock, limit, all_done);
            // Signal again and again: one that arrives between two blocks is ignored, and `stop` ends the rest.
            while (!in_time) {
                for (std::uint64_t i = 0; i < thread_count; ++i) {
                    if (!done[i]) pthread_kill(threads[i].native_handle(), timeout_signal());
                }
                in_time = changed.wait_for(lock, std::chrono::milliseconds(50), all_done);
            }
        }
        for (std::thread& thread : threads) thread.join();
    }

    for (const auto& cluster : clusters) {
        for (unsigned b = 0; b < size; ++b) {
            Worker& worker = *cluster->blocks[b];
            release_stacks(worker.stacks);
            release_copies(worker);
            if (worker.dynamic_region != nullptr) munmap(worker.dynamic_region, worker.dynamic_region_bytes);
        }
    }
    if (!enough_memory) return refuse(request, "not enough memory for the emulator's stacks and shared memory");
    return grid.reported.load() ? 1 : 0;
}

}  // namespace moesaic_emulate
