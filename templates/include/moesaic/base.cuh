// What every generated kernel builds on: element types, vector access to global memory, scalar functions.
//
// Compiled by NVRTC for a GPU and, with MOESAIC_EMULATE, by a host C++ compiler for the emulator. Whatever exists only
// in PTX has a portable body beside it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#ifndef MOESAIC_EMULATE
#define MOESAIC_DYNAMIC_SHARED(type, name)                            \
  extern __shared__ __align__(16) unsigned char name##_bytes[];       \
  type* const name = reinterpret_cast<type*>(name##_bytes)
#endif

namespace moesaic {

// ------------------------------------------------------------------------------------------------------- launches

// The first thing in a kernel: waits until the kernels before it in the stream have ended and their results can be read.
// The last thing in one that begins beside these.
// PTX ISA, "Parallel Synchronization and Communication Instructions: griddepcontrol" (sm_90).
__device__ __forceinline__ void after_kernels_before() {
#if !defined(MOESAIC_EMULATE) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The first thing in a kernel that needs nothing of those that may still run: what it reads had been written when the one
// before it waited. Sees that, by copies, too, and nothing that its multiprocessor has kept in its L1 cache.
// PTX ISA, "Parallel Synchronization and Communication Instructions: membar, fence".
__device__ __forceinline__ void beside_kernels_before() {
#if !defined(MOESAIC_EMULATE) && __CUDA_ARCH__ >= 900
  asm volatile("fence.acq_rel.gpu; fence.proxy.async.global;" ::: "memory");
#endif
}

// Lets the next kernel of the stream begin, once all blocks have come here, where multiprocessors have room for it: it waits
// then, with its launch behind it. Not before this one has waited itself, or blocks of many kernels would wait at once.
__device__ __forceinline__ void let_next_kernel_begin() {
#if !defined(MOESAIC_EMULATE) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// A number, or an address, that stays in its register: the compiler does not know how it came about, and cannot compute it once
// more wherever it is used, which it prefers in loops that need most registers for other things.
template <typename T>
__device__ __forceinline__ T kept(T value) {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "one register, or two");
#ifndef MOESAIC_EMULATE
  if constexpr (sizeof(T) == 4) {
    asm volatile("" : "+r"(value));
  } else {
    asm volatile("" : "+l"(value));
  }
#endif
  return value;
}

// ------------------------------------------------------------------------------------------------ element types

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(int x) { return static_cast<float>(x); }

// Rounds to nearest, ties to even.
template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }
template <>
__device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ bool from_float<bool>(float x) { return x != 0.0f; }

template <typename T>
__device__ __forceinline__ float round_to(float x) { return to_float(from_float<T>(x)); }
#ifndef MOESAIC_EMULATE
// One number is converted at a fraction of the rate of two. Of two bfloat16, the upper one is a float by itself.
template <>
__device__ __forceinline__ float round_to<__nv_bfloat16>(float x) {
  unsigned both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(x), "f"(0.0f));
  return __uint_as_float(both);
}
template <>
__device__ __forceinline__ float round_to<__half>(float x) {
  unsigned both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(0.0f), "f"(x));
  return __half2float(__ushort_as_half(static_cast<unsigned short>(both)));
}
#endif

// ------------------------------------------------------------------------------------------------ global memory

template <int kBytes>
struct Word;
template <>
struct Word<1> { using type = unsigned char; };
template <>
struct Word<2> { using type = unsigned short; };
template <>
struct Word<4> { using type = unsigned int; };
template <>
struct Word<8> { using type = uint2; };
template <>
struct Word<16> { using type = uint4; };

// The compiler likes to take words apart into elements early, and to keep each in a register of its own from one round of
// a loop to the next; assembly without an instruction, which it cannot look into, ends that.
template <typename W>
__device__ __forceinline__ void keep_whole(W& word) {
#ifndef MOESAIC_EMULATE
  if constexpr (sizeof(W) == 4) asm("" : "+r"(word));
#endif
}

__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__device__ __forceinline__ long long at_most(long long a, long long b) { return a < b ? a : b; }

// The emulator checks every access against the buffers of the launch.
__device__ __forceinline__ void check_access(const void* address, unsigned bytes, bool write) {
#ifdef MOESAIC_EMULATE
  moesaic_emulate_access(address, bytes, bytes, write);
#endif
}

// And where a write to shared memory goes, if what lies there says so.
__device__ __forceinline__ void check_shared(const void* address, unsigned bytes) {
#ifdef MOESAIC_EMULATE
  moesaic_emulate_shared_access(address, bytes, bytes);
#endif
}

// kCount consecutive elements in words as wide as kAlign bytes of alignment allow, at most 16 bytes each.
template <int kCount, int kAlign, typename T>
__device__ __forceinline__ void load(const T* address, T (&values)[kCount]) {
  constexpr int kWord = smaller(smaller(16, kAlign), static_cast<int>(sizeof(T)) * kCount);
  constexpr int kWords = static_cast<int>(sizeof(T)) * kCount / kWord;
  using W = typename Word<kWord>::type;
  W words[kWords];
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    check_access(reinterpret_cast<const W*>(address) + i, kWord, false);
    words[i] = reinterpret_cast<const W*>(address)[i];
  }
  memcpy(values, words, sizeof(words));
}

