// A dispatch: slots for the picks of all tokens, by a stable counting sort in three steps.
//
//   count     how many picks of each expert a block has
//   scan      how many come in the blocks before it, and how many there are
//   scatter   a slot for each pick: where its expert begins, past the picks of blocks before and those before it here
//
// Picks have one order, that of t K + k, and each block a run of it. Counters are integers, so it does not matter in which
// order they are added up, and slots depend on nothing but the picks.
//
// The steps are three launches, or, where blocks can wait for each other, one (`Share`).
#pragma once

#include "moesaic/cluster.cuh"
#include "moesaic/row.cuh"

namespace moesaic {

constexpr int kTogether = 4;  // picks that a thread loads before it looks at the first

// How often to unroll a loop of so many threads over so many elements: as often as it goes round, but 4 times at most. Left
// alone, the compiler also unrolls loops that go round once; a short kernel waits for its instructions, too.
__host__ __device__ constexpr int unrolled(int count, int threads) { return smaller(4, ceil_div(count, threads)); }

// The picks of tokens that follow one another.
template <int kExperts, int kTopK, typename Index>
struct Picks {
  const Index* indices;
  long long stride;  // elements between the rows of tokens, wherever the caller has them
  long long first_token;
  int count;

  // Of tokens first to end; none where that lies before.
  __device__ __forceinline__ Picks(const Index* indices, long long stride, long long first, long long end)
      : indices(indices), stride(stride), first_token(first),
        count(end > first ? static_cast<int>(end - first) * kTopK : 0) {}

  // The experts of picks first, first + step, ...; -1 for those that are not here, and past the last. What is past the last
  // reads that one (there must be one): behind a branch, each load would wait for the one before. Numbers are compared in
  // the type they come in: one beyond 32 bits must not be cut down to an expert's.
  template <int kLoads>
  __device__ __forceinline__ void load_experts(int first, int step, int (&experts)[kLoads]) const {
    const Index* const picks = indices + first_token * stride;
    const long long gap = stride - kTopK;
    Index ids[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const unsigned i = static_cast<unsigned>(min(first + j * step, count - 1));
      ids[j] = load_one(picks + i + i / kTopK * gap);
    }
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      const bool here = first + j * step < count && ids[j] >= 0 && ids[j] < kExperts;
      experts[j] = here ? static_cast<int>(ids[j]) : -1;
    }
  }
};

// --------------------------------------------------------------------------------------------------------- count

// Picks by expert: the first `split` of them in `before`, the others in `rest`.
template <int kExperts, int kThreads, int kLoads, class Picks>
__device__ __forceinline__ void count_picks(const Picks& picks, int split, int* before, int* rest) {
#pragma unroll unrolled(kExperts, kThreads)
  for (int e = threadIdx.x; e < kExperts; e += kThreads) before[e] = rest[e] = 0;
  __syncthreads();  // counters are 0
#pragma unroll 1
  for (int first = threadIdx.x; first < picks.count; first += kLoads * kThreads) {
    int experts[kLoads];
    picks.load_experts(first, kThreads, experts);
#pragma unroll
    for (int j = 0; j < kLoads; ++j) {
      // Lanes that add 1 at one address do so at once: no order of picks makes this slow.
      if (experts[j] >= 0) atomicAdd((first + j * kThreads < split ? before : rest) + experts[j], 1);
    }
  }
  __syncthreads();  // all picks are counted
}

// ---------------------------------------------------------------------------------------------------------- scan

constexpr int kScannedRows = 8;  // of the table, that a thread has at a time

