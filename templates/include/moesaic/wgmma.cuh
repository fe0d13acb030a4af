// Tensor cores through wgmma (sm_90a): a warpgroup, four warps, multiplies 64 x 16 by 16 x N from shared memory.
//
// Both operands lie in shared memory as the unit wants them for swizzle<128B>: lines of 128 bytes, whose chunks of 16 bytes
// are swapped by the line's number, in blocks of 8 lines, 1024 bytes, aligned to 1024.
//
//   along    a line is a row (column of the product, for the right operand) and holds 64 steps of the sum
//   across   a line is a step of the sum and holds 64 rows; the next 64 rows follow `group_bytes` further
//
// Who holds what of the product, with w the warp, g = lane / 4, t = lane % 4: rows 16 w + g and 16 w + g + 8, columns
// 8 j + 2 t and the next. Products run by themselves until they are waited for:
//
//   wgmma_fence(); wgmma<...>(...); ...; wgmma_commit(); ...; wgmma_wait<kGroupsLeft>();
//
// Until then neither the sums nor what is multiplied may be touched. What cp.async has written, a tensor core sees after
// `shared_to_async_proxy` and a barrier. PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate Instructions":
// "Matrix Descriptor", "wgmma.mma_async", figures for .m64nNk16; "Memory Consistency Model: Proxies".
#pragma once

#include "moesaic/boxes.cuh"

namespace moesaic {

constexpr int kSwizzledLine = 128;               // bytes
constexpr int kSwizzledBlock = 8 * kSwizzledLine;  // what repeats, and what stages are aligned to

// The offset of a chunk of 16 bytes from the beginning of its group of lines.
__host__ __device__ constexpr int swizzled(int line, int chunk) { return line * kSwizzledLine + 16 * (chunk ^ line % 8); }

#ifdef MOESAIC_EMULATE

// Where a matrix lies.
struct SharedMatrix {
  const unsigned char* start;
  int group_bytes;
};
inline SharedMatrix shared_matrix(const void* start, int group_bytes) {
  return {static_cast<const unsigned char*>(start), group_bytes};
}
inline SharedMatrix operator+(SharedMatrix matrix, int bytes) { return {matrix.start + bytes, matrix.group_bytes}; }

// The products of a warpgroup that have not been waited for. A tensor core reads its operands and writes its sums at any time
// before the wait. Here operands are read at once and again at the wait, when they must be the same; sums are poison
// between. A thread reads what its own sums are of: all threads together read all, several times.
class PendingProducts {
  static constexpr int kMost = 64;     // products in flight
  static constexpr int kMostSums = 256;

 public:
  // `sum_at(n)`: the sums of the first row, by column, then those of the second; zero where the product `begins` them.
  template <int kColumns, class SumAt>
  void add(const SumAt& sum_at, const moesaic_emulate_matrix& left, const moesaic_emulate_matrix& right, bool half,
           bool begins) {
    static_assert(kColumns % 8 == 0 && kColumns <= kMostSums, "a width there is");
    Sums& held = hold(&sum_at(0), kColumns / 2);
    if (!held.poisoned) {
      for (int n = 0; n < kColumns / 2; ++n) {
        float& sum = sum_at(n);
        held.at[n] = &sum;
        held.value[n] = sum;
        sum = quiet_nan();
      }
      held.poisoned = true;
    }
    if (begins) {
      for (int n = 0; n < kColumns / 2; ++n) held.value[n] = 0.0f;
    }
    if (count_ == kMost) moesaic_emulate_fail("more products in flight than there should be: is a wait missing?");
    const auto seen = moesaic_emulate_multiply(left, right, kColumns, half, held.value);
    products_[count_++] = {left, right, kColumns, groups_, seen};
    held.last_group = groups_;
  }
  void commit() { ++groups_; }
  void wait(int groups_left) {
    const int end = groups_ - groups_left;
    int kept = 0;
    for (int i = 0; i < count_; ++i) {
      const Product& product = products_[i];
      if (product.group >= end) {
        products_[kept++] = product;
      } else if (moesaic_emulate_multiplied(product.left, product.right, product.columns) != product.seen) {
        moesaic_emulate_fail("a product that this wait covers: an operand was written meanwhile");
      }
    }
    count_ = kept;
    for (Sums& held : sums_) {
      if (!held.poisoned || held.last_group >= end) continue;
      for (int n = 0; n < held.count; ++n) *held.at[n] = held.value[n];
      held.poisoned = false;
    }
  }

