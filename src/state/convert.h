#pragma once

#include <string>
#include <string_view>
#include <utility>

#include <ATen/core/Tensor.h>

#include <muon/step.h>

/// A parameter's whole state tensor from one format to another, when a file or
/// a state dict is loaded; a step never does.
namespace muon::detail {

/// The key of the 16 bits that a split parameter keeps.
constexpr const char* kRemainder = "param_remainder";

/// The key of the scales of a state's codes.
inline std::string scale_key(const std::string& key) {
  return key + "_scale";
}

/// Codes and scales, in `spec`'s format, of `values` (the parameter's shape, any
/// floating or complex dtype).
std::pair<at::Tensor, at::Tensor> encode_values(
    const at::Tensor& values, const GroupSpec& spec, std::string_view name);

/// float32 (complex64) values of the parameter's shape. The codes' dtype says
/// their format; ValueError where codes or scales do not fit the shape.
at::Tensor decode_values(
    const at::Tensor& codes, const at::Tensor& scales, at::IntArrayRef sizes, bool is_complex,
    const GroupSpec& spec, std::string_view name);

} // namespace muon::detail
