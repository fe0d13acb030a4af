// Device intrinsics on the host: reinterpretations, bit operations, rounding conversions, fast maths (here as exact as
// the host's own), minima and maxima.
#pragma once

#define MOESAIC_EMULATE_INLINE static inline __attribute__((always_inline))

// --- reinterpretations ----------------------------------------------------------------------------------------------
#define MOESAIC_EMULATE_REINTERPRET(name, to, from) \
    MOESAIC_EMULATE_INLINE to name(from value) {    \
        to result;                                  \
        memcpy(&result, &value, sizeof(to));        \
        return result;                              \
    }
MOESAIC_EMULATE_REINTERPRET(__float_as_uint, unsigned, float)
MOESAIC_EMULATE_REINTERPRET(__float_as_int, int, float)
MOESAIC_EMULATE_REINTERPRET(__uint_as_float, float, unsigned)
MOESAIC_EMULATE_REINTERPRET(__int_as_float, float, int)
MOESAIC_EMULATE_REINTERPRET(__double_as_longlong, long long, double)
MOESAIC_EMULATE_REINTERPRET(__longlong_as_double, double, long long)
#undef MOESAIC_EMULATE_REINTERPRET
MOESAIC_EMULATE_INLINE int __double2hiint(double value) { return static_cast<int>(__double_as_longlong(value) >> 32); }
MOESAIC_EMULATE_INLINE int __double2loint(double value) { return static_cast<int>(__double_as_longlong(value)); }

// --- bits -----------------------------------------------------------------------------------------------------------
MOESAIC_EMULATE_INLINE int __popc(unsigned value) { return __builtin_popcount(value); }
MOESAIC_EMULATE_INLINE int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
MOESAIC_EMULATE_INLINE int __ffs(int value) { return __builtin_ffs(value); }
MOESAIC_EMULATE_INLINE int __ffsll(long long value) { return __builtin_ffsll(value); }
MOESAIC_EMULATE_INLINE int __clz(int value) { return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value)); }
MOESAIC_EMULATE_INLINE int __clzll(long long value) {
    return value == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(value));
}
MOESAIC_EMULATE_INLINE unsigned __brev(unsigned value) {
    unsigned result = 0;
    for (int bit = 0; bit < 32; ++bit) result |= ((value >> bit) & 1u) << (31 - bit);
    return result;
}
MOESAIC_EMULATE_INLINE unsigned long long __brevll(unsigned long long value) {
    return (static_cast<unsigned long long>(__brev(static_cast<unsigned>(value))) << 32) |
           __brev(static_cast<unsigned>(value >> 32));
}
// Byte i of the result is the byte of (y:x) that nibble i of the selector names; its top bit spreads the sign.
MOESAIC_EMULATE_INLINE unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long bytes = (static_cast<unsigned long long>(y) << 32) | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned nibble = (selector >> (4 * i)) & 0xfu;
        unsigned byte = static_cast<unsigned>(bytes >> (8 * (nibble & 7u))) & 0xffu;
        if (nibble & 8u) byte = (byte & 0x80u) ? 0xffu : 0u;
        result |= byte << (8 * i);
    }
    return result;
}
MOESAIC_EMULATE_INLINE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
    const unsigned long long both = (static_cast<unsigned long long>(high) << 32) | low;
    return static_cast<unsigned>((both << (shift & 31u)) >> 32);
}
MOESAIC_EMULATE_INLINE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    const unsigned long long both = (static_cast<unsigned long long>(high) << 32) | low;
    return static_cast<unsigned>(both >> (shift & 31u));
}
MOESAIC_EMULATE_INLINE int __mul24(int x, int y) { return ((x << 8) >> 8) * ((y << 8) >> 8); }
MOESAIC_EMULATE_INLINE int __mulhi(int x, int y) { return static_cast<int>((static_cast<long long>(x) * y) >> 32); }
MOESAIC_EMULATE_INLINE unsigned __umulhi(unsigned x, unsigned y) {
    return static_cast<unsigned>((static_cast<unsigned long long>(x) * y) >> 32);
}
MOESAIC_EMULATE_INLINE unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return static_cast<unsigned long long>((static_cast<unsigned __int128>(x) * y) >> 64);
}
MOESAIC_EMULATE_INLINE long long __mul64hi(long long x, long long y) {
    return static_cast<long long>((static_cast<__int128>(x) * y) >> 64);
}
MOESAIC_EMULATE_INLINE unsigned __usad(unsigned x, unsigned y, unsigned z) { return (x > y ? x - y : y - x) + z; }

