#pragma once

#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

namespace muon {

/// A step of the matrix algorithm "muon" on lists of tensors, without a plan of
/// the caller's: `hyper` is [1, hyper_width], all parameters follow `spec`.
void muon_(
    at::TensorList params, const std::vector<at::Tensor>& grads, at::TensorList momentum_buffers,
    const at::Tensor& hyper, std::string_view spec);

} // namespace muon
