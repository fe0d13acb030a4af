// The native launcher: what a call of a compiled layer does between its arguments and its results, without Python.
//
// Built on the user's machine against the headers of the torch that is installed (see build.py). Three types:
//
//   Plan    a launch plan with its kernels loaded on one device: allocates, packs, launches
//   Table   the plans of one function, by device, number of tokens and alignments: called with a list of inputs
//   Caller  a layer: called with the layer's arguments, checks them, makes the named result
//
// Only the plain case is here. Where anything is not plain, a call gives None and has done nothing: the caller then
// takes the way through Python, which prepares what is missing or says what is wrong.

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include <ATen/EmptyTensor.h>
#include <ATen/core/TensorBase.h>
#include <ATen/cuda/EmptyTensor.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/util/SmallVector.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

// From libtorch_python. The header that declares it takes three times as long to compile as this file.
PyObject* THPVariable_Wrap(at::TensorBase&& tensor);

namespace at::detail {
// Not there in a torch without CUDA, where it is never called.
__attribute__((weak)) TensorBase empty_cuda(IntArrayRef, ScalarType, std::optional<Device>,
                                            std::optional<c10::MemoryFormat>);
}  // namespace at::detail

namespace {

using Shape = c10::SmallVector<int64_t, 4>;

// References ----------------------------------------------------------------------------------------------------------

class Reference {
public:
    Reference() = default;
    explicit Reference(PyObject* owned) : object_(owned) {}
    Reference(Reference&& other) noexcept : object_(std::exchange(other.object_, nullptr)) {}
    Reference& operator=(Reference&& other) noexcept {
        std::swap(object_, other.object_);
        return *this;
    }
    ~Reference() { Py_XDECREF(object_); }
    static Reference to(PyObject* borrowed) { return Reference(Py_XNewRef(borrowed)); }
    PyObject* get() const { return object_; }
    PyObject* release() { return std::exchange(object_, nullptr); }
    explicit operator bool() const { return object_ != nullptr; }

private:
    PyObject* object_ = nullptr;
};

PyTypeObject* tensor_type;
PyTypeObject* parameter_type;
Py_ssize_t tensor_offset;  // of the pointer to the TensorImpl in a Python tensor

const c10::TensorImpl* tensor_of(PyObject* tensor) {
    return *reinterpret_cast<c10::TensorImpl* const*>(reinterpret_cast<const char*>(tensor) + tensor_offset);
}

// Where Python tensors keep theirs differs between releases of torch, so it is looked up in a tensor we know.
bool find_tensor_offset() {
    at::TensorBase known = at::detail::empty_cpu({1}, at::kFloat);
    const c10::TensorImpl* const wanted = known.unsafeGetTensorImpl();
    const Reference object(THPVariable_Wrap(std::move(known)));
    if (!object) return false;
    const auto end = Py_TYPE(object.get())->tp_basicsize;
    for (tensor_offset = sizeof(PyObject); tensor_offset + Py_ssize_t(sizeof(void*)) <= end;
         tensor_offset += sizeof(void*)) {
        if (tensor_of(object.get()) == wanted) return true;
    }
    PyErr_SetString(PyExc_ImportError, "this torch keeps tensors where the launcher does not find them");
    return false;
}

// Whether a variable of the environment is unset, empty, or one of two words. The rest is for Python to judge.
bool is_one_of(const char* variable, const char* one, const char* other) {
    const char* const text = std::getenv(variable);
    return text == nullptr || *text == '\0' || std::strcmp(text, one) == 0 || std::strcmp(text, other) == 0;
}

bool is_allowed() { return is_one_of("MOESAIC_LAUNCHER", "auto", "native"); }

// Operands and arguments ----------------------------------------------------------------------------------------------

struct Operand {
    uint64_t address = 0;
    int64_t rows = 0;        // its first dimension
    int64_t row_stride = 0;    // of the first dimension, in elements
    int64_t inner_stride = 1;  // of the second, where there is one
};

void set_strides(Operand& operand, c10::IntArrayRef strides) {
    operand.row_stride = strides.empty() ? 1 : strides[0];
    operand.inner_stride = strides.size() < 2 ? 1 : strides[1];
}

// Bytes that an address and strides are all aligned to, at most 16; `alignments` in execute.py says why like this.
uint8_t alignment_of(const Operand& operand, c10::IntArrayRef sizes, c10::IntArrayRef strides, size_t element_bytes) {
    uint64_t bits = operand.address | 16;
    if (sizes.size() >= 2) {
        bits |= uint64_t(sizes.back()) * element_bytes;
        for (size_t d = 0; d + 1 < strides.size(); ++d) bits |= uint64_t(strides[d]) * element_bytes;
    }
    return uint8_t(bits & -bits);
}

struct Call {
    const Operand* operands;
    int64_t tokens;
    int64_t sequences;
    int64_t slots;
};

// What a kernel's argument of a kind is: 8 bytes each. `ARGUMENTS` in execute.py has the same table, but for tensor
// maps, which a launch puts in the places of their zeros.
struct Kind {
    const char* name;
    uint64_t (*value)(const Call& call, int operand);
};
constexpr Kind kKinds[] = {
    {"pointer", [](const Call& call, int operand) { return call.operands[operand].address; }},
    {"stride", [](const Call& call, int operand) { return uint64_t(call.operands[operand].row_stride); }},
    {"inner_stride", [](const Call& call, int operand) { return uint64_t(call.operands[operand].inner_stride); }},
    {"tokens", [](const Call& call, int) { return uint64_t(call.tokens); }},
    {"rows", [](const Call& call, int operand) { return uint64_t(call.operands[operand].rows); }},
    {"tensor_map", [](const Call&, int) { return uint64_t(0); }},
};

// What a tensor map says: `TensorBoxes` of driver.py. Without matrices, it is a map of rows.
struct TensorBoxes {
    uint64_t address;
    int64_t columns, rows, matrices, row_bytes, matrix_bytes, box_columns, box_rows, data_type;
};

// `_Boxes` of execute.py.
struct Boxes {
    long long columns, rows, matrices, box_columns, box_rows, data_type;
    int stacked;

