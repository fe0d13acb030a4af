// A tile of a product on Hopper's tensor cores by wgmma (sm_90a): bf16 and half.
//
// The last four warps of a block fetch, the others multiply: kStages of 64 steps of both operands go round in shared
// memory, `full` says that a stage is there, `empty` that it has been read. Who fetches runs ahead, into the next tile, too,
// while the others are still busy with what follows a product. Of those there are two warpgroups:
//
//   cooperative   both have one tile, half of its rows each
//   ping-pong     they have tiles in turn: one multiplies while the other is busy with what follows
//
//   Tile tile(shared);                       // all threads; Tile::kSharedBytes, aligned to 16
//   if (Tile::fetches()) {                   // registers go from here ...
//     give_registers<...>();
//     for (...) tile.fetch(left, right, depth, left_extent, right_extent, together);
//   } else {
//     take_registers<...>();                 // ... to here
//     for (...) {
//       if (tile.passes(depth)) continue;    // it is the other warpgroup's
//       tile.clear();
//       tile.multiply(depth, rows);
//       ... tile.values ...
//     }
//   }
//   tile.finish();                           // all threads
//
// An operand is fetched in one of three ways:
//
//   kLines   line by line, by copies of all fetching threads; `left(r)`, `right(part, r)` as in tile.cuh
//   kBoxes   by the copy engine; what is passed is a `Boxes`
//   kShared  the same, for a pair of blocks (a cluster) that compute neighbouring tiles at the same time, `together`: each
//            asks for half of it, for both. Otherwise each asks for all of its own
//
// Both blocks of a pair do the same number of steps, one after the other, whatever they find to do.
//
// What bounds it: per 64 x 256 x 16, 128 cycles of the tensor cores, 10 KiB are read from shared memory, 80 cycles. A tile
// of 128 x 256 wants 48 KiB from the L2 cache each 1024 cycles, of a pair 32 KiB.
#pragma once

#include "moesaic/staged.cuh"
#include "moesaic/tile_copied.cuh"
#include "moesaic/wgmma.cuh"

namespace moesaic {

enum class Fetch { kLines, kBoxes, kShared };

constexpr int kFetchThreads = 128;

// Where the boxes of an operand lie: lines are rows of a matrix of `map`. Along the sum, the tile's first row (or column, of
// part 0) is row `first`, and step k is column `step` + k; across it, they are column `first`, and row `step` + k. Part 1
// begins `apart` after part 0. Boxes have kBoxRows rows along, 64 across.
template <int kBoxRows_>
struct Boxes {
  static constexpr int kBoxRows = kBoxRows_;
  const TensorMap& map;
  int matrix, first, step, apart;
};

// The same for an operand whose rows after the last step are others, which must count as zeros: rows that lie across the
// sum. Its last steps, less than a stage of them, are fetched line by line.
template <class Lines>
struct BoxesAndLines {
  Boxes<64> boxes;
  Lines lines;
};

// The steps of one operand in a stage: groups of lines of 128 bytes, swizzled.
template <typename T, bool kAcross, int kRows, int kParts, int kAlign, int kFirstThread, Fetch kHow, int kPair>
class WgmmaOperand {
  static constexpr int kK = kSwizzledLine / static_cast<int>(sizeof(T));
  using Chunks = OperandChunks<T, kAcross, kRows, kParts, kK, 8, kFetchThreads, kFirstThread>;
  static constexpr int kGroupBytes = kK * kSwizzledLine;  // of 64 rows that lie across
  static_assert(kRows % 64 == 0, "groups of 64 rows");

 public:
  static constexpr int kBytes = kParts * kRows * kSwizzledLine;

  template <class Row>
  __device__ __forceinline__ void find(const Row& row, int depth, int extent) {
    copied_.find(row, 0, depth, extent);
  }
  template <int kBoxRows>
  __device__ __forceinline__ void find(const Boxes<kBoxRows>&, int, int) {}
  template <class Lines>
  __device__ __forceinline__ void find(const BoxesAndLines<Lines>& operand, int depth, int extent) {
    copied_.find(operand.lines, depth / kK * kK, depth, extent);
  }

