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
  using Id = Index;
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

  // As many neighbouring picks of a token as lie in kAlign bytes, number i of all such.
  template <int kAlign>
  static constexpr int kNeighbours = kAlign / static_cast<int>(sizeof(Index));
  template <int kAlign>
  __device__ __forceinline__ void load_neighbours(unsigned i, Index (&ids)[kNeighbours<kAlign>]) const {
    constexpr int kOfToken = kTopK / kNeighbours<kAlign>;
    const Index* const picks = indices + first_token * stride;
    load<kNeighbours<kAlign>, kAlign>(picks + i * kNeighbours<kAlign> + i / kOfToken * (stride - kTopK), ids);
  }

  // The number of an expert; of all that are not here, one more than there are.
  static __device__ __forceinline__ int counter_of(Index id) {
    if constexpr (sizeof(Index) > 4) return id >= 0 && id < kExperts ? static_cast<int>(id) : kExperts;
    return static_cast<int>(min(static_cast<unsigned>(static_cast<int>(id)), static_cast<unsigned>(kExperts)));
  }
};

// --------------------------------------------------------------------------------------------------------- count

// Counters of kExperts, and one for picks that are not here, become 0. The caller has a barrier after it.
template <int kExperts, int kThreads>
__device__ __forceinline__ void clear_counters(int* counters) {
#pragma unroll unrolled(kExperts + 1, kThreads)
  for (int e = threadIdx.x; e <= kExperts; e += kThreads) counters[e] = 0;
}

// Picks by expert: the first `split` of them, whole tokens, in `before`, the others in `rest`. A thread asks for kLoads at
// once, in words of kAlign bytes, which the rows of tokens are multiples of: one pick a word, addresses took more
// instructions than counting. The caller has barriers before and after it.
template <int kThreads, int kLoads, int kAlign, class Picks>
__device__ __forceinline__ void count_picks(const Picks& picks, int split, int* before, int* rest) {
  constexpr int kNeighbours = Picks::template kNeighbours<kAlign>;
  constexpr int kWords = ceil_div(kLoads, kNeighbours);
  const int words = picks.count / kNeighbours;
#pragma unroll 1
  for (int first = threadIdx.x; first < words; first += kWords * kThreads) {
    typename Picks::Id ids[kWords][kNeighbours];
#pragma unroll
    for (int j = 0; j < kWords; ++j) {  // what is past the last reads that one, as above
      picks.template load_neighbours<kAlign>(min(first + j * kThreads, words - 1), ids[j]);
    }
#pragma unroll
    for (int j = 0; j < kWords; ++j) {
      const int word = first + j * kThreads;
      if (word >= words) break;
      int* const counters = word * kNeighbours < split ? before : rest;
#pragma unroll
      for (int v = 0; v < kNeighbours; ++v) {
        // Lanes that add 1 at one address do so at once: no order of picks makes this slow.
        atomicAdd(counters + Picks::counter_of(ids[j][v]), 1);
      }
    }
  }
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

// `warp_before` of all threads. The caller has a barrier between two calls.
template <int kThreads>
__device__ __forceinline__ int block_before(int x, int& total) {
  constexpr int kWarps = kThreads / kWarp;
  __shared__ int of_warp[kWarps];
  const int warp = threadIdx.x / kWarp;
  int before = warp_before(x, total);
  if (threadIdx.x % kWarp == 0) of_warp[warp] = total;
  __syncthreads();  // sums of warps are there
  total = 0;
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    const int of_one = of_warp[w];
    before += w < warp ? of_one : 0;
    total += of_one;
  }
  return before;
}

// How many slots each expert has.
template <int kExperts, int kThreads, int kAlign, bool kPad>
__device__ __forceinline__ void size_groups(const int* found, int bound, int* sizes) {
#pragma unroll unrolled(kExperts, kThreads)
  for (int e = threadIdx.x; e < kExperts; e += kThreads) {
    const int rows = kPad ? bound : min(load_one(found + e), bound);
    sizes[e] = (rows + kAlign - 1) / kAlign * kAlign;
  }
}

