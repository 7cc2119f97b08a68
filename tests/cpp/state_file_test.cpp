// The state file: what comes back, its form on disk, and what it refuses to hold.

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <map>
#include <span>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include "state/file.h"
#include "support/files.h"
#include "support/optimizers.h"
#include "support/reference.h"

namespace muon::testing {
namespace {

using detail::Checksum;
using detail::read_state_file;
using detail::StateFile;
using detail::write_state_file;
using Names = std::vector<std::string>;

// CRC-32 by its definition, one bit at a time.
std::string crc32_digits(std::string_view bytes) {
  std::uint32_t crc = 0xFFFFFFFF;
  for (const char byte : bytes) {
    crc ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) {
      crc = (crc >> 1U) ^ ((crc & 1U) != 0 ? 0xEDB88320 : 0);
    }
  }
  std::array<char, 9> digits;
  std::snprintf(digits.data(), digits.size(), "%08x", ~crc);
  return digits.data();
}

StateFile by_element_size(StateFile file) {
  std::stable_sort(file.tensors.begin(), file.tensors.end(), [](const auto& a, const auto& b) {
    return a.second.element_size() > b.second.element_size();
  });
  return file;
}

StateFile one_tensor(const at::Tensor& tensor, const std::string& name = "a") {
  return {.metadata = {}, .tensors = {{name, tensor}}};
}

// The text of the ValueError.
std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const c10::ValueError& error) {
    return error.msg();
  }
  return "no error";
}

std::string write_error(const std::string& path, const StateFile& file) {
  return error_of([&] { write_state_file(path, file); });
}

TEST(StateFile, brings_back_text_and_tensors_bit_by_bit) {
  const TemporaryFolder folder;
  const StateFile file = sample_file();
  write_state_file(folder.path("a"), file);
  const StateFile back = read_state_file(folder.path("a"));
  EXPECT_TRUE(same_contents(back, by_element_size(file)));
  for (const auto& [name, tensor] : back.tensors) {
    EXPECT_TRUE(tensor.is_contiguous() && tensor.device().is_cpu() && !tensor.requires_grad());
  }
  const std::string bytes = bytes_of(folder.path("a"));
  EXPECT_TRUE(same_contents(back, detail::read_state_bytes(std::as_bytes(std::span(bytes)))));
}

TEST(StateFile, brings_back_nothing_and_the_same_bytes_for_the_same_contents) {
  const TemporaryFolder folder;
  write_state_file(folder.path("empty"), {});
  EXPECT_TRUE(same_contents(read_state_file(folder.path("empty")), {}));
  write_state_file(folder.path("a"), sample_file());
  write_state_file(folder.path("b"), read_state_file(folder.path("a")));
  EXPECT_EQ(bytes_of(folder.path("a")), bytes_of(folder.path("b")));
}

TEST(StateFile, tensors_larger_than_what_is_read_at_once_come_back) {
  const TemporaryFolder folder;
  const StateFile file = one_tensor(random_bits({1'000'003}, at::kByte, 1));
  write_state_file(folder.path("a"), file);
  EXPECT_TRUE(same_contents(read_state_file(folder.path("a")), file));
}

TEST(StateFile, index_is_the_file_without_the_bytes) {
  const TemporaryFolder folder;
  write_state_file(folder.path("a"), sample_file());
  const StateFile file = read_state_file(folder.path("a"));
  const detail::StateFileIndex index = detail::read_state_file_index(folder.path("a"));
  EXPECT_EQ(index.metadata, file.metadata);
  EXPECT_TRUE(index.has_checksum);
  ASSERT_EQ(index.tensors.size(), file.tensors.size());
  std::uint64_t offset = 0;
  for (std::size_t i = 0; i < file.tensors.size(); ++i) {
    const auto& [name, tensor] = file.tensors[i];
    EXPECT_EQ(index.tensors[i].name, name);
    EXPECT_EQ(index.tensors[i].dtype, tensor.scalar_type());
    EXPECT_EQ(c10::IntArrayRef(index.tensors[i].sizes), tensor.sizes());
    EXPECT_EQ(index.tensors[i].offset, offset);
    EXPECT_EQ(index.tensors[i].bytes, tensor.nbytes());
    offset += tensor.nbytes();
  }
}