 private:
  struct Product {
    moesaic_emulate_matrix left, right;
    int columns, group;
    unsigned long long seen;
  };
  struct Sums {
    float* at[kMostSums / 2];
    float value[kMostSums / 2];
    int count = 0, last_group = 0;
    bool poisoned = false;
  };

  static float quiet_nan() { return __uint_as_float(0x7fffffffu); }

  Sums& hold(const float* first, int count) {
    for (Sums& held : sums_) {
      if (held.poisoned && held.at[0] == first) return held;
    }
    for (Sums& held : sums_) {
      if (!held.poisoned) {
        held.count = count;
        return held;
      }
    }
    moesaic_emulate_fail("more sums in flight than a thread has registers for");
  }

  Product products_[kMost];
  Sums sums_[4];
  int count_ = 0, groups_ = 0;
};

#else

struct PendingProducts {};  // the tensor core's own

// The lower half of a descriptor: address, and distance of groups, in units of 16 bytes. The upper half is the same for all:
// the distance of blocks of 8 lines in these units, and the swizzle in the top bits.
struct SharedMatrix {
  unsigned low;
};
constexpr unsigned kUpperHalf = kSwizzledBlock >> 4 | 1u << 30;
__device__ __forceinline__ SharedMatrix shared_matrix(const void* start, int group_bytes) {
  const auto address = static_cast<unsigned>(__cvta_generic_to_shared(start)) & 0x3ffff;  // without the block's rank
  return {kept(address >> 4 | static_cast<unsigned>(group_bytes >> 4) << 16)};
}
__device__ __forceinline__ SharedMatrix operator+(SharedMatrix matrix, int bytes) {
  return {matrix.low + static_cast<unsigned>(bytes >> 4)};
}

#endif

// Before the first product, and before one that follows other accesses to its sums.
__device__ __forceinline__ void wgmma_fence() {
#ifndef MOESAIC_EMULATE
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

// Closes the group of the products since the last commit.
__device__ __forceinline__ void wgmma_commit(PendingProducts& pending) {
#ifdef MOESAIC_EMULATE
  pending.commit();
#else
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

// Waits for all groups but the kGroupsLeft committed last.
template <int kGroupsLeft>
__device__ __forceinline__ void wgmma_wait(PendingProducts& pending) {
#ifdef MOESAIC_EMULATE
  pending.wait(kGroupsLeft);
#else
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(kGroupsLeft) : "memory");
#endif
}

// Keeps the compiler from moving accesses to a sum past this place: it does not know that products write it later.
__device__ __forceinline__ void wgmma_pin(float& sum) {
#ifndef MOESAIC_EMULATE
  asm volatile("" : "+f"(sum) :: "memory");
#endif
}

// Fewer registers for the warps that fetch, more for those that multiply; each warpgroup calls one of them, in a branch of its
// own. PTX ISA, "Miscellaneous Instructions: setmaxnreg".
template <int kRegisters>
__device__ __forceinline__ void give_registers() {
#ifndef MOESAIC_EMULATE
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(kRegisters));
#endif
}
template <int kRegisters>
__device__ __forceinline__ void take_registers() {
#ifndef MOESAIC_EMULATE
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(kRegisters));
#endif
}

