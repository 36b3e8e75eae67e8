// Functions of the host in a stream. Each runs on a thread of its own and without the lock, so that it may wait for
// whatever the program does meanwhile; its stream stays where it is until it returns, the others go on.
#include "scheduler.h"

namespace simgpu {

void begin_host_function(Stream* stream) {
  Operation& head = stream->queue.front();
  head.under_way = true;
  std::thread([stream, function = head.work] {
    in_host_function = true;
    (*function)();
    in_host_function = false;  // this thread may now run what comes next
    Lock lock(world().mutex);
    finish_head(stream);
    breathe();
  }).detach();
}

namespace {

void enqueue_host_function(const char* name, Work function, cudaStream_t stream) {
  Operation operation;
  operation.name = name;
  operation.on_own_thread = true;
  operation.work = work(std::move(function));
  enqueue(std::move(operation), stream_of(stream));
}

}  // namespace

}  // namespace simgpu

using namespace simgpu;

extern "C" {

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void* data) {
  ENTER(OPENS_CONTEXT);
  enqueue_host_function("host function", [=] { function(data); }, stream);
  return cudaSuccess;
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t function, void* data, unsigned) {
  ENTER(OPENS_CONTEXT);
  enqueue_host_function("callback", [=] { function(stream, cudaSuccess, data); }, stream);
  return cudaSuccess;
}
}
