// The driver's virtual memory management, which torch's expandable segments use: addresses first, memory behind them
// later. Torch gets these functions by name.
//
// Memory belongs to a handle, but what it holds is here lost with its mapping: mapped a second time, it is empty.
#include <cuda.h>

#include <cstring>

#include "memory.h"
#include "scheduler.h"

#undef cuMemGetAddressRange  // the header gives it the name of its newest version; torch asks for the plain one

namespace simgpu {

namespace {

struct Allocation {
  int device;
  size_t nbytes;
  bool mapped = false, released = false;
};

// The driver's functions enter as the runtime's do, and tell the same troubles by the same numbers.
#define ENTER_DRIVER(rules)       \
  Entry entry(__func__, (rules)); \
  if (entry.refused) return static_cast<CUresult>(entry.refused)

std::map<uintptr_t, size_t>& reservations() {
  static auto* all = new std::map<uintptr_t, size_t>;
  return *all;
}

std::map<uintptr_t, Allocation*>& mappings() {
  static auto* all = new std::map<uintptr_t, Allocation*>;
  return *all;
}

void give_memory_back(Allocation* allocation) {
  if (allocation->mapped || !allocation->released) return;
  world().devices[allocation->device].used_bytes -= allocation->nbytes;
  delete allocation;
}

CUresult cuMemAddressReserve(CUdeviceptr* out, size_t nbytes, size_t, CUdeviceptr, unsigned long long) {
  ENTER_DRIVER(ORDINARY);
  uintptr_t address = take_addresses(current_device, nbytes);
  if (!address) return CUDA_ERROR_OUT_OF_MEMORY;
  reservations()[address] = nbytes;
  *out = address;
  return CUDA_SUCCESS;
}

CUresult cuMemAddressFree(CUdeviceptr address, size_t nbytes) {
  ENTER_DRIVER(ORDINARY);
  auto reservation = reservations().find(address);
  if (reservation == reservations().end() || reservation->second != nbytes) return CUDA_ERROR_INVALID_VALUE;
  reservations().erase(reservation);
  give_addresses_back(address, nbytes);
  return CUDA_SUCCESS;
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* out, size_t nbytes, const CUmemAllocationProp* wanted,
                     unsigned long long) {
  ENTER_DRIVER(UNSAFE_IN_CAPTURE);
  if (wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE) return CUDA_ERROR_NOT_SUPPORTED;
  if (wanted->requestedHandleTypes == CU_MEM_HANDLE_TYPE_FABRIC) return CUDA_ERROR_NOT_SUPPORTED;
  Device& device = world().devices[wanted->location.id];
  if (device.used_bytes + nbytes > world().settings.memory_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  device.used_bytes += nbytes;
  *out = reinterpret_cast<CUmemGenericAllocationHandle>(new Allocation{wanted->location.id, nbytes});
  return CUDA_SUCCESS;
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  ENTER_DRIVER(UNSAFE_IN_CAPTURE);
  auto* allocation = reinterpret_cast<Allocation*>(handle);
  allocation->released = true;
  give_memory_back(allocation);
  return CUDA_SUCCESS;
}

CUresult cuMemMap(CUdeviceptr address, size_t nbytes, size_t, CUmemGenericAllocationHandle handle, unsigned long long) {
  ENTER_DRIVER(UNSAFE_IN_CAPTURE);
  auto* allocation = reinterpret_cast<Allocation*>(handle);
  if (allocation->mapped || allocation->nbytes != nbytes) return CUDA_ERROR_INVALID_VALUE;
  if (world().blocks.count(address)) return CUDA_ERROR_INVALID_VALUE;
  allocation->mapped = true;
  mappings()[address] = allocation;
  make_block(address, nbytes);
  return CUDA_SUCCESS;
}

CUresult cuMemUnmap(CUdeviceptr begin, size_t nbytes) {
  ENTER_DRIVER(UNSAFE_IN_CAPTURE);
  if (const char* operation = pending_on(begin, nbytes))
    violation(std::string("FREED: cuMemUnmap while this is pending: ") + operation);
  auto mapping = mappings().lower_bound(begin);
  while (mapping != mappings().end() && mapping->first < begin + nbytes) {
    Allocation* allocation = mapping->second;
    drop_block(mapping->first, allocation->nbytes);
    allocation->mapped = false;
    give_memory_back(allocation);
    mapping = mappings().erase(mapping);
  }
  return CUDA_SUCCESS;
}

CUresult cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc*, size_t) { return CUDA_SUCCESS; }

CUresult cuMemGetAllocationGranularity(size_t* out, const CUmemAllocationProp*, CUmemAllocationGranularity_flags) {
  *out = GRANULARITY;
  return CUDA_SUCCESS;
}

CUresult cuMemGetAddressRange(CUdeviceptr* begin, size_t* nbytes, CUdeviceptr address) {
  ENTER_DRIVER(ORDINARY);
  auto block = world().blocks.upper_bound(address);
  if (block == world().blocks.begin() || !is_allocated(address, 1)) return CUDA_ERROR_NOT_FOUND;
  --block;
  if (begin) *begin = block->first;
  if (nbytes) *nbytes = block->second.nbytes;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGet(CUdevice* out, int ordinal) {
  *out = ordinal;
  return CUDA_SUCCESS;
}

CUresult cuDeviceGetAttribute(int* out, CUdevice_attribute attribute, CUdevice) {
  *out = attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED;
  return CUDA_SUCCESS;
}

CUresult cuGetErrorString(CUresult error, const char** out) {
  *out = cudaGetErrorString(static_cast<cudaError_t>(error));
  return CUDA_SUCCESS;
}

CUresult not_supported() { return CUDA_ERROR_NOT_SUPPORTED; }

#define FUNCTION(name) {#name, reinterpret_cast<void*>(name)}

void* driver_function(const char* name) {
  static const std::map<std::string, void*> FUNCTIONS = {
      FUNCTION(cuMemAddressReserve), FUNCTION(cuMemAddressFree), FUNCTION(cuMemCreate),
      FUNCTION(cuMemRelease),        FUNCTION(cuMemMap),         FUNCTION(cuMemUnmap),
      FUNCTION(cuMemSetAccess),      FUNCTION(cuMemGetAllocationGranularity),
      FUNCTION(cuMemGetAddressRange), FUNCTION(cuDeviceGet),     FUNCTION(cuDeviceGetAttribute),
      FUNCTION(cuGetErrorString),
  };
  auto found = FUNCTIONS.find(name);
  // Torch asks for all that it might ever use; it does not go on without them.
  return found == FUNCTIONS.end() ? reinterpret_cast<void*>(not_supported) : found->second;
}

}  // namespace

}  // namespace simgpu

extern "C" cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** out, unsigned, unsigned long long,
                                                        cudaDriverEntryPointQueryResult* result) {
  *out = simgpu::driver_function(name);
  if (result) *result = cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
