// A stand-in for libamdhip64: device memory is host memory, and the one
// kernel it knows is computed here. It writes down the calls that matter, and
// fails where it is told to.
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char calls[1 << 16];
static char failing[64], arch[256] = "gfx942:sramecc+:xnack-";
static int failing_code;
static __thread int device_of_thread = -1;
static int the_stream, the_module, scale_function;

const char *fake_calls(void) { return calls; }
void fake_fail(const char *function, int code) { strcpy(failing, function); failing_code = code; }
void fake_arch(const char *name) { strcpy(arch, name); }

static void say(const char *format, ...) {
  va_list args;
  va_start(args, format);
  size_t length = strlen(calls);
  vsnprintf(calls + length, sizeof calls - length - 1, format, args);
  strcat(calls, "\n");
  va_end(args);
}
static int outcome(const char *function) { return strcmp(failing, function) ? 0 : failing_code; }
static int on_device(void) { return device_of_thread == 1 ? 0 : 101; }

int hipInit(unsigned flags) { return outcome("hipInit"); }
int hipRuntimeGetVersion(int *version) { *version = 60241133; return 0; }
const char *hipGetErrorName(int code) { return code == 209 ? "hipErrorNoBinaryForGpu" : code == 700 ? "hipErrorIllegalAddress" : "hipErrorSome"; }
const char *hipGetErrorString(int code) { return "some words"; }
int hipGetDeviceCount(int *count) { *count = 2; return outcome("hipGetDeviceCount"); }
int hipSetDevice(int device) { device_of_thread = device; return 0; }
#ifndef OLD
int hipGetDevicePropertiesR0600(char *properties, int device) {
  memset(properties, 0xee, 1472);
  strcpy(properties, "Fake MI300X");
  *(uint64_t *)(properties + 288) = 206141652992ull;
  *(uint64_t *)(properties + 296) = 65536;
  *(int *)(properties + 388) = 304;
  strcpy(properties + 1160, arch);
  return outcome("hipGetDevicePropertiesR0600");
}
#endif
int hipMemGetInfo(size_t *available, size_t *total) { *available = 4096; *total = 206141652992ull; return on_device(); }
int hipStreamCreateWithFlags(void **stream, unsigned flags) { say("create stream %u", flags); *stream = &the_stream; return on_device(); }
int hipStreamDestroy(void *stream) { say("destroy stream"); return 0; }
int hipStreamSynchronize(void *stream) { say("synchronize"); return outcome("hipStreamSynchronize"); }
int hipMallocAsync(uint64_t *address, size_t bytes, void *stream) {
  say("alloc %zu", bytes);
  *address = (uint64_t)calloc(1, bytes);
  return outcome("hipMallocAsync") ? outcome("hipMallocAsync") : on_device();
}
int hipFreeAsync(uint64_t address, void *stream) { say("free"); free((void *)address); return on_device(); }
int hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *stream) {
  say("copy %zu %s", bytes, kind == 1 ? "up" : kind == 2 ? "down" : "?");
  memcpy(to, from, bytes);
  return on_device();
}
int hipModuleLoadData(void **module, const void *image) {
  say("load %s", memcmp(image, "\x7f" "ELF", 4) ? "rubbish" : "an ELF file");
  *module = &the_module;
  return outcome("hipModuleLoadData");
}
int hipModuleUnload(void *module) { say("unload"); return 0; }
int hipModuleGetFunction(void **function, void *module, const char *name) {
  *function = &scale_function;
  return strcmp(name, "scale") ? 500 : 0;
}
int hipModuleLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void *stream, void **params, void **extra) {
  say("launch %s grid %u %u %u block %u %u %u shared %u stream %s extra %s",
      function == &scale_function ? "scale" : "?", gx, gy, gz, bx, by, bz, shared,
      stream == &the_stream ? "ours" : "other", extra ? "some" : "none");
  if (outcome("hipModuleLaunchKernel")) return outcome("hipModuleLaunchKernel");
  float factor = *(float *)params[0], bias = *(float *)params[4];
  float *in = *(float **)params[1], *out = *(float **)params[2];
  int64_t count = *(int64_t *)params[3];
  for (int64_t i = 0; i < count; i++) out[i] = in[i] * factor + bias;
  return on_device();
}
