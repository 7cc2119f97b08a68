#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "state/file.h"
#include "state/json.h"

/// The header of a state file, to and from text (Note [State file]).
namespace muon::detail {

constexpr std::size_t kLengthBytes = 8;
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000; // as safetensors has it
constexpr std::string_view kMetadataKey = "__metadata__";
constexpr std::string_view kChecksumKey = "checksum";
constexpr std::string_view kComplexKey = "complex128";
constexpr std::string_view kChecksumName = "crc32";
constexpr std::string_view kNoDigits = "00000000";

struct FileDtype {
  std::string_view name;
  c10::ScalarType dtype;
};

inline constexpr std::array kFileDtypes = {
    FileDtype{"F64", c10::ScalarType::Double},
    FileDtype{"F32", c10::ScalarType::Float},
    FileDtype{"F16", c10::ScalarType::Half},
    FileDtype{"BF16", c10::ScalarType::BFloat16},
    FileDtype{"I64", c10::ScalarType::Long},
    FileDtype{"I32", c10::ScalarType::Int},
    FileDtype{"I16", c10::ScalarType::Short},
    FileDtype{"I8", c10::ScalarType::Char},
    FileDtype{"U8", c10::ScalarType::Byte},
    FileDtype{"BOOL", c10::ScalarType::Bool},
    FileDtype{"F8_E4M3", c10::ScalarType::Float8_e4m3fn},
    FileDtype{"C64", c10::ScalarType::ComplexFloat},
};

struct FileHeader {
  StateFileIndex index;
  std::uint32_t checksum = 0; ///< of the header, as it says itself
  std::size_t checksum_position = 0; ///< of these digits in its text
  std::vector<std::uint32_t> tensor_checksums; ///< as index.tensors, or none
};

/// Name in the file of a dtype; complex128 is F64 there. Empty if it has none.
std::string_view file_dtype_name(c10::ScalarType dtype);

/// Length and text of the header, with zeros for all checksums. All dtypes of
/// `index` must have a name.
std::string make_header(const StateFileIndex& index);

/// Puts checksums into what make_header returned.
void set_checksums(std::string& header, const std::vector<std::uint32_t>& tensor_checksums);

/// Reads a header's text, for a file with `data_bytes` bytes behind it, and
/// checks all but the checksums. Errors are `error.before` what is wrong
/// `error.after`.
FileHeader read_header(std::string_view text, std::uint64_t data_bytes, const JsonContext& error);

/// The checksum of a header, length included, whose own digits are at
/// `position` of its text.
std::uint32_t header_checksum(std::string_view text, std::size_t position);

} // namespace muon::detail
