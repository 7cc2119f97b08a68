#include "state/quantized.h"

#include <limits>

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>

#include "state/block_rows.h"

namespace muon::detail {
namespace {

// Rows x values, as the operators below take them.
struct RowSizes {
  std::int64_t rows = 1;
  std::int64_t length = 1;

  RowSizes(at::IntArrayRef sizes, std::int64_t lead_dims) {
    for (std::size_t dim = 0; dim < sizes.size(); ++dim) {
      (static_cast<std::int64_t>(dim) < lead_dims ? rows : length) *= sizes[dim];
    }
  }
};

double largest_code(StateFormat format) {
  return format == StateFormat::Int8 ? 127.0 : 7.0;
}

// The same numbers as decode_blocks, by operators of any device.
at::Tensor decode_any(const BlockState& state, const RowSizes& sizes) {
  at::Tensor codes = state.codes.reshape({sizes.rows, -1});
  if (state.format == StateFormat::Int4) {
    const at::Tensor nibbles =
        at::stack({codes.bitwise_and(0xF), codes.bitwise_right_shift(4)}, -1);
    codes = nibbles.flatten(1).narrow(1, 0, sizes.length).bitwise_xor(8).to(at::kChar) - 8;
  }
  at::Tensor values = codes.to(at::kFloat);
  at::Tensor unit = state.scales.reshape({sizes.rows, -1});
  if (state.format != StateFormat::Fp8) {
    const double largest = largest_code(state.format);
    values = values * values.abs();
    unit = unit / (largest * largest);
  }
  return values * unit.repeat_interleave(kBlock, 1).narrow(1, 0, sizes.length);
}

void encode_any_(const BlockState& state, const at::Tensor& values, const RowSizes& sizes) {
  const std::int64_t blocks = block_count(sizes.length);
  const at::Tensor rows = values.reshape({sizes.rows, sizes.length}).to(at::kFloat);
  const at::Tensor padded = at::constant_pad_nd(rows, {0, blocks * kBlock - sizes.length})
                                .view({sizes.rows, blocks, kBlock});
  at::Tensor scale = padded.abs().amax(-1, true);
  const at::Tensor smallest = (padded >= 0).all(-1, true); // code of a positive value
  const at::Tensor is_finite = at::isfinite(scale);
  if (state.format == StateFormat::Fp8) {
    scale = scale / 448.0;
  }
  const at::Tensor is_used = is_finite.logical_and(scale >= std::numeric_limits<float>::min());
  const at::Tensor ratio = at::where(is_used, padded / scale, 0.0);
  at::Tensor codes;
  if (state.format == StateFormat::Fp8) {
    codes = ratio.clamp(-448.0, 448.0).to(at::ScalarType::Float8_e4m3fn).view(at::kByte);
    codes = codes.maximum((padded > 0).logical_and(smallest).to(at::kByte));
  } else {
    const double largest = largest_code(state.format);
    const at::Tensor square = ratio.abs() * (largest * largest);
    const at::Tensor below = square.sqrt().floor();
    const at::Tensor nearest = below + (square > below * below + below + 0.5).to(at::kFloat);
    const at::Tensor code = nearest.maximum((padded > 0).logical_and(smallest).to(at::kFloat));
    codes = at::where(ratio < 0, -code, code).to(at::kChar).view(at::kByte);
  }
  codes = codes.view({sizes.rows, -1});
  if (state.format == StateFormat::Int4) {
    const at::Tensor pairs = codes.bitwise_and(0xF).view({sizes.rows, -1, 2});
    codes = pairs.select(2, 0).bitwise_or(pairs.select(2, 1).bitwise_left_shift(4));
  }
  const std::int64_t bytes = code_bytes(state.format, sizes.length);
  state.codes.view(at::kByte).copy_(codes.narrow(1, 0, bytes).reshape(state.codes.sizes()));
  const at::Tensor stored = at::where(
      is_finite, at::where(is_used, scale, 0.0), std::numeric_limits<double>::quiet_NaN());
  state.scales.copy_(stored.reshape(state.scales.sizes()));
}

} // namespace

std::vector<BlockState> block_states(at::TensorList state, at::TensorList like) {
  std::vector<BlockState> result;
  for (std::size_t i = 0; i < like.size(); ++i) {
    const at::Tensor& codes = state[2 * i];
    const at::Tensor& scales = state[2 * i + 1];
    const StateFormat format = codes.scalar_type() == at::kChar ? StateFormat::Int8
        : codes.scalar_type() == at::kByte                      ? StateFormat::Int4
                                                                : StateFormat::Fp8;
    const at::IntArrayRef sizes = like[i].sizes();
    const bool has_lead = scales.dim() > 0 && scales.dim() <= like[i].dim() + 1;
    const RowSizes rows(sizes, scales.dim() - 1);
    TORCH_CHECK_VALUE(
        has_lead && scales.scalar_type() == at::kFloat &&
            codes.scalar_type() == code_dtype(format) &&
            scales.numel() == rows.rows * block_count(rows.length) &&
            codes.numel() == rows.rows * code_bytes(format, rows.length) &&
            codes.device() == like[i].device() && scales.device() == like[i].device(),
        "muon: expected codes and float32 scales for a piece ", sizes, ", got ",
        codes.scalar_type(), " ", codes.sizes(), " and ", scales.scalar_type(), " ",
        scales.sizes());
    result.push_back({format, codes, scales});
  }
  return result;
}

at::Tensor decode_state(const BlockState& state, at::IntArrayRef sizes) {
  const std::int64_t lead_dims = state.scales.dim() - 1;
  if (!state.codes.is_cpu()) {
    return decode_any(state, RowSizes(sizes, lead_dims)).view(sizes);
  }
  at::Tensor values = at::empty(sizes, at::TensorOptions(at::kFloat));
  const std::vector<BlockRows> rows{BlockRows(sizes, lead_dims)};
  const BlockCodec codec(state, rows[0]);
  auto* const data = values.mutable_data_ptr<float>();
  for_each_unit(
      rows, [&](std::size_t, const BlockRows::Unit& unit) { codec.load(unit, data + unit.begin); });
  return values;
}

void encode_state_(const BlockState& state, const at::Tensor& values) {
  const std::int64_t lead_dims = state.scales.dim() - 1;
  if (!state.codes.is_cpu()) {
    encode_any_(state, values, RowSizes(values.sizes(), lead_dims));
    return;
  }
  const std::vector<BlockRows> rows{BlockRows(values.sizes(), lead_dims)};
  const BlockCodec codec(state, rows[0]);
  const ValueRuns runs(values);
  for_each_unit(rows, [&](std::size_t, const BlockRows::Unit& unit) {
    float buffer[kRun];
    codec.store(unit, runs.load(unit.begin, unit.length, buffer));
  });
}

} // namespace muon::detail
