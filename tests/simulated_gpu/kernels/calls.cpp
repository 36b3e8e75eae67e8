#include "calls.h"

#include <ATen/core/DimVector.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/empty_strided.h>
#include <c10/cuda/CUDAStream.h>

namespace simgpu {

using c10::DispatchKey;
using c10::DispatchKeySet;

std::string full_name(const c10::FunctionSchema& schema) {
  const auto& name = schema.operator_name();
  return name.overload_name.empty() ? name.name : name.name + "." + name.overload_name;
}

bool is_written(const c10::Argument& argument) { return argument.alias_info() && argument.alias_info()->isWrite(); }

Stack run_on_cpu(const Call& call) {
  BelowAutograd guard;
  Stack stack = call.arguments;
  call.op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &stack);
  return stack;
}

namespace {

void run(void* data) {
  const auto& call = *static_cast<Call*>(data);
  Stack returned = run_on_cpu(call);
  if (call.results.empty()) return;
  BelowAutograd guard;
  std::vector<at::Tensor> fresh;
  const auto& returns = call.op.schema().returns();
  for (size_t i = 0; i < returns.size(); i++)
    if (!returns[i].alias_info()) each_tensor(returned[i], [&](const at::Tensor& tensor) { fresh.push_back(tensor); });
  TORCH_CHECK(fresh.size() == call.results.size(), "the CPU kernel returns more or less than the Meta kernel");
  for (size_t i = 0; i < fresh.size(); i++) {
    bool alike = fresh[i].sizes() == call.results[i].sizes() && fresh[i].scalar_type() == call.results[i].scalar_type();
    TORCH_CHECK(alike, "the CPU kernel returns ", fresh[i].scalar_type(), fresh[i].sizes(), ", the Meta kernel ",
                call.results[i].scalar_type(), call.results[i].sizes());
    call.results[i].copy_(fresh[i]);
  }
}

}  // namespace

void enqueue(Call&& call, int device, const Ranges& touches) {
  auto stream = c10::cuda::getCurrentCUDAStream(static_cast<c10::DeviceIndex>(device));
  std::string name = full_name(call.op.schema());
  auto* data = new Call(std::move(call));
  auto destroy = [](void* each) { delete static_cast<Call*>(each); };
  int error = simgpu_enqueue(stream.stream(), device, run, destroy, data, name.c_str(), touches.data(),
                             static_cast<int>(touches.size()));
  C10_CUDA_CHECK(static_cast<cudaError_t>(error));
}

at::Tensor on_cpu(const at::Tensor& tensor) {
  auto* memory = const_cast<void*>(tensor.storage().data());
  c10::DataPtr borrowed(memory, memory, [](void*) {}, c10::Device(c10::kCPU));
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(borrowed), nullptr, false);
  auto alias = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CPU),
                                                        tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.is_conj()) alias._set_conj(true);
  if (tensor.is_neg()) alias._set_neg(true);
  return alias;
}

at::Tensor without_memory(const at::Tensor& tensor) {
  // A Meta kernel that is written in Python makes a number of it, and needs its value.
  if (tensor.is_cpu() && tensor.unsafeGetTensorImpl()->is_wrapped_number()) return tensor;
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(c10::kMeta);
  return at::empty_strided(tensor.sizes(), tensor.strides(), options);
}

at::Tensor as_of_now(const at::Tensor& tensor) {
  auto copy = tensor.clone();
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

void add_range(Ranges& touches, const at::Tensor& tensor, bool writes) {
  if (!tensor.numel()) return;
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); d++) last += (tensor.size(d) - 1) * tensor.stride(d);
  auto begin = reinterpret_cast<uintptr_t>(tensor.storage().data()) + tensor.storage_offset() * tensor.itemsize();
  touches.push_back({begin, begin + (last + 1) * tensor.itemsize(), writes});
}

}  // namespace simgpu
