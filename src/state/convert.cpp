#include "state/convert.h"

#include <vector>

#include <ATen/core/DimVector.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <muon/algorithm.h>

#include "state/quantized.h"

namespace muon::detail {
namespace {

std::vector<Region> state_regions(
    at::IntArrayRef sizes, bool is_complex, const GroupSpec& spec, std::string_view name) {
  if (find_algorithm(spec.algorithm).is_elementwise()) {
    return {whole_region(sizes, is_complex)};
  }
  return resolve_regions(sizes, is_complex, spec.layout, name);
}

StateFormat format_of(c10::ScalarType codes, std::string_view name) {
  for (const StateFormat format : {StateFormat::Int8, StateFormat::Int4, StateFormat::Fp8}) {
    if (code_dtype(format) == codes) {
      return format;
    }
  }
  TORCH_CHECK_VALUE(
      false, "muon: expected codes of dtype int8, uint8 or float8_e4m3fn, got ", codes, " (", name,
      ")");
}

} // namespace

std::pair<at::Tensor, at::Tensor> encode_values(
    const at::Tensor& values, const GroupSpec& spec, std::string_view name) {
  const BlockLayout layout = resolve_blocks(values.sizes(), values.is_complex(), spec, name);
  const StateFormat format = spec.state_format;
  const auto options = at::TensorOptions(values.device());
  at::Tensor codes = at::zeros(layout.code_sizes(format), options.dtype(code_dtype(format)));
  at::Tensor scales = at::zeros(layout.scale_sizes(), options.dtype(at::kFloat));
  for (const Region& region : state_regions(values.sizes(), values.is_complex(), spec, name)) {
    const std::int64_t count = region.shape.batch;
    const at::Tensor view = region_view(values, region, 0, count);
    encode_state_(
        block_view(layout, format, codes, scales, region, 0, count),
        in_block_order(layout, view, region));
  }
  return {std::move(codes), std::move(scales)};
}

at::Tensor decode_values(
    const at::Tensor& codes, const at::Tensor& scales, at::IntArrayRef sizes, bool is_complex,
    const GroupSpec& spec, std::string_view name) {
  const BlockLayout layout = resolve_blocks(sizes, is_complex, spec, name);
  const StateFormat format = format_of(codes.scalar_type(), name);
  TORCH_CHECK_VALUE(
      codes.sizes() == at::IntArrayRef(layout.code_sizes(format)) &&
          scales.sizes() == at::IntArrayRef(layout.scale_sizes()) &&
          scales.scalar_type() == at::kFloat,
      "muon: expected codes of shape ", layout.code_sizes(format), " and float32 scales of shape ",
      layout.scale_sizes(), ", got ", codes.sizes(), " and ", scales.scalar_type(), " ",
      scales.sizes(), " (", name, ")");
  at::Tensor values = at::empty(
      sizes, at::TensorOptions(codes.device()).dtype(is_complex ? at::kComplexFloat : at::kFloat));
  for (const Region& region : state_regions(sizes, is_complex, spec, name)) {
    const std::int64_t count = region.shape.batch;
    const at::Tensor view = region_view(values, region, 0, count);
    const at::Tensor target = in_block_order(layout, view, region);
    target.copy_(
        decode_state(block_view(layout, format, codes, scales, region, 0, count), target.sizes()));
  }
  return values;
}

} // namespace muon::detail
