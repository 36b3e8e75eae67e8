// Functions of the host in a stream. They run without the lock, so that one may wait for whatever the program does
// meanwhile; its stream stays where it is until it returns, and the others go on. As on a GPU all streams share one
// thread, in the order in which they got there: behind a function that waits the others' functions wait as well.
#include "scheduler.h"

namespace simgpu {

namespace {

struct HostFunction {
  Stream* stream;
  std::shared_ptr<const Work> work;
};

// Under the world's lock; never deleted, for the thread outlives main().
std::deque<HostFunction>& reached() {
  static auto* queue = new std::deque<HostFunction>;
  return *queue;
}

void run_host_functions() {
  Lock lock(world().mutex);
  for (;;) {
    world().progress.wait(lock, [] { return !reached().empty(); });
    HostFunction next = std::move(reached().front());
    reached().pop_front();
    lock.unlock();
    in_host_function = true;
    (*next.work)();
    in_host_function = false;  // this thread may now run what comes next
    lock.lock();
    finish_head(next.stream);
    breathe();
  }
}

}  // namespace

void begin_host_function(Stream* stream) {
  static std::once_flag started;
  std::call_once(started, [] { std::thread(run_host_functions).detach(); });
  Operation& head = stream->queue.front();
  head.under_way = true;
  reached().push_back({stream, head.work});
  world().progress.notify_all();
}

namespace {

void enqueue_host_function(const char* name, Work function, cudaStream_t stream) {
  Operation operation;
  operation.name = name;
  operation.on_host_thread = true;
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
