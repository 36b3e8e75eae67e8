// Device memory: where it lies, what of it is allocated, cudaMalloc and cudaFree.
#include "memory.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "scheduler.h"

namespace simgpu {

namespace {

constexpr int UNWRITTEN = 0xCB;            // what new memory holds, so that nobody takes it for zeros
constexpr size_t FILLED_UP_TO = 64 << 20;  // larger blocks hold zeros: filling them would take the memory

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

[[noreturn]] void give_up(const char* call) {
  fprintf(stderr, "simulated GPU: ");
  perror(call);
  abort();
}

}  // namespace

bool is_device(uintptr_t address) {
  return address >= DEVICE_MEMORY && address < DEVICE_MEMORY + world().devices.size() * ADDRESSES_PER_DEVICE;
}

int device_of(uintptr_t address) { return static_cast<int>((address - DEVICE_MEMORY) / ADDRESSES_PER_DEVICE); }

void reserve_addresses_of(int device) {
  uintptr_t begin = DEVICE_MEMORY + device * ADDRESSES_PER_DEVICE;
  int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
  if (mmap(pointer(begin), ADDRESSES_PER_DEVICE, PROT_NONE, flags, -1, 0) == MAP_FAILED) give_up("mmap");
  world().devices[device].free_addresses[begin] = ADDRESSES_PER_DEVICE;
}

uintptr_t take_addresses(int device, size_t nbytes) {
  auto& free = world().devices[device].free_addresses;
  size_t taken = nbytes + GRANULARITY;
  for (auto it = free.begin(); it != free.end(); ++it) {
    auto [address, size] = *it;
    if (size < taken) continue;
    free.erase(it);
    if (size > taken) free[address + taken] = size - taken;
    return address;
  }
  return 0;
}

void give_addresses_back(uintptr_t address, size_t nbytes) {
  // Not joined with its neighbours: there are more addresses than a test can use up.
  world().devices[device_of(address)].free_addresses[address] = nbytes + GRANULARITY;
}

void make_block(uintptr_t address, size_t nbytes) {
  if (mprotect(pointer(address), nbytes, PROT_READ | PROT_WRITE)) give_up("mprotect");
  if (nbytes <= FILLED_UP_TO) memset(pointer(address), UNWRITTEN, nbytes);
  world().blocks[address] = {nbytes};
}

void drop_block(uintptr_t address, size_t nbytes) {
  madvise(pointer(address), nbytes, MADV_DONTNEED);
  mprotect(pointer(address), nbytes, PROT_NONE);
  world().blocks.erase(address);
}

bool is_allocated(uintptr_t address, size_t nbytes) {
  auto& blocks = world().blocks;
  uintptr_t end = address + nbytes;
  auto it = blocks.upper_bound(address);
  if (it == blocks.begin()) return false;
  for (--it; it != blocks.end() && it->first <= address; ++it) {  // blocks may follow each other without a gap
    uintptr_t block_end = it->first + it->second.nbytes;
    if (block_end <= address) return false;
    if (block_end >= end) return true;
    address = block_end;
  }
  return false;
}

void check_is_allocated(uintptr_t address, size_t nbytes, const char* what) {
  if (is_device(address) && !is_allocated(address, nbytes))
    violation(std::string("FREED: ") + what + " ran after its device memory was freed");
}

Kind kind_of(uintptr_t address, size_t nbytes, const char* what) {
  if (is_device(address)) {
    if (is_allocated(address, nbytes)) return Kind::DEVICE;
    violation(std::string("FREED: ") + what + " of device memory that is not allocated");
    return Kind::WRONG;
  }
  auto& pinned = world().pinned;
  auto registration = registration_at(address);
  if (registration == pinned.end()) {
    auto next = pinned.lower_bound(address);
    if (next == pinned.end() || next->first >= address + nbytes) return Kind::PAGEABLE;
    violation(std::string("PINNED: ") + what + " begins before a registered range and ends in it");
    return Kind::WRONG;
  }
  if (address + nbytes <= registration->first + registration->second) return Kind::PINNED;
  violation(std::string("PINNED: ") + what + " crosses the end of a registered range");
  return Kind::WRONG;
}

const char* pending_on(uintptr_t address, size_t nbytes) {
  for (Stream* stream : world().streams)
    for (const Operation& operation : stream->queue)
      for (const SimgpuRange& touched : operation.touches)
        if (touched.begin < address + nbytes && address < touched.end) return operation.name;
  return nullptr;
}

}  // namespace simgpu

using namespace simgpu;

extern "C" {

cudaError_t cudaMalloc(void** out, size_t nbytes) {
  ENTER(OPENS_CONTEXT | UNSAFE_IN_CAPTURE);
  *out = nullptr;
  Device& device = world().devices[current_device];
  size_t size = (nbytes + GRANULARITY - 1) / GRANULARITY * GRANULARITY;
  if (device.used_bytes + size > world().settings.memory_bytes) return fail(cudaErrorMemoryAllocation);
  uintptr_t address = take_addresses(current_device, size);
  if (!address) return fail(cudaErrorMemoryAllocation);
  make_block(address, size);
  device.used_bytes += size;
  *out = pointer(address);
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  ENTER(OPENS_CONTEXT | UNSAFE_IN_CAPTURE);
  if (!memory) return cudaSuccess;
  auto address = reinterpret_cast<uintptr_t>(memory);
  auto block = world().blocks.find(address);
  if (block == world().blocks.end()) {
    violation("FREED: cudaFree of what is not allocated");
    return fail(cudaErrorInvalidValue);
  }
  int device = device_of(address);
  size_t nbytes = block->second.nbytes;
  if (cudaError_t error = wait_for_device(entry.lock, device)) return error;  // as the real one does
  drop_block(address, nbytes);
  give_addresses_back(address, nbytes);
  world().devices[device].used_bytes -= nbytes;
  return cudaSuccess;
}

// In the order of the stream on a GPU; at once is one of the orders that are legal there.
cudaError_t cudaMallocAsync(void** out, size_t nbytes, cudaStream_t) { return cudaMalloc(out, nbytes); }
cudaError_t cudaFreeAsync(void* memory, cudaStream_t) { return cudaFree(memory); }

cudaError_t cudaMemGetInfo(size_t* free, size_t* total) {
  ENTER(OPENS_CONTEXT);
  *total = world().settings.memory_bytes;
  *free = *total - world().devices[current_device].used_bytes;
  return cudaSuccess;
}

cudaError_t cudaGetSymbolAddress(void** out, const void*) { return cudaMalloc(out, 1 << 20); }
}
