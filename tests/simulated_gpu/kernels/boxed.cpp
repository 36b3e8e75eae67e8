// One kernel for nearly every operator. It finds the shapes of the results with the operator's Meta kernel, allocates
// them on the device, and enqueues the CPU kernel on the current stream. It needs no GIL when it runs.
//
// Operators whose results are no tensors, or of a shape that only the data tells, wait for the stream and run at once,
// as most of them do on a GPU.
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>
#include <set>

#include "calls.h"

namespace simgpu {

namespace {

using c10::Argument;
using c10::Device;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;

struct Invocation {
  const c10::OperatorHandle& op;
  const std::vector<Argument>& parameters;
  const std::vector<Argument>& returns;
  Stack arguments;
  int device;
};

int device_of(const Stack& arguments) {
  for (const IValue& argument : arguments) {
    int device = -1;
    each_tensor(argument, [&](const at::Tensor& tensor) {
      if (tensor.is_cuda() && device < 0) device = tensor.get_device();
    });
    if (argument.isDevice() && argument.toDevice().is_cuda() && argument.toDevice().has_index())
      device = argument.toDevice().index();
    if (device >= 0) return device;
  }
  return c10::cuda::current_device();
}

// On a GPU they are cuBLAS's.
const std::set<std::string> PRODUCTS = {
    "aten::_addmm_activation", "aten::addmm", "aten::addmm_",    "aten::addmv", "aten::addmv_", "aten::baddbmm",
    "aten::baddbmm_",          "aten::bmm",   "aten::dot",       "aten::mm",    "aten::vdot",
};

// The cuBLAS handles of a thread, one a device; torch gives those of a thread that has ended to the next one.
class Handles {
 public:
  void want(int device) {
    if (mine_.count(device)) return;
    std::lock_guard<std::mutex> lock(mutex());
    if (left()[device] > 0)
      left()[device]--;
    else
      C10_CUDA_CHECK(static_cast<cudaError_t>(simgpu_create_handle()));
    mine_.insert(device);
  }

  ~Handles() {
    std::lock_guard<std::mutex> lock(mutex());
    for (int device : mine_) left()[device]++;
  }

 private:
  // Never deleted, for threads outlive main().
  static std::mutex& mutex() {
    static auto* the_mutex = new std::mutex;
    return *the_mutex;
  }
  static std::map<int, int>& left() {
    static auto* counts = new std::map<int, int>;
    return *counts;
  }