  // How many bytes the copy engine brings for the steps from `first` on.
  template <class Row>
  static __device__ __forceinline__ int boxed_bytes(const Row&, int, int) { return 0; }
  template <int kBoxRows>
  static __device__ __forceinline__ int boxed_bytes(const Boxes<kBoxRows>&, int, int) { return kBytes; }
  template <class Lines>
  static __device__ __forceinline__ int boxed_bytes(const BoxesAndLines<Lines>&, int first, int depth) {
    return first + kK <= depth ? kBytes : 0;
  }

  // Asks for the steps from `first` on: one thread for boxes, all for lines.
  template <class Row>
  static __device__ __forceinline__ void fetch_boxes(unsigned char*, Mbarrier*, const Row&, int, int, bool) {}
  template <int kBoxRows>
  static __device__ __forceinline__ void fetch_boxes(unsigned char* stage, Mbarrier* full, const Boxes<kBoxRows>& boxes,
                                                     int first, int /*depth*/, bool together) {
    constexpr int kBox = kAcross ? 64 : kBoxRows;  // rows (columns) of the tile in a box
    constexpr int kBoxes = kParts * kRows / kBox;
    static_assert(kRows % kBox == 0, "boxes belong to one part");
    static_assert(kHow != Fetch::kShared || kBoxes % kPair == 0, "and to one block of a pair");
    const bool halves = kHow == Fetch::kShared && kPair == 2 && together;
    const int rank = kPair == 1 ? 0 : static_cast<int>(blockIdx.x) % kPair;
    const int begin = halves ? rank * (kBoxes / kPair) : 0;
#pragma unroll
    for (int n = 0; n < kBoxes; ++n) {
      const int box = begin + n;
      if (halves && n >= kBoxes / kPair) break;
      const int row = boxes.first + box * kBox / kRows * boxes.apart + box * kBox % kRows;
      const int step = boxes.step + first;
      unsigned char* const to = stage + box * kBox * kSwizzledLine;
      if (halves) {
        copy_box_to_pair(to, boxes.map, kAcross ? row : step, kAcross ? step : row, boxes.matrix, full);
      } else {
        copy_box(to, boxes.map, kAcross ? row : step, kAcross ? step : row, boxes.matrix, full);
      }
    }
  }
  template <class Lines>
  static __device__ __forceinline__ void fetch_boxes(unsigned char* stage, Mbarrier* full,
                                                     const BoxesAndLines<Lines>& operand, int first, int depth,
                                                     bool together) {
    if (first + kK <= depth) fetch_boxes(stage, full, operand.boxes, first, depth, together);
  }

  template <class Row>
  __device__ __forceinline__ void fetch_lines(unsigned char* stage, const Row& row, int first, int depth, int extent) {
    copied_.ask(row, first, depth, extent);
    copy_lines(stage, first, depth, extent);
  }
  template <int kBoxRows>
  __device__ __forceinline__ void fetch_lines(unsigned char*, const Boxes<kBoxRows>&, int, int, int) {}
  template <class Lines>
  __device__ __forceinline__ void fetch_lines(unsigned char* stage, const BoxesAndLines<Lines>& operand, int first,
                                              int depth, int extent) {
    static_assert(kAcross, "lines along the sum end where the matrix does");
    if (first + kK > depth) copy_lines(stage, first, depth, extent);
  }

  // Takes where the lines of the next stage lie, which `fetch_lines` has asked for.
  template <class Row>
  __device__ __forceinline__ void take(const Row&) {
    copied_.take();
  }
  template <int kBoxRows>
  __device__ __forceinline__ void take(const Boxes<kBoxRows>&) {}
  template <class Lines>
  __device__ __forceinline__ void take(const BoxesAndLines<Lines>&) {}

  // Of the rows from `first_row` on, a multiple of 64.
  static __device__ __forceinline__ SharedMatrix matrix(const unsigned char* stage, int first_row) {
    return shared_matrix(stage + first_row * kSwizzledLine, kGroupBytes);
  }
  // How much further the next 16 steps lie.
  static constexpr int kStepBytes = kAcross ? 16 * kSwizzledLine : 16 * static_cast<int>(sizeof(T));

