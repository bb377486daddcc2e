// A libcuda that does nothing: every call succeeds at once. There is no memory behind
// the addresses that it returns, and no lock.
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

static __thread void *current;
static char context, object;

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetCount(int *count) { *count = 1; return 0; }
int cuDeviceGetName(char *name, int length, int device) { strncpy(name, "idle H100", length); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 80ull << 30; return 0; }
int cuMemGetInfo_v2(size_t *available, size_t *total) { *available = *total = 80ull << 30; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case 10: *value = 32; break;      // lanes of a warp
    case 16: *value = 132; break;     // multiprocessors
    case 39: *value = 2048; break;    // threads of one
    case 75: *value = 9; break;       // the capability is 9.0
    case 81: *value = 233472; break;  // shared memory of a multiprocessor
    case 97: *value = 232448; break;  // and of a block
    case 115: *value = 1; break;      // pools of memory
    default: *value = 0;
  }
  return 0;
}
int cuDevicePrimaryCtxRetain(void **made, int device) { *made = &context; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { return 0; }
int cuCtxGetCurrent(void **found) { *found = current; return 0; }
int cuCtxSetCurrent(void *wanted) { current = wanted; return 0; }
int cuCtxSynchronize(void) { return 0; }
int cuGetErrorName(int code, const char **name) { *name = "CUDA_ERROR_OF_NOTHING"; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "some words"; return 0; }

int cuDeviceGetDefaultMemPool(void **pool, int device) { *pool = &object; return 0; }
int cuMemPoolSetAttribute(void *pool, int attribute, void *value) { return 0; }
int cuMemPoolSetAccess(void *pool, const void *access, size_t count) { return 0; }
int cuDeviceCanAccessPeer(int *can, int device, int peer) { *can = 0; return 0; }

int cuStreamCreate(void **stream, unsigned flags) { *stream = malloc(1); return 0; }
int cuStreamDestroy_v2(void *stream) { free(stream); return 0; }
int cuStreamSynchronize(void *stream) { return 0; }
int cuStreamWaitEvent(void *stream, void *event, unsigned flags) { return 0; }

int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
  static uint64_t next = 1ull << 40;
  *address = __atomic_fetch_add(&next, (bytes | 0xffff) + 1, __ATOMIC_RELAXED);
  return 0;
}
int cuMemAllocAsync(uint64_t *address, size_t bytes, void *stream) { return cuMemAlloc_v2(address, bytes); }
int cuMemFree_v2(uint64_t address) { return 0; }
int cuMemFreeAsync(uint64_t address, void *stream) { return 0; }
int cuMemHostAlloc(void **address, size_t bytes, unsigned flags) { *address = malloc(bytes); return 0; }
int cuMemFreeHost(void *address) { free(address); return 0; }
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) { return 0; }
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) { return 0; }
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream) { return 0; }
int cuMemcpy2DAsync_v2(const void *copy, void *stream) { return 0; }

int cuModuleLoadData(void **module, const void *image) { *module = &object; return 0; }
int cuModuleUnload(void *module) { return 0; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = &object; return 0; }
int cuFuncGetAttribute(int *value, int attribute, void *function) { *value = 0; return 0; }
int cuFuncSetAttribute(void *function, int attribute, int value) { return 0; }
int cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, void *function, int threads, size_t shared) {
  *blocks = 1;
  return 0;
}

static uint64_t launches;
uint64_t idle_launches(void) { return __atomic_load_n(&launches, __ATOMIC_RELAXED); }
static int launched(void) {
  __atomic_fetch_add(&launches, 1, __ATOMIC_RELAXED);
  return 0;
}
int cuLaunchKernel(void *function, unsigned x, unsigned y, unsigned z, unsigned a, unsigned b, unsigned c,
                   unsigned shared, void *stream, void **params, void **extra) {
  return launched();
}
int cuLaunchKernelEx(const void *config, void *function, void **params, void **extra) { return launched(); }
int cuTensorMapEncodeTiled(char *map, unsigned type, unsigned rank, uint64_t address, const uint64_t *sizes,
                           const uint64_t *strides, const unsigned *box, const unsigned *steps, unsigned interleave,
                           unsigned swizzle, unsigned promotion, unsigned fill) {
  memset(map, 0, 128);
  return 0;
}

int cuEventCreate(void **event, unsigned flags) { *event = malloc(1); return 0; }
int cuEventRecord(void *event, void *stream) { return 0; }
int cuEventQuery(void *event) { return 0; }
int cuEventSynchronize(void *event) { return 0; }
int cuEventElapsedTime(float *ms, void *from, void *to) { *ms = 0; return 0; }
int cuEventDestroy_v2(void *event) { free(event); return 0; }
int cuStreamBeginCapture_v2(void *stream, int mode) { return 0; }
int cuStreamEndCapture(void *stream, void **graph) { *graph = &object; return 0; }
int cuGraphInstantiateWithFlags(void **instance, void *graph, unsigned long long flags) { *instance = &object; return 0; }
int cuGraphLaunch(void *instance, void *stream) { return launched(); }
int cuGraphDestroy(void *graph) { return 0; }
int cuGraphExecDestroy(void *instance) { return 0; }
