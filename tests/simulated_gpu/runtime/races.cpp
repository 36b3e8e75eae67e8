// Conflicting accesses that nothing orders, whatever the schedule: vector clocks. An operation is ordered after what
// its stream's clock knows: earlier operations of the stream, what it waited for by events, and what the host had
// waited for when it was enqueued.
#include <algorithm>
#include <cstdio>

#include "memory.h"
#include "scheduler.h"

namespace simgpu {

namespace {

constexpr size_t MOST_REMEMBERED = 5000;  // a stream; a program that never waits would make it grow without an end

void forget_what_the_host_waited_for(Stream* stream) {
  auto& past = stream->past;
  while (!past.empty() && (past.front().number <= world().host[stream->number] || past.size() > MOST_REMEMBERED))
    past.pop_front();
}

bool conflict(const SimgpuRange& a, const SimgpuRange& b) {
  return (a.writes || b.writes) && a.begin < b.end && b.begin < a.end;
}

std::string described(const Operation& now, Stream* stream, const SimgpuRange& touched, const PastOperation& past,
                      Stream* past_stream, const SimgpuRange& past_touched) {
  uintptr_t begin = std::max(touched.begin, past_touched.begin), end = std::min(touched.end, past_touched.end);
  char text[640];
  const char* format = "RACE: %s (stream %d) %s %s memory that %s (stream %d) %s, and nothing orders them: 0x%zx+%zu";
  snprintf(text, sizeof text, format, now.name, stream->number, touched.writes ? "writes" : "reads",
           is_device(begin) ? "device" : "host", past.name, past_stream->number,
           past_touched.writes ? "writes" : "reads", static_cast<size_t>(begin), static_cast<size_t>(end - begin));
  return text;
}

}  // namespace

void check_races(const Operation& operation, Stream* stream) {
  World& w = world();
  if (!w.settings.races || operation.touches.empty()) return;
  SimgpuRange hull = operation.touches.front();
  for (const SimgpuRange& touched : operation.touches) {
    hull.begin = std::min(hull.begin, touched.begin);
    hull.end = std::max(hull.end, touched.end);
  }
  for (Stream* other : w.streams) {
    if (other == stream) continue;
    forget_what_the_host_waited_for(other);
    uint64_t known = stream->clock[other->number];
    for (auto past = other->past.rbegin(); past != other->past.rend() && past->number > known; ++past)
      for (const SimgpuRange& past_touched : past->touches) {
        if (past_touched.begin >= hull.end || hull.begin >= past_touched.end) continue;
        for (const SimgpuRange& touched : operation.touches)
          if (conflict(past_touched, touched)) {
            violation(described(operation, stream, touched, *past, other, past_touched));
            return;  // one for an operation tells enough
          }
      }
  }
}

void remember(const Operation& operation, Stream* stream) {
  if (!world().settings.races || operation.touches.empty()) return;
  forget_what_the_host_waited_for(stream);
  stream->past.push_back({operation.number, operation.name, operation.touches});
}

}  // namespace simgpu