    TensorBoxes operator()(const Operand& operand) const {
        const int64_t row_bytes = 2 * (stacked ? operand.inner_stride : operand.row_stride);
        if (rows == 0) {
            return {operand.address, columns, operand.rows, 0, row_bytes, 0, box_columns, box_rows, data_type};
        }
        const int64_t matrix_bytes = matrices == 1 ? rows * row_bytes : 2 * operand.row_stride;
        return {operand.address, columns, rows, matrices, row_bytes, matrix_bytes, box_columns, box_rows, data_type};
    }
};

// CUtensorMap of the driver's interface.
struct alignas(64) TensorMap {
    unsigned char opaque[128];
};

// Plans ---------------------------------------------------------------------------------------------------------------

// CUlaunchConfig of the driver's interface.
struct LaunchConfig {
    unsigned grid[3];
    unsigned block[3];
    unsigned shared_bytes;
    void* stream;
    void* attributes;
    unsigned attribute_count;
};

// Functions by their addresses, which come from the libraries that are loaded.
struct Driver {
    int (*launch)(const LaunchConfig*, void* function, void** arguments, void** extra);
    int (*encode)(TensorMap*, int data_type, uint32_t rank, void* address, const uint64_t* dims,
                  const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides, int interleave,
                  int swizzle, int promotion, int fill);
    int (*get_context)(void** context);
    int (*push_context)(void* context);
    int (*pop_context)(void** context);
    int (*current_stream)(int32_t device_index, void** stream);
    void* context;
};

struct Argument {
    uint64_t (*value)(const Call& call, int operand);
    int operand;
};

struct Mapped {
    size_t position;  // among the arguments
    int operand;
    Boxes boxes;
};
constexpr size_t kMostMaps = 8;  // of a kernel

int64_t divide_up(int64_t number, int64_t by) { return (number + by - 1) / by; }

// `_Blocks` of execute.py.
struct Blocks {
    int64_t rows, most, by_sequence, fixed, per_sequence, cluster;

