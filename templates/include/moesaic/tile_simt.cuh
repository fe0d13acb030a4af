// A tile of a product by plain multiply-adds: exact float32 for every element type, on any GPU.
//
// Each element is `fmaf` after `fmaf` in the order of the sum, and nothing is added that lies past its end: results are
// bit-equal for every shape. Shared memory holds floats, [k][row], so that a thread reads neighbouring rows and columns as
// vectors, and elements are converted once.
#pragma once

#include "moesaic/tile_common.cuh"

namespace moesaic {

// kCount neighbouring floats of shared memory, as one word.
template <int kCount>
__device__ __forceinline__ void read_floats(const float* from, float (&values)[kCount]) {
  const auto word = *reinterpret_cast<const typename Word<4 * kCount>::type*>(from);
  memcpy(values, &word, sizeof(values));
}

// The steps of one operand in shared memory, and their way there through registers.
template <typename T, bool kAcross, int kRows, int kParts, int kK, int kAlign, int kThreads>
class SimtOperand {
  static constexpr int kChunk = kAlign / static_cast<int>(sizeof(T));
  using Chunks = OperandChunks<T, kAcross, kRows, kParts, kK, kChunk, kThreads>;
  static_assert(kAlign >= static_cast<int>(sizeof(T)) && kAlign <= 16, "from an element to 16 bytes");

  // Lines along the sum are turned on their way: a warp stores, of each of its lines, steps that lie kChunk apart. A gap
  // after every kChunk steps moves them to different banks; at least four floats, so that vectors stay aligned.
  static constexpr int kGap = kAcross ? 0 : Chunks::kLineChunks < 8 ? 32 / Chunks::kLineChunks : 4;
  static constexpr int kStride = (kParts * kRows + 31) / 32 * 32;

 public:
  static constexpr int kFloats = kK * kStride + kK / kChunk * kGap;

  static __device__ __forceinline__ int place(int k, int row) { return k * kStride + k / kChunk * kGap + row; }

  template <class Row>
  __device__ __forceinline__ void find(const Row& row, int first, int depth, int extent) {
    chunks_.find(row, first, depth, extent);
  }

  // The steps from `first` on, from memory into registers; zeros where nothing is valid.
  template <class Row>
  __device__ __forceinline__ void fetch(const Row& row, int first, int depth, int extent) {
#pragma unroll
    for (int i = 0; i < Chunks::kOwn; ++i) {
      if (chunks_.valid(i, first, depth, extent) > 0) {
        load<kChunk, kAlign>(chunks_.address(i, first), held_[i]);
      } else {
#pragma unroll
        for (int v = 0; v < kChunk; ++v) held_[i][v] = from_float<T>(0.0f);
      }
    }
    if constexpr (kAcross) chunks_.find(row, first + kK, depth, extent);
  }

  // From registers into shared memory.
  __device__ __forceinline__ void put(float* shared) const {
#pragma unroll
    for (int i = 0; i < Chunks::kOwn; ++i) {
      if (!Chunks::exists(i)) continue;
      float values[kChunk];
#pragma unroll
      for (int v = 0; v < kChunk; ++v) values[v] = to_float(held_[i][v]);
      const int element = Chunks::chunk(i) * kChunk;
      if constexpr (kAcross) {
        put_vectors(shared + place(Chunks::line(i), element), values);
      } else {
#pragma unroll
        for (int v = 0; v < kChunk; ++v) shared[place(element + v, Chunks::line(i))] = values[v];
      }
    }
  }

 private:
  static __device__ __forceinline__ void put_vectors(float* to, const float (&values)[kChunk]) {
    constexpr int kVector = smaller(kChunk, 4);
    using W = typename Word<4 * kVector>::type;
#pragma unroll
    for (int v = 0; v < kChunk; v += kVector) {
      W word;
      memcpy(&word, values + v, sizeof(word));
      *reinterpret_cast<W*>(to + v) = word;
    }
  }

  Chunks chunks_;
  T held_[Chunks::kOwn][kChunk];
};

template <typename T, class Shape>
class SimtTile {
  // A warp is 4 x 8 threads; a thread owns vectors of rows that lie 4 vectors apart, and of columns 8 vectors apart. So a
  // warp reads 64 and 128 bytes of shared memory at a time, each word once.
  static constexpr int kLaneRows = 4;
  static constexpr int kLaneColumns = 8;

 public:
  static constexpr int kVector = 4;

