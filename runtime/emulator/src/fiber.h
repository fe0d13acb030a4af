// Cooperative contexts: one stack for each emulated thread, switched in a few instructions.
#pragma once

#include <cstddef>

// MOESAIC_EMULATE_UCONTEXT forces the portable switch, so that it can be tested anywhere.
#if defined(__x86_64__) && !defined(MOESAIC_EMULATE_UCONTEXT)
#define MOESAIC_EMULATE_FAST_SWITCH 1
#else
#include <ucontext.h>
#endif

namespace moesaic_emulate {

// A stack holds one lane's frames; its lowest page may not be touched, so that an overflow is a report and no
// silent damage to a neighbour.
constexpr std::size_t kStackBytes = 64 * 1024;
constexpr std::size_t kGuardBytes = 4096;

#if defined(MOESAIC_EMULATE_FAST_SWITCH)
struct Context {
    void* stack_pointer = nullptr;
};
#else
struct Context {
    ucontext_t state;
};
#endif

// Makes `context` start in `entry` on the given stack; `entry` must not return.
void context_prepare(Context& context, unsigned char* stack, void (*entry)());

// Stores the running context in `from` and continues `to`.
void context_switch(Context& from, Context& to);

// `count` stacks, guarded; kept for the next launch when released.
struct StackPool {
    unsigned char* base = nullptr;
    unsigned count = 0;

    unsigned char* stack(unsigned index) const { return base + index * kStackBytes; }
    bool is_guard(const void* address) const;
};
StackPool acquire_stacks(unsigned count);
void release_stacks(StackPool pool);

}  // namespace moesaic_emulate
