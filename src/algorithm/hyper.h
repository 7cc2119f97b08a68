#pragma once

#include <ATen/core/Tensor.h>

#include <muon/step.h>

namespace muon::detail {

/// One row of the hyperparameter tensor.
class HyperRow {
 public:
  HyperRow(const at::Tensor& hyper, std::int64_t group)
      : row_(hyper.const_data_ptr<double>() + group * hyper.size(1)) {}

  double operator[](std::int64_t column) const {
    return row_[column];
  }
  bool flag(std::int64_t column) const {
    return row_[column] != 0.0;
  }

 private:
  const double* row_;
};

/// 1 / grad_scale, or 1. Reads the value on the host.
inline double inverse_scale(const std::optional<at::Tensor>& grad_scale) {
  return grad_scale && grad_scale->defined() ? 1.0 / grad_scale->item<double>() : 1.0;
}

} // namespace muon::detail
