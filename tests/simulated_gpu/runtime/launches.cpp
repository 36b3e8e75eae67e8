// Launches of real kernels, which nothing here can run: torch's own spin kernel becomes a pause, the others fail, or do
// nothing where only the launches are of interest.
#include <cstring>

#include "scheduler.h"

using namespace simgpu;

namespace {

constexpr double CYCLES_PER_S = 1.8e9;

struct {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
} thread_local configuration;

}  // namespace

extern "C" {

// What the compiler makes of a file with kernels ----------------------------------------------------------------------

void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 0; }
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

void __cudaRegisterFunction(void**, const char* stub, char*, const char* name, int, uint3*, uint3*, dim3*, dim3*,
                            int*) {
  Lock lock(world().mutex);
  world().kernels[stub] = name;
}

// And of `kernel<<<grid, block, shared, stream>>>(...)` ---------------------------------------------------------------

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st* stream) {
  configuration = {grid, block, shared, stream};
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  *grid = configuration.grid;
  *block = configuration.block;
  *shared = configuration.shared;
  *static_cast<cudaStream_t*>(stream) = configuration.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* out, const void* stub) {
  *out = reinterpret_cast<cudaKernel_t>(const_cast<void*>(stub));
  return cudaSuccess;
}

cudaError_t cudaLaunchKernel(const void* stub, dim3, dim3, void** arguments, size_t, cudaStream_t stream) {
  ENTER(OPENS_CONTEXT);
  World& w = world();
  auto known = w.kernels.find(stub);
  std::string kernel = known == w.kernels.end() ? "of an unknown name" : known->second;
  Operation operation;
  operation.name = interned("kernel " + kernel);
  if (kernel.find("spin_kernel") != std::string::npos) {
    count("spin kernel");
    auto cycles = static_cast<double>(*static_cast<int64_t*>(arguments[0]));
    operation.sleeps_s = cycles / CYCLES_PER_S * w.settings.sleep_factor;
  } else {
    count(w.settings.kernels_fail ? operation.name : "kernel");
    if (w.settings.kernels_fail) {
      violation("KERNEL: a real kernel was launched: " + kernel);
      return fail(cudaErrorNoKernelImageForDevice);
    }
  }
  enqueue(std::move(operation), stream_of(stream));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared,
                               cudaStream_t stream) {
  return cudaLaunchKernel(kernel, grid, block, arguments, shared, stream);
}

cudaError_t cudaLaunchCooperativeKernel(const void* stub, dim3 grid, dim3 block, void** arguments, size_t shared,
                                        cudaStream_t stream) {
  return cudaLaunchKernel(stub, grid, block, arguments, shared, stream);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* stub, void** arguments) {
  return cudaLaunchKernel(stub, config->gridDim, config->blockDim, arguments, 0, config->stream);
}

// What launch code asks beforehand ------------------------------------------------------------------------------------

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* out, const void*) {
  memset(out, 0, sizeof *out);
  out->maxThreadsPerBlock = 1024;
  out->numRegs = 32;
  out->binaryVersion = out->ptxVersion = 80;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* out, const void*, int, size_t) {
  *out = 2;
  return cudaSuccess;
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* out, const void*, int, size_t, unsigned) {
  *out = 2;
  return cudaSuccess;
}
}