 private:
  using Grid = WarpGrid<Shape, kLaneRows, kLaneColumns * kVector>;
  using Left = SimtOperand<T, Shape::kLeftAcross, Shape::kM, 1, Shape::kK, Shape::kLeftAlign, Shape::kThreads>;
  using Right = SimtOperand<T, Shape::kRightAcross, Shape::kN, Shape::kParts, Shape::kK, Shape::kRightAlign,
                            Shape::kThreads>;
  static constexpr int kStageFloats = Left::kFloats + Right::kFloats;
  static constexpr int kStages = 2;
  static_assert(Shape::kStages == kStages, "one step is read while the next one is on its way through registers");

 public:
  static constexpr int kParts = Shape::kParts;
  static constexpr int kOwnRows = Shape::kM / (Grid::kRows * kLaneRows);
  static constexpr int kOwnVectors = Shape::kN / (Grid::kColumns * kLaneColumns * kVector);
  static constexpr int kSharedBytes = kStages * kStageFloats * static_cast<int>(sizeof(float));
  static_assert(kSharedBytes >= Grid::kColumns * Shape::kM * 4, "sum_rows needs as much");

  float values[kParts][kOwnRows][kOwnVectors][kVector];

  __device__ __forceinline__ int row(int i) const {
    const int lane_row = Grid::row() * kLaneRows + static_cast<int>(threadIdx.x) % 32 / kLaneColumns;
    return (i / kRowVector * Grid::kRows * kLaneRows + lane_row) * kRowVector + i % kRowVector;
  }
  __device__ __forceinline__ int column(int j) const {
    const int lane_column = Grid::column() * kLaneColumns + static_cast<int>(threadIdx.x) % kLaneColumns;
    return (j * Grid::kColumns * kLaneColumns + lane_column) * kVector;
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
    float* const stages = static_cast<float*>(shared);
    const auto left_line = [&](int, int r) { return left_row(r); };
    Left left;
    Right right;
    const auto fetch = [&](int first) {
      left.fetch(left_line, first, depth, left_extent);
      right.fetch(right_row, first, depth, right_extent);
    };
    const auto put = [&](float* stage) {
      left.put(stage);
      right.put(stage + Left::kFloats);
    };

    left.find(left_line, 0, depth, left_extent);
    right.find(right_row, 0, depth, right_extent);
    fetch(0);
    __syncthreads();  // whoever used shared memory before is done with it
    put(stages);
    for (int first = 0, stage = 0; first < depth; first += Shape::kK, stage ^= 1) {
      __syncthreads();  // this step is there, and the one before it has been read
      const bool more = first + Shape::kK < depth;
      if (more) fetch(first + Shape::kK);
      add_products(stages + stage * kStageFloats, depth - first);
      if (more) put(stages + (stage ^ 1) * kStageFloats);
    }
  }

  // The sum over the tile's columns of `own`, a number for each own row; `store(row, total)` is called once a row.
  template <class Store>
  __device__ __forceinline__ void sum_rows(const float (&own)[kOwnRows], void* shared, const Store& store) {
    sum_rows_of_tile<Shape, Grid, kLaneColumns>(own, [this](int i) { return row(i); }, shared, store);
  }

 private:
  static constexpr int kRowVector = kOwnRows % 4 == 0 ? 4 : kOwnRows % 2 == 0 ? 2 : 1;

  __device__ __forceinline__ void add_products(const float* stage, int steps) {
    if (steps >= Shape::kK) {
#pragma unroll 8
      for (int k = 0; k < Shape::kK; ++k) add_product(stage, k);
    } else {
#pragma unroll 1
      for (int k = 0; k < steps; ++k) add_product(stage, k);
    }
  }

  __device__ __forceinline__ void add_product(const float* stage, int k) {
    float left[kOwnRows / kRowVector][kRowVector];
#pragma unroll
    for (int i = 0; i < kOwnRows / kRowVector; ++i) read_floats(stage + Left::place(k, row(i * kRowVector)), left[i]);
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
#pragma unroll
      for (int j = 0; j < kOwnVectors; ++j) {
        float right[kVector];
        read_floats(stage + Left::kFloats + Right::place(k, p * Shape::kN + column(j)), right);
#pragma unroll
        for (int i = 0; i < kOwnRows; ++i)
#pragma unroll
          for (int v = 0; v < kVector; ++v) {
            float& sum = values[p][i][j][v];
            sum = fmaf(left[i / kRowVector][i % kRowVector], right[v], sum);
          }
      }
    }
  }
};

}  // namespace moesaic
