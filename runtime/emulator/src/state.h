// The emulator's state: a grid in flight, an OS thread with its cluster of blocks, a worker for each, warps and lanes.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "fiber.h"
#include "moesaic_emulate/context.h"

namespace moesaic_emulate {

constexpr unsigned kWarpSize = MOESAIC_EMULATE_WARP_SIZE;
constexpr unsigned kMaxThreads = MOESAIC_EMULATE_MAX_THREADS;
constexpr unsigned kMaxWarps = kMaxThreads / kWarpSize;
constexpr unsigned kNamedBarriers = 16;
constexpr unsigned kMaxCluster = MOESAIC_EMULATE_MAX_CLUSTER;

struct Cluster;
struct Worker;
struct Warp;

enum class LaneState : std::uint8_t { Ready, AtWarpOperation, AtBlockBarrier, AtActiveMask, AtMbarrier, AtClusterBarrier, Exited };

// One CUDA thread. The view comes first: `current_lane` points at it.
struct Lane {
    LaneView view;
    Context context;
    Warp* warp;
    unsigned index;  // within the warp
    LaneState state;

    // What the lane is doing in its current or last collective.
    WarpOperation warp_operation;
    BlockOperation block_operation;
    unsigned mask;        // warp operation: named lanes; named barrier: its id; mbarrier: the parity waited for
    unsigned operand;
    int width;
    std::uint64_t value;  // mbarrier: its address
    std::uint64_t result;
    bool arrived;         // at the barrier of the cluster, and has not waited yet
    unsigned cluster_phase;  // in which it has arrived
    Site site;
    // The copies it started: a list in the worker's pool, oldest first.
    std::uint32_t first_copy;
    std::uint32_t last_copy;
    std::uint32_t copy_groups;  // committed so far
    std::uint32_t store_groups;
    void* frame;  // frame pointer inside the runtime call, start of a walk to the kernel's line
};

// A copy from global to shared memory that has been started and not yet waited for.
struct PendingCopy {
    unsigned char* shared;
    const unsigned char* global;
    std::uint32_t bytes;
    std::uint32_t group;
    std::uint32_t next;
    bool valid;
    unsigned char data[16];  // what `global` held at the start
};

// 227 KiB of shared memory in words of 4 bytes, and some more.
constexpr std::uint32_t kMaxPendingCopies = 64 * 1024;
constexpr std::uint32_t kNoCopy = ~0u;

// A box of a matrix that the copy engine has been asked for.
struct PendingBox {
    unsigned char* shared;
    const unsigned char* global;
    unsigned rows;
    unsigned line_bytes;
    long long row_bytes;  // between rows in global memory
    int valid_rows;       // beyond them, and beyond the valid bytes of a row, are zeros
    int valid_bytes;
};

// What arrives at an mbarrier by itself: the copies of a lane up to a group, or a box.
struct PendingArrival {
    const void* barrier;
    Lane* lane;     // null: a box
    std::uint32_t group;
    PendingBox box;
    Site site;
};
// A box on its way to global memory.
struct PendingStore {
    Lane* lane;
    std::uint32_t group;
    const unsigned char* shared;
    unsigned char* global;
    unsigned line_bytes;
    long long row_bytes;
    int valid_rows;
    int valid_bytes;
    Site site;
};
constexpr unsigned kMaxStores = 1024;
constexpr unsigned kMaxArrivals = 16 * kMaxThreads;

// Lanes of one warp that wait for the rest of `mask`.
struct WarpBarrier {
    unsigned mask;
    unsigned arrived;
    WarpOperation operation;
};

struct Warp {
    Worker* worker;
    Lane* lanes;            // 32 of them; those beyond the block's threads count as exited
    unsigned index;
    unsigned alive;
    unsigned ready;
    unsigned at_active_mask;
    unsigned barrier_count;
    WarpBarrier barriers[kWarpSize];  // distinct masks; a lane waits in at most one
};

struct BlockBarrier {
    unsigned arrived;
    unsigned expected;  // named barriers: the stated number of threads
    unsigned sum;       // of predicates != 0
    BlockOperation operation;
    Site site;
    int result;
};

enum class Order : std::uint8_t { Forward, Reverse, Seeded };

struct Grid;

// A block that runs.
struct Worker {
    Grid* grid = nullptr;
    Cluster* cluster = nullptr;
    StackPool stacks;
    BlockView view{};
    Order order = Order::Forward;
    std::uint64_t random = 0;
    bool seeded = false;

    unsigned thread_count = 0;
    unsigned warp_count = 0;
    unsigned alive = 0;          // threads that have not exited
    unsigned ready_warps = 0;    // warps with at least one ready lane
    unsigned at_block_barrier = 0;
    Warp* current_warp = nullptr;
    BlockBarrier barriers[kNamedBarriers]{};
    Warp warps[kMaxWarps]{};
    Lane lanes[kMaxThreads]{};