    int64_t operator()(int64_t tokens, int64_t sequences) const {
        if (rows == 0) return fixed + sequences * per_sequence;
        const int64_t parts = by_sequence ? std::max<int64_t>(sequences, 1) : 1;
        const int64_t wanted = divide_up(divide_up(tokens, parts), rows);
        const int64_t blocks = std::max<int64_t>(1, std::min(wanted, most / parts));
        return by_sequence ? sequences * blocks : cluster * blocks;
    }
};

struct Step {
    LaunchConfig config;  // grid and stream are a call's own
    void* function;
    Blocks blocks;
    std::vector<Argument> arguments;
    std::vector<Mapped> maps;
};

constexpr int kTokens = -1, kSequences = -2, kSlots = -3;

struct Buffer {
    int rows;  // kTokens, kSequences, kSlots, the step whose number of blocks they are, or less than any: none
    Shape columns;
    at::ScalarType dtype;
    int reuses;  // the operand whose memory it takes over, or -1
    bool is_result = false;
};

// Small buffers of the workspace lie in one block of memory, at multiples of `kPlace` bytes: an allocation takes as much
// host time as a launch. Larger ones are each a block of their own, which torch's allocator finds room for.
constexpr int64_t kSmall = 1 << 20, kPlace = 256;

struct Plan {
    PyObject_HEAD
    c10::Device device = c10::kCPU;
    Driver driver;
    int inputs = 0;
    int tokens_from = -1;     // the input whose rows are the tokens, or -1
    int sequences_from = -1;  // that whose rows are the sequences, or -1
    int slots_from = -1;      // that whose rows are slots, or -1; then there are so many a token, and some more
    int64_t slots_per_token = 0;
    int64_t more_slots = 0;
    std::vector<Buffer> buffers;
    std::vector<Step> steps;
    std::vector<int> results;
    bool passes_inputs_on = false;
    Reference failed;  // (step, code of the driver, blocks, what a tensor map should have said or None) -> raises
    Reference keep;    // what the addresses above point into
};

enum class Outcome { kDone, kNotPlain, kRaised };

// The driver launches into the current context; torch may have another device's, or none on this thread yet.
class Context {
public:
    explicit Context(const Driver& driver) : driver_(driver) {
        void* now = nullptr;
        code = driver.get_context(&now);
        if (code != 0 || now == driver.context) return;
        code = driver.push_context(driver.context);
        pushed_ = code == 0;
    }
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;
    ~Context() {
        void* mine = nullptr;
        if (pushed_) driver_.pop_context(&mine);
    }
    int code = 0;

private:
    const Driver& driver_;
    bool pushed_ = false;
};

at::TensorBase fresh(const Shape& shape, at::ScalarType dtype, c10::Device device) {
    return device.is_cuda() ? at::detail::empty_cuda(shape, dtype, device, std::nullopt)
                            : at::detail::empty_cpu(shape, dtype);
}

// Gives each buffer its memory; `made` gets new tensors, the last of which is the block of small ones.
void allocate_buffers(const Plan& plan, const Call& call, Operand* operands,
                      c10::SmallVectorImpl<at::TensorBase>& made) {
    const size_t count = plan.buffers.size();
    made.resize(count + 1);
    c10::SmallVector<size_t, 16> together;  // buffers with a place in the block, for now in place of an address
    int64_t bytes_together = 0;
    Shape shape;
    for (size_t i = 0; i < count; ++i) {
        const Buffer& buffer = plan.buffers[i];
        Operand& operand = operands[plan.inputs + i];
        shape.clear();
        if (buffer.rows == kTokens) shape.push_back(call.tokens);
        if (buffer.rows == kSequences) shape.push_back(call.sequences);
        if (buffer.rows == kSlots) shape.push_back(call.slots);
        if (buffer.rows >= 0) shape.push_back(plan.steps[buffer.rows].blocks(call.tokens, call.sequences));
        shape.append(buffer.columns.begin(), buffer.columns.end());
        operand.rows = shape.empty() ? 0 : shape.front();
        operand.row_stride = 1;
        for (size_t d = 1; d < shape.size(); ++d) operand.row_stride *= shape[d];
        for (size_t d = 2; d < shape.size(); ++d) operand.inner_stride *= shape[d];
        if (buffer.reuses >= 0) continue;
        const int64_t bytes =
            (shape.empty() ? 1 : operand.rows * operand.row_stride) * int64_t(c10::elementSize(buffer.dtype));
        if (buffer.is_result || bytes > kSmall) {
            made[i] = fresh(shape, buffer.dtype, plan.device);
            operand.address = reinterpret_cast<uint64_t>(made[i].unsafeGetTensorImpl()->mutable_data());
        } else if (bytes > 0) {
            operand.address = uint64_t(bytes_together);
            bytes_together += divide_up(bytes, kPlace) * kPlace;
            together.push_back(plan.inputs + i);
        }
    }
    if (bytes_together > 0) {
        made[count] = fresh({bytes_together}, at::kByte, plan.device);
        const auto block = reinterpret_cast<uint64_t>(made[count].unsafeGetTensorImpl()->mutable_data());
        for (const size_t operand : together) operands[operand].address += block;
    }
    for (size_t i = 0; i < count; ++i) {  // of the same size, see plan-workspace
        const int reuses = plan.buffers[i].reuses;
        if (reuses >= 0) operands[plan.inputs + i].address = operands[reuses].address;
    }
}

struct Failure {
    int step = -1;
    int code = 0;
    int64_t blocks = 0;
    std::optional<TensorBoxes> boxes;  // of the tensor map that could not be encoded
};

// As `encode_tensor_map` of driver.py; the code that the driver gives.
int encode(const Driver& driver, const TensorBoxes& boxes, TensorMap& map) {
    constexpr int kInvalidValue = 1, kSwizzle64 = 2, kSwizzle128 = 3, kPromote256 = 3;
    if (boxes.rows == 0) {
        std::memset(&map, 0, sizeof map);
        return 0;
    }
    if (((boxes.address | uint64_t(boxes.row_bytes) | uint64_t(boxes.matrix_bytes)) & 15) != 0) return kInvalidValue;
    constexpr uint64_t kRunEnd = 1ull << 30, kWraps = 1ull << 34;  // their product is 2^64; see tensor_map.cuh
    const bool of_rows = boxes.matrices == 0;
    const uint64_t columns = uint64_t(boxes.columns), rows = uint64_t(boxes.rows), row_bytes = uint64_t(boxes.row_bytes);
    const uint64_t dims[] = {columns, of_rows ? kRunEnd : rows, of_rows ? rows + 1 : uint64_t(boxes.matrices), kRunEnd + 1};
    const uint64_t strides[] = {row_bytes, of_rows ? row_bytes : uint64_t(boxes.matrix_bytes), kWraps - row_bytes};
    const uint32_t box[] = {uint32_t(boxes.box_columns), uint32_t(boxes.box_rows), 1, 1};
    const uint32_t every[] = {1, 1, 1, 1};
    return driver.encode(&map, int(boxes.data_type), of_rows ? 4 : 3, reinterpret_cast<void*>(boxes.address), dims, strides,
                         box, every, /*interleave=*/0, boxes.box_columns == 32 ? kSwizzle64 : kSwizzle128, kPromote256,
                         /*fill=*/0);
}

// Launches every step on the current stream of the plan's device.
Failure launch_steps(const Plan& plan, const Call& call) {
    Failure failure;
    const Context context(plan.driver);
    void* stream = nullptr;
    failure.code = context.code;
    if (failure.code == 0) failure.code = plan.driver.current_stream(plan.device.index(), &stream);
    if (failure.code != 0) return failure;
    c10::SmallVector<uint64_t, 32> values;
    c10::SmallVector<void*, 32> addresses;
    TensorMap maps[kMostMaps];  // of this call alone, for threads share the plan
    for (size_t n = 0; n < plan.steps.size(); ++n) {
        const Step& step = plan.steps[n];
        const int64_t blocks = step.blocks(call.tokens, call.sequences);
        if (blocks == 0) continue;
        values.clear();
        for (const Argument& argument : step.arguments) values.push_back(argument.value(call, argument.operand));
        addresses.clear();
        for (uint64_t& value : values) addresses.push_back(&value);
        for (size_t i = 0; i < step.maps.size(); ++i) {
            const Mapped& mapped = step.maps[i];
            const TensorBoxes boxes = mapped.boxes(call.operands[mapped.operand]);
            failure.code = encode(plan.driver, boxes, maps[i]);
            if (failure.code != 0) {
                failure.step = int(n);
                failure.boxes = boxes;
                return failure;
            }
            addresses[mapped.position] = &maps[i];
        }
        LaunchConfig config = step.config;
        config.grid[0] = unsigned(blocks);
        config.grid[1] = config.grid[2] = 1;
        config.stream = stream;
        failure.code = plan.driver.launch(&config, step.function, addresses.data(), nullptr);
        if (failure.code != 0) {
            failure.step = int(n);
            failure.blocks = blocks;
            return failure;
        }
    }
    return failure;
}

PyObject* describe(const std::optional<TensorBoxes>& boxes) {
    if (!boxes) return Py_NewRef(Py_None);
    const TensorBoxes& b = *boxes;
    using Number = long long;
    return Py_BuildValue("(KLLLLLLLL)", static_cast<unsigned long long>(b.address), Number(b.columns), Number(b.rows),
                         Number(b.matrices), Number(b.row_bytes), Number(b.matrix_bytes), Number(b.box_columns),
                         Number(b.box_rows), Number(b.data_type));
}

// Allocates and launches. `operands` has the inputs, and room for the buffers.
Outcome run(const Plan& plan, Operand* operands, c10::SmallVectorImpl<at::TensorBase>& made) {
    const int64_t sequences = plan.sequences_from < 0 ? 0 : operands[plan.sequences_from].rows;
    const int64_t tokens = plan.tokens_from < 0 ? 0 : operands[plan.tokens_from].rows;
    const int64_t slots =
        plan.slots_from < 0 ? plan.slots_per_token * tokens + plan.more_slots : operands[plan.slots_from].rows;
    const Call call{operands, tokens, sequences, slots};
    Failure failure;
    bool finished = false;
    // As every operator of torch: an allocation may wait for the device, and a launch for room in the stream's queue.
    PyThreadState* const thread = PyEval_SaveThread();
    try {
        allocate_buffers(plan, call, operands, made);
        failure = launch_steps(plan, call);
        finished = true;
    } catch (const std::exception&) {
        // Out of memory, most likely. Python tries once more, and raises what torch raises.
    }
    PyEval_RestoreThread(thread);
    if (!finished) return Outcome::kNotPlain;
    if (failure.code == 0) return Outcome::kDone;
    Py_XDECREF(PyObject_CallFunction(plan.failed.get(), "iiLN", failure.step, failure.code,
                                     static_cast<long long>(failure.blocks), describe(failure.boxes)));
    return Outcome::kRaised;
}

// Tables --------------------------------------------------------------------------------------------------------------

struct Row {
    int device_index;
    int bucket;
    c10::SmallVector<uint8_t, 8> alignments;
    Reference plan;
};

struct Table {
    PyObject_HEAD
    vectorcallfunc call;
    c10::SmallVector<int64_t, 4> edges;  // the largest number of tokens of each bucket but the last
    std::vector<Row> rows;
};

const Plan* find(const Table& table, int device_index, int64_t tokens, c10::ArrayRef<uint8_t> alignments) {
    int bucket = 0;
    for (const int64_t edge : table.edges) bucket += tokens > edge;
    for (const Row& row : table.rows) {
        if (row.device_index == device_index && row.bucket == bucket && alignments.equals(row.alignments)) {
            return reinterpret_cast<const Plan*>(row.plan.get());
        }
    }
    return nullptr;
}

// A result that is an input is the same Python tensor again.
PyObject* wrap(const Plan& plan, int result, PyObject* const* inputs, c10::SmallVectorImpl<at::TensorBase>& made) {
    if (result < plan.inputs) return Py_NewRef(inputs[result]);
    return THPVariable_Wrap(at::TensorBase(made[result - plan.inputs]));
}

PyObject* call_table(PyObject* self, PyObject* const* arguments, size_t count, PyObject* names) {
    const auto& table = *reinterpret_cast<Table*>(self);
    if (PyVectorcall_NARGS(count) != 1 || names != nullptr) {
        PyErr_SetString(PyExc_TypeError, "a table takes a sequence of tensors");
        return nullptr;
    }
    if (!is_allowed()) Py_RETURN_NONE;
    const Reference sequence(PySequence_Tuple(arguments[0]));  // nobody can change it meanwhile
    if (!sequence) return nullptr;
    PyObject* const* const inputs = &PyTuple_GET_ITEM(sequence.get(), 0);
    const auto given = size_t(PyTuple_GET_SIZE(sequence.get()));
    c10::SmallVector<Operand, 16> operands(given);
    c10::SmallVector<uint8_t, 8> alignments(given);
    int64_t tokens = -1;
    int device_index = -1;
    try {
        for (size_t i = 0; i < given; ++i) {
            if (!PyObject_TypeCheck(inputs[i], tensor_type)) Py_RETURN_NONE;
            const c10::TensorImpl& tensor = *tensor_of(inputs[i]);
            const auto sizes = tensor.sizes(), strides = tensor.strides();
            if (i == 0) device_index = tensor.device().index();
            const bool has_rows = sizes.size() == 2;
            if (tokens < 0 && has_rows) tokens = sizes[0];
            operands[i].address = reinterpret_cast<uint64_t>(tensor.data());
            operands[i].rows = sizes.empty() ? 0 : sizes[0];
            set_strides(operands[i], strides);
            alignments[i] = alignment_of(operands[i], sizes, strides, tensor.itemsize());
        }
    } catch (const std::exception&) {  // sizes or memory that a tensor of this kind does not have
        Py_RETURN_NONE;
    }
    const Plan* const plan = find(table, device_index, tokens, alignments);
    if (plan == nullptr) Py_RETURN_NONE;
    const Reference kept = Reference::to(reinterpret_cast<PyObject*>(const_cast<Plan*>(plan)));
    operands.resize(given + plan->buffers.size());
    c10::SmallVector<at::TensorBase, 8> made;
    switch (run(*plan, operands.data(), made)) {
        case Outcome::kNotPlain: Py_RETURN_NONE;
        case Outcome::kRaised: return nullptr;
        case Outcome::kDone: break;
    }
    Reference list(PyList_New(Py_ssize_t(plan->results.size())));
    if (!list) return nullptr;
    for (size_t i = 0; i < plan->results.size(); ++i) {
        PyObject* const result = wrap(*plan, plan->results[i], inputs, made);
        if (result == nullptr) return nullptr;
        PyList_SET_ITEM(list.get(), Py_ssize_t(i), result);
    }
    return list.release();
}

// Callers -------------------------------------------------------------------------------------------------------------

struct Declared {
    Reference name;
    Shape shape;  // kTokens for T
    at::ScalarType dtype;
};

// What a layer runs for logits of one dtype, with or without a token mask.
struct Variant {
    std::vector<Declared> inputs;
    std::vector<bool> has_rows;  // of the results
    Reference table;
};

struct Caller {
    PyObject_HEAD
    vectorcallfunc call;
    c10::DispatchKeySet plain_keys;
    std::string backend;  // what MOESAIC_BACKEND may say; empty if it does not matter
    Reference result_type;
    std::vector<Variant> variants;
};

// A tensor without anything about it that torch would have to see: no subclass, no lazy negation, no wrapper of a
// transform, no forward-mode tangent.
const c10::TensorImpl* plain_tensor(const Caller& caller, PyObject* object) {
    if (Py_TYPE(object) != tensor_type && Py_TYPE(object) != parameter_type) return nullptr;
    const c10::TensorImpl* const tensor = tensor_of(object);
    if ((tensor->key_set().raw_repr() & ~caller.plain_keys.raw_repr()) != 0) return nullptr;
    if (tensor->autograd_meta() != nullptr) {
        const auto alias = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::unsafe_reclaim_from_nonowning(
            const_cast<c10::TensorImpl*>(tensor));
        const at::TensorBase base(alias);
        // at::Tensor adds functions to at::TensorBase, and its header takes long to compile.
        if (reinterpret_cast<const at::TensorBase&>(tensor->_fw_grad(0, base)).defined()) return nullptr;
    }
    return tensor;
}

bool rows_are_dense(c10::IntArrayRef sizes, c10::IntArrayRef strides) {
    return sizes.empty() || strides.back() == 1 || sizes.back() == 1;
}

const Variant* variant_for(const Caller& caller, at::ScalarType dtype, size_t inputs) {
    for (const Variant& variant : caller.variants) {
        if (variant.inputs[0].dtype == dtype && variant.inputs.size() == inputs) return &variant;
    }
    return nullptr;
}

PyObject* list_of(c10::ArrayRef<PyObject*> objects) {
    PyObject* const list = PyList_New(Py_ssize_t(objects.size()));
    for (size_t i = 0; list != nullptr && i < objects.size(); ++i) {
        PyList_SET_ITEM(list, Py_ssize_t(i), Py_NewRef(objects[i]));
    }
    return list;
}

// The inputs of a call, in the order of the function's.
struct Bound {
    const Variant* variant = nullptr;
    c10::SmallVector<PyObject*, 8> objects;
    c10::SmallVector<Operand, 16> operands;
    c10::SmallVector<uint8_t, 8> alignments;
    c10::Device device = c10::kCPU;
    int64_t tokens = 0;
    Shape leading;  // dimensions of the logits before the last, where they are not T alone
    bool is_matrix = true;
    bool needs_gradient = false;
};

// The logits' rows: all dimensions but the last count tokens.
bool bind_logits(const c10::TensorImpl& logits, int64_t columns, Bound& bound) {
    const auto sizes = logits.sizes(), strides = logits.strides();
    if (sizes.empty() || sizes.back() != columns || !rows_are_dense(sizes, strides)) return false;
    bound.device = logits.device();
    bound.is_matrix = sizes.size() == 2;
    if (!bound.is_matrix) {
        if (!logits.is_contiguous()) return false;  // rows may not be evenly spaced
        bound.leading.assign(sizes.begin(), sizes.end() - 1);
    }
    bound.tokens = bound.is_matrix ? sizes[0] : logits.numel() / columns;
    bound.operands[0].rows = bound.tokens;
    const int64_t stride = bound.is_matrix ? strides[0] : columns;
    bound.operands[0].row_stride = stride;
    bound.alignments[0] = alignment_of(bound.operands[0], {bound.tokens, columns}, {stride, 1}, logits.itemsize());
    return true;
}

bool bind_other(const c10::TensorImpl& tensor, const Declared& declared, Bound& bound, size_t number) {
    Operand& operand = bound.operands[number];
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    if (tensor.device() != bound.device || tensor.dtype().toScalarType() != declared.dtype ||
        sizes.size() != declared.shape.size() || !rows_are_dense(sizes, strides)) {
        return false;
    }
    for (size_t d = 0; d < sizes.size(); ++d) {
        const bool counts_tokens = declared.shape[d] == kTokens;
        if (counts_tokens && !bound.is_matrix) return false;  // it has the logits' leading dimensions
        if (sizes[d] != (counts_tokens ? bound.tokens : declared.shape[d])) return false;
    }
    operand.rows = sizes.empty() ? 0 : sizes[0];
    set_strides(operand, strides);
    bound.alignments[number] = alignment_of(operand, sizes, strides, tensor.itemsize());
    return true;
}

// Whether the call is plain, hence bound.
bool bind(const Caller& caller, PyObject* positional, PyObject* by_name, Bound& bound) {
    if (PyTuple_GET_SIZE(positional) != 1) return false;
    PyObject* const first = PyTuple_GET_ITEM(positional, 0);
    const c10::TensorImpl* const logits = plain_tensor(caller, first);
    if (logits == nullptr) return false;
    const size_t count = 1 + size_t(PyDict_GET_SIZE(by_name));
    bound.variant = variant_for(caller, logits->dtype().toScalarType(), count);
    if (bound.variant == nullptr) return false;
    bound.objects.resize(count);
    bound.operands.resize(count);
    bound.alignments.resize(count);
    for (size_t i = 0; i < count; ++i) {
        const Declared& declared = bound.variant->inputs[i];
        PyObject* const object = i == 0 ? first : PyDict_GetItemWithError(by_name, declared.name.get());
        const c10::TensorImpl* const tensor = object == nullptr ? nullptr : plain_tensor(caller, object);
        if (tensor == nullptr) return false;
        bound.operands[i].address = reinterpret_cast<uint64_t>(tensor->data());
        if (!(i == 0 ? bind_logits(*tensor, declared.shape[1], bound) : bind_other(*tensor, declared, bound, i))) {
            return false;
        }
        bound.objects[i] = object;
        bound.needs_gradient |= tensor->requires_grad();
    }
    return true;
}

// A new result of rows takes the leading dimensions of the logits in place of T.
void give_leading(const Shape& leading, const Buffer& buffer, at::TensorBase& result) {
    Shape shape(leading);
    shape.append(buffer.columns.begin(), buffer.columns.end());
    result.unsafeGetTensorImpl()->set_sizes_contiguous(shape);
}

// The result, for the positional and the named arguments of a call, as a tuple and a dict. Where autograd has to record
// the call, a list of the inputs in order instead, checked.
PyObject* call_caller(PyObject* self, PyObject* const* arguments, size_t count, PyObject* names) {
    const auto& caller = *reinterpret_cast<Caller*>(self);
    if (PyVectorcall_NARGS(count) != 2 || names != nullptr || !PyTuple_Check(arguments[0]) ||
        !PyDict_Check(arguments[1])) {
        PyErr_SetString(PyExc_TypeError, "a caller takes a tuple and a dict");
        return nullptr;
    }
    if (!is_allowed()) Py_RETURN_NONE;
    if (!caller.backend.empty() && !is_one_of("MOESAIC_BACKEND", "auto", caller.backend.c_str())) Py_RETURN_NONE;
    // Modes and transforms (fake tensors, tracing, vmap, grad) add keys that every operator has to pass.
    const auto included = c10::impl::tls_local_dispatch_key_set().included_;
    if (!(included - c10::default_included_set).empty()) Py_RETURN_NONE;
    Bound bound;
    try {
        if (!bind(caller, arguments[0], arguments[1], bound)) Py_RETURN_NONE;
    } catch (const std::exception&) {  // sizes or memory that a tensor of this kind does not have
        Py_RETURN_NONE;
    }
    if (bound.needs_gradient && c10::GradMode::is_enabled()) {
        return bound.is_matrix ? list_of(bound.objects) : Py_NewRef(Py_None);
    }
    const auto& table = *reinterpret_cast<const Table*>(bound.variant->table.get());
    const Plan* const plan = find(table, bound.device.index(), bound.tokens, bound.alignments);
    if (plan == nullptr || (!bound.is_matrix && plan->passes_inputs_on)) Py_RETURN_NONE;
    const Reference kept = Reference::to(reinterpret_cast<PyObject*>(const_cast<Plan*>(plan)));
    bound.operands.resize(bound.objects.size() + plan->buffers.size());
    c10::SmallVector<at::TensorBase, 8> made;
    switch (run(*plan, bound.operands.data(), made)) {
        case Outcome::kNotPlain: Py_RETURN_NONE;
        case Outcome::kRaised: return nullptr;
        case Outcome::kDone: break;
    }
    auto* const type = reinterpret_cast<PyTypeObject*>(caller.result_type.get());
    const auto& has_rows = bound.variant->has_rows;
    Reference result(type->tp_alloc(type, Py_ssize_t(has_rows.size())));  // a tuple with names
    if (!result) return nullptr;
    for (size_t i = 0; i < has_rows.size(); ++i) {
        const int number = plan->results[i];
        if (!bound.is_matrix && has_rows[i]) {
            const int buffer = number - plan->inputs;
            give_leading(bound.leading, plan->buffers[buffer], made[buffer]);
        }
        PyObject* const item = wrap(*plan, number, bound.objects.data(), made);
        if (item == nullptr) return nullptr;
        PyTuple_SET_ITEM(result.get(), Py_ssize_t(i), item);
    }
    return result.release();
}

// From Python ---------------------------------------------------------------------------------------------------------

// Descriptions come from our own Python, as tuples. What does not fit leaves a Python error behind, for which `false`
// and null stand.

bool integers(PyObject* tuple, std::vector<int64_t>& found) {
    if (!PyTuple_Check(tuple)) return PyErr_Format(PyExc_TypeError, "expected a tuple, found %R", tuple), false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(tuple); ++i) {
        found.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, i)));
        if (PyErr_Occurred()) return false;
    }
    return true;
}

