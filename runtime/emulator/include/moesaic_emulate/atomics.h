// Atomics on global and shared memory. Global ones are real host atomics, because blocks run on several OS threads.
// Each checks its address first and is a point where, under a seeded order, lanes may interleave.
#pragma once

namespace moesaic_emulate {

// Unsigned integer of the same size, on which the host's compare-and-swap works.
template <std::size_t bytes> struct AtomicWord;
template <> struct AtomicWord<2> { using type = std::uint16_t; };
template <> struct AtomicWord<4> { using type = std::uint32_t; };
template <> struct AtomicWord<8> { using type = std::uint64_t; };

// old = *address; *address = update(old); returns old.
template <class T, class Update>
inline T atomic_update(T* address, Site site, Update update) {
    using Word = typename AtomicWord<sizeof(T)>::type;
    check_access(address, sizeof(T), sizeof(T), true, site);
    yield_lane(false);
    Word* word = reinterpret_cast<Word*>(address);
    Word seen = __atomic_load_n(word, __ATOMIC_SEQ_CST);
    for (;;) {
        T old;
        memcpy(static_cast<void*>(&old), &seen, sizeof(T));
        const T next = update(old);
        Word wanted;
        memcpy(&wanted, static_cast<const void*>(&next), sizeof(T));
        if (__atomic_compare_exchange_n(word, &seen, wanted, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) return old;
    }
}

}  // namespace moesaic_emulate

// Spelled with T taken from the pointer only, so that `atomicAdd(&counter, 1)` works for every counter type.
#define MOESAIC_EMULATE_ATOMIC(name, expression)                                                    \
    template <class T>                                                                              \
    inline T name(T* address, std::common_type_t<T> value,                                          \
                  moesaic_emulate_site site = moesaic_emulate_site::here()) {                               \
        return ::moesaic_emulate::atomic_update(address, site, [&](T old) -> T { return expression; }); \
    }                                                                                               \
    template <class T>                                                                              \
    inline T name##_block(T* address, std::common_type_t<T> value,                                  \
                          moesaic_emulate_site site = moesaic_emulate_site::here()) {                       \
        return name(address, value, site);                                                          \
    }                                                                                               \
    template <class T>                                                                              \
    inline T name##_system(T* address, std::common_type_t<T> value,                                 \
                           moesaic_emulate_site site = moesaic_emulate_site::here()) {                      \
        return name(address, value, site);                                                          \
    }
MOESAIC_EMULATE_ATOMIC(atomicAdd, static_cast<T>(old + value))
MOESAIC_EMULATE_ATOMIC(atomicSub, static_cast<T>(old - value))
MOESAIC_EMULATE_ATOMIC(atomicMin, value < old ? value : old)
MOESAIC_EMULATE_ATOMIC(atomicMax, old < value ? value : old)
MOESAIC_EMULATE_ATOMIC(atomicExch, value)
MOESAIC_EMULATE_ATOMIC(atomicAnd, old& value)
MOESAIC_EMULATE_ATOMIC(atomicOr, old | value)
MOESAIC_EMULATE_ATOMIC(atomicXor, old ^ value)
MOESAIC_EMULATE_ATOMIC(atomicInc, old >= value ? T(0) : static_cast<T>(old + 1))
MOESAIC_EMULATE_ATOMIC(atomicDec, (old == 0 || old > value) ? value : static_cast<T>(old - 1))
#undef MOESAIC_EMULATE_ATOMIC

template <class T>
inline T atomicCAS(T* address, std::common_type_t<T> expected, std::common_type_t<T> value,
                   moesaic_emulate_site site = moesaic_emulate_site::here()) {
    const T old = ::moesaic_emulate::atomic_update(address, site, [&](T now) -> T {
        return memcmp(&now, &expected, sizeof(T)) == 0 ? value : now;
    });
    // A failed exchange may be somebody polling a lock: the holder must be able to run.
    if (memcmp(&old, &expected, sizeof(T)) != 0) ::moesaic_emulate::yield_lane(true);
    return old;
}
