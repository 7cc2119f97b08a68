#include "state/quantized.h"

#include <limits>

#include <ATen/TensorOperators.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/signbit.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

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

// |v| / s q^2, the code whose square is nearest.
at::Tensor nearest_square(const at::Tensor& ratio, double largest) {
  const at::Tensor square = ratio.abs() * (largest * largest);
  const at::Tensor below = square.sqrt().floor();
  return below + (square > below * below + below + 0.5).to(at::kFloat);
}

at::Tensor nearest_level(const at::Tensor& ratio) {
  at::Tensor code = at::zeros_like(ratio);
  for (const float middle : kInt4Middles) {
    code += (ratio.abs() > middle).to(at::kFloat);
  }
  return code;
}

at::Tensor level_of(const at::Tensor& nibbles) {
  std::vector<float> table(16, 0.0F);
  for (std::size_t code = 1; code < kInt4Levels.size(); ++code) {
    table[code] = kInt4Levels[code];
    table[16 - code] = -kInt4Levels[code];
  }
  return at::tensor(table)
      .to(nibbles.device())
      .index_select(0, nibbles.flatten())
      .view(nibbles.sizes());
}

// The same numbers as decode_blocks, by operators of any device.
at::Tensor decode_any(const BlockState& state, const RowSizes& sizes) {
  const at::Tensor codes = state.codes.reshape({sizes.rows, -1});
  const at::Tensor scale = state.scales.reshape({sizes.rows, -1})
                               .repeat_interleave(kBlock, 1)
                               .narrow(1, 0, sizes.length);
  if (state.format == StateFormat::Int4) {
    const at::Tensor nibbles = at::stack({codes.bitwise_and(0xF), codes.bitwise_right_shift(4)}, -1)
                                   .flatten(1)
                                   .narrow(1, 0, sizes.length)
                                   .to(at::kLong);
    const at::Tensor squares = (nibbles * nibbles).to(at::kFloat) * (-scale / 225.0);
    return at::where(at::signbit(scale), squares, level_of(nibbles) * scale);
  }
  const at::Tensor values = codes.to(at::kFloat);
  return state.format == StateFormat::Fp8 ? values * scale
                                          : values * values.abs() * (scale / (127.0 * 127.0));
}

// Codes as bytes, one a value, of [rows, blocks, kBlock].
at::Tensor codes_any(
    StateFormat format, const at::Tensor& ratio, const at::Tensor& is_positive_block) {
  const at::Tensor smallest = (ratio > 0).logical_and(is_positive_block);
  if (format == StateFormat::Fp8) {
    return ratio.clamp(-448.0, 448.0)
        .to(at::ScalarType::Float8_e4m3fn)
        .view(at::kByte)
        .maximum(smallest.to(at::kByte));
  }
  const bool is_int8 = format == StateFormat::Int8;
  const at::Tensor squares =
      nearest_square(ratio, is_int8 ? 127.0 : 15.0).maximum(smallest.to(at::kFloat));
  const at::Tensor code =
      is_int8 ? squares : at::where(is_positive_block, squares, nearest_level(ratio));
  return at::where(ratio < 0, -code, code).to(at::kChar).view(at::kByte);
}

void encode_any_(const BlockState& state, const at::Tensor& values, const RowSizes& sizes) {
  const std::int64_t blocks = block_count(sizes.length);
  const at::Tensor rows = values.reshape({sizes.rows, sizes.length}).to(at::kFloat);
  const at::Tensor padded = at::constant_pad_nd(rows, {0, blocks * kBlock - sizes.length})
                                .view({sizes.rows, blocks, kBlock});
  at::Tensor scale = padded.abs().amax(-1, true);
  const at::Tensor is_positive = at::signbit(padded).logical_not().all(-1, true);
  const at::Tensor is_finite = at::isfinite(scale);
  if (state.format == StateFormat::Fp8) {
    scale = scale / 448.0;
  }
  const at::Tensor is_used = is_finite.logical_and(scale >= std::numeric_limits<float>::min());
  const at::Tensor ratio = at::where(is_used, padded / scale, 0.0);
  at::Tensor codes = codes_any(state.format, ratio, is_positive).view({sizes.rows, -1});
  if (state.format == StateFormat::Int4) {
    const at::Tensor pairs = codes.bitwise_and(0xF).view({sizes.rows, -1, 2});
    codes = pairs.select(2, 0).bitwise_or(pairs.select(2, 1).bitwise_left_shift(4));
    scale = at::where(is_positive, -scale, scale);
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
