// A stand-in for libcuda: see fake_gpu.h.
#define FN_memory_info cuMemGetInfo_v2
#define FN_default_pool cuDeviceGetDefaultMemPool
#define FN_pool_set cuMemPoolSetAttribute
#define FN_pool_access cuMemPoolSetAccess
#define FN_can_access_peer cuDeviceCanAccessPeer
#define FN_stream_create cuStreamCreate
#define FN_stream_destroy cuStreamDestroy_v2
#define FN_stream_synchronize cuStreamSynchronize
#define FN_stream_wait cuStreamWaitEvent
#define FN_alloc_async cuMemAllocAsync
#define FN_free_async cuMemFreeAsync
#define FN_alloc cuMemAlloc_v2
#define FN_free cuMemFree_v2
#define FN_host_alloc cuMemHostAlloc
#define FN_host_free cuMemFreeHost
#define FN_upload cuMemcpyHtoDAsync_v2
#define FN_download cuMemcpyDtoHAsync_v2
#define FN_copy cuMemcpyDtoDAsync_v2
#define FN_module_load cuModuleLoadData
#define FN_module_unload cuModuleUnload
#define FN_module_function cuModuleGetFunction
#define FN_launch cuLaunchKernel
#define FN_occupancy cuOccupancyMaxActiveBlocksPerMultiprocessor
#define FN_event_create cuEventCreate
#define FN_event_record cuEventRecord
#define FN_event_query cuEventQuery
#define FN_event_synchronize cuEventSynchronize
#define FN_event_elapsed cuEventElapsedTime
#define FN_event_destroy cuEventDestroy_v2
#define FN_capture_begin cuStreamBeginCapture_v2
#define FN_capture_end cuStreamEndCapture
#define FN_graph_instantiate cuGraphInstantiateWithFlags
#define FN_graph_launch cuGraphLaunch
#define FN_graph_destroy cuGraphDestroy
#define FN_exec_destroy cuGraphExecDestroy
// The driver makes a copy of an image.
#define IMAGE_IS_KEPT 0
#include "fake_gpu.h"

static __thread int context_of_thread_set;
static int the_context, contexts;

static int bound(void) { return context_of_thread_set; }
static int static_shared(const char *kernel) { return strcmp(kernel, "scale") ? 0 : 1024; }
static int has_shared(const Object *f, unsigned dynamic) {
  unsigned fixed = static_shared(f->name);
  return f->dynamic ? dynamic <= f->dynamic : dynamic + fixed <= 48 << 10;
}
static int number_in(const char *variable, int otherwise) {
  const char *text = getenv(variable);
  return text ? atoi(text) : otherwise;
}

int cuInit(unsigned flags) { return outcome("cuInit"); }
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetCount(int *count) { *count = 2; return outcome("cuDeviceGetCount"); }
int cuDeviceGetName(char *name, int length, int device) { snprintf(name, length, "Fake H200"); return 0; }
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = 150754820096ull; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  switch (attribute) {
    case 10: *value = 32; break;
    case 13: *value = 1980000; break;
    case 16: *value = 132; break;
    case 33: *value = 0x17; break;
    case 38: *value = 62914560; break;
    case 39: *value = 2048; break;
    case 75: *value = number_in("FAKE_CUDA_MAJOR", 9); break;
    case 76: *value = 0; break;
    case 81: *value = 233472; break;
    case 97: *value = 232448; break;
    case 115: *value = getenv("FAKE_GPU_NO_POOLS") ? 0 : 1; break;
    default: *value = 0;
  }
  return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { *context = &the_context, contexts++; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) {
  say("release context");
  if (--contexts < 0) say("ILLEGAL release of a context");
  for (int i = 0; i < object_count && !contexts; i++)
    if (objects[i].live && objects[i].kind != 'f') say("LEAKED at the release of its context: %c%d", objects[i].kind, objects[i].number);
  return 0;
}
int cuCtxGetCurrent(void **context) { *context = context_of_thread_set ? &the_context : 0; return 0; }
int cuCtxSetCurrent(void *context) { context_of_thread_set = 1; return outcome("cuCtxSetCurrent"); }
int cuCtxSynchronize(void) { return 0; }
int cuFuncGetAttribute(int *value, int attribute, Object *f) {
  *value = attribute == 1 ? static_shared(f->name) : 0;
  return outcome("cuFuncGetAttribute");
}
int cuFuncSetAttribute(Object *f, int attribute, int value) {
  say("attribute %d of %s = %d", attribute, f->name, value);
  if (attribute == 8) f->dynamic = value;
  return outcome("cuFuncSetAttribute");
}
int cuGetErrorName(int code, const char **name) {
  *name = code == 2     ? "CUDA_ERROR_OUT_OF_MEMORY"
          : code == 100 ? "CUDA_ERROR_NO_DEVICE"
          : code == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU"
          : code == 500 ? "CUDA_ERROR_NOT_FOUND"
          : code == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS"
          : code == 701 ? "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
          : code == 9999 ? 0
                        : "CUDA_ERROR_SOME";
  return *name ? 0 : 1;
}
int cuGetErrorString(int code, const char **text) {
  *text = code == 9999 ? 0 : "some words";
  return *text ? 0 : 1;
}