// A run of values for each of kThreads threads: values[e] becomes the sum of those before, `all` that of all. Runs are of odd
// length, so that the threads of a warp meet in no bank. `before(sum, total)` says what threads of lower numbers have.
template <int kExperts, int kThreads, typename T, class Before>
__device__ __forceinline__ void sum_runs_before(T* values, int* all, int thread, const Before& before) {
  constexpr int kRun = ceil_div(kExperts, kThreads) | 1;
  const int first = thread * kRun;
  const int end = min(first + kRun, kExperts);
  int sum = 0, total;
#pragma unroll unrolled(kRun, 1)
  for (int e = first; e < end; ++e) sum += values[e];
  int upto = before(sum, total);
#pragma unroll unrolled(kRun, 1)
  for (int e = first; e < end; ++e) {
    const int value = values[e];
    values[e] = static_cast<T>(upto);
    upto += value;
  }
  if (thread == 0) *all = total;
}

// values[e] becomes the sum of those before, `all` that of all. One warp does it, number `warp` or the last; of many experts
// the whole block. The caller has barriers before and after it.
template <int kExperts, int kThreads, typename T>
__device__ __forceinline__ void sum_before(T* values, int* all, int warp) {
  if constexpr (kExperts <= 16 * kWarp) {
    if (static_cast<int>(threadIdx.x) / kWarp != smaller(warp, kThreads / kWarp - 1)) return;
    sum_runs_before<kExperts, kWarp>(values, all, threadIdx.x % kWarp,
                                     [](int sum, int& total) { return warp_before(sum, total); });
  } else {
    sum_runs_before<kExperts, kThreads>(values, all, threadIdx.x,
                                        [](int sum, int& total) { return block_before<kThreads>(sum, total); });
    __syncthreads();  // sums of warps have been read
  }
}

// What belongs to no pick; one block writes it.
template <int kExperts, int kThreads, bool kBounded>
__device__ __forceinline__ void store_groups(const int* found, int bound, const int* starts, int* counts, int* offsets,
                                             int* dropped) {
  int lost = 0, total = 0;
#pragma unroll unrolled(kExperts, kThreads)
  for (int e = threadIdx.x; e < kExperts; e += kThreads) {
    const int all = load_one(found + e);
    const int kept = min(all, bound);
    lost += all - kept;
    store_one(counts + e, kept);
    store_one(offsets + e, starts[e]);
  }
  if constexpr (kBounded) block_before<kThreads>(lost, total);
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

// A pick's expert, and a number below 2^16: how many picks of the expert come before it in its run; its place among the
// block's picks; or, in such a place, its own number.
__device__ __forceinline__ unsigned of_expert(int expert, int number) {
  return static_cast<unsigned>(expert) << 16 | static_cast<unsigned>(number);
}

// Nobody has been seen. The caller has a barrier after it.
template <int kExperts, int kThreads, int kRuns>
__device__ __forceinline__ void clear_runs(unsigned short* histograms) {
#pragma unroll unrolled(kRuns * kExperts, kThreads)
  for (int i = threadIdx.x; i < kRuns * kExperts; i += kThreads) histograms[i] = 0;
}

// Each of the first kRuns warps goes over a run of the picks, 32 at a time, in order. It has a histogram of its own: the
// picks that it has seen of each expert. The caller has a barrier after it.
template <int kExperts, int kRuns, int kRun, class Picks>
__device__ __forceinline__ void rank_picks(const Picks& picks, unsigned short* histograms, unsigned* ranked) {
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
      ranked[first + j * kWarp + lane] = expert >= 0 ? of_expert(expert, seen + before) : kNotHere;
    }
  }
}

