// Both operands of a product on their way to Hopper's tensor cores (sm_90a): bf16 and half.
//
// The last four warps of a block fetch, the others multiply: kStages of 64 steps of both operands go round in shared
// memory, `full` says that a stage is there, `empty` that it has been read. Who fetches runs ahead, into the next tile, too,
// while the others are still busy with what follows a product.
//
// An operand is fetched in one of three ways:
//
//   kLines   line by line, by copies of all fetching threads; `left(r)`, `right(part, r)` as in tile.cuh, or `TokenRows`
//   kBoxes   by the copy engine; what is passed is a `Boxes`
//   kShared  the same, for a pair of blocks (a cluster) that compute neighbouring tiles at the same time, `together`: each
//            asks for half of it, for both. Otherwise each asks for all of its own
//
// Both blocks of a pair do the same number of steps, one after the other, whatever they find to do.
//
// A pair of tiles may have kTail rows besides, which come to both blocks. They have no room in a stage: they lie where
// results wait to leave, of which there are none while products are under way. Who multiplies says when all have left
// (`vacate`).
#pragma once

#include "moesaic/cluster.cuh"
#include "moesaic/tile_copied.cuh"
#include "moesaic/token_rows.cuh"
#include "moesaic/wgmma.cuh"

namespace moesaic {

enum class Fetch { kLines, kBoxes, kShared };

constexpr int kFetchThreads = 128;

// Where the boxes of an operand lie: lines are rows of a matrix of `map`. Along the sum, the tile's first row (or column, of
// part 0) is row `first`, and step k is column `step` + k; across it, they are column `first`, and row `step` + k. Part 1
// begins `apart` after part 0. Boxes have kBoxRows rows along, 64 across.
//
// With kOfRows it is a map of an operand's rows (tensor_map.cuh): those past the tile's extent, or after the last step, are
// somebody else's, and zeros come in their place.
template <int kBoxRows_, bool kOfRows_ = false>
struct Boxes {
  static constexpr int kBoxRows = kBoxRows_;
  static constexpr bool kOfRows = kOfRows_;
  const TensorMap& map;
  int matrix, first, step = 0, apart = 0;
};
// In place of the boxes of rows that a tile has besides.
struct NoTail {
  static constexpr int kBoxRows = 0;
};

// Whether an operand can end with any step: a matrix ends where it does.
template <class Operand>
constexpr bool kEndsAnywhere = true;
template <int kBoxRows>
constexpr bool kEndsAnywhere<Boxes<kBoxRows, false>> = false;
// Whether its lines are rows of tokens.
template <class Operand>
constexpr bool kIsTokenRows = false;
template <typename T>
constexpr bool kIsTokenRows<TokenRows<T>> = true;

// The steps of one operand in a stage: groups of lines of 128 bytes, swizzled.
template <typename T, bool kAcross, int kRows, int kParts, int kAlign, int kFirstThread, Fetch kHow, int kPair>
class WgmmaOperand {
  static constexpr int kK = kSwizzledLine / static_cast<int>(sizeof(T));
  using Chunks = OperandChunks<T, kAcross, kRows, kParts, kK, 8, kFetchThreads, kFirstThread>;
  static constexpr int kGroupBytes = kK * kSwizzledLine;  // of 64 rows that lie across
  static_assert(!kAcross || kRows % 64 == 0, "groups of 64 rows");
  // Whether boxes without rows are left out: of many, which no other block waits for.
  template <int kBoxRows>
  static constexpr bool kSkips = !kAcross && kParts == 1 && kHow == Fetch::kBoxes && 2 * kBoxRows < kRows;

 public:
  static constexpr int kBytes = kParts * kRows * kSwizzledLine;

  // Finds the lines of the first stage, whose steps end at `end` or after it.
  template <class Row>
  __device__ __forceinline__ void find(const Row& row, int end, int, int extent) {
    copied_.find(row, 0, end, extent);
    if constexpr (!kAcross) lines_there_ = __all_sync(0xffffffffu, copied_.all_lines());
  }
  template <int kBoxRows, bool kOfRows>
  __device__ __forceinline__ void find(const Boxes<kBoxRows, kOfRows>&, int, int, int) {}
  __device__ __forceinline__ void find(const TokenRows<T>& rows, int end, int depth, int extent) {
    rows_ = kept(reinterpret_cast<const unsigned char*>(rows.rows + Chunks::own_element()));
    apart_ = kept(rows.stride * static_cast<long long>(sizeof(T)));
    numbers_.begin(rows.tokens, smaller(end, kK), depth);
    find_lines(end, extent);
  }

