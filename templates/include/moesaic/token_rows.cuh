// An operand of rows that tokens have, on its way to shared memory: the numbers of the tokens come first, some stages ahead.
//
// Where such rows lie across a sum, each stage has others. A number that copies wait for keeps their warp from all that
// comes after; from the L2 cache it takes about as long as the tensor cores take for a stage. So numbers are copied to shared
// memory, too, kAhead stages before they are wanted:
//
//   TokenNumbers<Chunks, kSteps, kFirstThread> numbers;    // all threads that fetch
//   numbers.begin(tokens, first_steps, steps);             // of a sum; its first stage has fewer steps, if any has
//   ... numbers.of(line) ...                               // in the first stage
//   for (...) {                                            // stages
//     numbers.ask();                                       // for those of a stage to come
//     ... copies of this stage ...
//     numbers.copied();
//     numbers.next();
//     ... numbers.of(line) ...                             // in the next stage, of lines that it has
//   }
//
// A warp asks for its own lines, and for no other's.
#pragma once

#include "moesaic/copy.cuh"

namespace moesaic {

// Step k of the sum is row tokens[k] of a matrix whose rows are `stride` elements apart; `rows` is where those begin.
template <typename T>
struct TokenRows {
  const T* rows;
  long long stride;
  const int* tokens;
};

template <class Chunks, int kSteps, int kFirstThread>
class TokenNumbers {
  static constexpr int kAhead = 3;                            // stages, whose copies may all be under way
  static constexpr int kTeams = 32 / Chunks::kTeam;           // of a warp
  static constexpr int kOfWarp = kTeams * Chunks::kOwnLines;  // lines of a warp in a stage

 public:
  __device__ __forceinline__ void begin(const int* tokens, int first_steps, int steps) {
    static_assert(kOfWarp <= 32 && Chunks::kTeams * Chunks::kOwnLines == kSteps, "a lane for each line, and whole teams");
    const int lane = static_cast<int>(threadIdx.x) % 32, warp = (static_cast<int>(threadIdx.x) - kFirstThread) / 32;
    line_ = warp * kTeams + lane % kTeams + lane / kTeams * Chunks::kTeams;
    from_ = tokens + line_;
    left_ = lane < kOfWarp ? steps - line_ : 0;
#pragma unroll
    for (slot_ = 0; slot_ < kAhead; ++slot_) {
      ask_for(slot_ == 0 ? first_steps : kSteps);
      copied();
    }
    slot_ = 0;
    arrived();
  }
  __device__ __forceinline__ void ask() { ask_for(kSteps); }
  __device__ __forceinline__ void copied() { copy_commit(); }
  __device__ __forceinline__ void next() {
    slot_ = slot_ == kAhead - 1 ? 0 : slot_ + 1;
    arrived();
  }
  __device__ __forceinline__ int of(int line) const { return memory()[slot_][line]; }

 private:
  static __device__ __forceinline__ int (&memory())[kAhead][kSteps] {
    __shared__ int numbers[kAhead][kSteps];
    static_assert(sizeof(numbers) == 768, "what room there is beside a tile is worked out with");
    return numbers;
  }

  // For the stage that is kAhead after the one whose numbers lay there.
  __device__ __forceinline__ void ask_for(int steps) {
    __syncwarp();  // all lanes have read those
    if (line_ < smaller(steps, kSteps) && left_ > 0) copy_async<4>(&memory()[slot_][line_], from_, true);
    copy_commit();
    from_ += steps;
    left_ -= steps;
  }
  // A stage's numbers and its copies are a group each. Behind the numbers of the stage that is wanted stand its copies, and
  // both of the stages asked for since.
  __device__ __forceinline__ void arrived() {
    copy_wait<2 * kAhead - 1>();
    __syncwarp();  // the other lanes' are there, too
  }

  const int* from_;  // where a lane's number of the next stage to ask for lies
  int left_;         // steps from there on
  int line_;         // whose number it asks for
  int slot_;         // of the stage whose numbers are read, and then of the next to ask for
};

}  // namespace moesaic
