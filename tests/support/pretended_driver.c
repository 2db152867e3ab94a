// libcuda without a GPU: every call succeeds, and a launch writes its arguments to a log.
#include <stdint.h>
#include <string.h>

typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream, *attributes;
  unsigned num_attributes;
} LaunchConfig;

#define MAX_KERNELS 256
#define MAX_ARGUMENTS 256
static int sizes[MAX_KERNELS][MAX_ARGUMENTS];
static int counts[MAX_KERNELS];
static uint64_t loaded = 0;

uint8_t pretended_log[1 << 20];
int pretended_log_size = 0;

// The bytes of each argument of a kernel, which a launch does not say.
void pretended_set_arguments(uint64_t function, int count, const int *bytes) {
  counts[function] = count;
  memcpy(sizes[function], bytes, count * sizeof(int));
}

static void note(const void *bytes, int size) {
  memcpy(pretended_log + pretended_log_size, bytes, size);
  pretended_log_size += size;
}

int cuLaunchKernelEx(const LaunchConfig *config, void *function, void **arguments,
                     void **extra) {
  uint64_t kernel = (uint64_t)function;
  note(&kernel, 8);
  note(config->grid, 12);
  note(&config->stream, 8);
  for (int i = 0; i < counts[kernel]; i++) note(arguments[i], sizes[kernel][i]);
  return 0;
}

// What a tensor map is made from, in place of the hardware's format.
int cuTensorMapEncodeTiled(void *map, int dtype, unsigned rank, void *address,
                           const uint64_t *shape, const uint64_t *strides,
                           const uint32_t *box, const uint32_t *steps, int interleave,
                           int swizzle, int promotion, int fill) {
  uint64_t *fields = map;
  memset(map, 0, 128);
  fields[0] = (uint64_t)address;
  for (unsigned i = 0; i < rank; i++) {
    fields[1 + i] = shape[i];
    fields[6 + i] = box[i];
  }
  for (unsigned i = 0; i + 1 < rank; i++) fields[11 + i] = strides[i];
  return 0;
}

int cuModuleLoadData(void **module, const void *image) {
  *module = (void *)1;
  return 0;
}
int cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = (void *)(++loaded);
  return loaded >= MAX_KERNELS;
}
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  // multiprocessors, compute capability, shared memory; a warp for the rest
  *value = attribute == 16   ? 132
           : attribute == 75 ? 9
           : attribute == 76 ? 0
           : attribute == 97 ? 232448
                             : 32;
  return 0;
}
int cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 0 ? 1024 : 64;
  return 0;
}
int cuCtxGetCurrent(void **context) {
  *context = (void *)1;
  return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) {
  *context = (void *)1;
  return 0;
}
int cuDeviceGet(int *device, int ordinal) {
  *device = 0;
  return 0;
}
// from triton 3.8 on
int cuCtxGetDevice(int *device) {
  *device = 0;
  return 0;
}
int cuModuleUnload(void *module) { return 0; }
int cuStreamIsCapturing(void *stream, int *status) {
  *status = 0;
  return 0;
}
int cuDriverGetVersion(int *version) {
  *version = 13000;
  return 0;
}
int cuCtxGetLimit(size_t *value, int limit) {
  *value = 1 << 20;
  return 0;
}
int cuGetErrorString(int error, const char **words) {
  *words = "pretended";
  return 0;
}
int cuPointerGetAttribute(void *value, int attribute, uint64_t pointer) {
  *(uint64_t *)value = pointer;
  return 0;
}
int cuOccupancyMaxActiveClusters(int *clusters, void *function, void *config) {
  *clusters = 1;
  return 0;
}
int cuCtxSetCurrent(void *context) { return 0; }
int cuCtxSetLimit(int limit, size_t value) { return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuFuncSetCacheConfig(void *function, int config) { return 0; }
int cuPointerGetAttributes(unsigned n, int *attributes, void **values, uint64_t p) {
  return 0;
}
int cuTensorMapEncodeIm2col(void) { return 1; }
