#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "state/block_layout.h"

/// Whole pieces of quantised state at once, for stages that take plain tensors:
/// a chunk's worth, never a parameter's.
namespace muon::detail {

/// Codes and scales, two tensors a piece, as a stage gets them; ValueError where
/// they do not fit the pieces `like` (block order).
std::vector<BlockState> block_states(at::TensorList state, at::TensorList like);

/// The values of a piece, contiguous in block order: `sizes` [batch, lead...,
/// side...], float32.
at::Tensor decode_state(const BlockState& state, at::IntArrayRef sizes);

/// Stores `values` (block order, any strides and floating dtype).
void encode_state_(const BlockState& state, const at::Tensor& values);

} // namespace muon::detail
