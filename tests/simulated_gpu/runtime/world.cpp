// Set-up from the environment (README.md lists the variables), and the rules that all calls share.
#include "world.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "memory.h"

namespace simgpu {

namespace {

std::atomic<bool> forked{false};
thread_local cudaError_t last_error = cudaSuccess;

std::string setting(const char* name, const char* otherwise) {
  const char* value = getenv((std::string("SIMULATED_GPU") + name).c_str());
  return value && *value ? value : otherwise;
}

void read_settings(Settings& settings) {
  settings.devices = std::clamp(atoi(setting("_DEVICES", "2").c_str()), 0, MOST_DEVICES);
  settings.memory_bytes = static_cast<size_t>(atoll(setting("_MEMORY", "8192").c_str())) << 20;
  settings.patience = atoi(setting("_QUERIES", "20").c_str());
  settings.sleep_factor = atof(setting("_SLEEP", "1").c_str());
  settings.races = setting("_RACES", "1") != "0";
  settings.ticks = setting("_TICKS", "1") != "0";
  settings.verbose = setting("_VERBOSE", "0") != "0";
  settings.kernels_fail = setting("_KERNELS", "fail") != "noop";
}

void set_up() {
  World& w = world();
  read_settings(w.settings);
  std::string schedule = setting("", "early");
  size_t colon = schedule.find(':');
  uint64_t seed = colon == std::string::npos ? 0 : strtoull(schedule.c_str() + colon + 1, nullptr, 10);
  if (!choose_schedule(schedule.substr(0, colon), seed)) {
    fprintf(stderr, "simulated GPU: SIMULATED_GPU=%s is none of early, late, random:SEED\n", schedule.c_str());
    abort();
  }
  w.devices.resize(w.settings.devices);
  for (int device = 0; device < w.settings.devices; device++) {
    reserve_addresses_of(device);
    w.devices[device].default_stream = make_stream(device, false, true, 0);
  }
  pthread_atfork(nullptr, nullptr, [] { forked = true; });  // CUDA does not survive a fork
}

}  // namespace

thread_local int current_device = 0;
thread_local bool in_host_function = false;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeGlobal;

void VectorClock::set(size_t stream, uint64_t operation) {
  if (known_.size() <= stream) known_.resize(stream + 1);
  known_[stream] = operation;
}

void VectorClock::merge(const VectorClock& other) {
  if (known_.size() < other.known_.size()) known_.resize(other.known_.size());
  for (size_t i = 0; i < other.known_.size(); i++) known_[i] = std::max(known_[i], other.known_[i]);
}

World& world() {
  static World* the_world = new World;  // never destroyed: threads of torch outlive main
  return *the_world;
}

Entry::Entry(const char* call, unsigned rules) {
  if (forked) {
    refused = cudaErrorInitializationError;
    return;
  }
  static std::once_flag once;
  std::call_once(once, set_up);
  World& w = world();
  lock = Lock(w.mutex);
  if (rules & HOST_ONLY) return;
  if (in_host_function) {
    violation(std::string("HOST FUNCTION: it calls ") + call + ", and may not call CUDA");
    refused = cudaErrorNotPermitted;
  } else if (w.broken) {
    refused = w.broken;
  } else if (w.devices.empty()) {
    refused = cudaErrorNoDevice;
  } else {
    if (rules & OPENS_CONTEXT) {
      auto& opened_by = w.devices[current_device].context_opened_by;
      if (opened_by.empty()) opened_by = call;
    }
    if (rules & UNSAFE_IN_CAPTURE) refused = forbidden_by_capture(call);
  }
}

cudaError_t fail(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}

cudaError_t take_last_error(bool forget) {
  cudaError_t error = last_error;
  if (forget) last_error = cudaSuccess;
  return error;
}

void violation(const std::string& text) {
  World& w = world();
  if (w.violations.size() < 10000) w.violations.push_back(text);
  if (w.settings.verbose) fprintf(stderr, "simulated GPU: %s\n", text.c_str());
}

void count(const std::string& what) { world().counts[what]++; }

const char* interned(const std::string& text) { return world().names.insert(text).first->c_str(); }

bool choose_schedule(const std::string& name, uint64_t seed) {
  World& w = world();
  if (name == "late") {
    w.schedule = Schedule::LATE;
  } else if (name == "early") {
    w.schedule = Schedule::EARLY;
  } else if (name == "random") {
    w.schedule = Schedule::RANDOM;
  } else {
    return false;
  }
  w.random.seed(seed);
  return true;
}

cudaError_t forbidden_by_capture(const char* call) {
  World& w = world();
  if (capture_mode == cudaStreamCaptureModeRelaxed) return cudaSuccess;
  for (Stream* stream : w.streams) {
    if (!stream->capture || !stream->capture->open) continue;
    Graph& graph = *stream->capture;
    bool own = graph.captured_by == std::this_thread::get_id();
    bool forbids = own ? graph.mode != cudaStreamCaptureModeRelaxed
                       : graph.mode == cudaStreamCaptureModeGlobal && capture_mode == cudaStreamCaptureModeGlobal;
    if (!forbids) continue;
    graph.broken = true;
    violation(std::string("CAPTURE: ") + call + " while " + (own ? "its thread" : "another thread") +
              " captures a stream: it fails, and so does the capture");
    return cudaErrorStreamCaptureUnsupported;
  }
  return cudaSuccess;
}

}  // namespace simgpu
