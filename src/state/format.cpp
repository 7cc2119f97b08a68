#include "state/format.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <limits>

#include <c10/util/Exception.h>
#include <c10/util/Float8_e4m3fn.h>

#include "target_clones.h"

namespace muon::detail {
namespace {

constexpr float kInt8Codes = 127.0F;
constexpr float kInt4Codes = 15.0F; // of blocks without negative values
constexpr float kFp8Largest = 448.0F;

struct BlockRange {
  float largest; // magnitude; NaN if a value is not finite
  bool has_negative;
};

// On bits, whose order is that of magnitudes: a float maximum does not vectorise.
MUON_TARGET_CLONES BlockRange range_of(const std::uint32_t* values, std::int64_t n) {
  std::int32_t largest = 0;
  std::uint32_t signs = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const auto magnitude = static_cast<std::int32_t>(values[i] & 0x7FFFFFFFU);
    largest = magnitude > largest ? magnitude : largest;
    signs |= values[i];
  }
  const bool is_finite = largest < 0x7F800000;
  return {
      is_finite ? std::bit_cast<float>(largest) : std::numeric_limits<float>::quiet_NaN(),
      (signs & 0x80000000U) != 0};
}

// The code whose square is nearest to q^2 |v| / s.
MUON_TARGET_CLONES void square_codes(
    const float* __restrict values, std::int64_t n, float scale, float codes, std::int32_t smallest,
    std::int8_t* __restrict out) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float square = std::fabs(values[i]) / scale * (codes * codes);
    const auto below = static_cast<std::int32_t>(std::sqrt(square));
    const float middle = static_cast<float>(below * below + below) + 0.5F;
    const std::int32_t nearest = below + (square > middle ? 1 : 0);
    const std::int32_t code = values[i] > 0.0F && nearest < smallest ? smallest : nearest;
    out[i] = static_cast<std::int8_t>(values[i] < 0.0F ? -code : code);
  }
}

// NOLINTBEGIN(bugprone-signed-bitwise, bugprone-signed-char-misuse): codes are small integers
MUON_TARGET_CLONES void square_values(
    const std::int8_t* __restrict codes, std::int64_t n, float unit, float* __restrict out) {
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int32_t code = codes[i];
    out[i] = unit * static_cast<float>(code * (code < 0 ? -code : code));
  }
}

MUON_TARGET_CLONES void level_codes(
    const float* __restrict values, std::int64_t n, float scale, std::int8_t* __restrict out) {
  for (std::int64_t i = 0; i < n; ++i) {
    // Written out: compilers vectorise the outer loop only where there is no inner one.
    const float ratio = std::fabs(values[i]) / scale;
    const auto above = [&](std::size_t middle) { return ratio > kInt4Middles[middle] ? 1 : 0; };
    const std::int32_t code =
        above(0) + above(1) + above(2) + above(3) + above(4) + above(5) + above(6);
    out[i] = static_cast<std::int8_t>(values[i] < 0.0F ? -code : code);
  }
}

MUON_TARGET_CLONES void pack(
    const std::int8_t* __restrict codes, std::int64_t pairs, std::uint8_t* __restrict packed) {
  for (std::int64_t i = 0; i < pairs; ++i) {
    packed[i] = static_cast<std::uint8_t>((codes[2 * i] & 0xF) | ((codes[2 * i + 1] & 0xF) << 4));
  }
}

// Nibbles as they are: 0 .. 15.
MUON_TARGET_CLONES void unpack(
    const std::uint8_t* __restrict packed, std::int64_t pairs, std::int8_t* __restrict codes) {
  for (std::int64_t i = 0; i < pairs; ++i) {
    codes[2 * i] = static_cast<std::int8_t>(packed[i] & 0xF);
    codes[2 * i + 1] = static_cast<std::int8_t>(packed[i] >> 4);
  }
}

void int4_values(const std::uint8_t* packed, std::int64_t n, float scale, float* values) {
  std::int8_t codes[kBlock];
  unpack(packed, (n + 1) / 2, codes);
  if (std::signbit(scale)) {
    square_values(codes, n, -scale / (kInt4Codes * kInt4Codes), values);
    return;
  }
  std::array<float, 16> table{}; // by the nibble of -7 .. 7
  for (std::size_t code = 0; code < kInt4Levels.size(); ++code) {
    table[code] = scale * kInt4Levels[code];
    table[(16 - code) % 16] = code == 0 ? table[0] : -table[code];
  }
  for (std::int64_t i = 0; i < n; ++i) {
    values[i] = table[static_cast<std::size_t>(codes[i])];
  }
}

// Returns the scale.
float int4_codes(
    const float* values, std::int64_t n, float scale, bool has_negative, std::uint8_t* packed) {
  std::int8_t codes[kBlock] = {};
  if (has_negative) {
    level_codes(values, n, scale, codes);
  } else {
    square_codes(values, n, scale, kInt4Codes, 1, codes);
  }
  pack(codes, (n + 1) / 2, packed);
  return has_negative ? scale : -scale;
}

