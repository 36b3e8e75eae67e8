// The simulation's own interface, for the kernels and for Python.
#include <algorithm>
#include <cstring>

#include "scheduler.h"

using namespace simgpu;

namespace {

int give(const std::string& text, char* buffer, int size) {
  int given = std::min(static_cast<int>(text.size()), size);
  memcpy(buffer, text.data(), given);
  return given;
}

}  // namespace

extern "C" {

int simgpu_enqueue(void* stream, int device, void (*run)(void*), void (*destroy)(void*), void* data, const char* name,
                   const SimgpuRange* ranges, int range_count) {
  std::shared_ptr<void> owned(data, destroy);
  ENTER(OPENS_CONTEXT);
  Operation operation;
  operation.name = interned(name);
  operation.touches.assign(ranges, ranges + range_count);
  operation.work = work([=] { run(owned.get()); });
  count(name);
  enqueue(std::move(operation), stream_of(static_cast<cudaStream_t>(stream), device));
  return cudaSuccess;
}

int simgpu_is_capturing(void* stream, int device) {
  Entry entry(__func__, HOST_ONLY);
  return stream_of(static_cast<cudaStream_t>(stream), device)->capture != nullptr;
}

int simgpu_create_handle(void) {
  Entry entry("cublasCreate", OPENS_CONTEXT | UNSAFE_IN_CAPTURE);
  return fail(entry.refused);
}

void simgpu_count(const char* what) {
  Lock lock(world().mutex);
  count(what);
}

void simgpu_violation(const char* text) {
  Lock lock(world().mutex);
  violation(text);
}

int simgpu_schedule(const char* name, uint64_t seed) {
  Entry entry(__func__, HOST_ONLY);
  return choose_schedule(name, seed);
}

int simgpu_take_violations(char* buffer, int size) {
  Lock lock(world().mutex);
  std::string lines;
  for (const auto& text : world().violations) lines += text + "\n";
  world().violations.clear();
  return give(lines, buffer, size);
}

int simgpu_take_counts(char* buffer, int size) {
  Lock lock(world().mutex);
  std::string lines;
  for (const auto& [name, count] : world().counts) lines += std::to_string(count) + " " + name + "\n";
  world().counts.clear();
  return give(lines, buffer, size);
}

const char* simgpu_context(int device) {
  Lock lock(world().mutex);
  if (device < 0 || device >= static_cast<int>(world().devices.size())) return nullptr;
  const std::string& opened_by = world().devices[device].context_opened_by;
  return opened_by.empty() ? nullptr : opened_by.c_str();
}

void simgpu_break_device(int code) {
  Entry entry(__func__, HOST_ONLY);
  world().broken = static_cast<cudaError_t>(code);
  abandon_queues();
}
}
