// What the kernels and Python use of the simulated runtime, beside the CUDA runtime API itself.
#pragma once
#include <cstddef>
#include <cstdint>

extern "C" {

// Memory that an operation touches, [begin, end).
struct SimgpuRange {
  uintptr_t begin, end;
  int writes;
};

// Enqueues host code in the place of a kernel. `run` is called once, or for every replay of the graph it is captured
// in; `destroy` once, when nothing can run it any more. A null `stream` is the default stream of `device`.
int simgpu_enqueue(void* stream, int device, void (*run)(void*), void (*destroy)(void*), void* data, const char* name,
                   const SimgpuRange* ranges, int range_count);
int simgpu_is_capturing(void* stream, int device);

// What cublasCreate asks of the runtime, on the thread's current device.
int simgpu_create_handle(void);

void simgpu_count(const char* what);
void simgpu_violation(const char* text);

// "late", "early" or "random"; 0 if it is none of these.
int simgpu_schedule(const char* name, uint64_t seed);

// Each copies lines into `buffer`, forgets what they told, and returns their length.
int simgpu_take_violations(char* buffer, int size);
int simgpu_take_counts(char* buffer, int size);  // "<count> <name>"

// Which call opened the context on a device; null where there is none.
const char* simgpu_context(int device);

// From now on every call that needs a device fails with this code, as after an illegal access; 0 mends it.
void simgpu_break_device(int code);
}
