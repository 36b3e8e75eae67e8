// Pinned host memory: registered, or allocated as such.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "memory.h"
#include "scheduler.h"

namespace simgpu {

std::map<uintptr_t, size_t>::iterator registration_at(uintptr_t address) {
  auto& pinned = world().pinned;
  auto it = pinned.upper_bound(address);
  if (it == pinned.begin()) return pinned.end();
  --it;
  return address < it->first + it->second ? it : pinned.end();
}

namespace {

bool is_mapped(uintptr_t address, size_t nbytes) {
  static const long PAGE = sysconf(_SC_PAGESIZE);
  uintptr_t begin = address & ~static_cast<uintptr_t>(PAGE - 1);
  size_t size = address + nbytes - begin;
  std::vector<unsigned char> resident((size + PAGE - 1) / PAGE);
  return mincore(reinterpret_cast<void*>(begin), size, resident.data()) == 0;
}

cudaError_t add_registration(uintptr_t address, size_t nbytes) {
  auto& pinned = world().pinned;
  auto next = pinned.upper_bound(address);
  bool overlaps = registration_at(address) != pinned.end() || (next != pinned.end() && next->first < address + nbytes);
  if (overlaps) return fail(cudaErrorHostMemoryAlreadyRegistered);
  pinned[address] = nbytes;
  return cudaSuccess;
}

// Nothing waits for copies that are under way: whoever ends a registration must have.
void check_is_idle(const char* call, std::map<uintptr_t, size_t>::iterator registration) {
  if (const char* operation = pending_on(registration->first, registration->second))
    violation(std::string("PINNED: ") + call + " while this is pending: " + operation);
}

}  // namespace

}  // namespace simgpu

using namespace simgpu;

extern "C" {

cudaError_t cudaHostRegister(void* memory, size_t nbytes, unsigned) {
  ENTER(OPENS_CONTEXT | UNSAFE_IN_CAPTURE);
  if (!memory || !nbytes) return fail(cudaErrorInvalidValue);
  auto address = reinterpret_cast<uintptr_t>(memory);
  if (!is_mapped(address, nbytes)) {
    violation("PINNED: cudaHostRegister of memory that is not mapped");
    return fail(cudaErrorInvalidValue);
  }
  return add_registration(address, nbytes);
}

cudaError_t cudaHostUnregister(void* memory) {
  ENTER(OPENS_CONTEXT | UNSAFE_IN_CAPTURE);
  auto registration = world().pinned.find(reinterpret_cast<uintptr_t>(memory));
  if (registration == world().pinned.end()) return fail(cudaErrorHostMemoryNotRegistered);
  check_is_idle("cudaHostUnregister", registration);
  world().pinned.erase(registration);
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** out, size_t nbytes, unsigned) {
  ENTER(OPENS_CONTEXT | UNSAFE_IN_CAPTURE);
  nbytes = std::max<size_t>(nbytes, 1);
  *out = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (*out == MAP_FAILED) return fail(cudaErrorMemoryAllocation);
  return add_registration(reinterpret_cast<uintptr_t>(*out), nbytes);
}

cudaError_t cudaFreeHost(void* memory) {
  ENTER(ORDINARY);
  if (!memory) return cudaSuccess;
  auto registration = world().pinned.find(reinterpret_cast<uintptr_t>(memory));
  if (registration == world().pinned.end()) return fail(cudaErrorInvalidValue);
  check_is_idle("cudaFreeHost", registration);
  munmap(memory, registration->second);
  world().pinned.erase(registration);
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* out, const void* memory) {
  ENTER(ORDINARY);
  memset(out, 0, sizeof *out);
  auto address = reinterpret_cast<uintptr_t>(memory);
  if (is_device(address)) {
    out->type = cudaMemoryTypeDevice;
    out->device = device_of(address);
    out->devicePointer = const_cast<void*>(memory);
  } else if (registration_at(address) != world().pinned.end()) {
    out->type = cudaMemoryTypeHost;
    out->hostPointer = out->devicePointer = const_cast<void*>(memory);
  } else {
    out->type = cudaMemoryTypeUnregistered;
    out->device = -2;  // "invalid device", as the real one has it
    out->hostPointer = const_cast<void*>(memory);
  }
  return cudaSuccess;
}
}