// bases[b][e] = table[0][e] + ... + table[b - 1][e], found[e] = the sum of all. A block has 32 experts, one a lane; its
// warps share the rows, 8 that follow one another each.
template <int kExperts, int kThreads>
__device__ __forceinline__ void scan_table(const int* table, long long blocks, int* bases, int* found) {
  constexpr int kWarps = kThreads / kWarp;
  __shared__ int sums[kWarps][kWarp];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  const int expert = blockIdx.x * kWarp + lane;
  int total = 0;
#pragma unroll 1
  for (long long first = 0; first < blocks; first += kWarps * kScannedRows) {
    const long long own = first + warp * kScannedRows;
    int counts[kScannedRows], sum = 0;
#pragma unroll
    for (int r = 0; r < kScannedRows; ++r) {
      counts[r] = expert < kExperts && own + r < blocks ? load_one(table + (own + r) * kExperts + expert) : 0;
    }
#pragma unroll
    for (int r = 0; r < kScannedRows; ++r) sum += counts[r];
    __syncthreads();  // sums of the rows before have been read
    sums[warp][lane] = sum;
    __syncthreads();  // sums are there
    int base = total;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      const int of_warp = sums[w][lane];
      base += w < warp ? of_warp : 0;
      total += of_warp;
    }
#pragma unroll
    for (int r = 0; r < kScannedRows; ++r) {
      if (expert < kExperts && own + r < blocks) store_one(bases + (own + r) * kExperts + expert, base);
      base += counts[r];
    }
  }
  if (warp == 0 && expert < kExperts) store_one(found + expert, total);
}

// ------------------------------------------------------------------------------------------------------- scatter

// C = min(T, ceil(capacity T K / E)) as the host works it out: in double, in this order.
template <int kExperts, int kTopK>
__device__ __forceinline__ int rows_of_expert(double capacity, long long tokens) {
  const double rows = ceil(capacity * static_cast<double>(tokens * kTopK) / kExperts);
  return static_cast<int>(rows < static_cast<double>(tokens) ? rows : static_cast<double>(tokens));
}

// The sum of what threads of lower numbers have, and the sum of all. The caller has a barrier between two calls.
template <int kThreads>
__device__ __forceinline__ int block_before(int x, int& total) {
  constexpr int kWarps = kThreads / kWarp;
  __shared__ int of_warp[kWarps];
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  int sum = x;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int below = __shfl_up_sync(kAllLanes, sum, distance);
    sum += lane >= distance ? below : 0;
  }
  if (lane == kWarp - 1) of_warp[warp] = sum;
  __syncthreads();  // sums of warps are there
  int before = sum - x;
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const int of_one = of_warp[w];
    before += w < warp ? of_one : 0;
    total += of_one;
  }
  return before;
}

// starts[e] = the first slot of expert e; starts[kExperts] = slots of all experts.
template <int kExperts, int kThreads, int kAlign, bool kPad>
__device__ __forceinline__ void first_slots(const int* found, int bound, int* starts) {
#pragma unroll unrolled(kExperts, kThreads)
  for (int e = threadIdx.x; e < kExperts; e += kThreads) {
    const int rows = kPad ? bound : min(load_one(found + e), bound);
    starts[e] = (rows + kAlign - 1) / kAlign * kAlign;
  }
  __syncthreads();  // sizes are there
  // A thread has a run of experts: of odd length, so that the threads of a warp meet in no bank.
  constexpr int kRun = ceil_div(kExperts, kThreads) | 1;
  const int first = threadIdx.x * kRun;
  const int end = min(first + kRun, kExperts);
  int sum = 0, total;
#pragma unroll unrolled(kRun, 1)
  for (int e = first; e < end; ++e) sum += starts[e];
  int slot = block_before<kThreads>(sum, total);
#pragma unroll unrolled(kRun, 1)
  for (int e = first; e < end; ++e) {
    const int rows = starts[e];
    starts[e] = slot;
    slot += rows;
  }
  if (threadIdx.x == 0) starts[kExperts] = total;
  __syncthreads();  // first slots are there
}

// What belongs to no pick; one block writes it.
template <int kExperts, int kThreads>
__device__ __forceinline__ void store_groups(const int* found, int bound, const int* starts, int* counts, int* offsets,
                                             int* dropped) {
  int lost = 0, total;
#pragma unroll unrolled(kExperts, kThreads)
  for (int e = threadIdx.x; e < kExperts; e += kThreads) {
    const int all = load_one(found + e);
    const int kept = min(all, bound);
    lost += all - kept;
    store_one(counts + e, kept);
    store_one(offsets + e, starts[e]);
  }
  block_before<kThreads>(lost, total);
  if (threadIdx.x == 0) {
    store_one(offsets + kExperts, starts[kExperts]);
    store_one(dropped, total);
  }
}