typedef struct {
  unsigned id, padding, value[16];
} Attribute;
typedef struct {
  unsigned grid[3], block[3], shared;
  void *stream;
  Attribute *attributes;
  unsigned count;
} Config;
int cuLaunchKernelEx(const Config *config, Object *f, void **params, void **extra) {
  ENTER(cuLaunchKernelEx)
  char text[64];
  const Attribute *a = config->attributes;
  snprintf(text, sizeof text, " attribute %u = %u %u %u", a->id, a->value[0], a->value[1], a->value[2]);
  if (config->count != 1 || extra) say("ILLEGAL attributes");
  return start(code, f, config->grid, config->shared, config->stream, params, text);
}
typedef struct {
  size_t x, y;
  unsigned memory;
  const void *host;
  uint64_t device;
  const void *array;
  size_t pitch;
} Side;
typedef struct {
  Side from, to;
  size_t width, height;
} Copy2d;
int cuMemcpy2DAsync_v2(const Copy2d *c, Object *s) {
  ENTER(cuMemcpy2DAsync_v2)
  const Side *sides[] = {&c->from, &c->to};
  for (int i = 0; i < 2; i++)
    if (sides[i]->memory != 2 || sides[i]->x || sides[i]->y || sides[i]->pitch < c->width) say("ILLEGAL copy of rows");
  return copy_rows(code, c->to.device, c->to.pitch, c->from.device, c->from.pitch, c->width, c->height, s);
}
int cuTensorMapEncodeTiled(char *map, unsigned type, unsigned rank, uint64_t address, const uint64_t *sizes,
                           const uint64_t *strides, const unsigned *box, const unsigned *steps, unsigned interleave,
                           unsigned swizzle, unsigned promotion, unsigned fill) {
  static int maps;
  char text[256];
  int length = snprintf(text, sizeof text, "encode type %u of %s sizes", type, place(address));
  for (unsigned i = 0; i < rank; i++) length += sprintf(text + length, " %llu", (unsigned long long)sizes[i]);
  length += sprintf(text + length, " strides");
  for (unsigned i = 0; i + 1 < rank; i++) length += sprintf(text + length, " %llu", (unsigned long long)strides[i]);
  length += sprintf(text + length, " box");
  for (unsigned i = 0; i < rank; i++) length += sprintf(text + length, " %u/%u", box[i], steps[i]);
  say("%s interleave %u swizzle %u promotion %u fill %u", text, interleave, swizzle, promotion, fill);
  if ((uint64_t)map % 128) say("ILLEGAL place for a tensor map");
  memset(map, 'x', 128);
  snprintf(map, 9, "map %04d", ++maps);
  return outcome("cuTensorMapEncodeTiled");
}
