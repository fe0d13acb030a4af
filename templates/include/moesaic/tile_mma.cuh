// A tile of a product on tensor cores by mma.sync (sm_80 and newer): bf16, half, and float rounded to tf32.
//
// Steps of both operands wait in shared memory, kStages of them, each brought by asynchronous copies that start
// kStages - 1 stages ahead; fragments of the next 16 (tf32: 8) steps are read while the present ones are multiplied.
// What bounds it is shared memory: a warp of 64 x 64 reads 4 KiB for 32 products of 16 x 8 x 16, one of 64 x 32 reads 3 KiB
// for 16. So tiles of 128 x 128 are best left to four warps, and those of 128 x 256 to eight.
#pragma once

#include "moesaic/mma.cuh"
#include "moesaic/tile_copied.cuh"

namespace moesaic {

template <typename T>
struct MmaElement { using type = T; };
template <>
struct MmaElement<float> { using type = Tf32; };

// The steps of one operand in a stage of shared memory, line for line as in memory, and its fragments.
template <typename T, bool kLeft, bool kAcross, int kRows, int kParts, int kK, int kAlign, int kThreads>
class MmaOperand {
  static constexpr int kSize = static_cast<int>(sizeof(T));
  static constexpr int kChunk = 16 / kSize;
  static constexpr int kStep = Mma<typename MmaElement<T>::type>::kDepth;
  using Chunks = OperandChunks<T, kAcross, kRows, kParts, kK, kChunk, kThreads>;

  static constexpr int kLineBytes = Chunks::kLineChunks * 16;
  static_assert((kLineBytes & (kLineBytes - 1)) == 0, "offsets within a line are made by exclusive or");

  // Rows of 32-bit elements that lie across have no ldmatrix: a word at a time, from four lines of eight elements.
  static constexpr bool kByWords = kAcross && kSize == 4;
  static_assert(!kByWords || kLineBytes >= 128, "four lines of eight words have to lie in different banks");

 public:
  static constexpr int kBytes = Chunks::kLines * kLineBytes;

  template <class Row>
  __device__ __forceinline__ void find(const Row& row, int first, int depth, int extent) {
    copied_.find(row, first, depth, extent);
  }
  template <class Row>
  __device__ __forceinline__ void fetch(unsigned char* stage, const Row& row, int first, int depth, int extent) {
    copied_.fetch(stage, first, depth, extent, [](int i) { return place(Chunks::line(i), Chunks::chunk(i)); });
    copied_.ask(row, first + kK, depth, extent);
    copied_.take();
  }

  // Where a lane reads the fragments of a warp whose rows begin at `first_row`; what `load` adds to it are constants.
  static __device__ __forceinline__ int lane_offset(int first_row) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if constexpr (kByWords) {
      const int row = first_row + lane / 4;
      return place(lane % 4, row / kChunk) + row % kChunk * kSize;
    } else {  // the row of a matrix that the lane names to ldmatrix
      const int row = 8 * row_half(lane / 8);
      const int step = 8 * step_half(lane / 8);
      if constexpr (kAcross) return place(step + lane % 8, (first_row + row) / kChunk);
      return place(first_row + row + lane % 8, step / 8);
    }
  }

