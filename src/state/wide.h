#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

/// bfloat16 parameters whose steps are computed in float32 and stored without a
/// bias: with 16 more bits, or rounded at random. All work on pieces.
namespace muon::detail {

/// The float32 of which `high` (bfloat16) is the nearest and `low` (int16) the
/// difference of their bits.
at::Tensor join_halves(const at::Tensor& high, const at::Tensor& low);
void split_halves_(const at::Tensor& wide, const at::Tensor& high, const at::Tensor& low);

/// Rounds `wide` (float32) to one of its two neighbours in `target` (bfloat16), to
/// each as often as it is near. The numbers are a function of `seed` and of
/// an element's index, counted from `first`: the same on every device.
void round_stochastically_(
    const at::Tensor& wide, const at::Tensor& target, std::uint64_t seed, std::int64_t first);

/// The seed of one step of one batch of a parameter's matrices.
std::uint64_t rounding_seed(std::int64_t param, std::int64_t step, std::int64_t ordinal);

} // namespace muon::detail