// --- single precision: named rounding -------------------------------------------------------------------------------
MOESAIC_EMULATE_INLINE float __fadd_rn(float x, float y) { return x + y; }
MOESAIC_EMULATE_INLINE float __fsub_rn(float x, float y) { return x - y; }
MOESAIC_EMULATE_INLINE float __fmul_rn(float x, float y) { return x * y; }
MOESAIC_EMULATE_INLINE float __fdiv_rn(float x, float y) { return x / y; }
MOESAIC_EMULATE_INLINE float __fmaf_rn(float x, float y, float z) { return ::fmaf(x, y, z); }
MOESAIC_EMULATE_INLINE float __frcp_rn(float x) { return 1.0f / x; }
MOESAIC_EMULATE_INLINE float __fsqrt_rn(float x) { return ::sqrtf(x); }
MOESAIC_EMULATE_INLINE float __frsqrt_rn(float x) { return static_cast<float>(1.0 / ::sqrt(static_cast<double>(x))); }
MOESAIC_EMULATE_INLINE double __dadd_rn(double x, double y) { return x + y; }
MOESAIC_EMULATE_INLINE double __dsub_rn(double x, double y) { return x - y; }
MOESAIC_EMULATE_INLINE double __dmul_rn(double x, double y) { return x * y; }
MOESAIC_EMULATE_INLINE double __ddiv_rn(double x, double y) { return x / y; }
MOESAIC_EMULATE_INLINE double __fma_rn(double x, double y, double z) { return ::fma(x, y, z); }

// --- single precision: fast maths -----------------------------------------------------------------------------------
MOESAIC_EMULATE_INLINE float rsqrtf(float x) { return __frsqrt_rn(x); }
MOESAIC_EMULATE_INLINE double rsqrt(double x) { return 1.0 / ::sqrt(x); }
// The C library already has names like __expf for itself: here they stand for the ordinary functions.
#define __expf ::expf
#define __logf ::logf
#define __log2f ::log2f
#define __log10f ::log10f
#define __powf ::powf
#define __sinf ::sinf
#define __cosf ::cosf
#define __tanf ::tanf
#define __tanhf ::tanhf
#define __exp10f ::exp10f
MOESAIC_EMULATE_INLINE float __fdividef(float x, float y) { return x / y; }
MOESAIC_EMULATE_INLINE float fdividef(float x, float y) { return x / y; }
// NaN becomes 0, as on the device.
MOESAIC_EMULATE_INLINE float __saturatef(float x) { return x > 0.0f ? (x < 1.0f ? x : 1.0f) : 0.0f; }

// --- conversions ----------------------------------------------------------------------------------------------------
namespace moesaic_emulate {
// Out-of-range values clamp and NaN becomes 0, as on the device; on the host the cast alone would be undefined.
template <class Integer, class Real>
inline Integer clamp_to(Real rounded, double lowest, double end, Integer smallest, Integer largest) {
    if (rounded != rounded) return 0;
    if (static_cast<double>(rounded) < lowest) return smallest;
    if (static_cast<double>(rounded) >= end) return largest;
    return static_cast<Integer>(rounded);
}
template <class Real>
inline int to_int(Real r) { return clamp_to<int>(r, -2147483648.0, 2147483648.0, -2147483647 - 1, 2147483647); }
template <class Real>
inline unsigned to_uint(Real r) { return clamp_to<unsigned>(r, 0.0, 4294967296.0, 0u, 4294967295u); }
template <class Real>
inline long long to_ll(Real r) {
    return clamp_to<long long>(r, -9223372036854775808.0, 9223372036854775808.0, -9223372036854775807ll - 1,
                               9223372036854775807ll);
}
template <class Real>
inline unsigned long long to_ull(Real r) {
    return clamp_to<unsigned long long>(r, 0.0, 18446744073709551616.0, 0ull, 18446744073709551615ull);
}
}  // namespace moesaic_emulate

#define MOESAIC_EMULATE_ROUNDINGS(from, real, to, integer, convert)                                                   \
    MOESAIC_EMULATE_INLINE integer __##from##2##to##_rn(real x) { return ::moesaic_emulate::convert(::nearbyint(x)); } \
    MOESAIC_EMULATE_INLINE integer __##from##2##to##_rz(real x) { return ::moesaic_emulate::convert(::trunc(x)); }     \
    MOESAIC_EMULATE_INLINE integer __##from##2##to##_rd(real x) { return ::moesaic_emulate::convert(::floor(x)); }     \
    MOESAIC_EMULATE_INLINE integer __##from##2##to##_ru(real x) { return ::moesaic_emulate::convert(::ceil(x)); }