// The format by its description, with another JSON reader and another CRC-32.
TEST(StateFile, is_safetensors_with_a_checksum_over_every_byte) {
  const TemporaryFolder folder;
  write_state_file(folder.path("a"), sample_file());
  const std::string bytes = bytes_of(folder.path("a"));
  std::uint64_t length = 0;
  std::memcpy(&length, bytes.data(), sizeof(length));
  EXPECT_EQ(length % 8, 0U);
  std::string front = bytes.substr(0, 8 + length);
  const std::string data = bytes.substr(8 + length);
  auto header = nlohmann::json::parse(front.substr(8));
  const std::string checksum = header["__metadata__"]["checksum"];
  EXPECT_EQ(
      nlohmann::json::parse(header["__metadata__"]["complex128"].get<std::string>()),
      nlohmann::json({"layer.ComplexDouble", "complex, zero-dimensional"}));
  const auto complex = header["layer.ComplexDouble"];
  EXPECT_EQ(complex["dtype"], "F64");
  EXPECT_EQ(complex["shape"], nlohmann::json({2, 3, 2}));
  EXPECT_EQ(header["layer.BFloat16"]["dtype"], "BF16");
  header.erase("__metadata__");

  std::map<std::pair<std::uint64_t, std::uint64_t>, std::size_t> places;
  for (const auto& [name, entry] : header.items()) {
    ++places[entry["data_offsets"].get<std::pair<std::uint64_t, std::uint64_t>>()];
  }
  std::string expected = "crc32 " + checksum.substr(6, 8);
  std::uint64_t end = 0;
  for (const auto& [place, count] : places) {
    EXPECT_EQ(place.first, end);
    end = place.second;
    for (std::size_t i = 0; i < count; ++i) {
      expected += ' ' + crc32_digits(std::string_view(data).substr(place.first, end - place.first));
    }
  }
  EXPECT_EQ(end, data.size());
  EXPECT_EQ(checksum, expected);
  front.replace(front.find("crc32 ") + 6, 8, "00000000");
  EXPECT_EQ(checksum.substr(6, 8), crc32_digits(front));
}

TEST(StateFile, reads_files_of_others_when_asked_to) {
  const std::string bytes = with_header(
      R"({"b" : {"data_offsets":[4, 8],"shape":[1],"dtype":"F32"},
          "__metadata__":{"who":"\u00e9"}, "none":{"dtype":"I8","shape":[0],"data_offsets":[4,4]},
          "a":{"dtype":"U8","shape":[2,2],"data_offsets":[0,4]} }  )",
      std::string("\1\2\3\4\0\0\x80\x3f", 8));
  const auto read = [&](Checksum checksum) {
    return detail::read_state_bytes(std::as_bytes(std::span(bytes)), checksum, "foreign");
  };
  EXPECT_TRUE(mentions(
      error_of([&] { read(Checksum::Required); }),
      {"muon: cannot read state file \"foreign\": its metadata has no \"checksum\"",
       "another program's"}));
  const StateFile expected = {
      .metadata = {{"who", "é"}},
      .tensors = {
          {"a", at::tensor({1, 2, 3, 4}, at::kByte).view({2, 2})},
          {"none", at::empty({0}, at::kChar)},
          {"b", at::ones({1})}}};
  EXPECT_TRUE(same_contents(read(Checksum::Optional), expected));
}

struct Refused {
  const char* name;
  std::function<StateFile()> file;
  std::string mentions;
};

std::ostream& operator<<(std::ostream& out, const Refused& row) {
  return out << row.name;
}

class StateFileRefuses : public ::testing::TestWithParam<Refused> {};

TEST_P(StateFileRefuses, and_leaves_what_is_there) {
  const TemporaryFolder folder;
  write_bytes(folder.path("a"), "old");
  EXPECT_TRUE(mentions(
      write_error(folder.path("a"), GetParam().file()),
      {"muon: cannot write state file \"" + folder.path("a") + "\": ", GetParam().mentions}));
  EXPECT_EQ(bytes_of(folder.path("a")), "old");
  EXPECT_EQ(folder.names(), Names{"a"});
}

INSTANTIATE_TEST_SUITE_P(
    contents, StateFileRefuses,
    ::testing::Values(
        Refused{"undefined", [] { return one_tensor({}); }, "tensor \"a\" is undefined"},
        Refused{
            "sparse", [] { return one_tensor(at::eye(2).to_sparse()); },
            "got SparseCPUFloatType for \"a\""},
        Refused{
            "meta", [] { return one_tensor(at::ones({2}).to(at::kMeta)); },
            "expected dense tensors"},
        Refused{
            "dtype", [] { return one_tensor(at::ones({2}, at::kUInt32)); }, "got UInt32 for \"a\""},
        Refused{
            "twice",
            [] {
              return StateFile{
                  .metadata = {}, .tensors = {{"a", at::ones({2})}, {"a", at::ones({3})}}};
            },
            "two tensors \"a\""},
        Refused{
            "reserved", [] { return one_tensor(at::ones({2}), "__metadata__"); }, "__metadata__"},
        Refused{"utf8", [] { return one_tensor(at::ones({2}), "\xff"); }, "not UTF-8"},
        Refused{
            "checksum", [] { return StateFile{.metadata = {{"checksum", ""}}, .tensors = {}}; },
            "\"checksum\" is taken"},
        Refused{
            "complex128", [] { return StateFile{.metadata = {{"complex128", ""}}, .tensors = {}}; },
            "\"complex128\" is taken"},
        Refused{
            "dimensions", [] { return one_tensor(at::ones(std::vector<std::int64_t>(65, 1))); },
            "more than 64 dimensions"},
        Refused{
            "header",
            [] {
              std::string text;
              text.resize(100'000'001, 'x');
              return StateFile{.metadata = {{"a", text}}, .tensors = {}};
            },
            "more than the limit of 100000000"}),
    [](const auto& row) { return row.param.name; });

} // namespace
} // namespace muon::testing