template <int kCount, int kAlign, typename T>
__device__ __forceinline__ void store(T* address, const T (&values)[kCount]) {
  constexpr int kWord = smaller(smaller(16, kAlign), static_cast<int>(sizeof(T)) * kCount);
  constexpr int kWords = static_cast<int>(sizeof(T)) * kCount / kWord;
  using W = typename Word<kWord>::type;
  W words[kWords];
  memcpy(words, values, sizeof(words));
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    check_access(reinterpret_cast<W*>(address) + i, kWord, true);
    reinterpret_cast<W*>(address)[i] = words[i];
  }
}

template <typename T>
__device__ __forceinline__ T load_one(const T* address) {
  check_access(address, sizeof(T), false);
  return *address;
}

template <typename T>
__device__ __forceinline__ void store_one(T* address, T value) {
  check_access(address, sizeof(T), true);
  *address = value;
}

// --------------------------------------------------------------------------------------------------------- lanes

constexpr unsigned kAllLanes = 0xffffffffu;
constexpr int kWarp = 32;

// A number that all lanes of the warp have, as the compiler knows from here on: it branches by it without asking each lane.
__device__ __forceinline__ unsigned of_warp(unsigned value) { return __shfl_sync(kAllLanes, value, 0); }

// So the warp's number in its block.
__device__ __forceinline__ unsigned own_warp() { return of_warp(threadIdx.x / kWarp); }

// The sum of what lanes of lower numbers have, and the sum of all.
__device__ __forceinline__ int warp_before(int x, int& total) {
  const int lane = threadIdx.x % kWarp;
  int sum = x;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int below = __shfl_up_sync(kAllLanes, sum, distance);
    sum += lane >= distance ? below : 0;
  }
  total = __shfl_sync(kAllLanes, sum, kWarp - 1);
  return sum - x;
}

// --------------------------------------------------------------------------------------------- scalar functions

__device__ __forceinline__ float not_a_number() { return __uint_as_float(0x7fffffffu); }
__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }

// max and min that hand NaN on, unlike fmaxf. PTX ISA, "Floating Point Instructions: max", modifier .NaN (sm_80).
__device__ __forceinline__ float maximum(float a, float b) {
#ifdef MOESAIC_EMULATE
  return a != a || b != b ? not_a_number() : (a < b ? b : a);
#else
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#endif
}

__device__ __forceinline__ float minimum(float a, float b) {
#ifdef MOESAIC_EMULATE
  return a != a || b != b ? not_a_number() : (b < a ? b : a);
#else
  float y;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#endif
}

// 1/x to 1 ulp. PTX ISA, "Floating Point Instructions: rcp"; .ftz takes a subnormal for zero.
__device__ __forceinline__ float reciprocal(float x) {
#ifdef MOESAIC_EMULATE
  return 1.0f / x;
#else
  float y;
  asm("rcp.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}
__device__ __forceinline__ float reciprocal_of_normal(float x) {
#ifdef MOESAIC_EMULATE
  return 1.0f / x;
#else
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#endif
}

// a / b to 2 ulp over the whole range of b: the divisor is brought near 1 first.
__device__ __forceinline__ float divide(float a, float b) {
  const float size = fabsf(b);
  const float scale = size < 0x1p-100f ? 0x1p100f : size > 0x1p100f ? 0x1p-100f : 1.0f;
  return (a * scale) * reciprocal_of_normal(b * scale);
}

// a / b to 2 ulp, 0 where |b| is below the smallest normal float. Where a row shares b, one product a value is left.
__device__ __forceinline__ float safe_divide(float a, float b) {
  const float r = reciprocal(b);
  return a * (fabsf(b) < 0x1p-126f ? 0.0f : r);
}

// sum + safe_divide(a, b), rounded once.
__device__ __forceinline__ float add_quotient(float sum, float a, float b) {
  const float r = reciprocal(b);
  return fmaf(a, fabsf(b) < 0x1p-126f ? 0.0f : r, sum);
}

__device__ __forceinline__ float square_root(float x) { return sqrtf(x); }
__device__ __forceinline__ float exp(float x) { return expf(x); }

// e^(x - shift) for x <= shift. PTX ISA, "Floating Point Instructions: ex2"; .ftz takes subnormals for zero.
__device__ __forceinline__ float exp_difference(float x, float shift) {
  const float exponent = (x - shift) * 1.4426950408889634f;
#ifdef MOESAIC_EMULATE
  return exp2f(exponent);
#else
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(exponent));
  return y;
#endif
}

// 1 / (1 + e^-x) to 2 ulp where x > -2 and to |x| half ulps below, 0 where the result is no normal float. What the product
// with log2(e) is rounded by would take five instructions an expert to put back: a quarter of a grouped router's time.
__device__ __forceinline__ float sigmoid(float x) {
  const float exponent = x * -1.4426950408889634f;
#ifdef MOESAIC_EMULATE
  return 1.0f / (1.0f + exp2f(exponent));
#else
  float e;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(e) : "f"(exponent));
  return reciprocal_of_normal(1.0f + e);
#endif
}

__device__ __forceinline__ float softplus(float x) { return maximum(x, 0.0f) + log1pf(expf(-fabsf(x))); }

__device__ __forceinline__ float gelu_tanh(float x) {
  return 0.5f * x * (1.0f + tanhf(0.7978845608028654f * (x + 0.044715f * x * x * x)));
}

}  // namespace moesaic
