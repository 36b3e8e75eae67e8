// Puts the kernels in the place of torch's own.
#include <c10/util/Exception.h>

#include <set>

#include "calls.h"

namespace simgpu {

namespace {

using c10::DispatchKey;
using c10::KernelFunction;

// Torch's own CUDA functions that launch nothing, or only what is replaced anyway.
const std::set<std::string> KEPT = {
    "aten::_copy_from",
    "aten::_copy_from_and_resize",
    "aten::_cudnn_init_dropout_state",
    "aten::_debug_has_internal_overlap",
    "aten::_efficientzerotensor",
    "aten::_has_same_storage_numel",
    "aten::_local_scalar_dense",
    "aten::_pin_memory",
    "aten::_resize_output_",
    "aten::_use_cudnn_ctc_loss",
    "aten::empty.memory_format",
    "aten::empty_strided",
    "aten::is_pinned",
    "aten::is_set_to",
    "aten::pin_memory",
    "aten::record_stream",
    "aten::resize_",
    "aten::resize_as_",
    "aten::set_",
    "aten::set_.source_Storage",
    "aten::set_.source_Storage_storage_offset",
    "aten::set_.source_Tensor",
    "aten::set_data",
};

// Torch warns of a kernel that is replaced.
struct Silence : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

bool returns_view(const c10::FunctionSchema& schema) {
  for (const auto& each : schema.returns())
    if (each.alias_info() && !each.alias_info()->isWrite()) return true;
  return false;
}

bool is_replaced(const c10::OperatorHandle& op, const std::string& name) {
  return op.hasKernelForDispatchKey(DispatchKey::CUDA) && !KEPT.count(name) && !returns_view(op.schema());
}

}  // namespace

}  // namespace simgpu

// Returns how many kernels were replaced.
extern "C" int simgpu_install_kernels() {
  using namespace simgpu;
  static auto* registrations = new std::vector<c10::RegistrationHandleRAII>;  // for good
  Silence silence;
  c10::WarningUtils::WarningHandlerGuard guard(&silence);
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& operator_name : dispatcher.getAllOpNames()) {
    if (operator_name.name.rfind("aten::", 0) != 0) continue;
    auto op = dispatcher.findOp(operator_name);
    if (!op || !op->hasSchema()) continue;
    std::string name = full_name(op->schema());
    bool is_copy = name == "aten::copy_";
    if (!is_copy && !is_replaced(*op, name)) continue;
    auto kernel = is_copy                          ? KernelFunction::makeFromBoxedFunction<&copy_operator>()
                  : name == "aten::_foreach_copy_" ? KernelFunction::makeFromBoxedFunction<&foreach_copy_operator>()
                                                   : KernelFunction::makeFromBoxedFunction<&any_operator>();
    registrations->push_back(dispatcher.registerImpl(operator_name, DispatchKey::CUDA, std::move(kernel), std::nullopt,
                                                     nullptr, "simulated GPU"));
  }
  return static_cast<int>(registrations->size());
}
