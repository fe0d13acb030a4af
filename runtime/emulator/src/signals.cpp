// Faults in a kernel (a wild pointer, an overflowing stack, a division by zero, a time limit) become reports. Faults
// anywhere else in the process go to whoever handled them before.
#include <signal.h>
#include <ucontext.h>

#include <cstdio>
#include <mutex>

#include "state.h"

namespace moesaic_emulate {

namespace {

constexpr int kFaults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
struct sigaction previous[NSIG];

void* program_counter(const ucontext_t& state) {
#if defined(__x86_64__)
    return reinterpret_cast<void*>(state.uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
    return reinterpret_cast<void*>(state.uc_mcontext.pc);
#else
    (void)state;
    return nullptr;
#endif
}

void* frame_pointer(const ucontext_t& state) {
#if defined(__x86_64__)
    return reinterpret_cast<void*>(state.uc_mcontext.gregs[REG_RBP]);
#elif defined(__aarch64__)
    return reinterpret_cast<void*>(state.uc_mcontext.regs[29]);
#else
    (void)state;
    return nullptr;
#endif
}

void describe(int number, const siginfo_t& info, const Worker& worker, char* text, std::size_t size) {
    const auto at = reinterpret_cast<std::uintptr_t>(info.si_addr);
    const auto shared_end =
        reinterpret_cast<std::uintptr_t>(worker.dynamic_region) + worker.dynamic_region_bytes - kGuardBytes;
    if (number == timeout_signal()) {
        snprintf(text, size, "the time limit of %g s is over while this thread runs; does it wait for a block that "
                 "has not started?", worker.grid->request->timeout_seconds);
    } else if (number == SIGFPE) {
        snprintf(text, size, "integer division by zero");
    } else if (number == SIGILL) {
        snprintf(text, size, "an index outside an array of known size (or code reached that must not be)");
    } else if (worker.stacks.is_guard(info.si_addr)) {
        snprintf(text, size, "the thread's stack of %zu bytes overflowed", kStackBytes - kGuardBytes);
    } else if (worker.dynamic_region != nullptr && at >= shared_end && at < shared_end + kGuardBytes) {
        snprintf(text, size, "access behind the end of dynamic shared memory (%zu bytes)",
                 worker.view.dynamic_shared_bytes);
    } else {
        snprintf(text, size, "access to unmapped memory at address 0x%llx", static_cast<unsigned long long>(at));
    }
}

void pass_on(int number, siginfo_t* info, void* state) {
    const struct sigaction& before = previous[number];
    // A process may hold two builds of this runtime (another compiler, say): each signal finds the one it is for.
    if ((before.sa_flags & SA_SIGINFO) != 0 && before.sa_sigaction != nullptr) {
        before.sa_sigaction(number, info, state);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(number);
    } else if (number != timeout_signal()) {
        signal(number, SIG_DFL);  // the instruction faults again, now for good
    }
}

void handle(int number, siginfo_t* info, void* state) {
    Worker* worker = current_worker;
    if (worker == nullptr || !worker->in_fiber.load(std::memory_order_relaxed)) return pass_on(number, info, state);
    if (worker->failing) {
        if (number != timeout_signal()) pass_on(number, info, state);
        return;
    }
    const auto& context = *static_cast<const ucontext_t*>(state);
    char text[240];
    describe(number, *info, *worker, text, sizeof text);
    // Leaves the signal's stack for good: the worker goes back to its own stack and ends.
    report_lane(*worker, text, nullptr, program_counter(context), frame_pointer(context));
}

}  // namespace

int timeout_signal() { return SIGRTMIN + 7; }

void install_signal_handlers() {
    static std::once_flag once;
    std::call_once(once, [] {
        struct sigaction action {};
        action.sa_sigaction = handle;
        action.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigemptyset(&action.sa_mask);
        for (const int number : kFaults) sigaction(number, &action, &previous[number]);
        sigaction(timeout_signal(), &action, &previous[timeout_signal()]);
    });
}

}  // namespace moesaic_emulate
