// Included after a kernel's text: the library's exported entry, with parameter types deduced from the kernel.
#pragma once

namespace moesaic_emulate {

// How a parameter is written in the signature string and in its argument word:
//   p  a pointer: the address                      i4 u8 ...  an integer of so many bytes: sign- or zero-extended
//   f4 f8 f2  a float (2: half or bfloat16): the bits of a double     s24 ...  a struct by value: address of its bytes
template <class T>
struct Parameter {
    using Value = std::remove_cv_t<T>;
    static constexpr bool is_small_float =
        std::is_class_v<Value> && sizeof(Value) == 2 && std::is_constructible_v<Value, float>;
    static constexpr char letter = std::is_pointer_v<Value>                                 ? 'p'
                                   : std::is_floating_point_v<Value> || is_small_float      ? 'f'
                                   : std::is_integral_v<Value> && std::is_signed_v<Value>   ? 'i'
                                   : std::is_integral_v<Value> || std::is_enum_v<Value>     ? 'u'
                                                                                            : 's';
    static Value decode(std::uint64_t word) {
        if constexpr (letter == 'p') {
            return reinterpret_cast<Value>(word);
        } else if constexpr (letter == 'f') {
            const double value = from_word<double>(word);
            if constexpr (is_small_float) return Value(static_cast<float>(value));
            else return static_cast<Value>(value);
        } else if constexpr (letter == 's') {
            return *reinterpret_cast<const Value*>(word);
        } else {
            return static_cast<Value>(word);
        }
    }
};

template <class Function>
struct Trampoline;

template <class... Ts>
struct Trampoline<void (*)(Ts...)> {
    template <std::size_t... I>
    static void call(void (*kernel)(Ts...), const std::uint64_t* arguments, std::index_sequence<I...>) {
        kernel(Parameter<Ts>::decode(arguments[I])...);
    }
    static void call(void (*kernel)(Ts...), const std::uint64_t* arguments) {
        call(kernel, arguments, std::index_sequence_for<Ts...>());
    }
    static int describe(char* text, std::size_t bytes) {
        std::size_t used = 0;
        text[0] = 0;
        ((used += static_cast<std::size_t>(snprintf(text + used, bytes - used, "%c%zu,", Parameter<Ts>::letter,
                                                    sizeof(Ts)))),
         ...);
        return static_cast<int>(used);
    }
};

// Static shared memory is this library's thread-local block; a member of it tells where the block is.
static thread_local char shared_anchor;

}  // namespace moesaic_emulate

#define MOESAIC_EMULATE_ENTRY(kernel)                                                                              \
    extern "C" MOESAIC_EMULATE_API int moesaic_emulate_signature(char* text, std::size_t bytes) {                  \
        return ::moesaic_emulate::Trampoline<decltype(&kernel)>::describe(text, bytes);                            \
    }                                                                                                              \
    extern "C" MOESAIC_EMULATE_API int moesaic_emulate_launch(const ::moesaic_emulate::LaunchRequest* request) {   \
        const ::moesaic_emulate::KernelBinding binding{                                                            \
            #kernel,                                                                                               \
            [](const std::uint64_t* arguments) {                                                                   \
                ::moesaic_emulate::Trampoline<decltype(&kernel)>::call(&kernel, arguments);                        \
            },                                                                                                     \
            []() -> const void* {                                                                                  \
                ::moesaic_emulate::shared_anchor = 1;                                                              \
                return &::moesaic_emulate::shared_anchor;                                                          \
            }};                                                                                                    \
        return ::moesaic_emulate::launch(*request, binding);                                                       \
    }
