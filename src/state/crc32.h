#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace muon::detail {

/// CRC-32 as zlib computes it (`zlib.crc32` in Python), so that files can be
/// verified without this library. `crc` is the value so far: 0 at the start.
std::uint32_t crc32(std::uint32_t crc, std::span<const std::byte> bytes);

} // namespace muon::detail
