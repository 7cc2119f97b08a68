#pragma once

#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

/// The stages of libmuon's own algorithms; contract in <muon/algorithm.h>,
/// registered as dispatcher ops in ops/library.cpp.
namespace muon::detail {

void accumulate_(
    at::TensorList grads, at::TensorList state, at::TensorList matrices, const at::Tensor& hyper,
    at::IntArrayRef groups, const std::optional<at::Tensor>& grad_scale);

void orthogonalize_stage_(
    at::Tensor matrices, const at::Tensor& hyper, at::IntArrayRef groups, std::string_view spec);

void normuon_(
    at::TensorList matrices, at::TensorList state, const at::Tensor& hyper, at::IntArrayRef groups);

void apply_(
    at::TensorList params, at::TensorList matrices, const at::Tensor& hyper, at::IntArrayRef groups,
    at::ArrayRef<double> factors);

void adam_(
    at::TensorList params, at::TensorList grads, at::TensorList state, const at::Tensor& hyper,
    at::IntArrayRef groups, const std::optional<at::Tensor>& grad_scale, std::string_view spec);

} // namespace muon::detail
