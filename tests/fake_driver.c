// A CUDA driver without a GPU: just enough of libcuda to test the launcher through the real Python bindings.
// It records launches, the last one also as text, and answers as one Hopper GPU (and a second one) would.
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

typedef int Result;
typedef void* Handle;
typedef struct {
  unsigned grid[3], block[3], shared;
  Handle stream, attributes;
  unsigned num_attributes;
} Config;

static __thread Handle contexts[16];
static __thread int depth;
static int allowed_shared, unloads, failure, encode_failure, encodes;
static char last[512];

// Kernels that a test has named, with the number of their arguments, of 8 bytes each but for those that are tensor maps.
static struct { char name[200]; int arguments; unsigned maps; } kernels[1024];
static int kernel_count;

// What a tensor map was encoded from, in the place of what the driver makes of it.
typedef struct {
  uint64_t address, dims[4], strides[3];
  uint32_t box[4], element_strides[4], type, rank, interleave, swizzle, promotion, fill;
  uint64_t unused;
} Map;
_Static_assert(sizeof(Map) == 128, "the size of CUtensorMap");

typedef struct {
  Handle function, stream, context;
  unsigned grid[3], block[3], dependent;
  uint64_t arguments[32];
  int map_count;
  Map maps[4];
} Record;
static Record records[4096];
static int record_count;
static pthread_mutex_t records_lock = PTHREAD_MUTEX_INITIALIZER;
static __thread Handle stream;

Result cuInit(unsigned flags) { return 0; }
Result cuDriverGetVersion(int* version) { *version = 13020; return 0; }
Result cuDeviceGetCount(int* count) { *count = 2; return 0; }
Result cuDeviceGet(int* device, int ordinal) { *device = ordinal; return ordinal < 0 || ordinal > 1 ? 101 : 0; }
Result cuDeviceGetName(char* name, int size, int device) { strncpy(name, "Fake GPU", size); return 0; }
Result cuDeviceGetAttribute(int* value, int which, int device) {
  *value = which == 75 ? 9 : which == 76 ? 0 : which == 16 ? 132 : which == 97 ? 232448 : -1;
  return 0;
}
Result cuDevicePrimaryCtxRetain(Handle* context, int device) {
  *context = (Handle)(uintptr_t)(0x1000 + device);
  return 0;
}
Result cuCtxGetCurrent(Handle* context) { *context = depth ? contexts[depth - 1] : 0; return 0; }
Result cuCtxPushCurrent(Handle context) { contexts[depth++] = context; return 0; }
Result cuCtxPopCurrent(Handle* context) { if (!depth) return 201; *context = contexts[--depth]; return 0; }
Result cuCtxPushCurrent_v2(Handle context) { return cuCtxPushCurrent(context); }
Result cuCtxPopCurrent_v2(Handle* context) { return cuCtxPopCurrent(context); }
Result cuModuleLoadData(Handle* module, const void* image) {
  if (!depth) return 201;
  if (memcmp(image, "\x7f" "ELF", 4)) return 209;
  *module = (Handle)0x2000;
  return 0;
}
Result cuModuleUnload(Handle module) { ++unloads; return 0; }
Result cuModuleGetFunction(Handle* function, Handle module, const char* name) {
  *function = (Handle)0x3000;
  for (int i = kernel_count - 1; i >= 0; --i) {  // the newest of a name
    if (!strcmp(name, kernels[i].name)) { *function = &kernels[i]; return 0; }
  }
  return strcmp(name, "kernel") ? 500 : 0;
}
Result cuFuncLoad(Handle function) { return 0; }
Result cuFuncGetAttribute(int* value, int which, Handle function) {
  *value = which == 0 ? 1024 : which == 1 ? 1024 : which == 4 ? 40 : 0;
  return 0;
}
Result cuFuncSetAttribute(Handle function, int which, int value) { allowed_shared = value; return which == 8 ? 0 : 1; }
// One fewer than the multiprocessors hold, as their groups would have it.
Result cuOccupancyMaxActiveClusters(int* clusters, Handle function, const Config* c) {
  const int* const attribute = c->attributes;
  *clusters = 132 * (1536 / c->block[0]) / attribute[2] - 1;  // at 40 registers
  return c->num_attributes == 1 && attribute[0] == 4 && attribute[3] == 1 && attribute[4] == 1 ? 0 : 1;
}
Result cuGetErrorString(Result result, const char** text) { *text = "the fake driver says so"; return 0; }
Result cuLaunchKernelEx(const Config* c, Handle function, void** p, void** extra) {
  if (failure) return failure;
  if (function != (Handle)0x3000) {
    Record record = {function, c->stream, depth ? contexts[depth - 1] : 0};
    memcpy(record.grid, c->grid, sizeof record.grid);
    memcpy(record.block, c->block, sizeof record.block);
    // Programmatic stream serialization, the one attribute there may be.
    record.dependent = c->num_attributes == 1 && *(const int*)c->attributes == 6;
    const __typeof__(&kernels[0]) kernel = function;
    for (int i = 0; i < kernel->arguments; ++i) {
      if (kernel->maps >> i & 1) memcpy(&record.maps[record.map_count++], p[i], sizeof(Map));
      else record.arguments[i] = *(uint64_t*)p[i];
    }
    pthread_mutex_lock(&records_lock);
    if (record_count < 4096) records[record_count++] = record;
    pthread_mutex_unlock(&records_lock);
    return 0;
  }
  snprintf(last, sizeof last,
           "grid %u %u %u block %u %u %u shared %u stream %p attributes %u context %p args %llx %d %g", c->grid[0],
           c->grid[1], c->grid[2], c->block[0], c->block[1], c->block[2], c->shared, c->stream, c->num_attributes,
           depth ? contexts[depth - 1] : 0, *(unsigned long long*)p[0], *(int*)p[1], *(float*)p[2]);
  return 0;
}

