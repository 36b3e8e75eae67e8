// What torch links and the simulation has not got. To support one: write it where it belongs, and take it out of here.
#include "world.h"

#define NOT_SUPPORTED(call, ...) \
  extern "C" cudaError_t call(__VA_ARGS__) { return simgpu::fail(cudaErrorNotSupported); }

NOT_SUPPORTED(cudaDeviceGetDefaultMemPool, cudaMemPool_t*, int)
NOT_SUPPORTED(cudaGraphAddNode, cudaGraphNode_t*, cudaGraph_t, const cudaGraphNode_t*, const cudaGraphEdgeData*, size_t,
              cudaGraphNodeParams*)
NOT_SUPPORTED(cudaGraphConditionalHandleCreate, cudaGraphConditionalHandle*, cudaGraph_t, unsigned, unsigned)
NOT_SUPPORTED(cudaIpcCloseMemHandle, void*)
NOT_SUPPORTED(cudaIpcGetEventHandle, cudaIpcEventHandle_t*, cudaEvent_t)
NOT_SUPPORTED(cudaIpcGetMemHandle, cudaIpcMemHandle_t*, void*)
NOT_SUPPORTED(cudaIpcOpenEventHandle, cudaEvent_t*, cudaIpcEventHandle_t)
NOT_SUPPORTED(cudaIpcOpenMemHandle, void**, cudaIpcMemHandle_t, unsigned)
NOT_SUPPORTED(cudaKernelSetAttributeForDevice, cudaKernel_t, cudaFuncAttribute, int, int)
NOT_SUPPORTED(cudaLibraryGetKernel, cudaKernel_t*, cudaLibrary_t, const char*)
NOT_SUPPORTED(cudaLibraryLoadData, cudaLibrary_t*, const void*, cudaJitOption*, void**, unsigned, cudaLibraryOption*,
              void**, unsigned)
NOT_SUPPORTED(cudaLibraryUnload, cudaLibrary_t)
NOT_SUPPORTED(cudaMemPoolGetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
NOT_SUPPORTED(cudaMemPoolSetAccess, cudaMemPool_t, const cudaMemAccessDesc*, size_t)
NOT_SUPPORTED(cudaMemPoolSetAttribute, cudaMemPool_t, cudaMemPoolAttr, void*)
NOT_SUPPORTED(cudaMemPoolTrimTo, cudaMemPool_t, size_t)