  std::set<int> mine_;
};

bool is_empty_foreach(const std::string& name, const Stack& arguments) {
  return name.rfind("aten::_foreach_", 0) == 0 && !arguments.empty() && arguments[0].isTensorList() &&
         arguments[0].toTensorVector().empty();
}

bool writes_host_memory(const Invocation& call) {
  bool writes = false;
  for (size_t i = 0; i < call.arguments.size(); i++)
    if (is_written(call.parameters[i]))
      each_tensor(call.arguments[i], [&](const at::Tensor& tensor) { writes |= !tensor.is_cuda(); });
  return writes;
}

bool returns_tensors(const Invocation& call) {
  for (const Argument& each : call.returns) {
    bool tensors = each.type()->isSubtypeOf(*c10::TensorType::get()) ||
                   each.type()->isSubtypeOf(*c10::ListType::ofTensors());
    if (!tensors) return false;
  }
  return true;
}

bool needs_shapes(const Invocation& call) {
  for (const Argument& each : call.returns)
    if (!each.alias_info()) return true;
  for (const Argument& each : call.parameters)
    if (is_written(each) && each.is_out()) return true;
  return false;
}

// What the operator will return, without memory; out= arguments get their size. False where only the data can tell.
bool foresee(Invocation& call, Stack& results) {
  if (!call.op.hasComputedKernelForDispatchKey(DispatchKey::Meta)) return false;
  try {
    Stack arguments;
    for (const IValue& argument : call.arguments) {
      if (argument.isGenerator())
        arguments.emplace_back();
      else if (argument.isDevice())
        arguments.emplace_back(Device(c10::kMeta));
      else
        arguments.push_back(map_tensors(argument, without_memory));
    }
    results = arguments;
    call.op.redispatchBoxed(DispatchKeySet(DispatchKey::Meta), &results);
    for (size_t i = 0; i < arguments.size(); i++) {
      if (!call.parameters[i].is_out() || !call.arguments[i].isTensor()) continue;
      at::Tensor out = call.arguments[i].toTensor();
      auto sizes = arguments[i].toTensor().sizes();
      if (out.sizes() != sizes) out.resize_(sizes);
    }
    return true;
  } catch (const std::exception& error) {
    if (getenv("SIMULATED_GPU_VERBOSE"))
      fprintf(stderr, "simulated GPU: Meta of %s: %.400s\n", full_name(call.op.schema()).c_str(), error.what());
    return false;
  }
}

Stack arguments_on_cpu(const Invocation& call, Ranges& touches) {
  Stack arguments;
  for (size_t i = 0; i < call.arguments.size(); i++) {
    const IValue& argument = call.arguments[i];
    bool writes = is_written(call.parameters[i]);
    if (argument.isGenerator())
      arguments.emplace_back();
    else if (argument.isDevice())
      arguments.emplace_back(Device(c10::kCPU));
    else
      arguments.push_back(map_tensors(argument, [&](const at::Tensor& tensor) -> at::Tensor {
        if (!tensor.is_cuda()) return writes || tensor.is_meta() ? tensor : as_of_now(tensor);
        add_range(touches, tensor, writes);
        return on_cpu(tensor);
      }));
  }
  return arguments;
}

// The argument that a result is.
IValue aliased(const Invocation& call, const Argument& result) {
  for (size_t i = 0; i < call.arguments.size(); i++) {
    const auto* alias = call.parameters[i].alias_info();
    if (alias && *alias == *result.alias_info()) return call.arguments[i];
  }
  for (size_t i = 0; i < call.arguments.size(); i++)
    if (is_written(call.parameters[i])) return call.arguments[i];
  TORCH_CHECK(false, "simulated GPU: ", full_name(call.op.schema()), " returns an alias of nothing");
}

at::Tensor on_device_like(const at::Tensor& tensor, int device) {
  auto options = at::TensorOptions().dtype(tensor.scalar_type());
  return at::empty_strided(tensor.sizes(), tensor.strides(),
                           options.device(Device(c10::kCUDA, static_cast<c10::DeviceIndex>(device))));
}

void run_later(const Invocation& call, const Stack& foreseen, Stack* stack) {
  Ranges touches;
  Call later{call.op, arguments_on_cpu(call, touches), {}};
  Stack results;
  for (size_t i = 0; i < call.returns.size(); i++) {
    if (call.returns[i].alias_info()) {
      results.push_back(aliased(call, call.returns[i]));
      continue;
    }
    results.push_back(map_tensors(foreseen[i], [&](const at::Tensor& shape) {
      at::Tensor result = on_device_like(shape, call.device);
      add_range(touches, result, true);
      later.results.push_back(on_cpu(result));
      return result;
    }));
  }
  enqueue(std::move(later), call.device, touches);
  for (IValue& result : results) stack->push_back(std::move(result));
}

void run_at_once(const Invocation& call, Stack* stack) {
  std::string name = full_name(call.op.schema());
  auto stream = c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(call.device)).stream();
  TORCH_CHECK(!simgpu_is_capturing(stream, call.device), "simulated GPU: ", name,
              " waits for the host, which a capture forbids");
  simgpu_count(("AT ONCE " + name).c_str());
  C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  Ranges touches;
  Stack done = run_on_cpu({call.op, arguments_on_cpu(call, touches), {}});
  for (size_t i = 0; i < call.returns.size(); i++) {
    if (call.returns[i].alias_info())
      stack->push_back(aliased(call, call.returns[i]));
    else
      stack->push_back(map_tensors(done[i], [&](const at::Tensor& tensor) {
        at::Tensor result = on_device_like(tensor, call.device);
        on_cpu(result).copy_(tensor);
        return result;
      }));
  }
}

}  // namespace

void any_operator(const c10::OperatorHandle& op, DispatchKeySet, Stack* stack) {
  const auto& schema = op.schema();
  size_t arity = schema.arguments().size();
  Stack arguments(stack->end() - arity, stack->end());
  stack->resize(stack->size() - arity);
  BelowAutograd guard;
  const std::string& name = schema.operator_name().name;
  if (name == "aten::_fused_sdp_choice") {
    stack->emplace_back(static_cast<int64_t>(0));  // the plain one: the fused ones have no CPU kernel of the same name
    return;
  }
  if (schema.returns().empty() && is_empty_foreach(name, arguments)) return;
  TORCH_CHECK(op.hasComputedKernelForDispatchKey(DispatchKey::CPU), "simulated GPU: ", full_name(schema),
              " has no CPU kernel");
  int device = device_of(arguments);
  c10::cuda::CUDAGuard on(static_cast<c10::DeviceIndex>(device));
  if (PRODUCTS.count(name)) {
    thread_local Handles handles;
    handles.want(device);
  }
  Invocation call{op, schema.arguments(), schema.returns(), std::move(arguments), device};
  bool later = returns_tensors(call) && !writes_host_memory(call);
  Stack foreseen;
  if (later && needs_shapes(call)) later = foresee(call, foreseen);
  if (later)
    run_later(call, foreseen, stack);
  else
    run_at_once(call, stack);
}

}  // namespace simgpu