// Refuses what the driver is documented to refuse. Nothing it does needs a GPU, but a context.
Result cuTensorMapEncodeTiled(void* encoded, int type, uint32_t rank, void* address, const uint64_t* dims,
                              const uint64_t* strides, const uint32_t* box, const uint32_t* element_strides,
                              int interleave, int swizzle, int promotion, int fill) {
  Map map = {(uint64_t)(uintptr_t)address};
  if (!depth) return 201;
  if (encode_failure) return encode_failure;
  if ((uintptr_t)encoded % 64 || rank < 3 || rank > 4 || !address || (uintptr_t)address % 16) return 1;
  for (uint32_t i = 0; i < rank; ++i) {
    if (!dims[i] || dims[i] > 1ull << 32 || !box[i] || box[i] > 256 || element_strides[i] != 1) return 1;
    map.dims[i] = dims[i], map.box[i] = box[i], map.element_strides[i] = element_strides[i];
  }
  for (uint32_t i = 0; i < rank - 1; ++i) {
    if (strides[i] % 16 || strides[i] >= 1ull << 40) return 1;
    map.strides[i] = strides[i];
  }
  if (swizzle == 3 && box[0] * 2 > 128) return 1;
  map.type = type, map.rank = rank, map.interleave = interleave, map.swizzle = swizzle, map.promotion = promotion;
  map.fill = fill;
  memcpy(encoded, &map, sizeof map);
  __atomic_fetch_add(&encodes, 1, __ATOMIC_RELAXED);
  return 0;
}

const char* fake_last(void) { return last; }
int fake_allowed_shared(void) { return allowed_shared; }
int fake_depth(void) { return depth; }
int fake_unloads(void) { return unloads; }
void fake_fail(int result) { failure = result; }
void fake_fail_encode(int result) { encode_failure = result; }
int fake_encodes(void) { return encodes; }
void fake_kernel(const char* name, int arguments, unsigned maps) {  // bit i of `maps`: argument i is one, of 4 at most
  strncpy(kernels[kernel_count].name, name, sizeof kernels[0].name - 1);
  kernels[kernel_count].maps = maps;
  kernels[kernel_count++].arguments = arguments;
}
const Record* fake_records(int* count) { *count = record_count; record_count = 0; return records; }
const char* fake_name(Handle function) { return ((__typeof__(&kernels[0]))function)->name; }

// As torch's `aoti_torch_get_current_cuda_stream`.
int fake_current_stream(int32_t device_index, Handle* current) { *current = stream; return 0; }
void fake_use_stream(Handle used) { stream = used; }

Result cuGetProcAddress_v2(const char* name, void** function, int version, uint64_t flags, int* status) {
  Dl_info self;
  dladdr((void*)fake_last, &self);
  void* library = dlopen(self.dli_fname, RTLD_NOW);
  *function = dlsym(library, name);
  if (status) *status = *function ? 0 : 1;
  return *function ? 0 : 500;
}
Result cuGetProcAddress(const char* name, void** function, int version, uint64_t flags, int* status) {
  return cuGetProcAddress_v2(name, function, version, flags, status);
}
