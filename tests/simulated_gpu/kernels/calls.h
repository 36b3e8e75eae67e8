// A call of a CUDA operator, kept until its stream gets there: then the CPU kernel runs on the device memory.
#pragma once
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <string>
#include <vector>

#include "../runtime/simgpu.h"

namespace simgpu {

using Stack = std::vector<c10::IValue>;
using Ranges = std::vector<SimgpuRange>;

// Autograd, autocast and the like have had their turn when a CUDA kernel is called.
struct BelowAutograd {
  at::AutoDispatchBelowADInplaceOrView below;
  c10::impl::ExcludeDispatchKeyGuard autocast{c10::autocast_dispatch_keyset};
};

struct Call {
  c10::OperatorHandle op;
  Stack arguments;                  // tensors of the CPU, over device memory
  std::vector<at::Tensor> results;  // where what it makes anew goes, in order
};

std::string full_name(const c10::FunctionSchema& schema);  // "aten::add.Tensor"
bool is_written(const c10::Argument& argument);

Stack run_on_cpu(const Call& call);
// On the current stream of the device.
void enqueue(Call&& call, int device, const Ranges& touches);

// Tensors -----------------------------------------------------------------------------------------------------------

// The same memory as a tensor of the CPU. By raw address, so that memory that was freed and is used again shows what is
// in it now, as on a GPU.
at::Tensor on_cpu(const at::Tensor& tensor);
// The same shape without memory.
at::Tensor without_memory(const at::Tensor& tensor);
// What a tensor in host memory holds at this moment.
at::Tensor as_of_now(const at::Tensor& tensor);
void add_range(Ranges& touches, const at::Tensor& tensor, bool writes);

// The same value with every tensor in it replaced.
template <class Replace>
c10::IValue map_tensors(const c10::IValue& value, Replace replace) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(replace(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> replaced;
    for (const at::Tensor& tensor : value.toTensorVector())
      replaced.push_back(tensor.defined() ? replace(tensor) : tensor);
    return replaced;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> replaced;
    for (const c10::IValue& element : value.toListRef()) {
      if (element.isNone() || !element.toTensor().defined())
        replaced.push_back(std::nullopt);
      else
        replaced.push_back(replace(element.toTensor()));
    }
    return replaced;
  }
  return value;
}

template <class Visit>
void each_tensor(const c10::IValue& value, Visit visit) {
  map_tensors(value, [&](const at::Tensor& tensor) {
    visit(tensor);
    return tensor;
  });
}

// boxed.cpp, copy.cpp: the kernels themselves.
void any_operator(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack);
void copy_operator(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack);
void foreach_copy_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack);

}  // namespace simgpu
