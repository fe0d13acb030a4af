// Products of matrices in shared memory by a warpgroup (PTX `wgmma`): what one thread of it does. Here and not in a header
// of the device, because kernels are compiled with little optimisation.
#include <cstring>
#include <type_traits>

#include "elements.h"
#include "state.h"

namespace moesaic_emulate {

namespace {

constexpr unsigned kLine = 128;   // bytes of a line
constexpr unsigned kChunk = 16;   // bytes that keep together
constexpr int kSteps = 16;        // of a product
constexpr int kGroup = 64;        // rows of the right operand, columns of the product, that are done at once,
constexpr int kSmallGroup = 8;    // and what is left; a fourth of either is a thread's

using TwoFloats = float __attribute__((vector_size(8)));
using FourFloats = float __attribute__((vector_size(16)));

// Where the tensor core finds what lies at an address before swizzling.
const unsigned char* swizzled(const unsigned char* at) {
    const auto address = reinterpret_cast<std::uintptr_t>(at);
    return reinterpret_cast<const unsigned char*>(address ^ address / kLine % 8 * kChunk);
}

// Lines must lie in shared memory whole.
void check_operand(const SwizzledMatrix& matrix, int rows, Site site) {
    if (matrix.across) {
        for (int group = 0; group < rows / kGroup; ++group) {
            const auto offset = group * static_cast<std::ptrdiff_t>(matrix.group_bytes);
            check_shared(matrix.start + offset, kSteps * kLine, kLine, site);
        }
    } else {
        const auto within = reinterpret_cast<std::uintptr_t>(matrix.start) % kLine;
        check_shared(matrix.start, kSteps * sizeof(Bits), kSteps * sizeof(Bits), site);
        check_shared(matrix.start - within, static_cast<unsigned>(rows) * kLine, kLine, site);
    }
}

// Two rows 8 apart, step by step, or one step after the other if they lie across.
void read_left(const SwizzledMatrix& matrix, int row, Bits (&bits)[2 * kSteps]) {
    for (int i = 0; i < 2; ++i) {
        if (matrix.across) {
            const unsigned char* const at = matrix.start + (row + 8 * i) * static_cast<int>(sizeof(Bits));
            for (int k = 0; k < kSteps; ++k) std::memcpy(&bits[i * kSteps + k], swizzled(at + k * kLine), sizeof(Bits));
        } else {
            const unsigned char* const at = matrix.start + (row + 8 * i) * kLine;
            std::memcpy(&bits[i * kSteps], swizzled(at), kChunk);
            std::memcpy(&bits[i * kSteps + kSteps / 2], swizzled(at + kChunk), kChunk);
        }
    }
}

// Of the rows from `row` on those that this thread multiplies, pairs 8 apart: [row][step], or [step][row] if they lie across.
template <int kOwn>
void read_right(const SwizzledMatrix& matrix, int row, unsigned first, Bits (&bits)[kOwn * kSteps]) {
    if (matrix.across) {
        const auto group = row / kGroup * static_cast<std::ptrdiff_t>(matrix.group_bytes);
        const unsigned char* line = matrix.start + group;
        for (int k = 0; k < kSteps; ++k, line += kLine) {
            const auto swaps = static_cast<unsigned>(swizzled(line) - line);
            // Two pairs at once: what is read next is longer than a pair, and would wait for both.
            for (unsigned j = 0; j < kOwn / 2; j += 2) {
                std::uint32_t pairs[2];
                std::memcpy(&pairs[0], line + (j * kChunk ^ swaps) + first * sizeof(Bits), sizeof pairs[0]);
                std::memcpy(&pairs[1], line + ((j + 1) * kChunk ^ swaps) + first * sizeof(Bits), sizeof pairs[1]);
                const std::uint64_t both = pairs[0] | static_cast<std::uint64_t>(pairs[1]) << 32;
                std::memcpy(&bits[k * kOwn + 2 * j], &both, sizeof both);
            }
        }
    } else {
        const unsigned char* const line = matrix.start + (row + static_cast<int>(first)) * kLine;
        for (unsigned part = 0; part < 4; ++part) {  // of a pair: a half of the steps of one of them
            const unsigned char* at = swizzled(line + part / 2 * kLine + part % 2 * kChunk);
            Bits* to = bits + part * kSteps / 2;
            for (int j = 0; j < kOwn / 2; ++j, at += 8 * kLine, to += 2 * kSteps) std::memcpy(to, at, kChunk);
        }
    }
}

// A number for all words seen. That of one changed word is another for sure.
struct Digest {
    std::uint64_t lanes[4] = {1, 2, 3, 4};  // side by side, for speed
    std::uint64_t result() const {
        std::uint64_t all = 0;
        for (const std::uint64_t lane : lanes) all = mixed(all, lane);
        return all;
    }
    template <int kCount>
    void add(const Bits (&bits)[kCount]) {
        static_assert(kCount % 16 == 0, "whole words, of all lanes");
        for (int i = 0; i < kCount; i += 16) {
            std::uint64_t words[4];
            std::memcpy(words, bits + i, sizeof words);
            for (int j = 0; j < 4; ++j) lanes[j] = mixed(lanes[j], words[j]);
        }
    }
    static std::uint64_t mixed(std::uint64_t state, std::uint64_t word) {
        state = (state ^ word) * 0x9E3779B97F4A7C15ULL;
        return state ^ state >> 32;
    }
};

struct Place {
    int row;             // and the one 8 further
    unsigned column;     // and the next, of 8
};
Place place() {
    const unsigned thread = current_lane->thread_index.x % 128;
    return {static_cast<int>(thread / 32 * 16 + thread % 32 / 4), thread % 4 * 2};
}

// sums[n] += row[k] * columns[k][n], one step after the other.
template <int kOwn>
void add_products(const float* row, const std::uint32_t* columns, float* sums) {
    using Floats = std::conditional_t<kOwn % 4 == 0, FourFloats, TwoFloats>;
    constexpr int kVectors = kOwn * static_cast<int>(sizeof(float)) / static_cast<int>(sizeof(Floats));
    Floats sum[kVectors];
    std::memcpy(sum, sums, sizeof sum);
    for (int k = 0; k < kSteps; ++k) {
        Floats factors[kVectors];
        std::memcpy(factors, columns + k * kOwn, sizeof factors);
        for (int v = 0; v < kVectors; ++v) sum[v] += row[k] * factors[v];
    }
    std::memcpy(sums, sum, sizeof sum);
}

// Products of two rows with the columns from `column` on, so many of which are a thread's.
template <bool kHalf, int kOwn>
void multiply_group(const SwizzledMatrix& right, int column, unsigned first, const float* rows, int own_columns,
                    float* sums, Digest& digest) {
    Bits raw[kOwn * kSteps];
    read_right<kOwn>(right, column, first, raw);
    digest.add(raw);
    std::uint32_t wide[kSteps * kOwn];  // [step][column]
    if (right.across) {
        for (int i = 0; i < kSteps * kOwn; ++i) wide[i] = widened<kHalf>(raw[i]);
    } else {
        for (int n = 0; n < kOwn; ++n) {
            for (int k = 0; k < kSteps; ++k) wide[k * kOwn + n] = widened<kHalf>(raw[n * kSteps + k]);
        }
    }
    for (int i = 0; i < 2; ++i) add_products<kOwn>(rows + i * kSteps, wide, sums + i * own_columns + column / 4);
}

template <bool kHalf>
std::uint64_t multiply(const SwizzledMatrix& left, const SwizzledMatrix& right, int columns, float* sums) {
    const Place own = place();
    Digest digest;
    Bits bits[2 * kSteps];
    read_left(left, own.row, bits);
    digest.add(bits);
    std::uint32_t words[2 * kSteps];
    for (int i = 0; i < 2 * kSteps; ++i) words[i] = widened<kHalf>(bits[i]);
    float rows[2 * kSteps];
    std::memcpy(rows, words, sizeof rows);

    int column = 0;
    for (; column + kGroup <= columns; column += kGroup) {
        multiply_group<kHalf, kGroup / 4>(right, column, own.column, rows, columns / 4, sums, digest);
    }
    for (; column < columns; column += kSmallGroup) {
        multiply_group<kHalf, kSmallGroup / 4>(right, column, own.column, rows, columns / 4, sums, digest);
    }
    return digest.result();
}

}  // namespace

std::uint64_t multiply_swizzled(const SwizzledMatrix& left, const SwizzledMatrix& right, int columns, bool half,
                                float* sums, Site site) {
    check_operand(left, 64, site);
    check_operand(right, columns, site);
    return half ? multiply<true>(left, right, columns, sums) : multiply<false>(left, right, columns, sums);
}

std::uint64_t digest_of_swizzled(const SwizzledMatrix& left, const SwizzledMatrix& right, int columns) {
    const Place own = place();
    Digest digest;
    Bits bits[2 * kSteps];
    read_left(left, own.row, bits);
    digest.add(bits);
    int column = 0;
    for (; column + kGroup <= columns; column += kGroup) {
        Bits raw[kGroup / 4 * kSteps];
        read_right<kGroup / 4>(right, column, own.column, raw);
        digest.add(raw);
    }
    for (; column < columns; column += kSmallGroup) {
        Bits raw[kSmallGroup / 4 * kSteps];
        read_right<kSmallGroup / 4>(right, column, own.column, raw);
        digest.add(raw);
    }
    return digest.result();
}

}  // namespace moesaic_emulate
