#include "support/stepper.h"

#include <ATen/ATen.h>

namespace muon::testing {
namespace {

// As the optimizer would have created it.
at::ScalarType state_dtype(const StateTensor& slot, at::ScalarType param) {
  switch (slot.kind) {
    case StateTensor::Kind::LikeParam:
      return param;
    case StateTensor::Kind::Statistic:
      return at::promote_types(c10::toRealValueType(param), at::kFloat);
    case StateTensor::Kind::Step:
      return at::kFloat;
    case StateTensor::Kind::Fixed:
      break;
  }
  return slot.dtype;
}

} // namespace

Stepper::Stepper(
    std::vector<std::string> names, std::vector<at::Tensor> params,
    const std::vector<std::int64_t>& groups, const std::vector<GroupSpec>& specs,
    const std::vector<at::Tensor>& hyper_rows)
    : params_(std::move(params)), hyper_(at::stack(hyper_rows)) {
  for (std::size_t i = 0; i < names.size(); ++i) {
    const GroupSpec& spec = specs.at(static_cast<std::size_t>(groups.at(i)));
    for (const StateTensor& slot :
         state_layout(spec, params_[i].sizes(), params_[i].scalar_type(), names[i])) {
      state_.push_back(at::zeros(slot.sizes, state_dtype(slot, params_[i].scalar_type())));
      slots_.emplace_back(names[i], slot.name);
    }
  }
  plan_ = create_plan(params_, groups, specs, names);
}

Stepper::~Stepper() {
  free_plan(plan_);
}

void Stepper::step(const std::vector<at::Tensor>& grads) {
  step_(plan_, params_, grads, state_, hyper_);
}

at::Tensor Stepper::state(const std::string& param, const std::string& slot) const {
  for (std::size_t i = 0; i < slots_.size(); ++i) {
    if (slots_[i] == std::pair{param, slot}) {
      return state_[i];
    }
  }
  return {};
}

} // namespace muon::testing
