#include "state/wide.h"

#include <bit>

#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/where.h>

#include "target_clones.h"

namespace muon::detail {
namespace {

constexpr std::int64_t kGrain = 32768;
constexpr std::uint32_t kFirstFactor = 0x7FEB352D;
constexpr std::uint32_t kSecondFactor = 0x846CA68B;
constexpr std::int64_t kMask = 0xFFFFFFFF;

// NOLINTBEGIN(bugprone-signed-bitwise): bits of unsigned numbers, shifted by constants
// A permutation of 32-bit numbers whose results look random: an avalanche of
// xor-shifts and odd factors.
MUON_ALWAYS_INLINE std::uint32_t mixed(std::uint32_t x) {
  x = (x ^ (x >> 16)) * kFirstFactor;
  x = (x ^ (x >> 15)) * kSecondFactor;
  return x ^ (x >> 16);
}

// The same by operators of any device, on int64.
at::Tensor mixed(at::Tensor x) {
  x = x.bitwise_xor(x.bitwise_right_shift(16)).mul(kFirstFactor).bitwise_and(kMask);
  x = x.bitwise_xor(x.bitwise_right_shift(15)).mul(kSecondFactor).bitwise_and(kMask);
  return x.bitwise_xor(x.bitwise_right_shift(16));
}

MUON_TARGET_CLONES void split_run(
    const std::uint32_t* wide, std::int64_t n, std::uint16_t* high, std::uint16_t* low) {
  for (std::int64_t i = 0; i < n; ++i) {
    high[i] = static_cast<std::uint16_t>((wide[i] + 0x8000U) >> 16);
    low[i] = static_cast<std::uint16_t>(wide[i]);
  }
}

MUON_TARGET_CLONES void round_run(
    const std::uint32_t* wide, std::int64_t n, std::uint32_t first, std::uint64_t seed,
    std::uint16_t* high) {
  const auto low_seed = static_cast<std::uint32_t>(seed);
  const auto high_seed = static_cast<std::uint32_t>(seed >> 32);
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t index = first + static_cast<std::uint32_t>(i);
    const std::uint32_t random = mixed(mixed(index ^ low_seed) ^ high_seed) & 0xFFFFU;
    const bool is_finite = (wide[i] & 0x7F800000U) != 0x7F800000U;
    // A NaN keeps a bit of its mantissa.
    const std::uint32_t special = wide[i] | ((wide[i] & 0xFFFFU) != 0 ? 0x10000U : 0U);
    high[i] = static_cast<std::uint16_t>((is_finite ? wide[i] + random : special) >> 16);
  }
}

template <typename Run>
void in_parallel(std::int64_t n, const Run& run) {
  at::parallel_for(
      0, n, kGrain, [&](std::int64_t begin, std::int64_t end) { run(begin, end - begin); });
}

const std::uint32_t* bits(const at::Tensor& wide) {
  return static_cast<const std::uint32_t*>(wide.const_data_ptr());
}

std::uint16_t* halves(const at::Tensor& tensor) {
  return static_cast<std::uint16_t*>(tensor.mutable_data_ptr());
}

at::Tensor long_bits(const at::Tensor& wide) {
  return wide.view(at::kInt).to(at::kLong);
}

at::Tensor from_high_bits(const at::Tensor& bits) {
  return bits.bitwise_right_shift(16).to(at::kShort).view(at::kBFloat16);
}

} // namespace

at::Tensor join_halves(const at::Tensor& high, const at::Tensor& low) {
  const at::Tensor bits = high.contiguous().view(at::kShort).to(at::kInt).bitwise_left_shift(16);
  return bits.add_(low.to(at::kInt)).view(at::kFloat);
}

void split_halves_(const at::Tensor& given, const at::Tensor& high, const at::Tensor& low) {
  const at::Tensor wide = given.contiguous();
  if (!wide.is_cpu()) {
    const at::Tensor rounded = long_bits(wide) + 0x8000;
    high.copy_(from_high_bits(rounded));
    low.copy_(long_bits(wide) - rounded.bitwise_right_shift(16).bitwise_left_shift(16));
    return;
  }
  const at::Tensor new_high = at::empty_like(wide, at::TensorOptions(at::kBFloat16));
  const at::Tensor new_low = at::empty_like(wide, at::TensorOptions(at::kShort));
  in_parallel(wide.numel(), [&](std::int64_t at, std::int64_t n) {
    split_run(bits(wide) + at, n, halves(new_high) + at, halves(new_low) + at);
  });
  high.copy_(new_high);
  low.copy_(new_low);
}

void round_stochastically_(
    const at::Tensor& given, const at::Tensor& target, std::uint64_t seed, std::int64_t first) {
  const at::Tensor wide = given.contiguous();
  if (!wide.is_cpu()) {
    const at::Tensor index =
        at::arange(first, first + wide.numel(), wide.options().dtype(at::kLong)).bitwise_and(kMask);
    const auto low_seed = static_cast<std::int64_t>(seed & kMask);
    const auto high_seed = static_cast<std::int64_t>(seed >> 32);
    const at::Tensor random =
        mixed(mixed(index.bitwise_xor(low_seed)).bitwise_xor(high_seed)).bitwise_and(0xFFFF);
    const at::Tensor rounded = from_high_bits(long_bits(wide) + random.view(wide.sizes()));
    target.copy_(at::where(at::isfinite(wide), rounded, wide.to(at::kBFloat16)));
    return;
  }
  const at::Tensor rounded = at::empty_like(wide, at::TensorOptions(at::kBFloat16));
  in_parallel(wide.numel(), [&](std::int64_t at, std::int64_t n) {
    round_run(
        bits(wide) + at, n, static_cast<std::uint32_t>(first + at), seed, halves(rounded) + at);
  });
  target.copy_(rounded);
}

std::uint64_t rounding_seed(std::int64_t param, std::int64_t step, std::int64_t ordinal) {
  const auto half = [&](std::uint32_t salt) {
    std::uint32_t x = mixed(static_cast<std::uint32_t>(step) ^ salt);
    x = mixed(x ^ static_cast<std::uint32_t>(param));
    return mixed(x ^ static_cast<std::uint32_t>(ordinal));
  };
  return (std::uint64_t{half(0x9E3779B9)} << 32) | half(0x85EBCA6B);
}

// NOLINTEND(bugprone-signed-bitwise)

} // namespace muon::detail