bool shape_of(PyObject* tuple, Shape& shape) {
    std::vector<int64_t> found;
    if (!integers(tuple, found)) return false;
    shape.assign(found.begin(), found.end());
    return true;
}

const c10::TensorImpl* sample(PyObject* object) {
    if (!PyObject_TypeCheck(object, tensor_type)) {
        return PyErr_Format(PyExc_TypeError, "expected a tensor, found %R", object), nullptr;
    }
    return tensor_of(object);
}

template <typename Object>
Object* allocate(PyTypeObject* type) {
    PyObject* const made = type->tp_alloc(type, 0);
    if (made == nullptr) return nullptr;
    const PyObject head = *made;  // constructing the rest must leave it
    auto* const object = new (made) Object;
    *reinterpret_cast<PyObject*>(object) = head;
    return object;
}

template <typename Object>
void deallocate(PyObject* self) {
    PyTypeObject* const type = Py_TYPE(self);
    reinterpret_cast<Object*>(self)->~Object();
    type->tp_free(self);
    Py_DECREF(type);
}

bool add_step(Plan& plan, PyObject* description) {
    unsigned long long config, function;
    long long rows, most, fixed, per_sequence, cluster;
    int by_sequence;
    PyObject* arguments;
    if (!PyArg_ParseTuple(description, "KK(LLpLLL)O!", &config, &function, &rows, &most, &by_sequence, &fixed,
                          &per_sequence, &cluster, &PyTuple_Type, &arguments)) {
        return false;
    }
    Step step{*reinterpret_cast<const LaunchConfig*>(config), reinterpret_cast<void*>(function),
              {rows, most, by_sequence, fixed, per_sequence, cluster}, {}, {}};
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(arguments); ++i) {
        const char* name;
        int operand;
        PyObject* boxes = nullptr;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(arguments, i), "si|O!", &name, &operand, &PyTuple_Type, &boxes)) {
            return false;
        }
        const auto* const kind = std::find_if(std::begin(kKinds), std::end(kKinds),
                                              [&](const Kind& k) { return std::strcmp(k.name, name) == 0; });
        if (kind == std::end(kKinds)) {
            return PyErr_Format(PyExc_ValueError, "no kernel argument of kind '%s' is known", name), false;
        }
        step.arguments.push_back({kind->value, operand});
        if (boxes == nullptr) continue;
        Mapped mapped{size_t(i), operand, {}};
        Boxes& b = mapped.boxes;
        if (!PyArg_ParseTuple(boxes, "LLLLLLp", &b.columns, &b.rows, &b.matrices, &b.box_columns, &b.box_rows,
                              &b.data_type, &b.stacked)) {
            return false;
        }
        step.maps.push_back(mapped);
        if (step.maps.size() > kMostMaps) {
            return PyErr_Format(PyExc_ValueError, "a kernel has more than %zu tensor maps", kMostMaps), false;
        }
    }
    plan.steps.push_back(std::move(step));
    return true;
}

