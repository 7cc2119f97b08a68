#include "state/file_header.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include <c10/util/Exception.h>

#include "state/crc32.h"

namespace muon::detail {
namespace {

static_assert(std::endian::native == std::endian::little, "safetensors is little-endian");

// The checksum is the first entry, so that its place is known.
constexpr std::string_view kFront = R"({"__metadata__":{"checksum":"crc32 )";

std::array<char, kLengthBytes> length_bytes(std::uint64_t length) {
  std::array<char, kLengthBytes> bytes;
  std::memcpy(bytes.data(), &length, bytes.size());
  return bytes;
}

void put_digits(char* out, std::uint32_t checksum) {
  for (std::size_t i = kNoDigits.size(); i-- > 0; checksum /= 16) {
    out[i] = "0123456789abcdef"[checksum % 16];
  }
}

std::uint32_t crc32_of(std::uint32_t crc, std::string_view text) {
  return crc32(crc, std::as_bytes(std::span(text)));
}

// A JSON array of the complex128 tensors' names; empty if there are none.
std::string complex_names(const StateFileIndex& index) {
  std::string names;
  for (const StateFileEntry& entry : index.tensors) {
    if (entry.dtype == c10::ScalarType::ComplexDouble) {
      names.push_back(names.empty() ? '[' : ',');
      append_json_string(names, entry.name);
    }
  }
  return names.empty() ? names : names + ']';
}

void append_metadata(std::string& out, std::string_view key, std::string_view value) {
  out.push_back(',');
  append_json_string(out, key);
  out.push_back(':');
  append_json_string(out, value);
}

void append_tensor(std::string& out, const StateFileEntry& entry) {
  out.push_back(',');
  append_json_string(out, entry.name);
  out += R"(:{"dtype":")";
  out += file_dtype_name(entry.dtype);
  out += R"(","shape":[)";
  for (std::size_t i = 0; i < entry.sizes.size(); ++i) {
    out += i == 0 ? "" : ",";
    out += std::to_string(entry.sizes[i]);
  }
  if (entry.dtype == c10::ScalarType::ComplexDouble) {
    out += entry.sizes.empty() ? "2" : ",2";
  }
  out += R"(],"data_offsets":[)";
  out += std::to_string(entry.offset);
  out.push_back(',');
  out += std::to_string(entry.offset + entry.bytes);
  out += "]}";
}

} // namespace

std::string_view file_dtype_name(c10::ScalarType dtype) {
  const c10::ScalarType stored =
      dtype == c10::ScalarType::ComplexDouble ? c10::ScalarType::Double : dtype;
  const auto* found = std::find_if(
      kFileDtypes.begin(), kFileDtypes.end(),
      [&](const FileDtype& row) { return row.dtype == stored; });
  return found == kFileDtypes.end() ? std::string_view() : found->name;
}

std::string make_header(const StateFileIndex& index) {
  std::string header(kLengthBytes, '\0');
  header += kFront;
  header += kNoDigits;
  for (std::size_t i = 0; i < index.tensors.size(); ++i) {
    header.push_back(' ');
    header += kNoDigits;
  }
  header.push_back('"');
  if (const std::string names = complex_names(index); !names.empty()) {
    append_metadata(header, kComplexKey, names);
  }
  for (const auto& [key, value] : index.metadata) {
    append_metadata(header, key, value);
  }
  header.push_back('}');
  for (const StateFileEntry& entry : index.tensors) {
    append_tensor(header, entry);
  }
  header.push_back('}');
  header.resize((header.size() + 7) / 8 * 8, ' ');
  const auto length = length_bytes(header.size() - kLengthBytes);
  std::copy(length.begin(), length.end(), header.begin());
  return header;
}

void set_checksums(std::string& header, const std::vector<std::uint32_t>& tensor_checksums) {
  char* const own = header.data() + kLengthBytes + kFront.size();
  char* place = own;
  for (const std::uint32_t checksum : tensor_checksums) {
    place += kNoDigits.size() + 1;
    put_digits(place, checksum);
  }
  const std::string_view text = std::string_view(header).substr(kLengthBytes);
  put_digits(own, header_checksum(text, kFront.size()));
}

std::uint32_t header_checksum(std::string_view text, std::size_t position) {
  const auto length = length_bytes(text.size());
  std::uint32_t crc = crc32_of(0, std::string_view(length.data(), length.size()));
  crc = crc32_of(crc, text.substr(0, position));
  crc = crc32_of(crc, kNoDigits);
  return crc32_of(crc, text.substr(position + kNoDigits.size()));
}

} // namespace muon::detail