 private:
  __device__ __forceinline__ void copy_lines(unsigned char* stage, int first, int depth, int extent) {
    copied_.fetch(stage, first, depth, extent, [](int line, int chunk) {
      return kAcross ? chunk / 8 * kGroupBytes + swizzled(line, chunk % 8) : swizzled(line, chunk);
    });
  }

  CopiedOperand<T, kAcross, kK, kAlign, Chunks> copied_;
};

// `kStagedBytes` of shared memory are each warpgroup's own, for what leaves by `StagedBoxes`. The tile's values then stay
// where the tensor cores leave them, two neighbouring columns with each thread; else a thread has eight, 16 bytes of a row.
template <typename T, class Shape, Fetch kLeft = Fetch::kLines, Fetch kRight = Fetch::kLines, bool kPingPong = false,
          int kStagedBytes = 0>
class WgmmaTile {
  static_assert(sizeof(T) == 2, "elements of 16 bits");
  static_assert(Shape::kK == 64 && Shape::kStages >= 2, "stages of 64 steps: read, fetched");
  static_assert(kLeft != Fetch::kShared || kRight != Fetch::kShared, "a pair has one operand in common");

 public:
  // Blocks that fetch for each other. The emulator runs blocks one by one.
#ifdef MOESAIC_EMULATE
  static constexpr int kPair = 1;
#else
  static constexpr int kPair = kLeft == Fetch::kShared || kRight == Fetch::kShared ? 2 : 1;
#endif
  static constexpr int kWorkers = Shape::kThreads - kFetchThreads;  // threads that multiply
  static constexpr int kGroupRows = kPingPong ? Shape::kM : Shape::kM / (kWorkers / 128);  // rows of a warpgroup
  static constexpr int kParts = Shape::kParts;
  static constexpr int kVector = kStagedBytes > 0 ? 2 : 8;
  // Registers of a thread that fetches, which holds addresses of lines, and of one that multiplies. A multiprocessor has 504
  // for one thread of each warpgroup.
  static constexpr int kFetchRegisters = kLeft != Fetch::kLines && kRight != Fetch::kLines ? 40
                                         : Shape::kM > 128 || kLeft == kRight              ? 88
                                         : kPingPong                                       ? 64
                                                                                           : 72;
  static constexpr int kWorkRegisters = smaller(240, (504 - kFetchRegisters) / (kWorkers / 128) / 8 * 8);

 private:
  using Left = WgmmaOperand<T, Shape::kLeftAcross, Shape::kM, 1, Shape::kLeftAlign, kWorkers, kLeft, kPair>;
  using Right = WgmmaOperand<T, Shape::kRightAcross, Shape::kN, kParts, Shape::kRightAlign, kWorkers, kRight, kPair>;
  static constexpr bool kCopies = kLeft == Fetch::kLines || kRight == Fetch::kLines;
  // Lines aligned to less than a copy takes are stored; what arrives by itself is only after copies.
  static constexpr bool kStores = (kLeft == Fetch::kLines && Shape::kLeftAlign < 4) ||
                                  (kRight == Fetch::kLines && Shape::kRightAlign < 4);
  static constexpr bool kAsks = kLeft != Fetch::kLines || kRight != Fetch::kLines;
  static constexpr int kGroups = kWorkers / 128;
  static_assert(!kPingPong || kGroups == 2, "two warpgroups in turn");
  static_assert(kWorkers > 0 && kWorkers % 128 == 0 && kGroupRows % 64 == 0, "a warpgroup has blocks of 64 rows");
  static_assert(Shape::kN % 32 == 0, "four neighbouring lanes have 32 columns");
  static constexpr int kStageBytes = Left::kBytes + Right::kBytes;
  static_assert(kStagedBytes % kSwizzledBlock == 0, "boxes stay aligned");
  static_assert(Left::kBytes % kSwizzledBlock == 0 && Right::kBytes % kSwizzledBlock == 0, "stages stay aligned");

