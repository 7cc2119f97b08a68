#include "state/crc32.h"

#include <array>
#include <bit>
#include <cstring>

namespace muon::detail {
namespace {

static_assert(std::endian::native == std::endian::little, "words are read as little-endian");

constexpr std::size_t kSlices = 16;
constexpr std::uint32_t kPolynomial = 0xEDB88320; // reflected
using Tables = std::array<std::array<std::uint32_t, 256>, kSlices>;

// tables[k][b] is what byte b leaves behind once k zero bytes have followed it, so that a step can
// take kSlices bytes with look-ups that do not wait for one another.
constexpr Tables make_tables() {
  Tables tables{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) {
      value = (value >> 1U) ^ ((value & 1U) != 0 ? kPolynomial : 0);
    }
    tables[0][byte] = value;
  }
  for (std::size_t slice = 1; slice < kSlices; ++slice) {
    for (std::size_t byte = 0; byte < 256; ++byte) {
      const std::uint32_t before = tables[slice - 1][byte];
      tables[slice][byte] = (before >> 8U) ^ tables[0][before & 0xFFU];
    }
  }
  return tables;
}

constexpr Tables kTables = make_tables();

// The four bytes of `word`, the last of which is followed by `after` more bytes of the step.
std::uint32_t fold(std::uint32_t word, std::size_t after) {
  return kTables[after + 3][word & 0xFFU] ^ kTables[after + 2][(word >> 8U) & 0xFFU] ^
      kTables[after + 1][(word >> 16U) & 0xFFU] ^ kTables[after][word >> 24U];
}

} // namespace

std::uint32_t crc32(std::uint32_t crc, std::span<const std::byte> bytes) {
  crc = ~crc;
  const std::byte* data = bytes.data();
  std::size_t left = bytes.size();
  for (; left >= kSlices; data += kSlices, left -= kSlices) {
    std::array<std::uint32_t, 4> words;
    std::memcpy(words.data(), data, kSlices);
    crc = fold(words[0] ^ crc, 12) ^ fold(words[1], 8) ^ fold(words[2], 4) ^ fold(words[3], 0);
  }
  for (; left > 0; ++data, --left) {
    crc = (crc >> 8U) ^ kTables[0][(crc ^ std::to_integer<std::uint32_t>(*data)) & 0xFFU];
  }
  return ~crc;
}

} // namespace muon::detail
