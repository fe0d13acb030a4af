// Tensor cores through mma.sync (sm_80 and newer): a warp multiplies 16 x kDepth by kDepth x 8 into a float tile.
//
// Who holds what, with g = lane / 4, t = lane % 4. A register of a or b is a word: two elements of 16 bits, the left
// or upper one in the low half, or one tf32.
//
//            bf16, half (kDepth 16)            tf32 (kDepth 8)
//   a[0]     row g,     columns 2t, 2t+1       row g,     column t
//   a[1]     row g + 8, columns 2t, 2t+1       row g + 8, column t
//   a[2]     row g,     columns 2t+8, 2t+9     row g,     column t + 4
//   a[3]     row g + 8, columns 2t+8, 2t+9     row g + 8, column t + 4
//   b[0]     rows 2t, 2t+1,     column g       row t,     column g
//   b[1]     rows 2t+8, 2t+9,   column g       row t + 4, column g
//   c[0..1]  row g,     columns 2t, 2t+1       the same
//   c[2..3]  row g + 8, columns 2t, 2t+1       the same
//
// A whole warp calls these, with all its lanes. PTX ISA, "Warp Level Matrix Multiply-Accumulate Instructions": "mma",
// figures for .m16n8k16 and .m16n8k8; "ldmatrix".
#pragma once

#include "moesaic/base.cuh"

namespace moesaic {

// The element type of 32-bit words that hold a float rounded to 10 bits of fraction, as `to_tf32` makes them.
struct Tf32 {};

template <typename T>
struct Mma {
  static constexpr int kRows = 16;
  static constexpr int kColumns = 8;
  static constexpr int kDepth = 16;
};
template <>
struct Mma<Tf32> {
  static constexpr int kRows = 16;
  static constexpr int kColumns = 8;
  static constexpr int kDepth = 8;
};

// Rounds to nearest, ties away from zero; NaN and infinity lose their low bits. PTX ISA, "Data Movement and Conversion
// Instructions: cvt", .rna.tf32.f32; the portable body is what ptxas makes of it.
__device__ __forceinline__ unsigned to_tf32(float x) {
#ifdef MOESAIC_EMULATE
  return (__float_as_uint(x) + (fabsf(x) < infinity() ? 0x1000u : 0u)) & 0xffffe000u;
#else
  unsigned y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
#endif
}

// c += a * b; T is __nv_bfloat16, __half or Tf32.
template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]);

#ifdef MOESAIC_EMULATE
// Products are exact in float, but for overflow and underflow; they are added in the order of k, each sum rounded to
// nearest. Tensor cores add several products at once and cut bits off instead: sums that are not exact differ in their
// last bits.
#define MOESAIC_MMA(T, element, instruction)                                                              \
  template <>                                                                                             \
  __device__ __forceinline__ void mma<T>(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { \
    moesaic_emulate_mma(c, a, b, moesaic_emulate_mma_element::element);                                   \
  }
#else
// volatile: what all lanes do together must not move into a branch that only some take.
#define MOESAIC_MMA(T, element, instruction)                                                              \
  template <>                                                                                             \
  __device__ __forceinline__ void mma<T>(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2]) { \
    asm volatile(instruction " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"           \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                         \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                     \
  }
#endif
MOESAIC_MMA(__nv_bfloat16, Bfloat16, "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")
MOESAIC_MMA(__half, Half, "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32")
MOESAIC_MMA(Tf32, Tf32, "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32")
#undef MOESAIC_MMA

// --------------------------------------------------------------------------------------- fragments from shared memory

// 8 x 8 matrices of 16-bit elements: lane 8m + r names row r of matrix m, 16 bytes at an address aligned to 16.
// words[m] gets row g, columns 2t and 2t+1 of matrix m, or, transposed, rows 2t and 2t+1 of column g.
//
// A fragment of a is four matrices: rows 0-7 and 8-15 of columns 0-7, then the same of columns 8-15. One of b is two:
// k 0-7, k 8-15, not transposed where k runs along the rows of shared memory (weights stored [n][k]), transposed where
// n does ([k][n]). For tf32 a row is four elements, and words[m] gets row g, column t: nothing to transpose.
//
// On the emulator a lane reads the row it names before it meets the others: rows that others stored need a barrier first.

__device__ __forceinline__ void ldmatrix_x4(unsigned (&words)[4], const void* row) {
#ifdef MOESAIC_EMULATE
  moesaic_emulate_ldmatrix(words, row, false);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row))) : "memory");
#endif
}

// The addresses of lanes 16 to 31 are not used.
__device__ __forceinline__ void ldmatrix_x2(unsigned (&words)[2], const void* row) {
#ifdef MOESAIC_EMULATE
  moesaic_emulate_ldmatrix(words, row, false);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
               : "=r"(words[0]), "=r"(words[1])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row))) : "memory");
#endif
}

__device__ __forceinline__ void ldmatrix_x4_transposed(unsigned (&words)[4], const void* row) {
#ifdef MOESAIC_EMULATE
  moesaic_emulate_ldmatrix(words, row, true);
#else
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(static_cast<unsigned>(__cvta_generic_to_shared(row))) : "memory");
#endif
}

}  // namespace moesaic