  struct Grid {  // of warps: each has whole rows
    static constexpr int kColumns = 1;
  };

 public:
  static constexpr int kBlocks = kGroupRows / 64;  // of 64 rows that a warpgroup has
  static constexpr int kOwnRows = 2 * kBlocks;
  static constexpr int kOwnVectors = Shape::kN / (4 * kVector);
  static constexpr int kOwners = kPingPong ? 128 : kWorkers;  // threads that share a tile
  // Stages, the gap before them that lets them begin at a whole block, two barriers for each, and one for each turn.
  static constexpr int kSharedBytes =
      Shape::kStages * (kStageBytes + 16) + kGroups * kStagedBytes + 16 + kSwizzledBlock - 16;

  float values[kParts][kOwnRows][kOwnVectors][kVector];

  __device__ __forceinline__ explicit WgmmaTile(void* shared) {
    const size_t misaligned = reinterpret_cast<size_t>(__cvta_generic_to_shared(shared)) % kSwizzledBlock;
    stages_ = static_cast<unsigned char*>(shared) + (kSwizzledBlock - misaligned) % kSwizzledBlock;
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < Shape::kStages; ++stage) {
        mbarrier_init(full(stage), (kCopies ? kFetchThreads : 0) + (kAsks ? 1 : 0));
        mbarrier_init(empty(stage), kOwners / 32 * kPair);
      }
      if constexpr (kPingPong) {
        for (int group = 0; group < 2; ++group) mbarrier_init(turn_of(group), 4);
      }
      mbarrier_ready();
    }
    sync();
  }

  // Nobody leaves while the other block of the pair may still write to, or arrive in, its shared memory.
  __device__ __forceinline__ void finish() const {
    if constexpr (kPair == 2) sync_pair();
  }

  static __device__ __forceinline__ bool fetches() { return threadIdx.x >= kWorkers; }
  // Which block of its pair this is.
  static __device__ __forceinline__ int rank() { return kPair == 1 ? 0 : static_cast<int>(blockIdx.x) % kPair; }

  __device__ __forceinline__ int row(int i) const { return first_row() + i / 2 * 64 + row_of_block(i); }
  // The row within its block.
  static __device__ __forceinline__ int row_of_block(int i) {
    return static_cast<int>(threadIdx.x) % 128 / 32 * 16 + i % 2 * 8 + static_cast<int>(threadIdx.x) % 32 / 4;
  }
  __device__ __forceinline__ int column(int j) const {
    return kVector * (4 * j + static_cast<int>(threadIdx.x) % 4);
  }
  // The warpgroup's first row, and its memory for boxes that leave.
  static __device__ __forceinline__ int first_row() { return group() * kGroupRows; }
  __device__ __forceinline__ unsigned char* staged() const {
    return stages_ + Shape::kStages * kStageBytes + own_turn() * kStagedBytes;
  }

  __device__ __forceinline__ void clear() {
    for_all([](float& value) { value = 0.0f; });
  }

  // Fetches the steps of a product; see tile.cuh for lines and extents.
  template <class LeftRows, class RightRows>
  __device__ __forceinline__ void fetch(const LeftRows& left_rows, const RightRows& right_rows, int depth,
                                        int left_extent, int right_extent, bool together) {
    const bool asks = threadIdx.x == kWorkers;
    if (!kCopies && !asks) return;
    const auto left_lines = lines_of(left_rows);
    Left left;
    Right right;
    left.find(left_lines, depth, left_extent);
    right.find(right_rows, depth, right_extent);
#pragma unroll 1
    for (int first = 0; first < depth; first += Shape::kK) {
      unsigned char* const stage = stages_ + stage_ * kStageBytes;
      mbarrier_wait(empty(stage_), parity_ ^ 1);
      if (kAsks && asks) {
        const int bytes = Left::boxed_bytes(left_lines, first, depth) + Right::boxed_bytes(right_rows, first, depth);
        mbarrier_arrive_and_expect(full(stage_), bytes);
        Left::fetch_boxes(stage, full(stage_), left_lines, first, depth, together);
        Right::fetch_boxes(stage + Left::kBytes, full(stage_), right_rows, first, depth, together);
      }
      if constexpr (kCopies) {
        // What comes line by line in every stage comes last: no branch between its question and the arrival.
        if constexpr (kRight == Fetch::kLines) left.fetch_lines(stage, left_lines, first, depth, left_extent);
        right.fetch_lines(stage + Left::kBytes, right_rows, first, depth, right_extent);
        if constexpr (kRight != Fetch::kLines) left.fetch_lines(stage, left_lines, first, depth, left_extent);
        if constexpr (kStores) {
          copy_commit();
          copy_wait<0>();
          mbarrier_arrive_and_expect(full(stage_), 0);
        } else {
          mbarrier_arrive_after_copies(full(stage_));
        }
        left.take(left_lines);
        right.take(right_rows);
      }
      advance();
    }
  }

  // Whether a tile is the other warpgroup's; then its steps are passed over. Once for each tile.
  __device__ __forceinline__ bool passes(int depth) {
    if constexpr (!kPingPong) return false;
    const bool mine = tiles_ % 2 == static_cast<int>(threadIdx.x) / 128;
    ++tiles_;
    if (mine) return false;
    stage_ += (depth + Shape::kK - 1) / Shape::kK;
    parity_ ^= stage_ / Shape::kStages % 2;
    stage_ %= Shape::kStages;
    return true;
  }

  // values[p][row][column] += the sum over k < depth of left(row, k) * right_p(column, k), of what is being fetched.
  // `rows` of the tile are there: warpgroups without any only take part in the waiting.
  __device__ __forceinline__ void multiply(int depth, long long rows) {
    const bool idle = first_row() >= rows;
    PendingProducts pending;
    // A stage's parity says nothing to who is two rounds of stages behind: no waiting for it out of turn.
    if constexpr (kPingPong) mbarrier_wait(turn_of(own_turn()), (tiles_ - 1) / 2 % 2 ^ (own_turn() == 0 ? 1 : 0));
    int read = -1;  // the stage before
#pragma unroll 1
    for (int first = 0; first < depth; first += Shape::kK) {
      mbarrier_wait(full(stage_), parity_);
      if (!idle) {
        if constexpr (kCopies) shared_to_async_proxy();
        const unsigned char* const stage = stages_ + stage_ * kStageBytes;
        for_all(wgmma_pin);
        wgmma_fence();
        const SharedMatrix rows_here = Left::matrix(stage, first_row());
        const SharedMatrix columns = Right::matrix(stage + Left::kBytes, 0);
#pragma unroll
        for (int k = 0; k < Shape::kK / 16; ++k) multiply_blocks(pending, rows_here, columns, k, Blocks<kBlocks>());
        wgmma_commit(pending);
        wgmma_wait<1>(pending);
      }
      if (read >= 0) release(read);
      read = stage_;
      advance();
    }
    if constexpr (kPingPong) arrive_once(turn_of(1 - own_turn()));
    wgmma_wait<0>(pending);
    for_all(wgmma_pin);
    if (read >= 0) release(read);
    if constexpr (kVector == 8) share_columns();
  }

  // The sum over the tile's columns of `own`, a number for each own row; `store(row, total)` is called once a row.
  template <class Store>
  __device__ __forceinline__ void sum_rows(const float (&own)[kOwnRows], void* shared, const Store& store) {
    int rows[kOwnRows];
#pragma unroll
    for (int i = 0; i < kOwnRows; ++i) rows[i] = row(i);
    sum_rows_of_tile<Shape, Grid, 4>(own, rows, shared, store);
  }

 private:
  template <int kCount>
  struct Blocks {};

  static __device__ __forceinline__ void sync() {
    if constexpr (kPair == 2) {
      sync_pair();
    } else {
      __syncthreads();
    }
  }

  __device__ __forceinline__ Mbarrier* full(int stage) const {
    return reinterpret_cast<Mbarrier*>(stages_ + Shape::kStages * kStageBytes + kGroups * kStagedBytes) + stage;
  }
  __device__ __forceinline__ Mbarrier* empty(int stage) const { return full(Shape::kStages + stage); }
  __device__ __forceinline__ Mbarrier* turn_of(int group) const { return full(2 * Shape::kStages + group); }

  // The warpgroup, among those that share a tile.
  static __device__ __forceinline__ int group() { return kPingPong ? 0 : static_cast<int>(threadIdx.x) / 128; }
  static __device__ __forceinline__ int own_turn() { return static_cast<int>(threadIdx.x) / 128; }

  __device__ __forceinline__ void advance() {
    if (++stage_ == Shape::kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

  // A warp has read a stage: it says so to whoever writes to it, lane by lane.
  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane < kPair) mbarrier_arrive_in(empty(stage), lane);
  }

  // One arrival of a warp.
  static __device__ __forceinline__ void arrive_once(Mbarrier* barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive_and_expect(barrier, 0);
  }

  // The right operand's functions take a part; so that both look alike, the left's do, too.
  template <class Row>
  static __device__ __forceinline__ auto lines_of(const Row& row) {
    return [&row](int, int r) { return row(r); };
  }
  template <int kBoxRows>
  static __device__ __forceinline__ const Boxes<kBoxRows>& lines_of(const Boxes<kBoxRows>& boxes) { return boxes; }
  template <class Lines>
  static __device__ __forceinline__ auto lines_of(const BoxesAndLines<Lines>& operand) {
    const auto lines = [&operand](int, int r) { return operand.lines(r); };
    return BoxesAndLines<decltype(lines)>{operand.boxes, lines};
  }

  // Block after block of 64 rows: which one is a constant of the instruction's registers.
  template <int kCount>
  __device__ __forceinline__ void multiply_blocks(PendingProducts& pending, SharedMatrix rows, SharedMatrix columns,
                                                  int k, Blocks<kCount>) {
    if constexpr (kCount > 1) multiply_blocks(pending, rows, columns, k, Blocks<kCount - 1>());
    constexpr int kBlock = kCount - 1;
    wgmma<T, Shape::kLeftAcross, Shape::kRightAcross, kBlock>(
        pending, values, rows + (kBlock * 64 * kSwizzledLine + k * Left::kStepBytes), columns + k * Right::kStepBytes);
  }

  // The tensor cores leave columns 8 j + 2 t and 8 j + 2 t + 1, j < 4, of each 32 with lane t of four; from here on it has
  // columns 8 t to 8 t + 7, 16 bytes of a row in memory. A transposition of 4 x 4 pairs, in two rounds.
  __device__ __forceinline__ void share_columns() {
    exchange<1>();
    exchange<2>();
  }
  template <int kDistance>
  __device__ __forceinline__ void exchange() {
    const bool upper = static_cast<int>(threadIdx.x) & kDistance;
#pragma unroll
    for (int p = 0; p < kParts; ++p)
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i)
#pragma unroll
        for (int g = 0; g < kOwnVectors; ++g)
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            if (j & kDistance) continue;
#pragma unroll
            for (int v = 0; v < 2; ++v) {
              float& low = values[p][i][g][2 * j + v];
              float& high = values[p][i][g][2 * (j | kDistance) + v];
              const float found = __shfl_xor_sync(0xffffffffu, upper ? low : high, kDistance);
              if (upper) {
                low = found;
              } else {
                high = found;
              }
            }
          }
  }

  template <class Function>
  __device__ __forceinline__ void for_all(const Function& function) {
#pragma unroll
    for (int p = 0; p < kParts; ++p)
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i)
#pragma unroll
        for (int j = 0; j < kOwnVectors; ++j)
#pragma unroll
          for (int v = 0; v < kVector; ++v) function(values[p][i][j][v]);
  }

  unsigned char* stages_;
  int stage_ = 0;  // the next one
  unsigned parity_ = 0;
  int tiles_ = 0;  // seen so far, of both warpgroups in turn
};

}  // namespace moesaic