  // How many bytes the copy engine brings for a stage. Boxes past `extent` need not come.
  template <class Row>
  static __device__ __forceinline__ int boxed_bytes(const Row&, int) { return 0; }
  template <int kBoxRows, bool kOfRows>
  static __device__ __forceinline__ int boxed_bytes(const Boxes<kBoxRows, kOfRows>&, int extent) {
    if constexpr (!kSkips<kBoxRows>) return kBytes;
    return smaller(kRows / kBoxRows, (extent + kBoxRows - 1) / kBoxRows) * kBoxRows * kSwizzledLine;
  }

  // Asks for a stage of steps from `first` on, if they do not end before: one thread for boxes, all for lines, of which the
  // next stage's begin at `next`.
  template <class Row>
  static __device__ __forceinline__ void fetch_boxes(unsigned char*, Mbarrier*, const Row&, int, int, int, bool) {}
  template <int kBoxRows, bool kOfRows>
  static __device__ __forceinline__ void fetch_boxes(unsigned char* stage, Mbarrier* full,
                                                     const Boxes<kBoxRows, kOfRows>& boxes, int first, int end, int extent,
                                                     bool together) {
    constexpr int kBox = kAcross ? 64 : kBoxRows;  // rows (columns) of the tile in a box
    constexpr int kBoxes = kParts * kRows / kBox;
    static_assert(kRows % kBox == 0, "boxes belong to one part");
    static_assert(!kOfRows || kParts == 1, "rows have one");
    static_assert(kHow != Fetch::kShared || kBoxes % kPair == 0, "and to one block of a pair");
    const bool halves = kHow == Fetch::kShared && kPair == 2 && together;
    const int rank = kPair == 1 ? 0 : static_cast<int>(blockIdx.x) % kPair;
    const int begin = halves ? rank * (kBoxes / kPair) : 0;
#pragma unroll
    for (int n = 0; n < kBoxes; ++n) {
      const int box = begin + n;
      if (halves && n >= kBoxes / kPair) break;
      if (kSkips<kBoxRows> && box * kBox >= extent) break;
      const int of_tile = boxes.first + box * kBox / kRows * boxes.apart + box * kBox % kRows;
      const int of_sum = boxes.step + first;
      const int column = kAcross ? of_tile : of_sum;
      const int row = kAcross ? of_sum : of_tile;
      unsigned char* const to = stage + box * kBox * kSwizzledLine;
      if constexpr (kOfRows) {
        const int there = kAcross ? end - first : extent - box * kBox;
        const int count = there < 0 ? 0 : smaller(kBox, there);
        if (halves) {
          copy_rows_to_pair(to, boxes.map, column, row, count, full);
        } else {
          copy_rows(to, boxes.map, column, row, count, full);
        }
      } else if (halves) {
        copy_box_to_pair(to, boxes.map, column, row, boxes.matrix, full);
      } else {
        copy_box(to, boxes.map, column, row, boxes.matrix, full);
      }
    }
  }
  template <class Row>
  __device__ __forceinline__ void fetch_lines(unsigned char* stage, const Row& row, int first, int end, int next,
                                              int depth, int extent) {
    copied_.ask(row, next, depth, extent);
    copy_lines(stage, first, end, extent);
  }
  template <int kBoxRows, bool kOfRows>
  __device__ __forceinline__ void fetch_lines(unsigned char*, const Boxes<kBoxRows, kOfRows>&, int, int, int, int, int) {}
  __device__ __forceinline__ void fetch_lines(unsigned char* stage, const TokenRows<T>&, int first, int end, int, int,
                                              int extent) {
    numbers_.ask();
    if (is_whole(end - first, extent)) {
      copied_.template fetch<true>(stage + own_, first, end, extent, further);
    } else {
      copy_lines(stage, first, end, extent);
    }
    numbers_.copied();
  }