MOESAIC_EMULATE_ROUNDINGS(float, float, int, int, to_int)
MOESAIC_EMULATE_ROUNDINGS(float, float, uint, unsigned, to_uint)
MOESAIC_EMULATE_ROUNDINGS(float, float, ll, long long, to_ll)
MOESAIC_EMULATE_ROUNDINGS(float, float, ull, unsigned long long, to_ull)
MOESAIC_EMULATE_ROUNDINGS(double, double, int, int, to_int)
MOESAIC_EMULATE_ROUNDINGS(double, double, uint, unsigned, to_uint)
MOESAIC_EMULATE_ROUNDINGS(double, double, ll, long long, to_ll)
MOESAIC_EMULATE_ROUNDINGS(double, double, ull, unsigned long long, to_ull)
#undef MOESAIC_EMULATE_ROUNDINGS
MOESAIC_EMULATE_INLINE float __int2float_rn(int x) { return static_cast<float>(x); }
MOESAIC_EMULATE_INLINE float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
MOESAIC_EMULATE_INLINE float __ll2float_rn(long long x) { return static_cast<float>(x); }
MOESAIC_EMULATE_INLINE float __ull2float_rn(unsigned long long x) { return static_cast<float>(x); }
MOESAIC_EMULATE_INLINE double __int2double_rn(int x) { return x; }
MOESAIC_EMULATE_INLINE double __uint2double_rn(unsigned x) { return x; }
MOESAIC_EMULATE_INLINE double __ll2double_rn(long long x) { return static_cast<double>(x); }
MOESAIC_EMULATE_INLINE double __ull2double_rn(unsigned long long x) { return static_cast<double>(x); }
MOESAIC_EMULATE_INLINE float __double2float_rn(double x) { return static_cast<float>(x); }

// --- minima and maxima ----------------------------------------------------------------------------------------------
// CUDA's overload set: mixed signedness compares as unsigned; for floats a NaN loses to a number.
#define MOESAIC_EMULATE_MIN_MAX(type)                                                  \
    MOESAIC_EMULATE_INLINE type min(type x, type y) { return y < x ? y : x; }          \
    MOESAIC_EMULATE_INLINE type max(type x, type y) { return x < y ? y : x; }
MOESAIC_EMULATE_MIN_MAX(int)
MOESAIC_EMULATE_MIN_MAX(unsigned)
MOESAIC_EMULATE_MIN_MAX(long)
MOESAIC_EMULATE_MIN_MAX(unsigned long)
MOESAIC_EMULATE_MIN_MAX(long long)
MOESAIC_EMULATE_MIN_MAX(unsigned long long)
#undef MOESAIC_EMULATE_MIN_MAX
#define MOESAIC_EMULATE_MIN_MAX_MIXED(wide, left, right)                                                         \
    MOESAIC_EMULATE_INLINE wide min(left x, right y) { return min(static_cast<wide>(x), static_cast<wide>(y)); } \
    MOESAIC_EMULATE_INLINE wide max(left x, right y) { return max(static_cast<wide>(x), static_cast<wide>(y)); } \
    MOESAIC_EMULATE_INLINE wide min(right x, left y) { return min(static_cast<wide>(x), static_cast<wide>(y)); } \
    MOESAIC_EMULATE_INLINE wide max(right x, left y) { return max(static_cast<wide>(x), static_cast<wide>(y)); }
MOESAIC_EMULATE_MIN_MAX_MIXED(unsigned, int, unsigned)
MOESAIC_EMULATE_MIN_MAX_MIXED(unsigned long, long, unsigned long)
MOESAIC_EMULATE_MIN_MAX_MIXED(unsigned long long, long long, unsigned long long)
#undef MOESAIC_EMULATE_MIN_MAX_MIXED
MOESAIC_EMULATE_INLINE float min(float x, float y) { return ::fminf(x, y); }
MOESAIC_EMULATE_INLINE float max(float x, float y) { return ::fmaxf(x, y); }
MOESAIC_EMULATE_INLINE double min(double x, double y) { return ::fmin(x, y); }
MOESAIC_EMULATE_INLINE double max(double x, double y) { return ::fmax(x, y); }
MOESAIC_EMULATE_INLINE double min(float x, double y) { return ::fmin(x, y); }
MOESAIC_EMULATE_INLINE double max(float x, double y) { return ::fmax(x, y); }
MOESAIC_EMULATE_INLINE double min(double x, float y) { return ::fmin(x, y); }
MOESAIC_EMULATE_INLINE double max(double x, float y) { return ::fmax(x, y); }
MOESAIC_EMULATE_INLINE unsigned umin(unsigned x, unsigned y) { return min(x, y); }
MOESAIC_EMULATE_INLINE unsigned umax(unsigned x, unsigned y) { return max(x, y); }
MOESAIC_EMULATE_INLINE long long llmin(long long x, long long y) { return min(x, y); }
MOESAIC_EMULATE_INLINE long long llmax(long long x, long long y) { return max(x, y); }
MOESAIC_EMULATE_INLINE unsigned long long ullmin(unsigned long long x, unsigned long long y) { return min(x, y); }
MOESAIC_EMULATE_INLINE unsigned long long ullmax(unsigned long long x, unsigned long long y) { return max(x, y); }

#undef MOESAIC_EMULATE_INLINE
