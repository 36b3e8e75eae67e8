// Graph capture. What is captured is one sequence in the order of the calls, whatever the streams were.
#include "scheduler.h"

using namespace simgpu;

namespace {

struct GraphHandle {
  std::shared_ptr<Graph> graph;
};

GraphHandle& graph_of(cudaGraph_t handle) { return *reinterpret_cast<GraphHandle*>(handle); }
GraphHandle& graph_of(cudaGraphExec_t handle) { return *reinterpret_cast<GraphHandle*>(handle); }

cudaStreamCaptureStatus status_of(const std::shared_ptr<Graph>& graph) {
  if (!graph) return cudaStreamCaptureStatusNone;
  return graph->broken ? cudaStreamCaptureStatusInvalidated : cudaStreamCaptureStatusActive;
}

}  // namespace

extern "C" {

cudaError_t cudaStreamBeginCapture(cudaStream_t handle, cudaStreamCaptureMode mode) {
  ENTER(OPENS_CONTEXT);
  Stream* stream = stream_of(handle);
  if (stream->capture || stream->is_default) return fail(cudaErrorStreamCaptureUnsupported);
  auto graph = std::make_shared<Graph>();
  graph->id = ++world().graphs;
  graph->mode = mode;
  graph->captured_by = std::this_thread::get_id();
  graph->streams.insert(stream);
  stream->capture = graph;
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t, const cudaGraphNode_t*,
                                          const cudaGraphEdgeData*, size_t, cudaStreamCaptureMode mode) {
  return cudaStreamBeginCapture(stream, mode);
}

cudaError_t cudaStreamEndCapture(cudaStream_t handle, cudaGraph_t* out) {
  ENTER(ORDINARY);
  auto graph = stream_of(handle)->capture;
  *out = nullptr;
  if (!graph) return fail(cudaErrorIllegalState);
  for (Stream* stream : graph->streams) stream->capture = nullptr;
  graph->open = false;
  if (graph->broken) return fail(cudaErrorStreamCaptureInvalidated);
  *out = reinterpret_cast<cudaGraph_t>(new GraphHandle{graph});
  return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t handle, cudaStreamCaptureStatus* status) {
  ENTER(ORDINARY);
  *status = status_of(stream_of(handle)->capture);
  return cudaSuccess;
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t handle, cudaStreamCaptureStatus* status, unsigned long long* id,
                                     cudaGraph_t* graph, const cudaGraphNode_t** dependencies,
                                     const cudaGraphEdgeData** edges, size_t* dependency_count) {
  ENTER(ORDINARY);
  auto capture = stream_of(handle)->capture;
  if (status) *status = status_of(capture);
  if (id) *id = capture ? capture->id : 0;
  if (graph) *graph = nullptr;
  if (dependencies) *dependencies = nullptr;
  if (edges) *edges = nullptr;
  if (dependency_count) *dependency_count = 0;
  return cudaSuccess;
}

cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t, cudaGraphNode_t*, const cudaGraphEdgeData*, size_t,
                                                unsigned) {
  return cudaSuccess;
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
  ENTER(ORDINARY);
  *out = reinterpret_cast<cudaGraphExec_t>(new GraphHandle(graph_of(graph)));
  return cudaSuccess;
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  ENTER(HOST_ONLY);
  delete &graph_of(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) {
  ENTER(HOST_ONLY);
  delete &graph_of(graph);
  return cudaSuccess;
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t stream) {
  ENTER(OPENS_CONTEXT);
  count("graph launch");
  for (const Operation& operation : graph_of(graph).graph->operations) enqueue(operation, stream_of(stream));
  return cudaSuccess;
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t*, size_t* count) {
  ENTER(ORDINARY);
  *count = graph_of(graph).graph->operations.size();
  return cudaSuccess;
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t, cudaGraphNode_t*, cudaGraphEdgeData*, size_t* count) {
  *count = 0;
  return cudaSuccess;
}

cudaError_t cudaGraphDebugDotPrint(cudaGraph_t, const char*, unsigned) { return cudaSuccess; }
}
