// When the operations of streams run.
#pragma once
#include "world.h"

namespace simgpu {

// Puts an operation at the end of a stream, or into the graph that the stream is captured for.
void enqueue(Operation operation, Stream* stream);
inline std::shared_ptr<const Work> work(Work function) { return std::make_shared<const Work>(std::move(function)); }

// Let happen what may happen at any call.
void breathe();

// The host waits, and knows then what is ordered before. The lock is released while it must wait.
cudaError_t wait_until(Lock& lock, Stream* stream, uint64_t operation);
cudaError_t wait_for_stream(Lock& lock, Stream* stream);
cudaError_t wait_for_device(Lock& lock, int device);

// Whether the stream has got there; asked often enough it is made to, as far as nothing has to be waited for.
cudaError_t query(Stream* stream, uint64_t operation, int& queries, const VectorClock& clock);

// All that is queued will do nothing.
void abandon_queues();

// races.cpp: reports what conflicts with an operation that is about to be enqueued, and remembers the operation.
void check_races(const Operation& operation, Stream* stream);
void remember(const Operation& operation, Stream* stream);

// host_functions.cpp: the host function at the head of a stream is the thread's next but for those before it.
void begin_host_function(Stream* stream);
void finish_head(Stream* stream);

double now_s();

}  // namespace simgpu
