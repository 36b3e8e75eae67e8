// Devices, their contexts, and errors.
#include <cstdio>
#include <cstring>

#include "scheduler.h"

using namespace simgpu;

namespace {

constexpr int VERSION = 13000;

struct Named {
  cudaError_t error;
  const char *name, *text;
};

constexpr Named NAMED[] = {
    {cudaSuccess, "cudaSuccess", "no error"},
    {cudaErrorInvalidValue, "cudaErrorInvalidValue", "invalid argument"},
    {cudaErrorMemoryAllocation, "cudaErrorMemoryAllocation", "out of memory"},
    {cudaErrorInitializationError, "cudaErrorInitializationError", "initialization error"},
    {cudaErrorNoDevice, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {cudaErrorInvalidDevice, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {cudaErrorNoKernelImageForDevice, "cudaErrorNoKernelImageForDevice", "the simulated GPU runs no real kernels"},
    {cudaErrorECCUncorrectable, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {cudaErrorInvalidResourceHandle, "cudaErrorInvalidResourceHandle", "invalid resource handle"},
    {cudaErrorNotReady, "cudaErrorNotReady", "device not ready"},
    {cudaErrorIllegalAddress, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {cudaErrorAssert, "cudaErrorAssert", "device-side assert triggered"},
    {cudaErrorHostMemoryAlreadyRegistered, "cudaErrorHostMemoryAlreadyRegistered",
     "part or all of the requested memory range is already mapped"},
    {cudaErrorHostMemoryNotRegistered, "cudaErrorHostMemoryNotRegistered",
     "pointer does not correspond to a registered memory region"},
    {cudaErrorLaunchFailure, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {cudaErrorNotPermitted, "cudaErrorNotPermitted", "operation not permitted"},
    {cudaErrorNotSupported, "cudaErrorNotSupported", "operation not supported"},
    {cudaErrorStreamCaptureUnsupported, "cudaErrorStreamCaptureUnsupported",
     "operation not permitted when stream is capturing"},
    {cudaErrorStreamCaptureInvalidated, "cudaErrorStreamCaptureInvalidated",
     "operation failed due to a previous error during capture"},
};

const Named* named(cudaError_t error) {
  for (const Named& each : NAMED)
    if (each.error == error) return &each;
  return nullptr;
}

const char* numbered(cudaError_t error) {
  static thread_local char text[64];
  snprintf(text, sizeof text, "CUDA error %d", static_cast<int>(error));
  return text;
}

}  // namespace

extern "C" {

// Errors --------------------------------------------------------------------------------------------------------------

cudaError_t cudaGetLastError() { return take_last_error(true); }
cudaError_t cudaPeekAtLastError() { return take_last_error(false); }
const char* cudaGetErrorString(cudaError_t error) { return named(error) ? named(error)->text : numbered(error); }
const char* cudaGetErrorName(cudaError_t error) { return named(error) ? named(error)->name : numbered(error); }

// Devices -------------------------------------------------------------------------------------------------------------

cudaError_t cudaGetDeviceCount(int* out) {
  ENTER(HOST_ONLY);
  *out = static_cast<int>(world().devices.size());
  return *out ? cudaSuccess : fail(cudaErrorNoDevice);
}

cudaError_t cudaGetDevice(int* out) {
  *out = current_device;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  ENTER(ORDINARY);
  if (device < 0 || device >= static_cast<int>(world().devices.size())) return fail(cudaErrorInvalidDevice);
  current_device = device;
  auto& opened_by = world().devices[device].context_opened_by;
  if (opened_by.empty()) opened_by = "cudaSetDevice";  // it does since CUDA 12
  return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int* out) {
  *out = VERSION;
  return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int* out) {
  *out = VERSION;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* out, int device) {
  ENTER(HOST_ONLY);
  memset(out, 0, sizeof *out);
  snprintf(out->name, sizeof out->name, "simulated GPU %d", device);
  out->totalGlobalMem = world().settings.memory_bytes;
  out->major = 8;
  out->multiProcessorCount = 108;
  out->warpSize = 32;
  out->maxThreadsPerBlock = 1024;
  out->maxThreadsPerMultiProcessor = 2048;
  out->sharedMemPerBlock = 48 << 10;
  out->sharedMemPerBlockOptin = 163 << 10;
  out->sharedMemPerMultiprocessor = 164 << 10;
  out->regsPerBlock = out->regsPerMultiprocessor = 1 << 16;
  out->l2CacheSize = 40 << 20;
  for (int i = 0; i < 3; i++) {
    out->maxThreadsDim[i] = 1024;
    out->maxGridSize[i] = i ? 65535 : 0x7fffffff;
  }
  out->unifiedAddressing = out->concurrentKernels = 1;
  out->asyncEngineCount = 2;
  out->memoryBusWidth = 5120;
  out->pciBusID = device;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* out, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *out = 8; break;
    case cudaDevAttrMultiProcessorCount: *out = 108; break;
    case cudaDevAttrMaxThreadsPerBlock: *out = 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *out = 2048; break;
    case cudaDevAttrWarpSize: *out = 32; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *out = 48 << 10; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *out = 163 << 10; break;
    case cudaDevAttrClockRate: *out = 1800000; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrAsyncEngineCount: *out = 1; break;
    default: *out = 0;
  }
  return cudaSuccess;
}

cudaError_t cudaDeviceGetPCIBusId(char* out, int size, int device) {
  snprintf(out, size, "0000:%02x:00.0", device);
  return cudaSuccess;
}

cudaError_t cudaDeviceCanAccessPeer(int* out, int, int) {
  *out = 1;
  return cudaSuccess;
}

cudaError_t cudaDeviceEnablePeerAccess(int, unsigned) {
  ENTER(OPENS_CONTEXT);
  return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = 0;
  *greatest = -5;
  return cudaSuccess;
}

cudaError_t cudaDeviceSynchronize() {
  ENTER(OPENS_CONTEXT | UNSAFE_IN_CAPTURE);
  count("HOST SYNC cudaDeviceSynchronize");
  return wait_for_device(entry.lock, current_device);
}

cudaError_t cudaProfilerStart() { return cudaSuccess; }
cudaError_t cudaProfilerStop() { return cudaSuccess; }
}