bool add_buffer(Plan& plan, PyObject* description) {
    Buffer buffer;
    PyObject *columns, *example;
    if (!PyArg_ParseTuple(description, "iOOi", &buffer.rows, &columns, &example, &buffer.reuses)) return false;
    const c10::TensorImpl* const tensor = sample(example);
    if (tensor == nullptr || !shape_of(columns, buffer.columns)) return false;
    buffer.dtype = tensor->dtype().toScalarType();
    plan.buffers.push_back(std::move(buffer));
    return true;
}

// Plan(example, driver, (inputs, tokens_from, sequences_from, slots_from, slots_per_token, more_slots), buffers, steps,
// results, failed, keep): see `Prepared` of execute.py.
PyObject* new_plan(PyTypeObject* type, PyObject* arguments, PyObject*) {
    PyObject *example, *driver, *buffers, *steps, *results, *failed, *keep;
    int inputs, tokens_from, sequences_from, slots_from;
    long long slots_per_token, more_slots;
    if (!PyArg_ParseTuple(arguments, "OO!(iiiiLL)O!O!OOO", &example, &PyTuple_Type, &driver, &inputs, &tokens_from,
                          &sequences_from, &slots_from, &slots_per_token, &more_slots, &PyTuple_Type, &buffers,
                          &PyTuple_Type, &steps, &results, &failed, &keep)) {
        return nullptr;
    }
    auto* const plan = allocate<Plan>(type);
    if (plan == nullptr) return nullptr;
    Reference owner(reinterpret_cast<PyObject*>(plan));
    const c10::TensorImpl* const tensor = sample(example);
    if (tensor == nullptr) return nullptr;
    plan->device = tensor->device();
    unsigned long long address[7];
    if (!PyArg_ParseTuple(driver, "KKKKKKK", address, address + 1, address + 2, address + 3, address + 4, address + 5,
                          address + 6)) {
        return nullptr;
    }
    static_assert(sizeof(Driver) == sizeof address);
    std::memcpy(&plan->driver, address, sizeof address);
    plan->inputs = inputs;
    plan->tokens_from = tokens_from;
    plan->sequences_from = sequences_from;
    plan->slots_from = slots_from;
    plan->slots_per_token = slots_per_token;
    plan->more_slots = more_slots;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(buffers); ++i) {
        if (!add_buffer(*plan, PyTuple_GET_ITEM(buffers, i))) return nullptr;
    }
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(steps); ++i) {
        if (!add_step(*plan, PyTuple_GET_ITEM(steps, i))) return nullptr;
    }
    std::vector<int64_t> numbers;
    if (!integers(results, numbers)) return nullptr;
    plan->results.assign(numbers.begin(), numbers.end());
    for (const int64_t number : numbers) {
        if (number >= inputs) plan->buffers[number - inputs].is_result = true;
    }
    plan->passes_inputs_on = std::any_of(numbers.begin(), numbers.end(), [&](int64_t n) { return n < inputs; });
    plan->failed = Reference::to(failed);
    plan->keep = Reference::to(keep);
    return owner.release();
}

