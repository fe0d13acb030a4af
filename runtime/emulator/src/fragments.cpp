// Products of fragments in registers by a warp (PTX `mma.sync`, `ldmatrix`), see mma.cuh for who holds what. Here and not in
// a header of the device, because kernels are compiled with little optimisation; and once a warp instead of once a lane.
#include <cstring>

#include "elements.h"
#include "state.h"

namespace moesaic_emulate {

namespace {

constexpr int kRows = 16;
constexpr int kColumns = 8;
constexpr int kWordsDeep = 8;  // words of a row of the left operand

using Row = float __attribute__((vector_size(kColumns * sizeof(float))));

// The elements of a word; of tf32, the lowest bits are ignored.
template <MmaElement kElement>
void unpack(std::uint32_t word, float* elements) {
    if constexpr (kElement == MmaElement::Tf32) {
        word &= 0xffffe000u;
        std::memcpy(elements, &word, sizeof word);
    } else {
        constexpr bool kHalf = kElement == MmaElement::Half;
        const std::uint32_t both[2] = {widened<kHalf>(static_cast<Bits>(word)),
                                       widened<kHalf>(static_cast<Bits>(word >> 16))};
        std::memcpy(elements, both, sizeof both);
    }
}

template <MmaElement kElement>
void multiply_warp(void* const* own) {
    constexpr int kPerWord = kElement == MmaElement::Tf32 ? 1 : 2;
    constexpr int kDepth = kWordsDeep * kPerWord;
    float left[kRows][kDepth];
    float right[kDepth][kColumns];
    float sums[kRows][kColumns];
    for (int lane = 0; lane < static_cast<int>(kWarpSize); ++lane) {
        const auto& fragments = *static_cast<const MmaFragments*>(own[lane]);
        const int g = lane / 4, t = lane % 4;
        for (int i = 0; i < 4; ++i) {
            unpack<kElement>(fragments.a[i], &left[g + i % 2 * 8][(t + i / 2 * 4) * kPerWord]);
            sums[g + i / 2 * 8][2 * t + i % 2] = fragments.sums[i];
        }
        for (int i = 0; i < 2; ++i) {
            float elements[kPerWord];
            unpack<kElement>(fragments.b[i], elements);
            for (int e = 0; e < kPerWord; ++e) right[(t + i * 4) * kPerWord + e][g] = elements[e];
        }
    }
    for (int row = 0; row < kRows; ++row) {
        Row sum;
        std::memcpy(&sum, sums[row], sizeof sum);
        for (int k = 0; k < kDepth; ++k) {
            Row factors;
            std::memcpy(&factors, right[k], sizeof factors);
            sum += left[row][k] * factors;
        }
        std::memcpy(sums[row], &sum, sizeof sum);
    }
    for (int lane = 0; lane < static_cast<int>(kWarpSize); ++lane) {
        auto& fragments = *static_cast<MmaFragments*>(own[lane]);
        for (int i = 0; i < 4; ++i) fragments.sums[i] = sums[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
    }
}

// A lane's part in an exchange of rows.
struct Exchange {
    const MatrixRow* row;
    std::uint32_t* words;
};

template <unsigned kCount, bool kTransposed>
void exchange_in_warp(void* const* own) {
    const auto element = [&](unsigned row, unsigned column) -> std::uint32_t {
        return static_cast<const Exchange*>(own[row])->row->elements[column];
    };
    for (unsigned lane = 0; lane < kWarpSize; ++lane) {
        const unsigned g = lane / 4, t = lane % 4;
        for (unsigned m = 0; m < kCount; ++m) {
            const std::uint32_t low = kTransposed ? element(8 * m + 2 * t, g) : element(8 * m + g, 2 * t);
            const std::uint32_t high = kTransposed ? element(8 * m + 2 * t + 1, g) : element(8 * m + g, 2 * t + 1);
            static_cast<const Exchange*>(own[lane])->words[m] = low | high << 16;
        }
    }
}

}  // namespace

void multiply_fragments(MmaFragments& own, MmaElement element, Site site) {
    execute_as_one({element == MmaElement::Bfloat16 ? multiply_warp<MmaElement::Bfloat16>
                    : element == MmaElement::Half   ? multiply_warp<MmaElement::Half>
                                                    : multiply_warp<MmaElement::Tf32>,
                    &own},
                   site);
}

void exchange_rows(const MatrixRow& row, unsigned count, bool transposed, std::uint32_t* words, Site site) {
    Exchange own{&row, words};
    if (count != 2 && count != 4) fail("ldmatrix loads 2 or 4 matrices here", site);
    execute_as_one({count == 4 ? transposed ? exchange_in_warp<4, true> : exchange_in_warp<4, false>
                    : transposed ? exchange_in_warp<2, true>
                                 : exchange_in_warp<2, false>,
                    &own},
                   site);
}

}  // namespace moesaic_emulate
