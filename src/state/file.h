#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <muon/export.h>

/// The state file: named tensors and text, as bytes. What they mean to an
/// optimizer is not known here.
///
/// Note [State file]
/// The file is safetensors (a length, a JSON header padded to 8 bytes, the
/// tensors' bytes without gaps), which any reader of that format can open. Two
/// keys of its metadata belong to this layer and never show in `metadata`:
///
/// - "checksum": `crc32 HEADER TENSOR TENSOR...`, each eight hexadecimal digits
///   of zlib's CRC-32. One a tensor, over its bytes, in the order of the data;
///   HEADER is over everything before the data, the length included, with its
///   own digits taken as 00000000. So every byte of the file is covered once,
///   and damage has a name.
/// - "complex128": a JSON array of the names of complex128 tensors. safetensors
///   has no such dtype: they are stored as F64 with a last dimension of 2.
///
/// Dtypes: float64, float32, float16, bfloat16, int64, int32, int16, int8,
/// uint8, bool, float8_e4m3fn, complex64, complex128.
namespace muon::detail {

struct StateFile {
  std::map<std::string, std::string> metadata;
  /// In the order of their bytes in the file, which writing chooses: by element
  /// size from large to small, so that each is aligned, else as given.
  std::vector<std::pair<std::string, at::Tensor>> tensors;
};

struct StateFileEntry {
  std::string name;
  c10::ScalarType dtype = c10::ScalarType::Undefined;
  std::vector<std::int64_t> sizes;
  std::uint64_t offset = 0; ///< of its first byte, from the first tensor's
  std::uint64_t bytes = 0;
};

/// What a file holds, without the tensors' bytes.
struct StateFileIndex {
  std::map<std::string, std::string> metadata;
  std::vector<StateFileEntry> tensors; ///< in the order of their bytes
  bool has_checksum = false;
};

/// Whether a file must have a checksum. Files of other programs have none; one
/// that is there is verified in any case.
enum class Checksum : std::uint8_t { Required, Optional };

/// Writes `file` to `path` so that, whatever happens meanwhile, `path` holds
/// either what it held before or all of the new file: into a temporary file
/// beside it (`.NAME.<16 digits>.tmp`), which takes its place once it is on
/// disk. A symbolic link is followed; an existing file's mode is kept.
/// Tensors of any strides and device are copied to the CPU one at a time, and
/// must not change meanwhile.
///
/// ValueError for what the format cannot hold (see Note [State file]; at most
/// 64 dimensions, 100 MB of header, 65,536 metadata entries; UTF-8 only; names
/// once) and for a path that is no regular file; c10::Error with the system's
/// reason for a failure to write. The temporary file is gone and `path` as it
/// was, unless the text says that only the last sync failed.
MUON_API void write_state_file(const std::string& path, const StateFile& file);

/// Reads and verifies the whole file: tensors are on the CPU, contiguous, with
/// memory of their own. ValueError, as `muon: cannot read state file "PATH":
/// ...`, for whatever is wrong with it. Takes at most twice the file's size and
/// 64 MB, whatever its bytes are.
MUON_API StateFile read_state_file(const std::string& path, Checksum checksum = Checksum::Required);

/// The same from memory; `name` takes the path's place in errors.
MUON_API StateFile read_state_bytes(
    std::span<const std::byte> bytes, Checksum checksum = Checksum::Required,
    std::string_view name = "memory");

/// Reads and verifies the header alone.
MUON_API StateFileIndex
read_state_file_index(const std::string& path, Checksum checksum = Checksum::Required);

} // namespace muon::detail
