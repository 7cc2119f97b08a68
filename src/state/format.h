#pragma once

#include <cstdint>

#include <ATen/core/Tensor.h>

#include <muon/step.h>

/// Storage formats of quantised state. Blocks of kBlock values along a row have
/// one float32 scale s each and codes of one byte, or of half a byte:
///
///   int8  v = s c|c| / 127^2, c = -127 .. 127   (int8)
///   int4  v = s c|c| / 7^2,   c = -7 .. 7       (uint8, two a byte, even one low)
///   fp8   v = s c,            c a float8_e4m3fn
///
/// s is the block's largest magnitude (over 448, the largest code, in fp8).
/// The square makes steps near zero fine: a momentum or a second moment far
/// below its block's largest still decays. Codes are rounded to the nearest
/// value; but in a block without negative values, as second moments are, nothing
/// positive becomes zero, so that no quotient explodes. A block with a NaN or an
/// infinity is NaN as a whole.
namespace muon::detail {

constexpr std::int64_t kBlock = 128;

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
