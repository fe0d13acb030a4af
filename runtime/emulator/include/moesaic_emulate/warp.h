// Warp collectives: shuffles, votes, matches, integer reductions. Values travel as 64-bit words; the last lane to
// arrive computes everybody's result (see collectives.cpp).
#pragma once

namespace moesaic_emulate {

template <class T>
inline std::uint64_t to_word(const T& value) {
    static_assert(sizeof(T) == 2 || sizeof(T) == 4 || sizeof(T) == 8, "a shuffle moves values of 2, 4 or 8 bytes");
    std::uint64_t word = 0;
    memcpy(static_cast<void*>(&word), static_cast<const void*>(&value), sizeof(T));
    return word;
}

template <class T>
inline T from_word(std::uint64_t word) {
    T value;
    memcpy(static_cast<void*>(&value), static_cast<const void*>(&word), sizeof(T));
    return value;
}

template <class T>
inline T shuffle(WarpOperation operation, unsigned mask, const T& value, unsigned operand, int width, Site site) {
    return from_word<T>(warp_collective(operation, mask, to_word(value), operand, width, site));
}

inline unsigned collect(WarpOperation operation, unsigned mask, std::uint64_t value, Site site) {
    return static_cast<unsigned>(warp_collective(operation, mask, value, 0, MOESAIC_EMULATE_WARP_SIZE, site));
}

}  // namespace moesaic_emulate

inline void __syncwarp(unsigned mask = 0xffffffffu, moesaic_emulate_site site = moesaic_emulate_site::here()) {
    ::moesaic_emulate::collect(::moesaic_emulate::WarpOperation::SyncWarp, mask, 0, site);
}

#define MOESAIC_EMULATE_SHUFFLE(name, operation)                                                          \
    template <class T>                                                                                    \
    inline T name(unsigned mask, T value, unsigned operand, int width = MOESAIC_EMULATE_WARP_SIZE,        \
                  moesaic_emulate_site site = moesaic_emulate_site::here()) {                                     \
        return ::moesaic_emulate::shuffle(::moesaic_emulate::WarpOperation::operation, mask, value, operand, \
                                          width, site);                                                   \
    }
MOESAIC_EMULATE_SHUFFLE(__shfl_sync, ShuffleIndex)
MOESAIC_EMULATE_SHUFFLE(__shfl_up_sync, ShuffleUp)
MOESAIC_EMULATE_SHUFFLE(__shfl_down_sync, ShuffleDown)
MOESAIC_EMULATE_SHUFFLE(__shfl_xor_sync, ShuffleXor)
#undef MOESAIC_EMULATE_SHUFFLE

inline unsigned __ballot_sync(unsigned mask, int predicate, moesaic_emulate_site site = moesaic_emulate_site::here()) {
    return ::moesaic_emulate::collect(::moesaic_emulate::WarpOperation::Ballot, mask, predicate != 0, site);
}
inline int __any_sync(unsigned mask, int predicate, moesaic_emulate_site site = moesaic_emulate_site::here()) {
    return static_cast<int>(
        ::moesaic_emulate::collect(::moesaic_emulate::WarpOperation::Any, mask, predicate != 0, site));
}
inline int __all_sync(unsigned mask, int predicate, moesaic_emulate_site site = moesaic_emulate_site::here()) {
    return static_cast<int>(
        ::moesaic_emulate::collect(::moesaic_emulate::WarpOperation::All, mask, predicate != 0, site));
}

template <class T>
inline unsigned __match_any_sync(unsigned mask, T value, moesaic_emulate_site site = moesaic_emulate_site::here()) {
    return ::moesaic_emulate::collect(::moesaic_emulate::WarpOperation::MatchAny, mask,
                                      ::moesaic_emulate::to_word(value), site);
}
template <class T>
inline unsigned __match_all_sync(unsigned mask, T value, int* all_equal,
                                 moesaic_emulate_site site = moesaic_emulate_site::here()) {
    const unsigned lanes = ::moesaic_emulate::collect(::moesaic_emulate::WarpOperation::MatchAll, mask,
                                                      ::moesaic_emulate::to_word(value), site);
    *all_equal = lanes != 0;
    return lanes;
}

#define MOESAIC_EMULATE_REDUCE(name, type, operation)                                                          \
    inline type name(unsigned mask, type value, moesaic_emulate_site site = moesaic_emulate_site::here()) {            \
        return static_cast<type>(::moesaic_emulate::collect(::moesaic_emulate::WarpOperation::operation, mask, \
                                                            static_cast<unsigned>(value), site));              \
    }
MOESAIC_EMULATE_REDUCE(__reduce_add_sync, unsigned, ReduceAddUnsigned)
MOESAIC_EMULATE_REDUCE(__reduce_add_sync, int, ReduceAddSigned)
MOESAIC_EMULATE_REDUCE(__reduce_min_sync, unsigned, ReduceMinUnsigned)
MOESAIC_EMULATE_REDUCE(__reduce_min_sync, int, ReduceMinSigned)
MOESAIC_EMULATE_REDUCE(__reduce_max_sync, unsigned, ReduceMaxUnsigned)
MOESAIC_EMULATE_REDUCE(__reduce_max_sync, int, ReduceMaxSigned)
MOESAIC_EMULATE_REDUCE(__reduce_and_sync, unsigned, ReduceAnd)
MOESAIC_EMULATE_REDUCE(__reduce_or_sync, unsigned, ReduceOr)
MOESAIC_EMULATE_REDUCE(__reduce_xor_sync, unsigned, ReduceXor)
#undef MOESAIC_EMULATE_REDUCE

inline unsigned __activemask(moesaic_emulate_site site = moesaic_emulate_site::here()) {
    return ::moesaic_emulate::active_mask(site);
}

// PTX `%laneid`.
inline unsigned moesaic_emulate_lane() {
    const uint3& thread = threadIdx;
    return ((thread.z * blockDim.y + thread.y) * blockDim.x + thread.x) % MOESAIC_EMULATE_WARP_SIZE;
}

// PTX `mma.sync` and `ldmatrix` for helpers that wrap them.
using moesaic_emulate_mma_element = ::moesaic_emulate::MmaElement;
inline void moesaic_emulate_mma(float (&sums)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                                moesaic_emulate_mma_element element,
                                moesaic_emulate_site site = moesaic_emulate_site::here()) {
    ::moesaic_emulate::MmaFragments own;
    memcpy(own.a, a, sizeof(own.a));
    memcpy(own.b, b, sizeof(own.b));
    memcpy(own.sums, sums, sizeof(own.sums));
    ::moesaic_emulate::multiply_fragments(own, element, site);
    memcpy(sums, own.sums, sizeof(own.sums));
}
template <int kMatrices>
inline void moesaic_emulate_ldmatrix(unsigned (&words)[kMatrices], const void* row, bool transposed,
                                     moesaic_emulate_site site = moesaic_emulate_site::here()) {
    ::moesaic_emulate::MatrixRow own = {};
    if (moesaic_emulate_lane() < 8 * kMatrices) {
        ::moesaic_emulate::check_shared(row, sizeof(own), sizeof(own), site);
        memcpy(&own, row, sizeof(own));
    }
    ::moesaic_emulate::exchange_rows(own, kMatrices, transposed, words, site);
}