    unsigned char* static_shared = nullptr;  // of the OS thread: holds the block's while a lane of it runs
    std::size_t static_shared_bytes = 0;
    std::unique_ptr<unsigned char[]> own_static_shared;  // holds it else; only where a cluster has several blocks
    unsigned char* dynamic_region = nullptr;  // mapping that ends in a guard page
    std::size_t dynamic_region_bytes = 0;

    // Pending copies of all lanes; mapped at the first, because a lane must not take the lock of malloc.
    PendingCopy* copies = nullptr;
    std::uint32_t copies_used = 0;           // entries ever taken in this block
    std::uint32_t free_copy = kNoCopy;       // list of those given back

    PendingArrival arrivals[kMaxArrivals];  // these and stores: so many as are counted
    unsigned arrival_count = 0;
    PendingStore stores[kMaxStores];
    unsigned store_count = 0;

    const Buffer* last_read = nullptr;   // the buffers hit last: most accesses hit the same again
    const Buffer* last_write = nullptr;

    std::atomic<bool> in_fiber{false};
    bool failing = false;
};

// One OS thread and the cluster it runs: blocks in turn, a lane at a time. Most clusters have one block.
struct Cluster {
    Context main;
    std::unique_ptr<Worker> blocks[kMaxCluster];
    unsigned size = 1;
    unsigned alive = 0;    // threads that have not exited
    unsigned arrived = 0;  // threads at the barrier
    unsigned phase = 0;    // barriers that are over
};

// A launch in flight.
struct Grid {
    const LaunchRequest* request = nullptr;
    const KernelBinding* kernel = nullptr;
    std::uint64_t cluster_count = 0;
    const std::uint32_t* cluster_order = nullptr;  // null: by arithmetic
    std::atomic<std::uint64_t> next_cluster{0};
    std::atomic<bool> stop{false};
    std::atomic<bool> reported{false};
    std::uintptr_t code_begin = 0;  // the kernel library in memory
    std::uintptr_t code_end = 0;
};

// The worker whose lane runs on this OS thread, or null.
extern __thread Worker* current_worker;

inline Lane& this_lane() { return *reinterpret_cast<Lane*>(current_lane); }
inline Worker& this_worker() { return *current_worker; }

// xorshift64*: only spreads schedules, quality beyond that does not matter.
inline std::uint32_t next_random(Worker& worker) {
    std::uint64_t x = worker.random;
    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    worker.random = x;
    return static_cast<std::uint32_t>((x * 0x2545F4914F6CDD1DULL) >> 32);
}

// scheduler.cpp
void run_cluster(Cluster& cluster, std::uint64_t number);
void dispatch(Worker& worker);  // switches to the next lane that can go on; reports a deadlock if there is none
void make_ready(Warp& warp, unsigned lanes);
// Releases what can go on now that a lane exited.
void release_after_exit(Worker& worker, Warp& warp);
[[noreturn]] void leave_cluster(Cluster& cluster);  // abandons all lanes, back to the OS thread's own stack

// Unwritten shared memory, and the destination of a copy in flight, hold a pattern that is a NaN as float, double,
// bfloat16 and half, and a huge number as an integer (not -1, which kernels use to say "none").
void poison(unsigned char* memory, std::size_t bytes);
bool is_poison(const unsigned char* memory, std::size_t bytes);

// copies.cpp
void forget_copies(Worker& worker);  // before a block
void release_copies(Worker& worker);
// Finishes the copies of a lane that belong to groups before `end`.
void finish_copies(Lane& lane, std::uint32_t end, Site site);

// collectives.cpp
bool warp_barrier_complete(const Warp& warp, const WarpBarrier& barrier);
void complete_warp_barrier(Warp& warp, unsigned slot);
// An instruction of the whole warp: `own` is this lane's part in it, and `execute` is given those of all lanes.
struct WholeWarp {
    void (*execute)(void* const* own);
    void* own;
};
void execute_as_one(const WholeWarp& request, Site site);
const char* name_of(WarpOperation operation);
const char* name_of(BlockOperation operation);

// access.cpp
// What `check_access` does, and no other lane gets the processor: for whoever is in the middle of a list of the worker's.
void check_global(const void* pointer, unsigned bytes, unsigned align, bool write, Site site);

// mbarriers.cpp
bool has_stores(const Worker& worker, const Lane& lane);
// A box that nobody has waited for, or null.
const PendingArrival* box_under_way(const Worker& worker);

// clusters.cpp
// Releases a barrier of the cluster where all threads that have not exited are at it.
void release_cluster(Cluster& cluster);
// Block `rank` of the cluster of this lane, which must not have ended.
Worker& block_of_cluster(unsigned rank, Site site);
// The address by which the lanes of a block know what lies in its shared memory: while another block runs, its static part
// is kept elsewhere.
std::uintptr_t address_at_home(const Worker& worker, const void* address);

// report.cpp
[[noreturn]] void report_lane(Worker& worker, const char* message, const Site* site, void* pc, void* frame);
[[noreturn]] void report_deadlock(Worker& worker);

// signals.cpp
void install_signal_handlers();
int timeout_signal();

}  // namespace moesaic_emulate
