#include "fiber.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <mutex>
#include <vector>

namespace moesaic_emulate {

#if defined(MOESAIC_EMULATE_FAST_SWITCH)

// The System V ABI makes the callee keep rbx, rbp and r12 to r15; everything else is dead across a call, and kernels
// do not change the floating-point control words. ucontext would cost a system call for each switch.
extern "C" void moesaic_emulate_switch(void** from, void* to);
asm(R"(
    .text
    .p2align 4
    .type moesaic_emulate_switch, @function
moesaic_emulate_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size moesaic_emulate_switch, . - moesaic_emulate_switch
)");

void context_prepare(Context& context, unsigned char* stack, void (*entry)()) {
    // From the top: a zero that ends frame walks, the entry as return address, six zero registers. At the entry the
    // stack pointer is 8 below a multiple of 16, as after a call.
    std::uintptr_t top = (reinterpret_cast<std::uintptr_t>(stack) + kStackBytes) & ~std::uintptr_t{15};
    void** slot = reinterpret_cast<void**>(top);
    *--slot = nullptr;
    *--slot = reinterpret_cast<void*>(entry);
    for (int i = 0; i < 6; ++i) *--slot = nullptr;
    context.stack_pointer = slot;
}

void context_switch(Context& from, Context& to) { moesaic_emulate_switch(&from.stack_pointer, to.stack_pointer); }

#else

void context_prepare(Context& context, unsigned char* stack, void (*entry)()) {
    getcontext(&context.state);
    context.state.uc_stack.ss_sp = stack + kGuardBytes;
    context.state.uc_stack.ss_size = kStackBytes - kGuardBytes;
    context.state.uc_link = nullptr;
    makecontext(&context.state, entry, 0);
}

void context_switch(Context& from, Context& to) { swapcontext(&from.state, &to.state); }

#endif

bool StackPool::is_guard(const void* address) const {
    const auto at = reinterpret_cast<std::uintptr_t>(address);
    const auto low = reinterpret_cast<std::uintptr_t>(base);
    return at >= low && at < low + count * kStackBytes && (at - low) % kStackBytes < kGuardBytes;
}

namespace {
std::mutex pool_mutex;
std::vector<StackPool> idle_pools;
}  // namespace

StackPool acquire_stacks(unsigned count) {
    {
        std::lock_guard<std::mutex> lock(pool_mutex);
        for (std::size_t i = 0; i < idle_pools.size(); ++i) {
            if (idle_pools[i].count < count) continue;
            StackPool pool = idle_pools[i];
            idle_pools.erase(idle_pools.begin() + static_cast<std::ptrdiff_t>(i));
            return pool;
        }
    }
    const unsigned rounded = (count + 127) / 128 * 128;
    const std::size_t bytes = rounded * kStackBytes;
    void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED) return {};
    StackPool pool{static_cast<unsigned char*>(memory), rounded};
    for (unsigned i = 0; i < rounded; ++i) mprotect(pool.stack(i), kGuardBytes, PROT_NONE);
    return pool;
}

void release_stacks(StackPool pool) {
    if (pool.base == nullptr) return;
    std::lock_guard<std::mutex> lock(pool_mutex);
    idle_pools.push_back(pool);
}

}  // namespace moesaic_emulate