// histograms[run][e], the picks of expert e in a run, become those in the runs before; of the first run, before which there
// are none, all that the block has. The caller has a barrier after it.
template <int kExperts, int kThreads, int kRuns>
__device__ __forceinline__ void join_runs(unsigned short* histograms) {
#pragma unroll unrolled(kExperts, kThreads)
  for (int e = threadIdx.x; e < kExperts; e += kThreads) {
    int before = histograms[e];
#pragma unroll
    for (int run = 1; run < kRuns; ++run) {
      const int counted = histograms[run * kExperts + e];
      histograms[run * kExperts + e] = static_cast<unsigned short>(before);
      before += counted;
    }
    histograms[e] = static_cast<unsigned short>(before);
  }
}

// The block's picks in the order of experts: neighbours have neighbouring slots, which are written together. Of an expert's,
// the first has place histograms[e], the sum of `join_runs` over the experts before; bases[e] picks come before it, and
// distances[e] lies between a place and its slot. ends[e] is the place of the first without room within the capacity. `next`,
// if there is one, gets the bases of the picks after these; it may be `bases`, and distances may be starts if nobody reads
// them any more. The caller has a barrier after it.
template <int kExperts, int kThreads, int kPicks, int kRun, bool kBounded>
__device__ __forceinline__ void place_picks(int count, int here, const int* bases, int bound, const int* starts,
                                            const unsigned short* histograms, unsigned* ranked, unsigned* ordered,
                                            int* distances, unsigned short* ends, int* next) {
#pragma unroll unrolled(kPicks, kThreads)
  for (int i = threadIdx.x; i < count; i += kThreads) {
    if (ranked[i] == kNotHere) continue;
    const int expert = static_cast<int>(ranked[i] >> 16);
    const int run = i / kRun;
    int place = histograms[expert] + static_cast<int>(ranked[i] & 0xffff);
    if (run > 0) place += histograms[run * kExperts + expert];
    ranked[i] = of_expert(expert, place);
    check_shared(ordered + place, sizeof(unsigned));
    ordered[place] = of_expert(expert, i);
  }
#pragma unroll unrolled(kExperts, kThreads)
  for (int e = threadIdx.x; e < kExperts; e += kThreads) {
    const int base = load_one(bases + e);
    const int first = histograms[e];
    distances[e] = starts[e] + base - first;
    if constexpr (kBounded) ends[e] = static_cast<unsigned short>(min(first + min(max(bound - base, 0), kPicks), kPicks));
    if (next != nullptr) next[e] = base + (e + 1 < kExperts ? histograms[e + 1] : here) - first;
  }
}

// Slots at the picks; picks and tokens at the slots, in order.
template <int kTopK, int kThreads, int kPicks, bool kBounded, class Picks>
__device__ __forceinline__ void store_slots(const Picks& picks, int here, const unsigned* ranked, const unsigned* ordered,
                                            const int* distances, const unsigned short* ends, int* tokens, int* pick_of,
                                            int* slots) {
  const long long first = picks.first_token * kTopK;
#pragma unroll unrolled(kPicks, kThreads)
  for (int i = threadIdx.x; i < picks.count; i += kThreads) {
    int slot = -1;
    if (ranked[i] != kNotHere) {
      const int expert = static_cast<int>(ranked[i] >> 16);
      const int place = static_cast<int>(ranked[i] & 0xffff);
      if (!kBounded || place < ends[expert]) slot = place + distances[expert];
    }
    store_one(slots + first + i, slot);
  }
#pragma unroll unrolled(kPicks, kThreads)
  for (int place = threadIdx.x; place < here; place += kThreads) {
    const int expert = static_cast<int>(ordered[place] >> 16);
    const int i = static_cast<int>(ordered[place] & 0xffff);
    if (kBounded && place >= ends[expert]) continue;
    const int slot = place + distances[expert];
    store_one(pick_of + slot, static_cast<int>(first + i));
    store_one(tokens + slot, static_cast<int>(picks.first_token + i / kTopK));
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