PyTypeObject* plan_type;
PyTypeObject* table_type;

// Table(edges)
PyObject* new_table(PyTypeObject* type, PyObject* arguments, PyObject*) {
    PyObject* edges;
    std::vector<int64_t> numbers;
    if (!PyArg_ParseTuple(arguments, "O", &edges) || !integers(edges, numbers)) return nullptr;
    auto* const table = allocate<Table>(type);
    if (table == nullptr) return nullptr;
    table->call = call_table;
    table->edges.assign(numbers.begin(), numbers.end());
    return reinterpret_cast<PyObject*>(table);
}

// add(device_index, bucket, alignments, plan)
PyObject* add_plan(PyObject* self, PyObject* arguments) {
    Row row;
    PyObject *alignments, *plan;
    if (!PyArg_ParseTuple(arguments, "iiOO!", &row.device_index, &row.bucket, &alignments, plan_type, &plan)) {
        return nullptr;
    }
    std::vector<int64_t> numbers;
    if (!integers(alignments, numbers)) return nullptr;
    row.alignments.assign(numbers.begin(), numbers.end());
    row.plan = Reference::to(plan);
    reinterpret_cast<Table*>(self)->rows.push_back(std::move(row));
    Py_RETURN_NONE;
}

// clear()
PyObject* clear_table(PyObject* self, PyObject*) {
    reinterpret_cast<Table*>(self)->rows.clear();
    Py_RETURN_NONE;
}

