#pragma once

#include <initializer_list>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

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

/// ValueError unless `hyper` is as <muon/step.h> says and has a row for every group.
inline void check_groups(const char* stage, const at::Tensor& hyper, at::IntArrayRef groups) {
  TORCH_CHECK_VALUE(
      hyper.is_cpu() && hyper.scalar_type() == at::kDouble && hyper.is_contiguous() &&
          hyper.dim() == 2 && hyper.size(1) >= Hyper::kCount,
      "muon: expected hyper as a contiguous float64 CPU tensor [groups, ",
      std::int64_t{Hyper::kCount}, "] or wider, got ", hyper.scalar_type(), " ", hyper.sizes(),
      " (", stage, ")");
  for (const std::int64_t group : groups) {
    TORCH_CHECK_VALUE(
        group >= 0 && group < hyper.size(0), "muon: expected groups below ", hyper.size(0),
        ", got ", group, " (", stage, ")");
  }
}

/// What a stage is called with, from Python too: ValueError unless every list
/// has one tensor a piece, of the shape that `like` has, and every group is a
/// row of `hyper`.
inline void check_pieces(
    const char* stage, at::TensorList like, std::initializer_list<at::TensorList> others,
    const at::Tensor& hyper, at::IntArrayRef groups) {
  check_groups(stage, hyper, groups);
  TORCH_CHECK_VALUE(
      groups.size() == like.size() && !like.empty(), "muon: expected one group a piece, got ",
      groups.size(), " for ", like.size(), " pieces (", stage, ")");
  for (const at::TensorList tensors : others) {
    TORCH_CHECK_VALUE(
        tensors.size() == like.size(), "muon: expected lists of ", like.size(),
        " tensors, one a piece, got ", tensors.size(), " (", stage, ")");
    for (std::size_t i = 0; i < like.size(); ++i) {
      TORCH_CHECK_VALUE(
          tensors[i].sizes() == like[i].sizes() && tensors[i].device() == like[i].device(),
          "muon: expected piece ", i, " of shape ", like[i].sizes(), " on ", like[i].device(),
          ", got ", tensors[i].sizes(), " on ", tensors[i].device(), " (", stage, ")");
    }
  }
}

} // namespace muon::detail