// sums += left * right, 64 x N; where it `begins` them, sums = left * right. `sums` is [parts][2 x blocks of 64 rows][vectors
// of a part][elements of a vector], of which block kBlock is meant; N = parts times columns of a part, of which a thread has a fourth. A pair of sums of columns
// 8 j + 2 t lies at 2 j.
template <typename T, bool kLeftAcross, bool kRightAcross, int kBlock, int kParts, int kRows, int kVectors, int kVector>
__device__ __forceinline__ void wgmma(PendingProducts& pending, float (&sums)[kParts][kRows][kVectors][kVector],
                                      SharedMatrix left, SharedMatrix right, bool begins);

// The same for what is kept as the tensor cores leave it, of the first kColumns columns: sums[j][2 i + v] is that of row
// g + 8 i, column 8 j + 2 t + v. For products whose width varies: 32, 64, 96, and from 120 to 144 in steps of 8.
template <typename T, bool kLeftAcross, bool kRightAcross, int kColumns, int kBlocks>
__device__ __forceinline__ void wgmma_columns(PendingProducts& pending, float (&sums)[kBlocks][4], SharedMatrix left,
                                              SharedMatrix right, bool begins);

// Element v of the pair in column vector j, counted through all parts, and row i of the two.
#define MOESAIC_SUM(j, i, v)                                                                     \
  sums[(j) / (kVectors * kVector / 2)][2 * kBlock + (i)][(j) % (kVectors * kVector / 2) / (kVector / 2)] \
      [2 * ((j) % (kVector / 2)) + (v)]

#ifdef MOESAIC_EMULATE

template <typename T, bool kLeftAcross, bool kRightAcross, int kBlock, int kParts, int kRows, int kVectors, int kVector>
__device__ __forceinline__ void wgmma(PendingProducts& pending, float (&sums)[kParts][kRows][kVectors][kVector],
                                      SharedMatrix left, SharedMatrix right, bool begins) {
  constexpr int kOwn = kParts * kVectors * kVector;  // sums of a row
  const auto sum_at = [&](int n) -> float& { return MOESAIC_SUM(n % kOwn / 2, n / kOwn, n % 2); };
  pending.add<4 * kOwn>(sum_at, {left.start, left.group_bytes, kLeftAcross}, {right.start, right.group_bytes, kRightAcross},
                        std::is_same<T, __half>::value, begins);
}

template <typename T, bool kLeftAcross, bool kRightAcross, int kColumns, int kBlocks>
__device__ __forceinline__ void wgmma_columns(PendingProducts& pending, float (&sums)[kBlocks][4], SharedMatrix left,
                                              SharedMatrix right, bool begins) {
  constexpr int kOwn = kColumns / 4;  // sums of a row
  const auto sum_at = [&](int n) -> float& { return sums[n % kOwn / 2][n / kOwn * 2 + n % 2]; };
  pending.add<kColumns>(sum_at, {left.start, left.group_bytes, kLeftAcross}, {right.start, right.group_bytes, kRightAcross},
                        std::is_same<T, __half>::value, begins);
}

#else

template <typename T>
constexpr bool kIsBfloat16 = false;
template <>
constexpr bool kIsBfloat16<__nv_bfloat16> = true;

#define MOESAIC_SUMS4(j) \
  "+f"(MOESAIC_SUM(j, 0, 0)), "+f"(MOESAIC_SUM(j, 0, 1)), "+f"(MOESAIC_SUM(j, 1, 0)), "+f"(MOESAIC_SUM(j, 1, 1))
#define MOESAIC_SUMS16(j) MOESAIC_SUMS4(j), MOESAIC_SUMS4(j + 1), MOESAIC_SUMS4(j + 2), MOESAIC_SUMS4(j + 3)
#define MOESAIC_SUMS32(j) MOESAIC_SUMS16(j), MOESAIC_SUMS16(j + 4)
#define MOESAIC_SUMS64 MOESAIC_SUMS32(0), MOESAIC_SUMS32(8)
#define MOESAIC_SUMS128 MOESAIC_SUMS64, MOESAIC_SUMS32(16), MOESAIC_SUMS32(24)
#define MOESAIC_TEN(t) \
  "%" t "0, %" t "1, %" t "2, %" t "3, %" t "4, %" t "5, %" t "6, %" t "7, %" t "8, %" t "9, "