  // The fragments of rows 16 x to 16 x + 15 of a part, and of products' steps number k of this stage.
  static __device__ __forceinline__ void load(unsigned (&words)[4], const unsigned char* stage, int lane_offset, int part,
                                              int x, int k) {
    if constexpr (kByWords) {
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const int across = (part * kRows + 16 * x + 8 * row_half(w)) * kSize;
        const int at = (lane_offset ^ across) + (kStep * k + 4 * step_half(w)) * kLineBytes;
        words[w] = *reinterpret_cast<const unsigned*>(stage + at);
      }
    } else if constexpr (kAcross) {
      const int across = (part * kRows + 16 * x) * kSize;
      ldmatrix_x4_transposed(words, stage + (lane_offset ^ across) + kStep * k * kLineBytes);
    } else {
      ldmatrix_x4(words, stage + (lane_offset ^ 32 * k) + (part * kRows + 16 * x) * kLineBytes);
    }
  }

 private:
  // Which half of 16 rows, and which half of the steps of a product, word w of a fragment holds: mma.cuh. Two fragments of
  // the right operand, of eight columns each, are loaded at once.
  static __device__ __forceinline__ int row_half(int w) { return kLeft ? w % 2 : w / 2; }
  static __device__ __forceinline__ int step_half(int w) { return kLeft ? w / 2 : w % 2; }

  // The offset of a chunk of 16 bytes. Chunks are swapped within a line such that what is read at a time lies in
  // different banks: the same chunk of eight lines; by words, the same two chunks of four lines. As this repeats every
  // eight lines, and swaps by exclusive or, neither 16 lines nor a power of two of chunks further changes it.
  static __device__ __forceinline__ int place(int line, int chunk) {
    constexpr int kSwaps = smaller(8, Chunks::kLineChunks);
    const int swap = kByWords ? line % 4 * 2 : line / (8 / kSwaps) % kSwaps;
    return line * kLineBytes + 16 * (chunk ^ swap);
  }

  CopiedOperand<T, kAcross, kK, kAlign, Chunks> copied_;
};

template <typename T, class Shape>
class MmaTile {
  using Product = Mma<typename MmaElement<T>::type>;
  using Grid = WarpGrid<Shape, 16, 16>;
  using Left = MmaOperand<T, true, Shape::kLeftAcross, Shape::kM, 1, Shape::kK, Shape::kLeftAlign, Shape::kThreads>;
  using Right = MmaOperand<T, false, Shape::kRightAcross, Shape::kN, Shape::kParts, Shape::kK, Shape::kRightAlign,
                           Shape::kThreads>;

  static constexpr int kWarpRows = Shape::kM / Grid::kRows;
  static constexpr int kWarpColumns = Shape::kN / Grid::kColumns;
  static_assert((kWarpRows & (kWarpRows - 1)) == 0 && (kWarpColumns & (kWarpColumns - 1)) == 0,
                "offsets of fragments are made by exclusive or");
  static constexpr int kSteps = Shape::kK / Product::kDepth;  // products' steps in a stage
  static_assert(kSteps >= 2 && kSteps % 2 == 0, "the right operand's fragments alternate between two sets");
  static_assert(Shape::kStages >= 2, "one stage is read while others are fetched");
  static constexpr int kStageBytes = Left::kBytes + Right::kBytes;

 public:
  static constexpr int kParts = Shape::kParts;
  static constexpr int kVector = 2;
  static constexpr int kOwnRows = kWarpRows / 8;
  static constexpr int kOwnVectors = kWarpColumns / 8;
  static constexpr int kSharedBytes = Shape::kStages * kStageBytes;
  static_assert(kSharedBytes >= Grid::kColumns * Shape::kM * 4, "sum_rows needs as much");

  float values[kParts][kOwnRows][kOwnVectors][kVector];

  __device__ __forceinline__ int row(int i) const {
    return Grid::row() * kWarpRows + 8 * i + static_cast<int>(threadIdx.x) % 32 / 4;
  }
  __device__ __forceinline__ int column(int j) const {
    return Grid::column() * kWarpColumns + 8 * j + 2 * (static_cast<int>(threadIdx.x) % 4);
  }

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int p = 0; p < kParts; ++p)
#pragma unroll
      for (int i = 0; i < kOwnRows; ++i)
#pragma unroll
        for (int j = 0; j < kOwnVectors; ++j)
