// Streams, and what the host may ask of them.
#include "scheduler.h"

using namespace simgpu;

extern "C" {

cudaError_t cudaStreamCreateWithPriority(cudaStream_t* out, unsigned flags, int priority) {
  ENTER(OPENS_CONTEXT);
  *out = reinterpret_cast<cudaStream_t>(make_stream(current_device, !(flags & cudaStreamNonBlocking), false, priority));
  return cudaSuccess;
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t* out, unsigned flags) {
  return cudaStreamCreateWithPriority(out, flags, 0);
}

cudaError_t cudaStreamCreate(cudaStream_t* out) { return cudaStreamCreateWithPriority(out, 0, 0); }

cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }  // what is in it still runs, as on a GPU

cudaError_t cudaStreamGetPriority(cudaStream_t handle, int* priority) {
  ENTER(ORDINARY);
  *priority = stream_of(handle)->priority;
  return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t handle) {
  ENTER(OPENS_CONTEXT);
  Stream* stream = stream_of(handle);
  if (stream->capture) {  // not reported: the caller gets to know
    stream->capture->broken = true;
    return fail(cudaErrorStreamCaptureUnsupported);
  }
  if (cudaError_t error = forbidden_by_capture(__func__)) return fail(error);
  count("HOST SYNC cudaStreamSynchronize");
  return wait_for_stream(entry.lock, stream);
}

cudaError_t cudaStreamQuery(cudaStream_t handle) {
  ENTER(OPENS_CONTEXT);
  Stream* stream = stream_of(handle);
  if (stream->capture) return fail(cudaErrorStreamCaptureUnsupported);
  return query(stream, stream->next - 1, stream->queries, VectorClock(stream->clock));
}
}
