// What a kernel library and the emulator's runtime library share: the current lane, source positions, and the calls
// that a lane makes into the runtime. Includes no CUDA header, so that the runtime builds without them.
#pragma once

#include <cstddef>
#include <cstdint>

#define MOESAIC_EMULATE_API __attribute__((visibility("default")))

// The largest block and warp of every CUDA device so far.
#define MOESAIC_EMULATE_MAX_THREADS 1024
#define MOESAIC_EMULATE_WARP_SIZE 32
// Blocks of a cluster; every device with clusters has them up to 8.
#define MOESAIC_EMULATE_MAX_CLUSTER 16

namespace moesaic_emulate {

// Same layout as CUDA's uint3 and dim3.
struct Index3 {
    unsigned x, y, z;
};

// A position in the source. `Site::here()` as a default argument is the caller's.
struct Site {
    const char* file;
    int line;

    static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
        return Site{file, line};
    }
};

// What all threads of one block see alike.
struct BlockView {
    Index3 block_index;
    Index3 block_dim;
    Index3 grid_dim;
    unsigned char* dynamic_shared;
    std::size_t dynamic_shared_bytes;
};

// What one thread sees of itself.
struct LaneView {
    Index3 thread_index;
    const BlockView* block;
};

// The thread that runs now on this OS thread. A lane never moves to another OS thread.
extern MOESAIC_EMULATE_API __thread LaneView* current_lane;

// Operations in which the lanes named by a mask meet.
enum class WarpOperation : std::uint8_t {
    SyncWarp,
    ShuffleIndex,
    ShuffleUp,
    ShuffleDown,
    ShuffleXor,
    Ballot,
    Any,
    All,
    MatchAny,
    MatchAll,
    ReduceAddUnsigned,
    ReduceAddSigned,
    ReduceMinUnsigned,
    ReduceMinSigned,
    ReduceMaxUnsigned,
    ReduceMaxSigned,
    ReduceAnd,
    ReduceOr,
    ReduceXor,
    WholeWarp,
};

// Operations in which all threads of a block (or the stated number, for named barriers) meet.
enum class BlockOperation : std::uint8_t { Sync, Count, And, Or, Named };

// Waits until every lane named in `mask` that has not exited calls the same operation with the same mask, then
// returns this lane's result. `operand` is the source lane, delta or lane mask of a shuffle; `width` its segment.
MOESAIC_EMULATE_API std::uint64_t warp_collective(WarpOperation operation, unsigned mask, std::uint64_t value,
                                                  unsigned operand, int width, Site site);

// Waits until all threads of the block that have not exited arrive. Returns the combined predicate. Barrier `id` 0 is
// __syncthreads; named barriers (1 to 15) wait for `threads` threads.
MOESAIC_EMULATE_API int block_barrier(BlockOperation operation, unsigned id, unsigned threads, int predicate,
                                      Site site);

// Instructions that a whole warp executes as one, on its tensor cores: the last of 32 lanes to arrive does for all what
// they came for. A lane that has exited, never existed, or is at another instruction, is an error.
//
// PTX `mma.sync`, 16 x 8 in 16 steps of the sum (tf32: 8): sums += a * b. Products are added in order, each sum rounded.
enum class MmaElement : std::uint8_t { Bfloat16, Half, Tf32 };
struct MmaFragments {
    std::uint32_t a[4];
    std::uint32_t b[2];
    float sums[4];
};
MOESAIC_EMULATE_API void multiply_fragments(MmaFragments& own, MmaElement element, Site site);
// PTX `ldmatrix` of `count` matrices: the words of this lane; `row` is what it has read of the row that it names.
struct MatrixRow {
    std::uint16_t elements[8];
};
MOESAIC_EMULATE_API void exchange_rows(const MatrixRow& row, unsigned count, bool transposed, std::uint32_t* words,
                                       Site site);

// Lanes of the warp that reached this call together: all that wait here once no other lane of the warp can go on.
MOESAIC_EMULATE_API unsigned active_mask(Site site);

// Checks one access to global memory against the registered buffers.
MOESAIC_EMULATE_API void check_access(const void* address, unsigned bytes, unsigned align, bool write, Site site);

// Checks that an address lies in the block's shared memory.
MOESAIC_EMULATE_API void check_shared(const void* address, unsigned bytes, unsigned align, Site site);

// A copy from global to shared memory that this lane starts: 4, 8 or 16 bytes, zeros if not `valid`. From here to the
// wait that covers it the destination holds poison, and neither side may change.
MOESAIC_EMULATE_API void copy_async(void* shared, const void* global, unsigned bytes, bool valid, Site site);
// Closes the group of the copies that this lane started since the last commit; it may be empty.
MOESAIC_EMULATE_API void copy_commit();
// Finishes all groups of this lane but the `groups_left` committed last.
MOESAIC_EMULATE_API void copy_wait(unsigned groups_left, Site site);