  // Takes where the lines of the next stage lie, from step `next` on, which `fetch_lines` has asked for.
  template <class Row>
  __device__ __forceinline__ void take(const Row&, int, int, int) {
    copied_.take();
  }
  template <int kBoxRows, bool kOfRows>
  __device__ __forceinline__ void take(const Boxes<kBoxRows, kOfRows>&, int, int, int) {}
  __device__ __forceinline__ void take(const TokenRows<T>&, int next, int depth, int extent) {
    numbers_.next();
    find_lines(depth - next, extent);
  }

  // Of the rows from `first_row` on, a multiple of 64.
  static __device__ __forceinline__ SharedMatrix matrix(const unsigned char* stage, int first_row) {
    return shared_matrix(stage + first_row * kSwizzledLine, kGroupBytes);
  }
  // How much further the next 16 steps lie.
  static constexpr int kStepBytes = kAcross ? 16 * kSwizzledLine : 16 * static_cast<int>(sizeof(T));

 private:
  __device__ __forceinline__ void copy_lines(unsigned char* stage, int first, int end, int extent) {
    if (!kAcross && lines_there_ && first + kK <= end) {
      copied_.template fetch<true>(stage + own_, first, end, extent, further);
    } else {
      copied_.fetch(stage + own_, first, end, extent, further);
    }
  }

  // Whether all of a stage's lines, of so many steps that are left, are there.
  static __device__ __forceinline__ bool is_whole(int steps, int extent) {
    return steps >= kK && extent >= kRows;
  }
  // Where the lines of a stage lie whose numbers have come.
  __device__ __forceinline__ void find_lines(int steps, int extent) {
    const auto row = [&](int line) {
      return reinterpret_cast<const T*>(rows_ + static_cast<unsigned>(numbers_.of(line)) * apart_);
    };
    if (is_whole(steps, extent)) {
      copied_.template place<true>(row, steps, extent);
    } else {
      copied_.template place<false>(row, steps, extent);
    }
  }

  // How far a thread's chunks lie behind its first one: swizzling repeats after 8 lines.
  static __device__ __forceinline__ constexpr int further(int i) {
    constexpr int kOfLine = Chunks::kLineChunks / Chunks::kTeam;
    static_assert(Chunks::kTeam == 8 && Chunks::kTeams % 8 == 0, "lines of a thread are swizzled alike");
    return i / kOfLine * Chunks::kTeams * kSwizzledLine + (kAcross ? i % kOfLine * kGroupBytes : 0);
  }

  int own_ = swizzled(Chunks::line(0), Chunks::chunk(0));  // where its first one goes in a stage
  bool lines_there_ = false;  // along the sum: all of a warp's
  CopiedOperand<T, kAcross, kK, kAlign, Chunks> copied_;
  TokenNumbers<Chunks, kK, kFirstThread> numbers_;
  const unsigned char* rows_;  // where own chunks of tokens' rows begin, and bytes from one to the next
  long long apart_;
};

// The stages of a block, and the roles of its threads. A stage is free again when kOwners threads of either block of a pair
// have read it. `kStagedBytes` of shared memory are each warpgroup's own, for what leaves by boxes; kTurns barriers are the
// tile's, of four arrivals.
template <typename T, class Shape, Fetch kLeft, Fetch kRight, int kStagedBytes, int kOwners_, int kTurns>
class WgmmaStages {
  static_assert(sizeof(T) == 2, "elements of 16 bits");
  static_assert(Shape::kK == 64 && Shape::kStages >= 2, "stages of 64 steps: read, fetched");
  static_assert(kLeft != Fetch::kShared || kRight != Fetch::kShared, "a pair has one operand in common");

 public:
  // Blocks that fetch for each other.
  static constexpr int kPair = kLeft == Fetch::kShared || kRight == Fetch::kShared ? 2 : 1;
  static constexpr int kWorkers = Shape::kThreads - kFetchThreads;  // threads that multiply
  static constexpr int kGroups = kWorkers / 128;
  static constexpr int kOwners = kOwners_;  // threads that share a tile
  // Where both operands lie across the sum, it is the first stage that may not be whole: who multiplies leaves out products of
  // zeros there, before its loop, and lines of such a stage take longer, for which there is time while the others are still busy
  // with what follows the product before.
  static constexpr bool kShortFirst = Shape::kLeftAcross && Shape::kRightAcross;
  // Registers of a thread that fetches, which holds addresses of lines, and of one that multiplies. A multiprocessor has 504
  // for one thread of each warpgroup.
  static constexpr int kFetchRegisters = kLeft != Fetch::kLines && kRight != Fetch::kLines ? (Shape::kTail > 0 ? 56 : 40)
                                         : Shape::kM <= 64                                ? 56
                                         : kOwners < kWorkers && kLeft != kRight          ? 64
                                                                                          : 88;
  static constexpr int kWorkRegisters = smaller(240, (504 - kFetchRegisters) / kGroups / 8 * 8);