#define MOESAIC_NAMES30 MOESAIC_TEN("") MOESAIC_TEN("1") MOESAIC_TEN("2")
#define MOESAIC_NAMES60 MOESAIC_NAMES30 MOESAIC_TEN("3") MOESAIC_TEN("4") MOESAIC_TEN("5")
#define MOESAIC_NAMES120                                                                             \
  MOESAIC_NAMES60 MOESAIC_TEN("6") MOESAIC_TEN("7") MOESAIC_TEN("8") MOESAIC_TEN("9") MOESAIC_TEN("10") \
      MOESAIC_TEN("11")

// One instruction: its sums, then the two descriptors, which operands lie across, and whether it begins the sums.
#define MOESAIC_WGMMA(n, type, names, a, b, upper, left_across, right_across, first, ...)                     \
  asm volatile("{.reg .pred adds; .reg .b64 left, right; setp.eq.b32 adds, %" first ", 0;\n"                  \
               "mov.b64 left, {%" a ", %" upper "}; mov.b64 right, {%" b ", %" upper "};\n"                   \
               "wgmma.mma_async.sync.aligned.m64n" n "k16.f32." type "." type " {" names "}, left, right, "   \
               "adds, 1, 1, %" left_across ", %" right_across ";}"                                            \
               : __VA_ARGS__                                                                                  \
               : "r"(left.low), "r"(right.low), "n"(kUpperHalf), "n"(kLeftAcross ? 1 : 0), "n"(kRightAcross ? 1 : 0), \
                 "r"(static_cast<int>(begins)))
#define MOESAIC_WGMMAS(type)                                                                                     \
  if constexpr (kColumns == 64) {                                                                                \
    MOESAIC_WGMMA("64", type, MOESAIC_NAMES30 "%30, %31", "32", "33", "34", "35", "36", "37", MOESAIC_SUMS32(0)); \
  } else if constexpr (kColumns == 128) {                                                                        \
    MOESAIC_WGMMA("128", type, MOESAIC_NAMES60 "%60, %61, %62, %63", "64", "65", "66", "67", "68", "69", MOESAIC_SUMS64); \
  } else {                                                                                                       \
    MOESAIC_WGMMA("256", type, MOESAIC_NAMES120 "%120, %121, %122, %123, %124, %125, %126, %127", "128", "129",    \
                  "130", "131", "132", "133", MOESAIC_SUMS128); \
  }

template <typename T, bool kLeftAcross, bool kRightAcross, int kBlock, int kParts, int kRows, int kVectors, int kVector>
__device__ __forceinline__ void wgmma(PendingProducts&, float (&sums)[kParts][kRows][kVectors][kVector], SharedMatrix left,
                                      SharedMatrix right, bool begins) {
  constexpr int kColumns = kParts * kVectors * kVector * 4;
  static_assert(kColumns == 64 || kColumns == 128 || kColumns == 256, "the widths there are");
  if constexpr (kIsBfloat16<T>) {
    MOESAIC_WGMMAS("bf16")
  } else {
    MOESAIC_WGMMAS("f16")
  }
}