// -1 in the rows without a pick: behind those of each expert, and past the last expert's. All blocks share the work.
template <int kExperts, int kThreads, int kAlign, bool kPad>
__device__ __forceinline__ void store_dead_rows(const int* found, int bound, const int* starts, int* tokens, int* picks,
                                                long long rows) {
  const long long thread = static_cast<long long>(blockIdx.x) * kThreads + threadIdx.x;
  const long long threads = static_cast<long long>(gridDim.x) * kThreads;
  if constexpr (kAlign > 1 || kPad) {
    // A warp for each expert; where padding may leave long gaps between few experts, several.
    constexpr int kShares = kPad ? ceil_div(1024, kExperts) : 1;
#pragma unroll 1
    for (long long share = thread / kWarp; share < kExperts * kShares; share += threads / kWarp) {
      const int e = static_cast<int>(share / kShares);
      const long long used = starts[e] + min(load_one(found + e), bound);
      const long long end = starts[e + 1];
#pragma unroll 1
      for (long long row = used + share % kShares * kWarp + thread % kWarp; row < end; row += kShares * kWarp) {
        store_one(tokens + row, -1);
        store_one(picks + row, -1);
      }
    }
  }
#pragma unroll 1
  for (long long row = starts[kExperts] + thread; row < rows; row += threads) {
    store_one(tokens + row, -1);
    store_one(picks + row, -1);
  }
}

constexpr unsigned kNotHere = 0xffffffffu;

// An expert, and how many picks of it come before this one in its run; below 2^16 both.
__device__ __forceinline__ unsigned ranked_pick(int expert, int rank) {
  return static_cast<unsigned>(expert) << 16 | static_cast<unsigned>(rank);
}

// Each of the first kRuns warps goes over a run of the picks, 32 at a time, in order. It has a histogram of its own: the
// picks that it has seen of each expert.
template <int kExperts, int kThreads, int kRuns, int kRun, class Picks>
__device__ __forceinline__ void rank_picks(const Picks& picks, unsigned short* histograms, unsigned* ranked) {
#pragma unroll unrolled(kRuns * kExperts, kThreads)
  for (int i = threadIdx.x; i < kRuns * kExperts; i += kThreads) histograms[i] = 0;
  __syncthreads();  // nobody has been seen
  const int lane = threadIdx.x % kWarp;
  const int warp = threadIdx.x / kWarp;
  if (warp >= kRuns) return;
  const int run = warp * kRun;
  unsigned short* const histogram = histograms + warp * kExperts;
#pragma unroll 1
  for (int first = run; first < run + kRun && first < picks.count; first += kTogether * kWarp) {
    int experts[kTogether];
    picks.load_experts(first + lane, kWarp, experts);
#pragma unroll
    for (int j = 0; j < kTogether; ++j) {
      if (first + j * kWarp >= run + kRun) break;  // of the run of the warp after
      const int expert = experts[j];
      const unsigned equals = __match_any_sync(kAllLanes, expert);
      const int before = __popc(equals & ((1u << lane) - 1));
      const int seen = expert >= 0 ? histogram[expert] : 0;
      __syncwarp();  // equals have read their counter
      if (expert >= 0 && before == 0) histogram[expert] = static_cast<unsigned short>(seen + __popc(equals));
      __syncwarp();  // counters are up to date
      ranked[first + j * kWarp + lane] = expert >= 0 ? ranked_pick(expert, seen + before) : kNotHere;
    }
  }
}

