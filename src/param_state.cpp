#include "param_state.h"

#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/StringUtil.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

namespace muon {

MuonParamState::MuonParamState(const at::Tensor& param) : param_(param.getIntrusivePtr()) {}

at::Tensor MuonParamState::get(const std::string& key) const {
  const auto found = tensors_.find(key);
  return found == tensors_.end() ? at::Tensor() : found->second;
}

void MuonParamState::serialize(torch::serialize::InputArchive& archive) {
  tensors_.clear();
  for (const std::string& key : archive.keys()) {
    archive.read(key, tensors_[key], /*is_buffer=*/true);
  }
}

void MuonParamState::serialize(torch::serialize::OutputArchive& archive) const {
  for (const auto& [key, tensor] : tensors_) {
    if (tensor.defined()) {
      archive.write(key, tensor, /*is_buffer=*/true);
    }
  }
}

namespace detail {
namespace {

// Not every supported torch lets a parameter say which dtype its gradients have.
template <typename Param>
c10::ScalarType gradient_dtype(const Param& param) {
  if (param.grad().defined()) {
    return param.grad().scalar_type();
  }
  if constexpr (requires { param.grad_dtype(); }) {
    return param.grad_dtype().value_or(param.scalar_type());
  } else {
    return param.scalar_type();
  }
}

// A step count lives on the CPU, everything else with the parameter.
c10::Device slot_device(const StateTensor& slot, const at::Tensor& param) {
  return !slot.like_param && slot.sizes.empty() ? c10::Device(c10::kCPU) : param.device();
}

} // namespace

std::string param_label(const MuonOptions& options, std::size_t group, std::size_t index) {
  return index < options.param_names().size() ? options.param_names()[index]
                                              : c10::str("parameter ", index, " of group ", group);
}

std::string group_label(const MuonOptions& options, std::size_t group) {
  return options.param_names().empty()
      ? c10::str("group ", group)
      : c10::str("group ", group, ", first parameter ", options.param_names().front());
}

std::vector<StateTensor> state_slots(
    const MuonOptions& options, const at::Tensor& param, std::string_view name) {
  return state_layout(options.spec(), param.sizes(), name);
}

at::Tensor create_state(
    const StateTensor& slot, const at::Tensor& param, const MuonOptions& options) {
  if (slot.like_param) {
    const auto asked = options.state_dtype();
    const c10::ScalarType dtype = !asked ? gradient_dtype(param)
        : param.is_complex()             ? c10::toComplexType(*asked)
                                         : *asked;
    return at::zeros_like(param, dtype);
  }
  // Statistics are no narrower than their parameter; counts are float32 everywhere.
  const c10::ScalarType dtype = slot.sizes.empty()
      ? c10::kFloat
      : c10::promoteTypes(c10::kFloat, c10::toRealValueType(param.scalar_type()));
  return at::zeros(slot.sizes, at::TensorOptions(slot_device(slot, param)).dtype(dtype));
}

void fit_state(
    MuonParamState& state, const std::vector<StateTensor>& slots, const at::Tensor& param) {
  std::map<std::string, at::Tensor> kept;
  for (const StateTensor& slot : slots) {
    const at::Tensor tensor = state.get(slot.name);
    if (tensor.defined() && tensor.sizes() == slot.sizes) {
      kept[slot.name] = slot_device(slot, param) == tensor.device()
          ? tensor
          : tensor.to(slot_device(slot, param));
    }
  }
  state.tensors() = std::move(kept);
}

bool takes_part(const at::Tensor& param) {
  return param.requires_grad() || param.grad().defined();
}

} // namespace detail
} // namespace muon
