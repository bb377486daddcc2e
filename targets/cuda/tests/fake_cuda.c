// A stand-in for libcuda: device memory is host memory, and the one kernel it
// knows is computed here. Calls that matter are written to FAKE_CUDA_LOG.
// FAKE_CUDA_FAIL="function:code" makes a function fail.
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef int Result;

static void say(const char *format, ...) {
  const char *path = getenv("FAKE_CUDA_LOG");
  FILE *file = path ? fopen(path, "a") : 0;
  if (!file) return;
  va_list args;
  va_start(args, format);
  vfprintf(file, format, args);
  va_end(args);
  fputc('\n', file);
  fclose(file);
}

static Result outcome(const char *function) {
  const char *fail = getenv("FAKE_CUDA_FAIL");
  size_t length = strlen(function);
  if (fail && !strncmp(fail, function, length) && fail[length] == ':') return atoi(fail + length + 1);
  return 0;
}

static int context_of_thread_set;
static int the_context, the_stream, the_module, the_pool, scale_function, fill_function;

Result cuInit(unsigned flags) { return outcome("cuInit"); }
Result cuDriverGetVersion(int *version) { *version = 12040; return 0; }
Result cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
Result cuDeviceGetCount(int *count) { *count = 2; return outcome("cuDeviceGetCount"); }
Result cuDeviceGetName(char *name, int length, int device) { snprintf(name, length, "Fake H200"); return 0; }
Result cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 150754820096ull; return 0; }
Result cuDeviceGetDefaultMemPool(void **pool, int device) { *pool = &the_pool; return 0; }
Result cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case 16: *value = 132; break;     // multiprocessors
    case 75: *value = 9; break;       // capability, major
    case 76: *value = 0; break;       // capability, minor
    case 97: *value = 232448; break;  // shared memory per block at most
    case 115: *value = getenv("FAKE_CUDA_NO_POOLS") ? 0 : 1; break;
    default: *value = 0;
  }
  return 0;
}
Result cuDevicePrimaryCtxRetain(void **context, int device) { *context = &the_context; return 0; }
Result cuDevicePrimaryCtxRelease_v2(int device) { say("release"); return 0; }
Result cuCtxGetCurrent(void **context) { *context = context_of_thread_set ? &the_context : 0; return 0; }
Result cuCtxSetCurrent(void *context) { context_of_thread_set = 1; return 0; }
Result cuCtxSynchronize(void) { return 0; }
Result cuStreamCreate(void **stream, unsigned flags) { *stream = &the_stream; return 0; }
Result cuStreamDestroy_v2(void *stream) { say("destroy stream"); return 0; }
Result cuStreamSynchronize(void *stream) { say("synchronize"); return outcome("cuStreamSynchronize"); }
Result cuMemAllocAsync(uint64_t *address, size_t bytes, void *stream) {
  say("alloc %zu", bytes);
  *address = (uint64_t)calloc(1, bytes);
  return outcome("cuMemAllocAsync");
}
Result cuMemAlloc_v2(uint64_t *address, size_t bytes) {
  say("alloc sync %zu", bytes);
  *address = (uint64_t)calloc(1, bytes);
  return 0;
}
Result cuMemFreeAsync(uint64_t address, void *stream) { say("free"); free((void *)address); return 0; }
Result cuMemFree_v2(uint64_t address) { say("free sync"); free((void *)address); return 0; }
Result cuMemGetInfo_v2(size_t *available, size_t *total) { *available = 4096; *total = 150754820096ull; return 0; }
Result cuMemPoolSetAttribute(void *pool, int attribute, uint64_t *value) {
  say("pool attribute %d = %llx", attribute, (unsigned long long)*value);
  return 0;
}
Result cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
  say("upload %zu", bytes);
  memcpy((void *)to, from, bytes);
  return outcome("cuMemcpyHtoDAsync");
}
Result cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
  say("download %zu", bytes);
  memcpy(to, (void *)from, bytes);
  return 0;
}
Result cuPointerGetAttribute(void *value, int attribute, uint64_t address) { return 1; }
Result cuModuleLoadData(void **module, const void *image) {
  say("load %s", memcmp(image, "\x7f" "ELF", 4) ? "rubbish" : "an ELF file");
  *module = &the_module;
  return outcome("cuModuleLoadData");
}
Result cuModuleUnload(void *module) { say("unload"); return 0; }
Result cuModuleGetFunction(void **function, void *module, const char *name) {
  *function = !strcmp(name, "scale") ? &scale_function : &fill_function;
  return !strcmp(name, "scale") || !strcmp(name, "fill") ? 0 : 500;
}
Result cuFuncGetAttribute(int *value, int attribute, void *function) {
  *value = attribute == 1 && function == &scale_function ? 1024 : 0;
  return 0;
}
Result cuFuncSetAttribute(void *function, int attribute, int value) {
  say("function attribute %d = %d", attribute, value);
  return outcome("cuFuncSetAttribute");
}
Result cuLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                      unsigned shared, void *stream, void **params, void **extra) {
  say("launch %s grid %u %u %u block %u %u %u shared %u stream %s extra %s",
      function == &scale_function ? "scale" : "fill", gx, gy, gz, bx, by, bz, shared,
      stream == &the_stream ? "ours" : "other", extra ? "some" : "none");
  if (outcome("cuLaunchKernel")) return outcome("cuLaunchKernel");
  if (function != &scale_function) return 0;
  float factor = *(float *)params[0], bias = *(float *)params[4];
  float *in = *(float **)params[1], *out = *(float **)params[2];
  int64_t count = *(int64_t *)params[3];
  for (int64_t i = 0; i < count; i++) out[i] = in[i] * factor + bias;
  return 0;
}
#ifndef OLD
Result cuGetErrorString(int code, const char **text) {
  *text = code == 700 ? "an illegal memory access was encountered" : "some words";
  return 0;
}
#endif
