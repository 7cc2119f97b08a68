#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include <gtest/gtest.h>

#include "state/file.h"

namespace muon::testing {

/// A folder of its own, removed at the end of the scope.
class TemporaryFolder {
 public:
  TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder();

  std::string path(std::string_view name) const {
    return (folder_ / name).string();
  }
  /// The names of what is in it, sorted.
  std::vector<std::string> names() const;

 private:
  std::filesystem::path folder_;
};

std::string bytes_of(const std::string& path);
void write_bytes(const std::string& path, std::string_view bytes);

/// Same text, and the same tensors in the same order, bit by bit.
bool same_contents(const detail::StateFile& a, const detail::StateFile& b);

/// safetensors bytes with the given header, without its length and padding.
std::string with_header(std::string_view header, std::string_view data);

/// A tensor of the dtype with seeded random bits.
at::Tensor random_bits(c10::IntArrayRef sizes, c10::ScalarType dtype, std::uint64_t salt);

/// Metadata with characters of every kind, and tensors of every dtype and kind of shape.
detail::StateFile sample_file();

/// Whether reading these bytes is a ValueError that begins as all do and contains `mention`.
::testing::AssertionResult refused(
    std::string_view bytes, detail::Checksum checksum, const std::string& mention = "");

/// Expects that what is read in its lifetime, from files of at most `bytes`, takes at most twice
/// that and 64 MB.
class MemoryBound {
 public:
  explicit MemoryBound(std::size_t bytes);
  MemoryBound(const MemoryBound&) = delete;
  MemoryBound& operator=(const MemoryBound&) = delete;
  ~MemoryBound();

 private:
  std::size_t bytes_;
  std::size_t before_;
};

} // namespace muon::testing
