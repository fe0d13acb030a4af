// Elements of 16 bits as floats.
#pragma once

#include <cstdint>
#include <cstring>

namespace moesaic_emulate {

using Bits = std::uint16_t;

// An element as the bits of a float.
template <bool kHalf>
inline std::uint32_t widened(Bits bits) {
    if constexpr (!kHalf) return static_cast<std::uint32_t>(bits) << 16;
    const std::uint32_t magnitude = (bits & 0x7fffu) << 13, sign = (bits & 0x8000u) << 16;
    float value;
    std::memcpy(&value, &magnitude, sizeof value);
    value *= 0x1p112f;  // the difference of the exponents' biases; right for subnormal numbers, too
    std::uint32_t word;
    std::memcpy(&word, &value, sizeof word);
    return word | (magnitude >= 0x0f800000u ? 0x7f800000u : 0u) | sign;  // infinite, or not a number
}

}  // namespace moesaic_emulate
