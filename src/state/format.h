#pragma once

#include <array>
#include <cstdint>

#include <ATen/core/Tensor.h>

#include <muon/step.h>

/// Storage formats of quantised state. Blocks of kBlock values along a row have
/// one float32 scale s each and codes of one byte, or of half a byte:
///
///   int8  v = s c|c| / 127^2   c = -127 .. 127   (int8)
///   int4  v = s t(c)           c = -7 .. 7       (uint8, two a byte, even one low)
///   int4  v = |s| c^2 / 15^2   c = 0 .. 15       where s is negative
///   fp8   v = s c              c a float8_e4m3fn
///
/// |s| is the block's largest magnitude (over 448, the largest code, in fp8).
/// Squares make steps near zero fine: a momentum or a second moment far below
/// its block's largest still decays. int4 has too few codes for that: t is the
/// table with the least error on Gaussian blocks, but blocks without negative values, as second
/// moments are, keep squares, and the sign of s says so. In such blocks nothing
/// positive becomes zero in any format, so that no quotient explodes. Codes are
/// rounded to the nearest value. A block with a NaN or an infinity is NaN as a whole.
namespace muon::detail {

constexpr std::int64_t kBlock = 128;

/// t of int4 for codes 0 .. 7; t(-c) = -t(c). Lloyd's algorithm on the
/// magnitudes of Gaussian blocks over their largest, which stays exact.
constexpr std::array<float, 8> kInt4Levels = {0.0F,    0.0972F, 0.1975F, 0.3041F,
                                              0.4219F, 0.5598F, 0.735F,  1.0F};

/// The middles between levels.
constexpr std::array<float, 7> kInt4Middles = [] {
  std::array<float, 7> middles{};
  for (std::size_t i = 0; i < middles.size(); ++i) {
    middles[i] = (kInt4Levels[i] + kInt4Levels[i + 1]) / 2.0F;
  }
  return middles;
}();

/// Bytes of codes for `values` values of one row.
inline std::int64_t code_bytes(StateFormat format, std::int64_t values) {
  return format == StateFormat::Int4 ? (values + 1) / 2 : values;
}

inline std::int64_t block_count(std::int64_t values) {
  return (values + kBlock - 1) / kBlock;
}

/// The dtype of the codes.
c10::ScalarType code_dtype(StateFormat format);

/// `n` values that begin at a block's boundary.
void decode_blocks(
    StateFormat format, const std::uint8_t* codes, const float* scales, std::int64_t n,
    float* values);
void encode_blocks(
    StateFormat format, const float* values, std::int64_t n, std::uint8_t* codes, float* scales);

} // namespace muon::detail