#undef MOESAIC_SUM
#define MOESAIC_SUM(j, i, v) sums[j][2 * (i) + (v)]
#define MOESAIC_NAMES40 MOESAIC_NAMES30 MOESAIC_TEN("3")
#define MOESAIC_NAMES70 MOESAIC_NAMES60 MOESAIC_TEN("6")
#define MOESAIC_WGMMAS_OF(type)                                                                                   \
  if constexpr (kColumns == 32) {                                                                                 \
    MOESAIC_WGMMA("32", type, MOESAIC_TEN("") "%10, %11, %12, %13, %14, %15", "16", "17", "18", "19", "20", "21", \
                  MOESAIC_SUMS16(0));                                                                             \
  } else if constexpr (kColumns == 64) {                                                                          \
    MOESAIC_WGMMA("64", type, MOESAIC_NAMES30 "%30, %31", "32", "33", "34", "35", "36", "37", MOESAIC_SUMS32(0)); \
  } else if constexpr (kColumns == 96) {                                                                          \
    MOESAIC_WGMMA("96", type, MOESAIC_NAMES40 "%40, %41, %42, %43, %44, %45, %46, %47", "48", "49", "50", "51",     \
                  "52", "53", MOESAIC_SUMS32(0), MOESAIC_SUMS16(8));                                                    \
  } else if constexpr (kColumns == 120) {                                                                         \
    MOESAIC_WGMMA("120", type, MOESAIC_TEN("") MOESAIC_TEN("1") MOESAIC_TEN("2") MOESAIC_TEN("3") MOESAIC_TEN("4")  \
                  "%50, %51, %52, %53, %54, %55, %56, %57, %58, %59", "60", "61", "62", "63", "64", "65", \
                  MOESAIC_SUMS32(0), MOESAIC_SUMS16(8), MOESAIC_SUMS4(12), MOESAIC_SUMS4(13), MOESAIC_SUMS4(14)); \
  } else if constexpr (kColumns == 128) {                                                                         \
    MOESAIC_WGMMA("128", type, MOESAIC_NAMES60 "%60, %61, %62, %63", "64", "65", "66", "67", "68", "69", MOESAIC_SUMS64); \
  } else if constexpr (kColumns == 136) {                                                                         \
    MOESAIC_WGMMA("136", type, MOESAIC_NAMES60 "%60, %61, %62, %63, %64, %65, %66, %67", "68", "69", "70", "71",    \
                  "72", "73", MOESAIC_SUMS64, MOESAIC_SUMS4(16));                                                       \
  } else if constexpr (kColumns == 256) {                                                                         \
    MOESAIC_WGMMA("256", type, MOESAIC_NAMES120 "%120, %121, %122, %123, %124, %125, %126, %127", "128", "129",     \
                  "130", "131", "132", "133", MOESAIC_SUMS128);                                                         \
  } else {                                                                                                        \
    MOESAIC_WGMMA("144", type, MOESAIC_NAMES70 "%70, %71", "72", "73", "74", "75", "76", "77", MOESAIC_SUMS64, \
                  MOESAIC_SUMS4(16), MOESAIC_SUMS4(17));                                                          \
  }

template <typename T, bool kLeftAcross, bool kRightAcross, int kColumns, int kBlocks>
__device__ __forceinline__ void wgmma_columns(PendingProducts&, float (&sums)[kBlocks][4], SharedMatrix left,
                                              SharedMatrix right, bool begins) {
  static_assert(kColumns <= 8 * kBlocks, "sums for all columns");
  static_assert(kColumns == 32 || kColumns == 64 || kColumns == 96 || (kColumns >= 120 && kColumns <= 144) ||
                    kColumns == 256,
                "the widths there are");
  if constexpr (kIsBfloat16<T>) {
    MOESAIC_WGMMAS_OF("bf16")
  } else {
    MOESAIC_WGMMAS_OF("f16")
  }
}

#undef MOESAIC_WGMMAS_OF
#undef MOESAIC_NAMES70
#undef MOESAIC_NAMES40
#undef MOESAIC_WGMMAS
#undef MOESAIC_WGMMA
#undef MOESAIC_NAMES120
#undef MOESAIC_NAMES60
#undef MOESAIC_NAMES30
#undef MOESAIC_TEN
#undef MOESAIC_SUMS128
#undef MOESAIC_SUMS64
#undef MOESAIC_SUMS32
#undef MOESAIC_SUMS16
#undef MOESAIC_SUMS4
#endif
#undef MOESAIC_SUM

}  // namespace moesaic
