// A stream is a queue. What is enqueued runs when the schedule lets it:
//   late    only what a forcing call needs, nothing before
//   early   everything as soon as its dependencies allow
//   random  at every call a random number of ready operations of random streams
// Operations run under the world's lock, one at a time, but for host functions.
#include "scheduler.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <limits>
#include <utility>

namespace simgpu {

namespace {

constexpr int ALL = std::numeric_limits<int>::max();
constexpr double NEVER = std::numeric_limits<double>::infinity();
std::atomic<bool> exiting{false};

enum class Step { RAN, BLOCKED, SLEEPS, UNDER_WAY };

bool is_ready(const Operation& operation) {
  return std::all_of(operation.waits_for.begin(), operation.waits_for.end(),
                     [](const Dependency& d) { return d.stream->done >= d.operation; });
}

void run(const Operation& operation) {
  if (!operation.work) return;
  World& w = world();
  bool before = std::exchange(w.running, true);
  try {
    (*operation.work)();
  } catch (const std::exception& error) {
    violation(std::string("EXCEPTION in ") + operation.name + ": " + error.what());
  }
  w.running = before;
}

// Tries to run the head of a stream. If it sleeps, `wake` becomes the end of that, unless it is earlier.
Step step(Stream* stream, double& wake) {
  Operation& head = stream->queue.front();
  if (!is_ready(head)) return Step::BLOCKED;
  if (head.under_way) return Step::UNDER_WAY;
  if (head.sleeps_s > 0) {
    if (head.began < 0) head.began = now_s();
    double until = head.began + head.sleeps_s;
    if (now_s() < until) {
      wake = std::min(wake, until);
      return Step::SLEEPS;
    }
  }
  if (head.on_host_thread && head.work) {
    begin_host_function(stream);
    return Step::UNDER_WAY;
  }
  head.under_way = true;  // a kernel that looks into CUDA must not run it a second time
  Operation mine = head;
  run(mine);
  finish_head(stream);
  return Step::RAN;
}

// The stream whose head must run next for `stream` to get on; it follows dependencies.
Stream* first_needed(Stream* stream) {
  for (int depth = 0; depth < 10000; depth++) {
    Stream* before = nullptr;
    for (const Dependency& dependency : stream->queue.front().waits_for)
      if (dependency.stream->done < dependency.operation) before = dependency.stream;
    if (!before) return stream;
    stream = before;
  }
  fprintf(stderr, "simulated GPU: streams wait for each other in a circle\n");
  abort();
}

// Runs up to `most` of the operations that are ready; whether any ran.
bool run_ready(int most, double& wake) {
  World& w = world();
  bool any = false;
  std::vector<Stream*> ready;
  while (most-- > 0) {
    ready.clear();
    for (Stream* stream : w.streams)
      if (!stream->queue.empty() && is_ready(stream->queue.front())) ready.push_back(stream);
    if (w.schedule == Schedule::RANDOM) std::shuffle(ready.begin(), ready.end(), w.random);
    bool ran = std::any_of(ready.begin(), ready.end(), [&](Stream* s) { return step(s, wake) == Step::RAN; });
    if (!ran) break;
    any = true;
  }
  return any;
}

// Lets early and random go on while the host does not call.
void tick() {
  World& w = world();
  while (!exiting) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    Lock lock(w.mutex);
    if (exiting || w.schedule == Schedule::LATE || w.running) continue;
    double wake = NEVER;
    run_ready(w.schedule == Schedule::EARLY ? ALL : static_cast<int>(w.random() % 8), wake);
  }
}

void start_ticking() {
  World& w = world();
  if (w.ticking || !w.settings.ticks || w.schedule == Schedule::LATE) return;
  w.ticking = true;
  atexit([] { exiting = true; });
  std::thread(tick).detach();
}

// The default stream waits for streams made without cudaStreamNonBlocking, and they for it.
void order_with_default_stream(Operation& operation, Stream* stream) {
  World& w = world();
  auto order_after = [&](Stream* other) {
    if (other->done < other->next - 1) operation.waits_for.push_back({other, other->next - 1});
    stream->clock.merge(other->clock);
  };
  if (stream->waits_for_default) order_after(w.devices[stream->device].default_stream);
  if (!stream->is_default) return;
  for (Stream* other : w.streams)
    if (other->device == stream->device && other->waits_for_default) order_after(other);
}

}  // namespace

