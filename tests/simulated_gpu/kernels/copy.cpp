// copy_: torch's own code decides how, but where it would launch a kernel (other types, other strides) the CPU's runs.
// _foreach_copy_: one launch where torch makes one, else a copy for each tensor, and what torch's refuses is refused.
#include <ATen/core/Tensor.h>
#include <ATen/native/Copy.h>
#include <ATen/ops/copy_native.h>
#include <c10/cuda/CUDAGuard.h>

#include "calls.h"

namespace simgpu {

namespace {

bool is_one_memcpy(const at::Tensor& to, const at::Tensor& from) {
  return to.scalar_type() == from.scalar_type() && to.sizes() == from.sizes() && to.strides() == from.strides() &&
         to.is_non_overlapping_and_dense() && to.is_conj() == from.is_conj() && to.is_neg() == from.is_neg();
}

void copy(const c10::OperatorHandle& op, at::Tensor& to, const at::Tensor& from, bool non_blocking) {
  bool needs_kernel = to.is_cuda() && from.is_cuda() && to.numel() && !is_one_memcpy(to, from);
  if (!needs_kernel) {
    at::native::copy_(to, from, non_blocking);
  } else if (to.get_device() != from.get_device()) {  // gathered where it is, then carried over
    auto gathered = from.to(to.scalar_type()).expand(to.sizes()).contiguous();
    to.copy_(gathered.to(to.device()), non_blocking);
  } else {
    c10::cuda::CUDAGuard on(to.device());
    Ranges touches;
    add_range(touches, to, true);
    add_range(touches, from, false);
    enqueue({op, {on_cpu(to), on_cpu(from), false}, {}}, to.get_device(), touches);
  }
}

bool is_alike(const at::Tensor& to, const at::Tensor& from, const at::Tensor& first) {
  return to.sizes() == from.sizes() && to.strides() == from.strides() && to.is_non_overlapping_and_dense() &&
         to.device() == from.device() && from.scalar_type() == first.scalar_type();
}

// Those of AT_DISPATCH_SOURCE_TYPES in torch's ForeachBinaryOpList.cu.
bool has_fused_copy(at::ScalarType type) {
  using enum at::ScalarType;
  for (auto known : {Byte, Char, Short, Int, Long, Half, BFloat16, Float, Double, ComplexFloat, ComplexDouble, Bool})
    if (type == known) return true;
  return false;
}

}  // namespace

void foreach_copy_operator(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  auto arguments = stack->end() - 3;
  std::vector<at::Tensor> to = arguments[0].toTensorVector(), from = arguments[1].toTensorVector();
  bool non_blocking = arguments[2].toBool();
  bool fused = !to.empty() && to.size() == from.size();
  for (size_t i = 0; fused && i < to.size(); i++) fused = is_alike(to[i], from[i], from[0]);
  if (fused) {
    TORCH_CHECK_NOT_IMPLEMENTED(has_fused_copy(to[0].scalar_type()) && has_fused_copy(from[0].scalar_type()),
                                "\"foreach_tensor_copy\" not implemented for '", to[0].scalar_type(), "'");
    any_operator(op, keys, stack);
    return;
  }
  TORCH_CHECK(!to.empty() && to.size() == from.size(), "Tensor lists must have the same number of tensors, at least one");
  BelowAutograd guard;
  for (size_t i = 0; i < to.size(); i++) {
    simgpu_count("copy of a _foreach_copy_ that is not fused");
    to[i].copy_(from[i], non_blocking);
  }
  stack->resize(stack->size() - 3);
}

void copy_operator(const c10::OperatorHandle& op, c10::DispatchKeySet, Stack* stack) {
  auto arguments = stack->end() - 3;
  at::Tensor to = arguments[0].toTensor(), from = arguments[1].toTensor();
  bool non_blocking = arguments[2].toBool();
  BelowAutograd guard;
  copy(op, to, from, non_blocking);
  stack->resize(stack->size() - 3);
  stack->emplace_back(to);
}

}  // namespace simgpu
