#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "state/descriptor.h"

namespace muon::detail {

/// A file's new contents, which take the place of what is at a path in one
/// step, or not at all: they are written to a temporary file beside it, which
/// the destructor removes unless commit() was called. Failures of the system
/// raise c10::Error that names the path and the reason; a target that cannot be
/// replaced raises ValueError.
class FileReplacement {
 public:
  /// Creates the temporary file. `before` begins all errors.
  FileReplacement(const std::string& path, std::string before);
  FileReplacement(const FileReplacement&) = delete;
  FileReplacement& operator=(const FileReplacement&) = delete;
  ~FileReplacement();

  void write(std::uint64_t offset, std::span<const std::byte> bytes);
  /// Makes the contents durable and puts them at the path.
  void commit();

 private:
  [[noreturn]] void fail(std::string_view what) const;
  void check_target();
  int create();
  void sync_directory() const;

  std::string before_;
  std::string target_; // behind all symbolic links
  bool exists_ = false;
  mode_t mode_ = 0; // of the target that exists
  std::string temporary_; // empty once there is none
  Descriptor file_;
};

} // namespace muon::detail