double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

Stream* make_stream(int device, bool waits_for_default, bool is_default, int priority) {
  World& w = world();
  auto* stream = new Stream;
  stream->number = static_cast<int>(w.streams.size());
  stream->device = device;
  stream->waits_for_default = waits_for_default;
  stream->is_default = is_default;
  stream->priority = priority;
  w.streams.push_back(stream);
  return stream;
}

Stream* stream_of(cudaStream_t handle, int device) {
  if (handle == nullptr || handle == cudaStreamLegacy || handle == cudaStreamPerThread)
    return world().devices[device < 0 ? current_device : device].default_stream;
  return reinterpret_cast<Stream*>(handle);
}

void enqueue(Operation operation, Stream* stream) {
  if (stream->capture) {
    // A wait inside a capture only orders, and what is captured is one sequence.
    if (operation.waits_for.empty()) stream->capture->operations.push_back(std::move(operation));
    return;
  }
  order_with_default_stream(operation, stream);
  stream->clock.merge(world().host);
  check_races(operation, stream);
  operation.number = stream->next++;
  stream->clock.set(stream->number, operation.number);
  remember(operation, stream);
  stream->queue.push_back(std::move(operation));
  stream->queries = 0;
  start_ticking();
  breathe();
}

void finish_head(Stream* stream) {
  stream->done = stream->queue.front().number;
  stream->queue.pop_front();
  world().progress.notify_all();
}

void breathe() {
  World& w = world();
  if (w.running || w.schedule == Schedule::LATE) return;
  double wake = NEVER;
  if (w.schedule == Schedule::EARLY)
    run_ready(ALL, wake);
  else if (w.random() % 4 == 0)
    run_ready(1 + static_cast<int>(w.random() % 4), wake);
}

cudaError_t wait_until(Lock& lock, Stream* stream, uint64_t operation) {
  World& w = world();
  while (stream->done < operation && !w.broken) {
    double wake = NEVER;
    bool others = w.schedule == Schedule::EARLY || (w.schedule == Schedule::RANDOM && w.random() % 2);
    if (others && run_ready(w.schedule == Schedule::EARLY ? ALL : 1, wake)) continue;
    if (step(first_needed(stream), wake) == Step::RAN) continue;
    // Something sleeps or is under way elsewhere; other threads may enqueue meanwhile.
    double wait_s = std::min(wake - now_s(), 0.05);
    if (wait_s > 0) w.progress.wait_for(lock, std::chrono::duration<double>(wait_s));
  }
  return w.broken;
}

cudaError_t wait_for_stream(Lock& lock, Stream* stream) {
  VectorClock clock = stream->clock;
  if (cudaError_t error = wait_until(lock, stream, stream->next - 1)) return fail(error);
  world().host.merge(clock);
  return cudaSuccess;
}

cudaError_t wait_for_device(Lock& lock, int device) {
  World& w = world();
  for (size_t i = 0; i < w.streams.size(); i++)  // by index: a wait lets other threads make streams
    if (w.streams[i]->device == device)
      if (cudaError_t error = wait_for_stream(lock, w.streams[i])) return error;
  return cudaSuccess;
}

cudaError_t query(Stream* stream, uint64_t operation, int& queries, const VectorClock& clock) {
  World& w = world();
  breathe();
  if (stream->done < operation && ++queries > w.settings.patience) {
    double wake = NEVER;
    while (stream->done < operation && step(first_needed(stream), wake) == Step::RAN) {
    }
  }
  if (stream->done < operation) return fail(cudaErrorNotReady);
  w.host.merge(clock);
  return cudaSuccess;
}

void abandon_queues() {
  World& w = world();
  for (Stream* stream : w.streams)
    for (Operation& operation : stream->queue) {
      operation.work = nullptr;
      operation.sleeps_s = 0;
    }
  w.progress.notify_all();
}

}  // namespace simgpu