 protected:
  using Left = WgmmaOperand<T, Shape::kLeftAcross, Shape::kM, 1, Shape::kLeftAlign, kWorkers, kLeft, kPair>;
  using Right =
      WgmmaOperand<T, Shape::kRightAcross, Shape::kN, Shape::kParts, Shape::kRightAlign, kWorkers, kRight, kPair>;
  static constexpr bool kCopies = kLeft == Fetch::kLines || kRight == Fetch::kLines;
  // Lines aligned to less than a copy takes are stored; what arrives by itself is only after copies.
  static constexpr bool kStores = (kLeft == Fetch::kLines && Shape::kLeftAlign < 4) ||
                                  (kRight == Fetch::kLines && Shape::kRightAlign < 4);
  static constexpr bool kAsks = kLeft != Fetch::kLines || kRight != Fetch::kLines;
  static_assert(kWorkers > 0 && kWorkers % 128 == 0, "whole warpgroups");
  static constexpr int kStageBytes = Left::kBytes + Right::kBytes;
  static constexpr int kTailBytes = Shape::kTail * kSwizzledLine;  // of a stage
  static constexpr int kLastTogether = (Shape::kStages - 1) * Shape::kK;  // first step of the last whose tail comes late
  static_assert(kStagedBytes % kSwizzledBlock == 0 && kTailBytes % kSwizzledBlock == 0, "boxes stay aligned");
  static_assert(Shape::kStages * kTailBytes <= kGroups * kStagedBytes, "a tail has room where results leave");
  static_assert(Shape::kTail == 0 ||
                    (kRight == Fetch::kShared && !Shape::kLeftAcross && kLeft == Fetch::kBoxes && kTurns == 0),
                "a tail's rows come in boxes, to warpgroups that share a tile, of a pair below each other");
  static_assert(Left::kBytes % kSwizzledBlock == 0 && Right::kBytes % kSwizzledBlock == 0, "stages stay aligned");

 public:
  // Stages, the gap before them that lets them begin at a whole block, two barriers for each, and two more.
  static constexpr int kSharedBytes =
      Shape::kStages * (kStageBytes + 16) + kGroups * kStagedBytes + 16 + kSwizzledBlock - 16;
  static_assert(kTurns <= 2, "room for two");