// An mbarrier of 8 bytes of shared memory: arrivals that end a phase; an arrival that announces bytes; one for the copies
// that this lane has started; a wait until the phase of a parity is over.
MOESAIC_EMULATE_API void mbarrier_init(void* barrier, unsigned arrivals, Site site);
MOESAIC_EMULATE_API void mbarrier_arrive(void* barrier, unsigned bytes, Site site);
MOESAIC_EMULATE_API void mbarrier_arrive_after_copies(void* barrier, Site site);
MOESAIC_EMULATE_API void mbarrier_wait(void* barrier, unsigned parity, Site site);
// The same place in block `rank` of the cluster, which must not have ended: an arrival; a value, whose bytes count for the
// barrier there.
MOESAIC_EMULATE_API void mbarrier_arrive_in(void* barrier, unsigned rank, Site site);
MOESAIC_EMULATE_API void mbarrier_store_in(void* barrier, void* address, const void* value, unsigned bytes, unsigned rank,
                                           Site site);

// A box that the copy engine brings: `rows` lines of `line_bytes`, swizzled; zeros beyond the valid rows and bytes. The
// barrier counts its bytes when it is there. The other function brings it to the same place in block `rank` of the cluster,
// whose barrier counts it.
MOESAIC_EMULATE_API void copy_box(void* shared, const void* global, unsigned rows, unsigned line_bytes, long long row_bytes,
                                  int valid_rows, int valid_bytes, void* barrier, Site site);
MOESAIC_EMULATE_API void copy_box_in(void* shared, const void* global, unsigned rows, unsigned line_bytes,
                                     long long row_bytes, int valid_rows, int valid_bytes, void* barrier, unsigned rank,
                                     Site site);

// A box that the copy engine takes from shared to global memory: what is valid of it. Stores are in groups of this lane;
// until the wait that covers a store, shared memory may not change.
MOESAIC_EMULATE_API void store_box(const void* shared, void* global, unsigned line_bytes, long long row_bytes,
                                   int valid_rows, int valid_bytes, Site site);
MOESAIC_EMULATE_API void store_commit();
MOESAIC_EMULATE_API void store_wait(unsigned groups_left, Site site);

// An operand of 16-bit elements in shared memory, in swizzled lines of 128 bytes. A line is a row, or, `across`, a step of
// the sum that holds 64 rows, of which the next 64 follow `group_bytes` further.
struct SwizzledMatrix {
    const unsigned char* start;
    int group_bytes;
    bool across;
};

// sums += left * right, 64 x columns (whole 64s) in 16 steps: what this thread of a warpgroup has of it by PTX
// `wgmma.mma_async`, its first row's sums and then its second's. Elements are bfloat16, or half. Returns a number for what
// it has multiplied; the other function, the number for what there is now.
MOESAIC_EMULATE_API std::uint64_t multiply_swizzled(const SwizzledMatrix& left, const SwizzledMatrix& right, int columns,
                                                    bool half, float* sums, Site site);
MOESAIC_EMULATE_API std::uint64_t digest_of_swizzled(const SwizzledMatrix& left, const SwizzledMatrix& right,
                                                     int columns);

// The halves of the barrier of all threads of a cluster that have not exited, and where something in the shared memory of
// this block lies in that of block `rank`, which must not have ended.
MOESAIC_EMULATE_API void cluster_arrive(Site site);
MOESAIC_EMULATE_API void cluster_wait(Site site);
MOESAIC_EMULATE_API const void* in_block_of_cluster(const void* address, unsigned bytes, unsigned rank, Site site);

// Lets other lanes run. `always` false: only now and then, and only under a seeded order (finds more interleavings).
MOESAIC_EMULATE_API void yield_lane(bool always);

// Ends the launch with a report about the current lane.
[[noreturn]] MOESAIC_EMULATE_API void fail(const char* message, Site site);

// Global memory that a kernel may touch.
struct Buffer {
    std::uint64_t address;
    std::uint64_t bytes;
    const char* name;
    std::uint32_t writable;
    std::uint32_t reserved;
};

// One launch. Mirrored by a ctypes structure in launch.py: keep the two alike.
struct LaunchRequest {
    Index3 grid;
    Index3 block;
    std::uint32_t workers;        // OS threads; one cluster at a time each
    std::uint32_t buffer_count;
    std::uint32_t cluster;        // blocks of a cluster, which divides the grid
    std::uint32_t reserved;
    std::int64_t order;           // 0 forward, -1 reverse, positive: seed of a shuffle
    std::uint64_t shared_bytes;   // dynamic shared memory of a block
    double timeout_seconds;       // for the whole grid
    const Buffer* buffers;
    const std::uint64_t* arguments;  // one word a parameter, encoded as entry.h says
    char* message;                // out: the report of a failure, zero-terminated
    std::uint64_t message_bytes;
};

// What a kernel library tells the runtime about itself.
struct KernelBinding {
    const char* name;
    void (*run)(const std::uint64_t* arguments);  // calls the kernel once, for the current lane
    const void* (*touch_shared)();                // makes this OS thread's static shared memory exist
};

// Runs the grid. 0: done; 1: `request.message` holds a report.
MOESAIC_EMULATE_API int launch(const LaunchRequest& request, const KernelBinding& kernel);

}  // namespace moesaic_emulate