bool add_variant(Caller& caller, PyObject* description) {
    Variant variant;
    PyObject *inputs, *has_rows, *table;
    if (!PyArg_ParseTuple(description, "O!OO!", &PyTuple_Type, &inputs, &has_rows, table_type, &table)) return false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(inputs); ++i) {
        Declared declared;
        PyObject *name, *shape, *example;
        if (!PyArg_ParseTuple(PyTuple_GET_ITEM(inputs, i), "UOO", &name, &shape, &example)) return false;
        const c10::TensorImpl* const tensor = sample(example);
        if (tensor == nullptr || !shape_of(shape, declared.shape)) return false;
        Py_INCREF(name);
        PyUnicode_InternInPlace(&name);
        declared.name = Reference(name);
        declared.dtype = tensor->dtype().toScalarType();
        variant.inputs.push_back(std::move(declared));
    }
    std::vector<int64_t> flags;
    if (!integers(has_rows, flags)) return false;
    variant.has_rows.assign(flags.begin(), flags.end());
    variant.table = Reference::to(table);
    caller.variants.push_back(std::move(variant));
    return true;
}

// Caller(example, backend, result_type, variants); see `CompiledLayer` in layer.py.
PyObject* new_caller(PyTypeObject* type, PyObject* arguments, PyObject*) {
    PyObject *example, *result_type, *variants;
    const char* backend;
    if (!PyArg_ParseTuple(arguments, "OsO!O!", &example, &backend, &PyType_Type, &result_type, &PyTuple_Type,
                          &variants)) {
        return nullptr;
    }
    const c10::TensorImpl* const tensor = sample(example);
    if (tensor == nullptr) return nullptr;
    auto* const caller = allocate<Caller>(type);
    if (caller == nullptr) return nullptr;
    Reference owner(reinterpret_cast<PyObject*>(caller));
    caller->call = call_caller;
    const bool cuda = tensor->device().is_cuda();
    caller->plain_keys = c10::DispatchKeySet(cuda ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU) |
                         c10::DispatchKeySet(cuda ? c10::DispatchKey::AutocastCUDA : c10::DispatchKey::AutocastCPU) |
                         c10::autograd_dispatch_keyset_with_ADInplaceOrView;
    caller->backend = backend;
    caller->result_type = Reference::to(result_type);
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(variants); ++i) {
        if (!add_variant(*caller, PyTuple_GET_ITEM(variants, i))) return nullptr;
    }
    return owner.release();
}