#pragma unroll
          for (int v = 0; v < kVector; ++v) values[p][i][j][v] = 0.0f;
  }

  // values[p][row][column] += the sum over k < depth of left(row, k) * right_p(column, k). See tile.cuh.
  template <class LeftRow, class RightRow>
  __device__ __forceinline__ void multiply(const LeftRow& left_row, const RightRow& right_row, int depth,
                                           int left_extent, int right_extent, void* shared) {
    unsigned char* const stages = static_cast<unsigned char*>(shared);
    const auto left_line = [&](int, int r) { return left_row(r); };
    Left left;
    Right right;
    left.find(left_line, 0, depth, left_extent);
    right.find(right_row, 0, depth, right_extent);

    int fetched = 0;  // the next steps to fetch, and the offset of the stage they go to
    int to = 0;
    const auto fetch = [&]() {
      if (fetched < depth) {
        left.fetch(stages + to, left_line, fetched, depth, left_extent);
        right.fetch(stages + to + Left::kBytes, right_row, fetched, depth, right_extent);
      }
      copy_commit();
      fetched += Shape::kK;
      to = next_stage(to);
    };

    __syncthreads();  // whoever used shared memory before is done with it
#pragma unroll 1
    for (int i = 0; i < Shape::kStages - 1; ++i) fetch();
    copy_wait<Shape::kStages - 2>();
    __syncthreads();  // the first steps are there

    const int left_offset = Left::lane_offset(Grid::row() * kWarpRows);
    const int right_offset = Right::lane_offset(Grid::column() * kWarpColumns);
    int from = 0;
    unsigned left_words[kWarpRows / 16][4];
    RightWords right_words[2];
    const auto load_left = [&](int x, int k) { Left::load(left_words[x], stages + from, left_offset, 0, x, k); };
    const auto load_right = [&](int k) {
      RightWords& words = right_words[k % 2];
#pragma unroll
      for (int p = 0; p < kParts; ++p)
#pragma unroll
        for (int x = 0; x < kWarpColumns / 16; ++x) {
          Right::load(words[p][x], stages + from + Left::kBytes, right_offset, p, x, k);
        }
    };

    load_right(0);
#pragma unroll
    for (int x = 0; x < kWarpRows / 16; ++x) load_left(x, 0);
#pragma unroll 1
    for (int first = 0; first < depth; first += Shape::kK) {
#pragma unroll
      for (int k = 0; k < kSteps; ++k) {
        const int next = (k + 1) % kSteps;
        if (next == 0) {
          // The next steps are there, and these have been read: their stage is the next to be filled.
          from = next_stage(from);
          copy_wait<Shape::kStages - 2>();
          __syncthreads();
        }
        load_right(next);  // at the very end, what is not used
        if (k == 0) fetch();
        round_words(right_words[k % 2]);
#pragma unroll
        for (int x = 0; x < kWarpRows / 16; ++x) {
          round_words(left_words[x]);
          add_products(x, left_words[x], right_words[k % 2]);
          load_left(x, next);  // into the same registers: used a whole step later
        }
      }
    }
  }

  // The sum over the tile's columns of `own`, a number for each own row; `store(row, total)` is called once a row.
  template <class Store>
  __device__ __forceinline__ void sum_rows(const float (&own)[kOwnRows], void* shared, const Store& store) {
    sum_rows_of_tile<Shape, Grid, 4>(own, [this](int i) { return row(i); }, shared, store);
  }

 private:
  using RightWords = unsigned[kParts][kWarpColumns / 16][4];

  static __device__ __forceinline__ int next_stage(int offset) {
    return offset == (Shape::kStages - 1) * kStageBytes ? 0 : offset + kStageBytes;
  }

  // As products want it: words of floats are rounded, just before they are used.
  static __device__ __forceinline__ void round_words(unsigned& word) {
    if constexpr (sizeof(T) == 4) word = to_tf32(__uint_as_float(word));
  }
  template <typename W, int kCount>
  static __device__ __forceinline__ void round_words(W (&words)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) round_words(words[i]);
  }

  // Products of rows 16 x to 16 x + 15 of the warp with all of its columns.
  __device__ __forceinline__ void add_products(int x, const unsigned (&left)[4], const RightWords& right) {
#pragma unroll
    for (int p = 0; p < kParts; ++p)
#pragma unroll
      for (int j = 0; j < kOwnVectors; ++j) {
        float (&upper)[kVector] = values[p][2 * x][j];
        float (&lower)[kVector] = values[p][2 * x + 1][j];
        float sums[4] = {upper[0], upper[1], lower[0], lower[1]};
        const unsigned pair[2] = {right[p][j / 2][j % 2 * 2], right[p][j / 2][j % 2 * 2 + 1]};
        mma<typename MmaElement<T>::type>(sums, left, pair);
        upper[0] = sums[0];
        upper[1] = sums[1];
        lower[0] = sums[2];
        lower[1] = sums[3];
      }
  }
};

}  // namespace moesaic
