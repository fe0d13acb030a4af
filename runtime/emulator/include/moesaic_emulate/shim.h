// Force-included before a kernel's text: the CUDA language on a host C++ compiler.
//
// Not emulated: inline PTX. Generated code puts it behind helpers with a portable body for `#ifdef MOESAIC_EMULATE`. For
// cp.async, mbarrier, boxes of the copy engine, clusters, ldmatrix and mma.sync there is what such a body builds on.
#pragma once

// Qualifiers first: CUDA's own headers define only those that are still undefined.
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __grid_constant__
#define __managed__ static
// One copy for each OS thread, which holds that of the block whose lane runs; poisoned before every block.
#define __shared__ static thread_local
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <type_traits>
#include <utility>

#include <vector_types.h>
#include <vector_functions.h>

#include "moesaic_emulate/context.h"

// Some of CUDA's headers redefine these.
#undef __launch_bounds__
#define __launch_bounds__(...)
#undef __maxnreg__
#define __maxnreg__(...)
#undef __noinline__
#define __noinline__ __attribute__((noinline))

// Device compilers accept `__shared__ alignas(16) float x[4]`; for g++ a standard attribute may not stand there.
#define alignas(bytes) __attribute__((aligned(bytes)))

static_assert(sizeof(uint3) == sizeof(moesaic_emulate::Index3), "threadIdx is read as a uint3");
static_assert(sizeof(dim3) == sizeof(moesaic_emulate::Index3), "blockDim is read as a dim3");

namespace moesaic_emulate {

inline const uint3& as_uint3(const Index3& index) { return reinterpret_cast<const uint3&>(index); }
inline const dim3& as_dim3(const Index3& index) { return reinterpret_cast<const dim3&>(index); }

}  // namespace moesaic_emulate

#define threadIdx (::moesaic_emulate::as_uint3(::moesaic_emulate::current_lane->thread_index))
#define blockIdx (::moesaic_emulate::as_uint3(::moesaic_emulate::current_lane->block->block_index))
#define blockDim (::moesaic_emulate::as_dim3(::moesaic_emulate::current_lane->block->block_dim))
#define gridDim (::moesaic_emulate::as_dim3(::moesaic_emulate::current_lane->block->grid_dim))
static constexpr int warpSize = MOESAIC_EMULATE_WARP_SIZE;

#define __trap() ::moesaic_emulate::fail("__trap()", ::moesaic_emulate::Site::here())
#define __brkpt() ::moesaic_emulate::fail("__brkpt()", ::moesaic_emulate::Site::here())
#define assert(condition) \
    ((condition) ? (void)0 : ::moesaic_emulate::fail("assertion failed: " #condition, ::moesaic_emulate::Site::here()))
// A GPU compiler believes this; here it is checked.
#define __builtin_assume(condition)                                                 \
    ((condition) ? (void)0                                                          \
                 : ::moesaic_emulate::fail("assumption does not hold: " #condition, \
                                           ::moesaic_emulate::Site::here()))

#include "moesaic_emulate/memory.h"
#include "moesaic_emulate/block.h"
#include "moesaic_emulate/warp.h"
#include "moesaic_emulate/atomics.h"
#include "moesaic_emulate/intrinsics.h"