// Rounds to the nearest float8_e4m3fn, ties to even; |v| <= 448.
MUON_ALWAYS_INLINE std::uint8_t to_fp8(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  const std::uint32_t sign = (bits >> 24) & 0x80U;
  const std::uint32_t magnitude = bits & 0x7FFFFFFFU;
  // Normal numbers keep 3 bits of the mantissa; their exponent's bias is 7.
  const std::uint32_t normal =
      ((magnitude + 0x7FFFFU + ((magnitude >> 20) & 1U)) >> 20) - ((127U - 7U) << 3);
  // Below 2^-6 codes are multiples of 2^-9: adding 2^14 rounds to them.
  const float shifted = std::bit_cast<float>(magnitude) + 16384.0F;
  const std::uint32_t subnormal = std::bit_cast<std::uint32_t>(shifted) & 0xFU;
  return static_cast<std::uint8_t>(sign | (magnitude < 0x3C800000U ? subnormal : normal));
}

MUON_TARGET_CLONES void fp8_codes(
    const float* values, std::int64_t n, float scale, std::uint8_t smallest, std::uint8_t* out) {
  for (std::int64_t i = 0; i < n; ++i) {
    const float ratio = values[i] / scale;
    const std::uint8_t code = to_fp8(ratio > kFp8Largest ? kFp8Largest : ratio);
    out[i] = values[i] > 0.0F && code < smallest ? smallest : code;
  }
}

const std::array<float, 256>& fp8_table() {
  static const auto table = [] {
    std::array<float, 256> values{};
    for (std::size_t code = 0; code < values.size(); ++code) {
      values[code] = static_cast<float>(
          c10::Float8_e4m3fn(static_cast<std::uint8_t>(code), c10::Float8_e4m3fn::from_bits()));
    }
    return values;
  }();
  return table;
}

void decode_block(
    StateFormat format, const std::uint8_t* codes, float scale, std::int64_t n, float* values) {
  if (format == StateFormat::Fp8) {
    const std::array<float, 256>& table = fp8_table();
    for (std::int64_t i = 0; i < n; ++i) {
      values[i] = scale * table[codes[i]];
    }
    return;
  }
  if (format == StateFormat::Int4) {
    int4_values(codes, n, scale, values);
    return;
  }
  square_values(
      reinterpret_cast<const std::int8_t*>(codes), n, scale / (kInt8Codes * kInt8Codes), values);
}

// Returns the scale.
float encode_block(StateFormat format, const float* values, std::int64_t n, std::uint8_t* codes) {
  const BlockRange range = range_of(reinterpret_cast<const std::uint32_t*>(values), n);
  const std::int32_t smallest = range.has_negative ? 0 : 1; // code of a positive value
  const float scale = format == StateFormat::Fp8 ? range.largest / kFp8Largest : range.largest;
  if (!(scale >= std::numeric_limits<float>::min())) { // zero, subnormal or NaN
    std::fill_n(codes, code_bytes(format, n), std::uint8_t{0});
    return std::isnan(scale) ? scale : 0.0F;
  }
  if (format == StateFormat::Fp8) {
    fp8_codes(values, n, scale, static_cast<std::uint8_t>(smallest), codes);
  } else if (format == StateFormat::Int4) {
    return int4_codes(values, n, scale, range.has_negative, codes);
  } else {
    square_codes(values, n, scale, kInt8Codes, smallest, reinterpret_cast<std::int8_t*>(codes));
  }
  return scale;
}

// NOLINTEND(bugprone-signed-bitwise, bugprone-signed-char-misuse)

} // namespace

c10::ScalarType code_dtype(StateFormat format) {
  switch (format) {
    case StateFormat::Int8:
      return c10::ScalarType::Char;
    case StateFormat::Int4:
      return c10::ScalarType::Byte;
    case StateFormat::Fp8:
      return c10::ScalarType::Float8_e4m3fn;
    case StateFormat::Plain:
      break;
  }
  TORCH_INTERNAL_ASSERT(false, "a plain format has no codes");
}

void decode_blocks(
    StateFormat format, const std::uint8_t* codes, const float* scales, std::int64_t n,
    float* values) {
  for (std::int64_t i = 0; i < n; i += kBlock) {
    decode_block(
        format, codes + code_bytes(format, i), scales[i / kBlock], std::min(kBlock, n - i),
        values + i);
  }
}

void encode_blocks(
    StateFormat format, const float* values, std::int64_t n, std::uint8_t* codes, float* scales) {
  for (std::int64_t i = 0; i < n; i += kBlock) {
    scales[i / kBlock] =
        encode_block(format, values + i, std::min(kBlock, n - i), codes + code_bytes(format, i));
  }
}

} // namespace muon::detail