#define MEMBER(type) {"__vectorcalloffset__", T_PYSSIZET, offsetof(type, call), READONLY, nullptr}
PyMemberDef table_members[] = {MEMBER(Table), {}};
PyMemberDef caller_members[] = {MEMBER(Caller), {}};
PyMethodDef table_methods[] = {
    {"add", add_plan, METH_VARARGS, nullptr}, {"clear", clear_table, METH_NOARGS, nullptr}, {}};

PyType_Slot plan_slots[] = {{Py_tp_new, reinterpret_cast<void*>(new_plan)},
                            {Py_tp_dealloc, reinterpret_cast<void*>(deallocate<Plan>)},
                            {}};
PyType_Slot table_slots[] = {{Py_tp_new, reinterpret_cast<void*>(new_table)},
                             {Py_tp_dealloc, reinterpret_cast<void*>(deallocate<Table>)},
                             {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                             {Py_tp_members, table_members},
                             {Py_tp_methods, table_methods},
                             {}};
PyType_Slot caller_slots[] = {{Py_tp_new, reinterpret_cast<void*>(new_caller)},
                              {Py_tp_dealloc, reinterpret_cast<void*>(deallocate<Caller>)},
                              {Py_tp_call, reinterpret_cast<void*>(PyVectorcall_Call)},
                              {Py_tp_members, caller_members},
                              {}};

constexpr unsigned kCallable = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL;
PyType_Spec plan_spec = {"moesaic_launcher.Plan", sizeof(Plan), 0, Py_TPFLAGS_DEFAULT, plan_slots};
PyType_Spec table_spec = {"moesaic_launcher.Table", sizeof(Table), 0, kCallable, table_slots};
PyType_Spec caller_spec = {"moesaic_launcher.Caller", sizeof(Caller), 0, kCallable, caller_slots};

PyModuleDef module = {PyModuleDef_HEAD_INIT, "moesaic_launcher", nullptr, -1, {}, {}, {}, {}, {}};

PyTypeObject* type_from(const char* module_name, const char* name) {
    const Reference from(PyImport_ImportModule(module_name));
    return from ? reinterpret_cast<PyTypeObject*>(PyObject_GetAttrString(from.get(), name)) : nullptr;
}

}  // namespace

PyMODINIT_FUNC PyInit_moesaic_launcher() {
    tensor_type = type_from("torch", "Tensor");
    parameter_type = type_from("torch.nn", "Parameter");
    if (tensor_type == nullptr || parameter_type == nullptr || !find_tensor_offset()) return nullptr;
    Reference made(PyModule_Create(&module));
    if (!made) return nullptr;
    plan_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&plan_spec));
    table_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&table_spec));
    auto* const caller_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&caller_spec));
    for (PyTypeObject* type : {plan_type, table_type, caller_type}) {
        if (type == nullptr || PyModule_AddType(made.get(), type) != 0) return nullptr;
    }
    Reference kinds(PyTuple_New(Py_ssize_t(std::size(kKinds))));
    if (!kinds) return nullptr;
    for (size_t i = 0; i < std::size(kKinds); ++i) {
        PyObject* const name = PyUnicode_FromString(kKinds[i].name);
        if (name == nullptr) return nullptr;
        PyTuple_SET_ITEM(kinds.get(), Py_ssize_t(i), name);
    }
    if (PyModule_AddObjectRef(made.get(), "ARGUMENT_KINDS", kinds.get()) != 0) return nullptr;
    return made.release();
}
