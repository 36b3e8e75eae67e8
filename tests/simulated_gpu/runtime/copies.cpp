// Copies and fills. They run in a stream; those from and to pageable memory wait as on a GPU.
#include <cstring>

#include "memory.h"
#include "scheduler.h"

namespace simgpu {

namespace {

const char* name_of(Kind kind) {
  return kind == Kind::PAGEABLE ? "pageable" : kind == Kind::PINNED ? "pinned" : "device";
}

// Rows of equal length; the bytes between them are not touched.
struct Rows {
  uintptr_t address;
  size_t pitch, length, count;

  size_t nbytes() const { return pitch * (count - 1) + length; }
  SimgpuRange range(bool writes) const { return {address, address + nbytes(), writes}; }
  char* row(size_t i) const { return reinterpret_cast<char*>(address + i * pitch); }
};

Rows rows(const void* memory, size_t pitch, size_t length, size_t count) {
  return {reinterpret_cast<uintptr_t>(memory), pitch, length, count};
}

// What the driver takes from pageable memory before the call returns: a copy with the same rows.
std::shared_ptr<std::vector<char>> staged(const Rows& source) {
  return std::make_shared<std::vector<char>>(source.row(0), source.row(0) + source.nbytes());
}

cudaError_t copy(Lock& lock, Rows target, Rows source, cudaStream_t handle, bool waits, const char* what) {
  if (!target.length || !target.count) return cudaSuccess;
  if (!target.address || !source.address) return fail(cudaErrorInvalidValue);  // a program may try, and the driver tells
  Kind to = kind_of(target.address, target.nbytes(), what), from = kind_of(source.address, source.nbytes(), what);
  if (to == Kind::WRONG || from == Kind::WRONG) return fail(cudaErrorInvalidValue);
  Stream* stream = stream_of(handle);
  bool captured = static_cast<bool>(stream->capture);
  Operation operation;
  const char* name = interned(std::string(what) + " " + name_of(from) + "->" + name_of(to));
  operation.name = name;
  count(name);
  std::shared_ptr<std::vector<char>> stage;
  if (from == Kind::PAGEABLE && to == Kind::DEVICE && !waits && !captured)
    stage = staged(source);
  else
    operation.touches.push_back(source.range(false));
  operation.touches.push_back(target.range(true));
  operation.work = work([=] {
    check_is_allocated(target.address, target.nbytes(), name);
    check_is_allocated(source.address, source.nbytes(), name);
    uintptr_t host = to == Kind::PINNED ? target.address : from == Kind::PINNED ? source.address : 0;
    if (host && registration_at(host) == world().pinned.end()) {
      violation(std::string("PINNED: ") + name + " ran after its host memory was unregistered");
      return;
    }
    Rows read = source;
    if (stage) read.address = reinterpret_cast<uintptr_t>(stage->data());
    for (size_t i = 0; i < target.count; i++) memmove(target.row(i), read.row(i), target.length);
  });
  enqueue(std::move(operation), stream);
  if (captured) return cudaSuccess;
  if (to == Kind::PAGEABLE && from == Kind::DEVICE && !waits) {
    count(std::string("SYNCHRONOUS (pageable) ") + what);
    waits = true;
  }
  return waits ? wait_for_stream(lock, stream) : cudaSuccess;
}

cudaError_t fill(Lock& lock, void* memory, int value, size_t nbytes, cudaStream_t handle, bool waits) {
  if (!nbytes) return cudaSuccess;
  auto address = reinterpret_cast<uintptr_t>(memory);
  if (kind_of(address, nbytes, "memset") == Kind::WRONG) return fail(cudaErrorInvalidValue);
  Operation operation;
  operation.name = "memset";
  operation.touches.push_back({address, address + nbytes, 1});
  operation.work = work([=] {
    check_is_allocated(address, nbytes, "memset");
    memset(memory, value, nbytes);
  });
  Stream* stream = stream_of(handle);
  enqueue(std::move(operation), stream);
  return waits ? wait_for_stream(lock, stream) : cudaSuccess;
}

}  // namespace

}  // namespace simgpu

using namespace simgpu;

extern "C" {

cudaError_t cudaMemcpy(void* to, const void* from, size_t nbytes, cudaMemcpyKind) {
  ENTER(OPENS_CONTEXT | UNSAFE_IN_CAPTURE);
  return copy(entry.lock, rows(to, nbytes, nbytes, 1), rows(from, nbytes, nbytes, 1), nullptr, true, "memcpy");
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t nbytes, cudaMemcpyKind, cudaStream_t stream) {
  ENTER(OPENS_CONTEXT);
  return copy(entry.lock, rows(to, nbytes, nbytes, 1), rows(from, nbytes, nbytes, 1), stream, false, "copy");
}

cudaError_t cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t nbytes, cudaStream_t stream) {
  ENTER(OPENS_CONTEXT);
  return copy(entry.lock, rows(to, nbytes, nbytes, 1), rows(from, nbytes, nbytes, 1), stream, false, "peer copy");
}

cudaError_t cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                              size_t height, cudaMemcpyKind, cudaStream_t stream) {
  ENTER(OPENS_CONTEXT);
  Rows target = rows(to, to_pitch, width, height), source = rows(from, from_pitch, width, height);
  return copy(entry.lock, target, source, stream, false, "copy 2D");
}

cudaError_t cudaMemset(void* memory, int value, size_t nbytes) {
  ENTER(OPENS_CONTEXT);
  return fill(entry.lock, memory, value, nbytes, nullptr, true);
}

cudaError_t cudaMemsetAsync(void* memory, int value, size_t nbytes, cudaStream_t stream) {
  ENTER(OPENS_CONTEXT);
  return fill(entry.lock, memory, value, nbytes, stream, false);
}

// Of __constant__ variables, which only real kernels read.
cudaError_t cudaMemcpyToSymbol(const void*, const void*, size_t, size_t, cudaMemcpyKind) { return cudaSuccess; }
}