  __device__ __forceinline__ explicit WgmmaStages(void* shared) {
    const auto address = static_cast<unsigned>(reinterpret_cast<size_t>(__cvta_generic_to_shared(shared)));
    stages_ = static_cast<unsigned char*>(shared) + kept((kSwizzledBlock - address % kSwizzledBlock) % kSwizzledBlock);
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < Shape::kStages; ++stage) {
        mbarrier_init(full(stage), (kCopies ? kFetchThreads : 0) + (kAsks ? 1 : 0));
        mbarrier_init(empty(stage), kOwners / 32 * kPair);
      }
      for (int turn = 0; turn < kTurns; ++turn) mbarrier_init(turn_of(turn), 4);
      if (Shape::kTail > 0) {
        mbarrier_init(vacated(), kGroups);
        mbarrier_init(tail_there(), 1);
      }
      mbarrier_ready();
    }
    sync();
  }

  // Nobody leaves while the other block of the pair may still write to, or arrive in, its shared memory.
  __device__ __forceinline__ void finish() const {
    if constexpr (kPair == 2) sync_cluster();
  }

  static __device__ __forceinline__ bool fetches() { return threadIdx.x >= kWorkers; }
  // The one of them that asks the copy engine, and tells what is next.
  static __device__ __forceinline__ bool asks() { return threadIdx.x == kWorkers; }
  // Which block of its pair this is.
  static __device__ __forceinline__ int rank() { return kPair == 1 ? 0 : static_cast<int>(blockIdx.x) % kPair; }
  // The warpgroup's memory for boxes that leave.
  __device__ __forceinline__ unsigned char* staged() const {
    return stages_ + Shape::kStages * kStageBytes + own_group() * kStagedBytes;
  }

  // Of a tile that has a tail, by each warpgroup and before its product: the one lane of it that has results sent knows
  // that they have left.
  template <class Staged>
  __device__ __forceinline__ void vacate(Staged& staged) {
    staged.finish([this] { mbarrier_arrive_and_expect(vacated(), 0); });
  }

  // Fetches the steps of a product; see tile.cuh for lines and extents. `tail` are the boxes of so many rows besides, of
  // kStages stages at least.
  template <class LeftRows, class RightRows, class TailRows = NoTail>
  __device__ __forceinline__ void fetch(const LeftRows& left_rows, const RightRows& right_rows, int depth,
                                        int left_extent, int right_extent, bool together, const TailRows& tail = {},
                                        int tail_rows = 0) {
    static_assert(TailRows::kBoxRows == Shape::kTail, "boxes of as many rows as a tail has");
    if (!kCopies && !asks()) return;
    // Where whole warps are here, one lane asks for boxes, of a warp which the compiler knows to be all there.
    const unsigned warp = kCopies ? own_warp() : 0;
    const auto left_lines = lines_of(left_rows);
    Left left;
    Right right;
    static_assert(!kShortFirst || (kEndsAnywhere<LeftRows> && kEndsAnywhere<RightRows>), "a stage ends before the sum does");
    static_assert(!kIsTokenRows<LeftRows> || !kIsTokenRows<RightRows>, "copies are waited for by their number");
    int next = kShortFirst && depth > 0 ? (depth - 1) % Shape::kK + 1 : Shape::kK;  // stage's first step
    const int first_end = kShortFirst ? smaller(next, depth) : depth;
    left.find(left_lines, first_end, depth, left_extent);
    right.find(right_rows, first_end, depth, right_extent);
#pragma unroll 1
    for (int first = 0; first < depth; first = next, next += Shape::kK) {
      const int end = kShortFirst ? next : depth;  // of the steps, if they end in this stage; a constant, if depth is
      unsigned char* const stage = stages_ + stage_ * kStageBytes;
      mbarrier_wait(empty(stage_), parity_ ^ 1);
      if (kAsks && (!kCopies || (warp == kWorkers / 32 && elect_lane()))) {
        const int bytes = Left::boxed_bytes(left_lines, left_extent) + Right::boxed_bytes(right_rows, right_extent);
        const bool with_tail = tail_rows > 0 && first > kLastTogether;
        mbarrier_arrive_and_expect(full(stage_), bytes + (with_tail ? kTailBytes : 0));
        Left::fetch_boxes(stage, full(stage_), left_lines, first, end, left_extent, together);
        Right::fetch_boxes(stage + Left::kBytes, full(stage_), right_rows, first, end, right_extent, together);
        if constexpr (Shape::kTail > 0) {
          if (tail_rows > 0) fetch_tail(tail, first, tail_rows);
        }
      }
      if constexpr (kCopies) {
        // What comes line by line in every stage comes last: no branch between its question and the arrival.
        if constexpr (kRight == Fetch::kLines) left.fetch_lines(stage, left_lines, first, end, next, depth, left_extent);
        right.fetch_lines(stage + Left::kBytes, right_rows, first, end, next, depth, right_extent);
        if constexpr (kRight != Fetch::kLines) left.fetch_lines(stage, left_lines, first, end, next, depth, left_extent);
        if constexpr (kStores) {
          copy_commit();
          copy_wait<0>();
          mbarrier_arrive_and_expect(full(stage_), 0);
        } else {
          mbarrier_arrive_after_copies(full(stage_));
        }
        left.take(left_lines, next, depth, left_extent);
        right.take(right_rows, next, depth, right_extent);
      }
      advance();
    }
  }

 protected:
  static __device__ __forceinline__ void sync() {
    if constexpr (kPair == 2) {
      sync_cluster();
    } else {
      __syncthreads();
    }
  }

  __device__ __forceinline__ Mbarrier* full(int stage) const {
    return reinterpret_cast<Mbarrier*>(stages_ + Shape::kStages * kStageBytes + kGroups * kStagedBytes) + stage;
  }
  __device__ __forceinline__ Mbarrier* empty(int stage) const { return full(Shape::kStages + stage); }
  __device__ __forceinline__ Mbarrier* turn_of(int group) const { return full(2 * Shape::kStages + group); }
  // Of a tail, where there are no turns: it may come; of its first kStages stages all has come.
  __device__ __forceinline__ Mbarrier* vacated() const { return full(2 * Shape::kStages); }
  __device__ __forceinline__ Mbarrier* tail_there() const { return full(2 * Shape::kStages + 1); }
  // A tail's lines of a stage.
  __device__ __forceinline__ unsigned char* tail_of(int stage) const {
    return stages_ + Shape::kStages * kStageBytes + stage * kTailBytes;
  }

  // Asks for a tail's lines of the stage whose first step is `first`. Results of the tile before may still wait to leave
  // from there when the first kStages of this one are asked for: their lines of a tail are asked for after the last of
  // them, when the tile's first stage is the next one again, and counted by themselves.
  template <class TailRows>
  __device__ __forceinline__ void fetch_tail(const TailRows& tail, int first, int rows) {
    if (first > kLastTogether) {
      copy_rows(tail_of(stage_), tail.map, tail.step + first, tail.first, rows, full(stage_));
      return;
    }
    if (first < kLastTogether) return;
    mbarrier_wait(vacated(), tails_++ % 2);
    mbarrier_arrive_and_expect(tail_there(), Shape::kStages * kTailBytes);
    for (int n = 0; n < Shape::kStages; ++n) {
      copy_rows(tail_of(stage_of(n + 1)), tail.map, tail.step + n * Shape::kK, tail.first, rows, tail_there());
    }
  }
  // So many stages after this one.
  __device__ __forceinline__ int stage_of(int further) const {
    return stage_ + further < Shape::kStages ? stage_ + further : stage_ + further - Shape::kStages;
  }

  static __device__ __forceinline__ int own_group() { return static_cast<int>(threadIdx.x) / 128; }

  __device__ __forceinline__ void advance() {
    if (++stage_ == Shape::kStages) {
      stage_ = 0;
      parity_ ^= 1;
    }
  }

  // The steps of a first stage that is not whole, if they are so few that a product of 16 can be left out; else 0.
  static __device__ __forceinline__ int short_steps(int depth) {
    const int steps = (depth - 1) % Shape::kK + 1;
    return depth > 0 && steps <= Shape::kK - 16 ? steps : 0;
  }
  // The products of such a stage that have any of its steps, kMost at most, and the wait for them: of ways that meet in
  // flight, the compiler has each product waited for. `kOfTile` are what the tile's `multiply_stage` takes besides.
  template <int kMost, int... kOfTile, class Tile>
  static __device__ __forceinline__ void multiply_short(Tile& tile, int steps, PendingProducts& pending, SharedMatrix rows,
                                                        SharedMatrix columns) {
    if constexpr (kMost > 1) {
      if (steps <= 16 * (kMost - 1)) return multiply_short<kMost - 1, kOfTile...>(tile, steps, pending, rows, columns);
    }
    tile.template multiply_stage<kMost, kOfTile...>(pending, rows, columns, /*begins=*/true);
    wgmma_wait<0>(pending);
  }

  // A warp has read a stage: it says so to whoever writes to it, lane by lane.
  __device__ __forceinline__ void release(int stage) const {
    __syncwarp();
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (lane < kPair) mbarrier_arrive_in(empty(stage), lane);
  }

  // The right operand's functions take a part; so that both look alike, the left's do, too.
  template <class Row>
  static __device__ __forceinline__ auto lines_of(const Row& row) {
    return [&row](int, int r) { return row(r); };
  }
  template <int kBoxRows, bool kOfRows>
  static __device__ __forceinline__ const Boxes<kBoxRows, kOfRows>& lines_of(const Boxes<kBoxRows, kOfRows>& boxes) {
    return boxes;
  }
  static __device__ __forceinline__ const TokenRows<T>& lines_of(const TokenRows<T>& rows) { return rows; }

  unsigned char* stages_;
  int stage_ = 0;  // the next one
  unsigned parity_ = 0;
  unsigned tails_ = 0;  // asked for, or multiplied
};

}  // namespace moesaic