// Counters become what they are needed as: histograms[run][e] the picks of expert e in the runs before, placed[e] the slot
// of the first of them all, which bases[e] picks come before. rooms[e] is how many find a place within the capacity. `next`,
// if there is one, gets the bases of the picks after these; tables may be the same.
template <int kExperts, int kThreads, int kRuns, int kPicks, bool kBounded>
__device__ __forceinline__ void place_runs(const int* bases, int bound, const int* starts, unsigned short* histograms,
                                           int* placed, unsigned short* rooms, int* next) {
#pragma unroll unrolled(kExperts, kThreads)
  for (int e = threadIdx.x; e < kExperts; e += kThreads) {
    const int base = load_one(bases + e);
    placed[e] = starts[e] + base;
    if constexpr (kBounded) rooms[e] = static_cast<unsigned short>(min(max(bound - base, 0), kPicks));
    int before = 0;
#pragma unroll
    for (int run = 0; run < kRuns; ++run) {
      const int counted = histograms[run * kExperts + e];
      histograms[run * kExperts + e] = static_cast<unsigned short>(before);
      before += counted;
    }
    if (next != nullptr) next[e] = base + before;
  }
}

// Slots at the picks, picks and tokens at the slots.
template <int kExperts, int kTopK, int kThreads, int kPicks, int kRun, bool kBounded, class Picks>
__device__ __forceinline__ void store_slots(const Picks& picks, const unsigned* ranked, const unsigned short* histograms,
                                            const int* placed, const unsigned short* rooms, int* tokens, int* pick_of,
                                            int* slots) {
  const long long first = picks.first_token * kTopK;
#pragma unroll unrolled(kPicks, kThreads)
  for (int i = threadIdx.x; i < picks.count; i += kThreads) {
    int slot = -1;
    if (ranked[i] != kNotHere) {
      const int expert = static_cast<int>(ranked[i] >> 16);
      const int rank = static_cast<int>(ranked[i] & 0xffff) + histograms[i / kRun * kExperts + expert];
      if (!kBounded || rank < rooms[expert]) slot = placed[expert] + rank;
    }
    store_one(slots + first + i, slot);
    if (slot >= 0) {
      store_one(pick_of + slot, static_cast<int>(first + i));
      store_one(tokens + slot, static_cast<int>(picks.first_token + i / kTopK));
    }
  }
}

// --------------------------------------------------------------------------------------------------- in one launch

// What a block has to do where blocks wait for each other only within clusters of kBlocks. Each cluster counts all picks,
// those of block r of any cluster being the r-th run of them; so no cluster waits for another, and there may be more than
// run at once. It gives slots to a part of them: in each run, block r of cluster c has the c-th piece.
template <int kBlocks>
struct Share {
  int rank;                   // of the block in its cluster
  long long run, run_end;     // tokens that it counts
  long long first, end;       // tokens whose picks it gives slots

  __device__ __forceinline__ explicit Share(long long tokens) {
    const long long clusters = gridDim.x / kBlocks;
    const long long each = (tokens + gridDim.x - 1) / gridDim.x;
    rank = static_cast<int>(blockIdx.x % kBlocks);
    run = at_most(rank * clusters * each, tokens);
    run_end = at_most((rank + 1) * clusters * each, tokens);
    first = at_most((rank * clusters + blockIdx.x / kBlocks) * each, tokens);
    end = at_most(first + each, tokens);
  }
};

// bases[e], the picks of expert e before the block's own in its run, become all that come before them; found[e] is the sum
// of what the blocks of the cluster have counted.
template <int kExperts, int kThreads, int kBlocks>
__device__ __forceinline__ void sum_cluster(const int* counted, int rank, int* bases, int* found) {
#pragma unroll unrolled(kExperts, kThreads)
  for (int e = threadIdx.x; e < kExperts; e += kThreads) {
    int counts[kBlocks];
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) counts[r] = load_from_block(counted + e, r);
    int before = bases[e], total = 0;
#pragma unroll
    for (int r = 0; r < kBlocks; ++r) {
      before += r < rank ? counts[r] : 0;
      total += counts[r];
    }
    bases[e] = before;
    found[e] = total;
  }
}

}  // namespace moesaic
