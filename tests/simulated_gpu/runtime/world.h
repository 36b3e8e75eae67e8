// The state of the simulated machine, and what every call begins with.
#pragma once
#include <cuda_runtime_api.h>

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "simgpu.h"

namespace simgpu {

struct Stream;

// By stream number: up to which of its operations everything is known to have run before.
class VectorClock {
 public:
  uint64_t operator[](size_t stream) const { return stream < known_.size() ? known_[stream] : 0; }
  void set(size_t stream, uint64_t operation);
  void merge(const VectorClock& other);

 private:
  std::vector<uint64_t> known_;
};

struct Dependency {
  Stream* stream;
  uint64_t operation;
};

using Work = std::function<void()>;

struct Operation {
  const char* name = "";
  uint64_t number = 0;  // its place in its stream, from 1
  std::vector<Dependency> waits_for;
  std::shared_ptr<const Work> work;  // shared, because a graph runs it again and again
  std::vector<SimgpuRange> touches;
  double sleeps_s = 0, began = -1;
  bool on_host_thread = false, under_way = false;  // host functions
};

// What the race check remembers of an operation.
struct PastOperation {
  uint64_t number;
  const char* name;
  std::vector<SimgpuRange> touches;
};

struct Graph {
  uint64_t id = 0;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  std::thread::id captured_by;
  bool open = true, broken = false;
  std::vector<Operation> operations;  // one sequence, whatever the streams
  std::set<Stream*> streams;
};

struct Stream {
  int number = 0, device = 0, priority = 0;
  bool is_default = false;          // the legacy default stream of its device
  bool waits_for_default = false;   // made without cudaStreamNonBlocking
  std::deque<Operation> queue;
  uint64_t next = 1, done = 0;  // the number of the next operation; all up to `done` have run
  int queries = 0;              // how often it was asked since something was enqueued
  VectorClock clock;            // what is ordered before the next operation
  std::deque<PastOperation> past;
  std::shared_ptr<Graph> capture;
};

struct Event {
  int device = 0;
  bool recorded = false;
  Stream* stream = nullptr;
  uint64_t operation = 0;
  int queries = 0;
  VectorClock clock;
  std::shared_ptr<double> happened_at;
  std::shared_ptr<Graph> capture;  // it was recorded in this capture
};

// Device memory that may be touched.
struct Block {
  size_t nbytes;
};

struct Device {
  Stream* default_stream = nullptr;
  std::map<uintptr_t, size_t> free_addresses;
  size_t used_bytes = 0;
  std::string context_opened_by;  // a call; empty while there is no context
};

enum class Schedule { LATE, EARLY, RANDOM };

struct Settings {
  int devices = 2;
  size_t memory_bytes = 0;  // of each device
  int patience = 20;        // how many queries of pending work are told "not ready" before they make it run
  double sleep_factor = 1;
  bool races = true, verbose = false, kernels_fail = true, ticks = true;
};

struct World {
  std::recursive_mutex mutex;
  std::condition_variable_any progress;  // an operation has run
  Settings settings;
  Schedule schedule = Schedule::EARLY;
  std::mt19937_64 random{0};
  std::vector<Device> devices;
  std::vector<Stream*> streams;       // by number; never deleted, events and clocks refer to them
  std::map<uintptr_t, Block> blocks;  // by address
  std::map<uintptr_t, size_t> pinned;
  VectorClock host;  // what the host has waited for; one clock for all threads
  cudaError_t broken = cudaSuccess;
  std::vector<std::string> violations;
  std::map<std::string, long> counts;
  std::unordered_map<const void*, std::string> kernels;  // names, by the address of the host's stub
  std::set<std::string> names;
  uint64_t graphs = 0;
  bool running = false, ticking = false;
};

World& world();

using Lock = std::unique_lock<std::recursive_mutex>;

extern thread_local int current_device;
extern thread_local bool in_host_function;
extern thread_local cudaStreamCaptureMode capture_mode;

// Rules of a call.
enum : unsigned {
  ORDINARY = 0,
  OPENS_CONTEXT = 1,      // on the thread's current device, if it has none
  UNSAFE_IN_CAPTURE = 2,  // fails, and the capture with it, where CUDA's capture modes forbid it
  HOST_ONLY = 4,          // goes on when the device is broken
};

// One call at a time. Holds the lock; `refused` says why a call must not go on.
struct Entry {
  Entry(const char* call, unsigned rules);

  Lock lock;
  cudaError_t refused = cudaSuccess;
};

// What every function of the API begins with.
#define ENTER(rules)                       \
  ::simgpu::Entry entry(__func__, (rules)); \
  if (entry.refused) return ::simgpu::fail(entry.refused)

// Remembers an error for cudaGetLastError.
cudaError_t fail(cudaError_t error);
cudaError_t take_last_error(bool forget);

void violation(const std::string& text);
void count(const std::string& what);
const char* interned(const std::string& text);  // lives as long as the process

bool choose_schedule(const std::string& name, uint64_t seed);
Stream* make_stream(int device, bool waits_for_default, bool is_default, int priority);
// A handle of the API; null is the default stream of a device, by default of the current one.
Stream* stream_of(cudaStream_t handle, int device = -1);

// Whether an unsafe call of this thread is forbidden by a capture; if so, the capture is broken.
cudaError_t forbidden_by_capture(const char* call);

}  // namespace simgpu
