#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <muon/step.h>

namespace muon::testing {

/// A plan over named parameters together with their state: an optimizer without a shell.
class Stepper {
 public:
  /// `groups[i]` is the index of parameter i's entry in `specs` and `hyper_rows`.
  Stepper(
      std::vector<std::string> names, std::vector<at::Tensor> params,
      const std::vector<std::int64_t>& groups, const std::vector<GroupSpec>& specs,
      const std::vector<at::Tensor>& hyper_rows);
  ~Stepper();

  Stepper(const Stepper&) = delete;
  Stepper& operator=(const Stepper&) = delete;

  /// `grads` in the order of the parameters; undefined: no gradient.
  void step(const std::vector<at::Tensor>& grads);

  const std::vector<at::Tensor>& params() const {
    return params_;
  }

  /// [groups, Hyper::kCount]
  const at::Tensor& hyper() const {
    return hyper_;
  }

  /// The state tensor `slot` of `param`; undefined if it has none.
  at::Tensor state(const std::string& param, const std::string& slot) const;

 private:
  std::vector<at::Tensor> params_;
  at::Tensor hyper_;
  std::vector<at::Tensor> state_;
  std::vector<std::pair<std::string, std::string>> slots_; // parameter and slot of each state_
  PlanHandle plan_ = 0;
};

} // namespace muon::testing
