// What the blocks of a product do next: one thread of a block, or of a pair of them, finds out, and tells all warps of both.
//
//   ItemQueue<kPair, kReaders, kCounted> queue(counter);           // all threads; a barrier of the block, or the pair, after it
//   if (one thread that fetches) queue.tell(find);                 // find(n) is the QueuedItem of that number
//   for (auto item = queue.next(); item.is_one(); item = queue.next()) {  // every warp
//     if (the same thread) queue.tell(find);                       // the next one
//     ...
//   }
//   queue.finish(items);                                           // the same thread; how many there are
//
// Where an item lies takes a search among experts and numbers from memory, a thousand cycles, in which tensor cores would do
// nothing. Who fetches has time for it: the next item is told before this one is fetched.
//
// Items are taken in turn, or by a counter in memory: the next one is whose block has room for it, so that all end at about the
// same time. The first two of a block are in turn. For the others it asks when it tells the one before, and nobody waits for
// the answer. The counter is 0 at first, and again after the kernel: a block asks once for each item that it has, so that who
// asks last gets the number of the last item.
#pragma once

#include "moesaic/experts.cuh"
#include "moesaic/mbarrier.cuh"

namespace moesaic {

// Item `number` of those that an expert has, whose `rows` begin at `first_slot`.
struct alignas(16) QueuedItem {
  int expert, number, rows, first_slot;
  __device__ __forceinline__ bool is_one() const { return expert >= 0; }
  static __device__ __forceinline__ QueuedItem none() { return {-1, 0, 0, 0}; }
};

// Item n of all, of which first_item[e] come before those of expert e.
template <int kExperts>
__device__ __forceinline__ QueuedItem find_item(int n, const int* first_item, const int* counts, const int* offsets) {
  if (n >= first_item[kExperts]) return QueuedItem::none();
  const int expert = expert_of_tile<kExperts>(first_item, n);
  return {expert, n - first_item[expert], load_one(counts + expert), load_one(offsets + expert)};
}

// The same where every expert has kItems, which take the longer the more rows it has: those of long experts come first, or
// the last of all could keep everybody waiting. See `count_long`.
template <int kExperts, int kItems>
__device__ __forceinline__ QueuedItem find_item(int n, const unsigned short* long_before, const int* counts,
                                                const int* offsets) {
  if (n >= kExperts * kItems) return QueuedItem::none();
  const int place = n / kItems;  // of the expert among all
  const int longs = long_before[kExperts];
  const int expert = place < longs
                         ? last_expert<kExperts>(place, [&](int e) { return static_cast<int>(long_before[e]); })
                         : last_expert<kExperts>(place - longs, [&](int e) { return e - long_before[e]; });
  return {expert, n % kItems, load_one(counts + expert), load_one(offsets + expert)};
}

// In the order of experts, for who has items in turn.
template <int kExperts, int kItems>
__device__ __forceinline__ QueuedItem find_item(int n, const int* counts, const int* offsets) {
  if (n >= kExperts * kItems) return QueuedItem::none();
  const int expert = n / kItems;
  return {expert, n % kItems, load_one(counts + expert), load_one(offsets + expert)};
}

// kReaders warps of a block read what is told.
template <int kPair, int kReaders, bool kCounted>
class ItemQueue {
  static constexpr int kSlots = 4;  // for items: some warps are at one before others have read the one before

  struct Memory {
    QueuedItem items[kSlots];
    Mbarrier told[kSlots];  // an item is there
    Mbarrier read[kSlots];  // all warps have read it, of both blocks; the first block's
  };
  static_assert(sizeof(Memory) == 128, "what room there is beside a tile is worked out with");

 public:
  __device__ __forceinline__ explicit ItemQueue(int* counter) : counter_(counter), next_(blockIdx.x / kPair) {
    if (threadIdx.x == 0) {
      for (int slot = 0; slot < kSlots; ++slot) {
        mbarrier_init(&memory().told[slot], 1);
        mbarrier_init(&memory().read[slot], kReaders * kPair);
      }
      mbarrier_ready();
    }
  }

  // Both blocks of a pair call it; the first one finds, and tells both.
  template <class Find>
  __device__ __forceinline__ void tell(const Find& find) {
    const int slot = seen_ % kSlots;
    Mbarrier* const told = &memory().told[slot];
    if constexpr (kPair == 2) mbarrier_arrive_and_expect(told, sizeof(QueuedItem));
    if (kPair == 2 && blockIdx.x % kPair != 0) return;
    const QueuedItem item = find(next_);
    mbarrier_wait(&memory().read[slot], seen_ / kSlots % 2 ^ 1);
    if constexpr (kPair == 2) {
      for (int rank = 0; rank < kPair; ++rank) mbarrier_store_in(told, &memory().items[slot], item, rank);
    } else {
      memory().items[slot] = item;
      mbarrier_arrive_and_expect(told, 0);
    }
    const int all = static_cast<int>(gridDim.x) / kPair;
    if (!kCounted || seen_ == 0) {
      next_ += all;
    } else {
      check_access(counter_, sizeof(int), true);
      next_ = atomicAdd(counter_, 1) + 2 * all;
    }
  }

  __device__ __forceinline__ QueuedItem next() {
    const int slot = seen_ % kSlots;
    mbarrier_wait(&memory().told[slot], seen_ / kSlots % 2);
    const QueuedItem item = memory().items[slot];
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive_in(&memory().read[slot], 0);
    ++seen_;
    return item;
  }

  __device__ __forceinline__ void finish(int items) {
    if constexpr (kCounted) {
      const int last = items - 1 + 2 * (static_cast<int>(gridDim.x) / kPair);
      if (blockIdx.x % kPair == 0 && next_ == last) store_one(counter_, 0);
    }
  }

 private:
  static __device__ __forceinline__ Memory& memory() {
    __shared__ Memory shared;
    return shared;
  }

  int* counter_;
  int seen_ = 0;  // items that this warp has read
  int next_;      // of the thread that tells: the number of what it will tell next
};

}  // namespace moesaic
