// libFuzzer on the readers of state files and of JSON. With clang:
//
//     clang++ -std=c++20 -g -O1 -fsanitize=fuzzer,address,undefined -fno-sanitize=vptr ... -I include -I src
//         tests/cpp/fuzz_state_file.cpp src/state/{crc32,json*,file_*,header_reader,replace_file}.cpp
//
// and torch's include and library flags. Nothing may leave the readers but ValueError. A mutator of
// its own starts from whole files, keeps the header's length right and repairs the checksums of
// most inputs, so that they get past those.

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <span>
#include <string>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "state/file.h"
#include "state/file_header.h"
#include "state/json.h"

// NOLINTBEGIN(readability-identifier-naming): libFuzzer's names
extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);
// NOLINTEND(readability-identifier-naming)

namespace {

using namespace muon::detail;

constexpr std::string_view kTensors =
    R"("a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},)"
    R"("b":{"dtype":"BOOL","shape":[],"data_offsets":[24,25]},)"
    R"("c":{"dtype":"F64","shape":[0,2],"data_offsets":[25,25]}})";
constexpr std::size_t kDataBytes = 25;

void check(bool good) {
  if (!good) {
    std::abort();
  }
}

std::string text_of(const std::uint8_t* data, std::size_t size) {
  return {reinterpret_cast<const char*>(data), size};
}

std::string file_of(std::string_view header, std::string_view data) {
  const std::uint64_t length = header.size();
  std::string file(sizeof(length), '\0');
  std::memcpy(file.data(), &length, sizeof(length));
  return file.append(header).append(data);
}

std::string seed(std::uint64_t choice) {
  const std::string metadata = choice == 0
      ? R"({"checksum":"crc32 00000000 00000000 00000000 00000000","k":"\u00e9"})"
      : choice == 1 ? R"({"complex128":"[\"c\"]"})"
                    : R"({"k":"{\"lr\":0.1,\"list\":[1,-2.5e3,null,true]}"})";
  return file_of(
      "{\"__metadata__\":" + metadata + "," + std::string(kTensors), std::string(kDataBytes, '\1'));
}

// Puts the header's true checksum where its digits may be.
void repair(std::string& header) {
  const std::size_t place = header.find("\"crc32 ") + 7;
  if (place >= 7 + kChecksumName.size() && place + kNoDigits.size() <= header.size()) {
    char digits[9];
    std::snprintf(digits, sizeof(digits), "%08x", header_checksum(header, place));
    header.replace(place, kNoDigits.size(), digits);
  }
}

void read_file(std::span<const std::byte> bytes, Checksum checksum) {
  try {
    const StateFile file = read_state_bytes(bytes, checksum);
    std::size_t total = 0;
    for (const auto& [name, tensor] : file.tensors) {
      total += tensor.nbytes();
      check(invalid_utf8(name) == std::string::npos);
    }
    check(total < bytes.size());
  } catch (const c10::ValueError& error) {
    check(error.msg().starts_with("muon: cannot read state file \"memory\": "));
    check(invalid_utf8(error.msg()) == std::string::npos);
  }
}

void read_json(std::string_view text) {
  try {
    const Json json = Json::parse(text, {"the text", ""});
    const std::string written = json.dump();
    check(Json::parse(written, {"what was written", ""}) == json);
  } catch (const c10::ValueError& error) {
    check(error.msg().starts_with("the text"));
    check(invalid_utf8(error.msg()) == std::string::npos);
  }
}

} // namespace

// NOLINTNEXTLINE(readability-identifier-naming)
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto bytes = std::as_bytes(std::span(data, size));
  read_file(bytes, Checksum::Required);
  read_file(bytes, Checksum::Optional);
  read_json(text_of(data, size).substr(std::min(size, kLengthBytes)));
  return 0;
}

// NOLINTNEXTLINE(readability-identifier-naming)
extern "C" std::size_t LLVMFuzzerCustomMutator(
    std::uint8_t* data, std::size_t size, std::size_t max_size, unsigned int seed_value) {
  std::minstd_rand random(seed_value);
  std::string file = text_of(data, size);
  if (size < kLengthBytes + kDataBytes || random() % 100 == 0) {
    file = seed(random() % 3);
  }
  if (file.size() > max_size || random() % 8 == 0) {
    return LLVMFuzzerMutate(data, size, max_size);
  }
  std::uint64_t length = 0;
  std::memcpy(&length, file.data(), sizeof(length));
  length = std::min<std::uint64_t>(length, file.size() - kLengthBytes);
  std::string header = file.substr(kLengthBytes, length);
  const std::string rest = file.substr(kLengthBytes + length);
  const std::size_t room = max_size - kLengthBytes - rest.size();
  header.resize(std::max(room, header.size()));
  header.resize(
      LLVMFuzzerMutate(reinterpret_cast<std::uint8_t*>(header.data()), length, header.size()));
  repair(header);
  file = file_of(header, rest);
  std::copy(file.begin(), file.end(), data);
  return file.size();
}
