// A stand-in for libamdhip64: see fake_gpu.h.
#define FN_memory_info hipMemGetInfo
#define FN_default_pool hipDeviceGetDefaultMemPool
#define FN_pool_set hipMemPoolSetAttribute
#define FN_pool_access hipMemPoolSetAccess
#define FN_can_access_peer hipDeviceCanAccessPeer
#define FN_stream_create hipStreamCreateWithFlags
#define FN_stream_destroy hipStreamDestroy
#define FN_stream_synchronize hipStreamSynchronize
#define FN_stream_wait hipStreamWaitEvent
#define FN_alloc_async hipMallocAsync
#define FN_free_async hipFreeAsync
#define FN_alloc hipMalloc
#define FN_free hipFree
#define FN_host_alloc hipHostMalloc
#define FN_host_free hipHostFree
#define FN_upload hipMemcpyHtoDAsync
#define FN_download hipMemcpyDtoHAsync
#define FN_copy hipMemcpyDtoDAsync
#define FN_module_load hipModuleLoadData
#define FN_module_unload hipModuleUnload
#define FN_module_function hipModuleGetFunction
#define FN_launch hipModuleLaunchKernel
#define FN_occupancy hipModuleOccupancyMaxActiveBlocksPerMultiprocessor
#define FN_event_create hipEventCreateWithFlags
#define FN_event_record hipEventRecord
#define FN_event_query hipEventQuery
#define FN_event_synchronize hipEventSynchronize
#define FN_event_elapsed hipEventElapsedTime
#define FN_event_destroy hipEventDestroy
#define FN_capture_begin hipStreamBeginCapture
#define FN_capture_end hipStreamEndCapture
#define FN_graph_instantiate hipGraphInstantiateWithFlags
#define FN_graph_launch hipGraphLaunch
#define FN_graph_destroy hipGraphDestroy
#define FN_exec_destroy hipGraphExecDestroy
// The runtime makes no copy of a code object that is in no bundle.
#define IMAGE_IS_KEPT 1
#include "fake_gpu.h"

static __thread int device_of_thread = -1;

static int has_shared(const Object *f, unsigned dynamic) { return dynamic + (strcmp(f->name, "scale") ? 0 : 1024) <= 65536; }
static int bound(void) { return device_of_thread >= 0; }

int hipInit(unsigned flags) { return outcome("hipInit"); }
int hipRuntimeGetVersion(int *version) { *version = 60241133; return 0; }
const char *hipGetErrorName(int code) {
  return code == 2     ? "hipErrorOutOfMemory"
         : code == 100 ? "hipErrorNoDevice"
         : code == 209 ? "hipErrorNoBinaryForGpu"
         : code == 500 ? "hipErrorNotFound"
         : code == 700 ? "hipErrorIllegalAddress"
         : code == 701 ? "hipErrorLaunchOutOfResources"
                       : "hipErrorSome";
}
const char *hipGetErrorString(int code) { return "some words"; }
int hipGetDeviceCount(int *count) { *count = 2; return outcome("hipGetDeviceCount"); }
int hipDeviceGetPCIBusId(char *text, int bytes, int device) { snprintf(text, bytes, "0000:C1:00.0"); return 0; }
int hipSetDevice(int device) {
  int code = outcome("hipSetDevice");
  if (!code) device_of_thread = device;
  return code;
}
int hipGetDevicePropertiesR0600(char *properties, int device) {
  const char *arch = getenv("FAKE_HIP_ARCH");
  memset(properties, 0xee, 1472);
  strcpy(properties, "Fake MI300X");
  *(uint64_t *)(properties + 288) = 206141652992ull;
  *(uint64_t *)(properties + 296) = 65536;
  *(int *)(properties + 308) = 64;
  *(int *)(properties + 348) = 2100000;
  *(int *)(properties + 388) = 304;
  *(int *)(properties + 616) = 4194304;
  *(int *)(properties + 624) = 2048;
  *(uint64_t *)(properties + 640) = 0;
  strcpy(properties + 1160, arch ? arch : "gfx942:sramecc+:xnack-");
  return outcome("hipGetDevicePropertiesR0600");
}
int hipMemcpy2DAsync(uint64_t to, size_t to_pitch, uint64_t from, size_t from_pitch, size_t width, size_t height, int kind,
                     Object *s) {
  ENTER(hipMemcpy2DAsync)
  if (kind != 3 || to_pitch < width || from_pitch < width) say("ILLEGAL copy of rows");
  return copy_rows(code, to, to_pitch, from, from_pitch, width, height, s);
}
