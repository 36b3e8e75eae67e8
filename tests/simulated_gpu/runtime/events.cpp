// Events: places in streams that other streams and the host can wait for.
#include "scheduler.h"

using namespace simgpu;

namespace {

Event* event_of(cudaEvent_t handle) { return reinterpret_cast<Event*>(handle); }

}  // namespace

extern "C" {

cudaError_t cudaEventCreateWithFlags(cudaEvent_t* out, unsigned) {
  ENTER(OPENS_CONTEXT);
  auto* event = new Event;
  event->device = current_device;
  *out = reinterpret_cast<cudaEvent_t>(event);
  return cudaSuccess;
}

cudaError_t cudaEventCreate(cudaEvent_t* out) { return cudaEventCreateWithFlags(out, 0); }

cudaError_t cudaEventDestroy(cudaEvent_t handle) {
  ENTER(HOST_ONLY);
  delete event_of(handle);
  return cudaSuccess;
}

cudaError_t cudaEventRecord(cudaEvent_t handle, cudaStream_t stream_handle) {
  ENTER(ORDINARY);
  Event* event = event_of(handle);
  Stream* stream = stream_of(stream_handle, event->device);
  event->recorded = true;
  event->capture = stream->capture;
  if (event->capture) return cudaSuccess;
  if (stream->device != event->device) return fail(cudaErrorInvalidResourceHandle);
  event->happened_at = std::make_shared<double>(0);
  Operation operation;
  operation.name = "event";
  operation.work = work([when = event->happened_at] { *when = now_s(); });
  event->stream = stream;
  event->operation = stream->next;
  event->queries = 0;
  enqueue(std::move(operation), stream);
  event->clock = stream->clock;
  return cudaSuccess;
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned) {
  return cudaEventRecord(event, stream);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream_handle, cudaEvent_t handle, unsigned) {
  ENTER(OPENS_CONTEXT);
  Event* event = event_of(handle);
  Stream* stream = stream_of(stream_handle);
  if (!event->recorded) {  // legal, and waits for nothing: worth a look wherever it is not meant
    count("WAIT for an event that was never recorded");
    return cudaSuccess;
  }
  if (event->capture) {
    if (!stream->capture && event->capture->open) {  // the stream joins the capture
      stream->capture = event->capture;
      event->capture->streams.insert(stream);
    }
    return cudaSuccess;
  }
  if (stream->capture) {
    stream->capture->broken = true;
    violation("CAPTURE: a captured stream waits for an event from outside");
    return fail(cudaErrorStreamCaptureIsolation);
  }
  Operation operation;
  operation.name = "wait";
  if (event->stream != stream) {
    operation.waits_for.push_back({event->stream, event->operation});
    stream->clock.merge(event->clock);
  }
  enqueue(std::move(operation), stream);
  return cudaSuccess;
}

cudaError_t cudaEventSynchronize(cudaEvent_t handle) {
  ENTER(UNSAFE_IN_CAPTURE);
  Event* event = event_of(handle);
  if (event->capture) return fail(cudaErrorStreamCaptureUnsupported);
  count("HOST SYNC cudaEventSynchronize");
  if (!event->recorded) return cudaSuccess;
  VectorClock clock = event->clock;  // the event may be recorded again meanwhile
  if (cudaError_t error = wait_until(entry.lock, event->stream, event->operation)) return fail(error);
  world().host.merge(clock);
  return cudaSuccess;
}

cudaError_t cudaEventQuery(cudaEvent_t handle) {
  ENTER(UNSAFE_IN_CAPTURE);
  Event* event = event_of(handle);
  if (event->capture) return fail(cudaErrorStreamCaptureUnsupported);
  if (!event->recorded) return cudaSuccess;
  return query(event->stream, event->operation, event->queries, event->clock);
}

cudaError_t cudaEventElapsedTime(float* out_ms, cudaEvent_t begin_handle, cudaEvent_t end_handle) {
  ENTER(ORDINARY);
  Event *begin = event_of(begin_handle), *end = event_of(end_handle);
  if (!begin->happened_at || !end->happened_at) return fail(cudaErrorInvalidResourceHandle);
  bool happened = begin->stream->done >= begin->operation && end->stream->done >= end->operation;
  if (!happened) return fail(cudaErrorNotReady);
  *out_ms = static_cast<float>((*end->happened_at - *begin->happened_at) * 1e3);
  return cudaSuccess;
}
}
