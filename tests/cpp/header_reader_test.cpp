// The headers of state files: what is wrong is named, nothing false is believed, and reading takes
// little memory whatever the text.

#include <array>
#include <chrono>
#include <cmath>
#include <cstring>
#include <initializer_list>
#include <random>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>

#include "state/file.h"
#include "support/files.h"
#include "support/reference.h"

namespace muon::testing {
namespace {

using detail::Checksum;

constexpr std::uint64_t kTwoTo63 = 0x8000000000000000;

// A file without a checksum, so that nothing but its structure is in the way of being read.
struct Entry {
  std::string name;
  std::string dtype;
  std::string shape;
  std::string begin;
  std::string end;

  std::string text() const {
    return "\"" + name + "\":{\"dtype\":" + dtype + ",\"shape\":" + shape + ",\"data_offsets\":[" +
        begin + "," + end + "]}";
  }
};

const std::vector<Entry> kEntries = {
    {"a", "\"F32\"", "[2,3]", "0", "24"},
    {"b", "\"I64\"", "[]", "24", "32"},
    {"c", "\"BF16\"", "[4,1,2]", "32", "48"},
    {"d", "\"U8\"", "[7]", "48", "55"}};
constexpr std::size_t kDataBytes = 55;

std::string file_of(const std::vector<Entry>& entries, std::size_t data_bytes = kDataBytes) {
  std::string header = "{\"__metadata__\":{\"k\":\"v\"}";
  for (const Entry& entry : entries) {
    header += ',' + entry.text();
  }
  return with_header(header + '}', std::string(data_bytes, 'x'));
}

// Files with one change that no reader may accept, of a kind and at a place chosen at random.
class Liar {
 public:
  std::string lie() {
    entries_ = kEntries;
    where_ = below(entries_.size());
    using Kind = std::string (Liar::*)();
    constexpr std::array<Kind, 7> kKinds = {&Liar::offset, &Liar::offset,  &Liar::shape,
                                            &Liar::dtype,  &Liar::tensors, &Liar::sizes,
                                            &Liar::key};
    return (this->*kKinds[below(kKinds.size())])();
  }

 private:
  std::size_t below(std::size_t n) {
    return static_cast<std::size_t>(random_() % n);
  }
  std::string any(std::initializer_list<const char*> texts) {
    return *(texts.begin() + below(texts.size()));
  }
  Entry& entry() {
    return entries_[where_];
  }

  std::string no_number() {
    return any(
        {"-1", "1.5", "1e2", "\"24\"", "null", "true", "[24]", "{}", "024", "", "-0",
         "18446744073709551616", "99999999999999999999999999", "NaN", "24 24", "0x18"});
  }
  std::string other_number(const std::string& text) {
    const std::uint64_t value = std::stoull(text);
    const std::array<std::uint64_t, 4> values = {
        value + 1 + below(100), ~std::uint64_t{0} - below(100),
        static_cast<std::uint64_t>(std::exp2(20 + below(44))), value + kTwoTo63};
    return std::to_string(values[below(values.size())]);
  }

  std::string offset() {
    std::string& number = below(2) == 0 ? entry().begin : entry().end;
    number = below(2) == 0 ? no_number() : other_number(number);
    return file_of(entries_);
  }

  std::string shape() {
    const std::string number = below(2) == 0 ? no_number() : other_number("24");
    entry().shape = below(3) != 0
        ? "[" + number + ",3]"
        : any(
              {"[2,3,0]", "[4294967296,4294967296,4294967296]", "[0,9223372036854775807,3]", "7",
               "{}", "[[2,3]]", "[2,3", "null", "[9223372036854775808]", "[2,,3]", "[2,3,]"});
    return file_of(entries_);
  }

  std::string dtype() {
    entry().dtype = any(
        {"\"F31\"", "\"f32\"", "\"\"", "\"F4\"", "\"I128\"", "\"float32\"", "7", "null", "F32",
         "[]", "\"F32", "\"C128\""});
    return file_of(entries_);
  }

  // One too many, one too few, or two at one place; no two take the same number of bytes.
  std::string tensors() {
    const std::size_t kind = below(4);
    if (kind == 0) {
      entries_.push_back(entry());
    } else if (kind == 1) {
      entries_.erase(entries_.begin() + static_cast<std::ptrdiff_t>(where_));
    } else if (kind == 2) {
      entry().name = entries_[(where_ + 1) % entries_.size()].name;
    } else {
      const Entry& other = entries_[(where_ + 1) % entries_.size()];
      entry().begin = other.begin;
      entry().end = other.end;
    }
    return file_of(entries_);
  }

  // Another length of the header or of the data.
  std::string sizes() {
    if (below(2) == 0) {
      return file_of(entries_, kDataBytes + 1 + below(kDataBytes)).substr(below(2));
    }
    std::string bytes = file_of(entries_);
    const std::uint64_t good = bytes.size() - 8 - kDataBytes;
    const std::uint64_t length = below(2) == 0 ? random_() : good + 1 + below(200) - 100;
    std::memcpy(bytes.data(), &length, sizeof(length));
    return length == good ? bytes + 'x' : bytes;
  }

  // Another name for what a tensor must have.
  std::string key() {
    std::string header = file_of(entries_);
    header = header.substr(8, header.size() - 8 - kDataBytes);
    const std::string key = any({"dtype", "shape", "data_offsets"});
    const std::string change = any({"x", "\\u0000", "\n", "\"", "\\ud800", "\xff", "", "offsets"});
    std::size_t place = 0;
    for (std::size_t i = 0; i <= where_; ++i) {
      place = header.find('"' + key, place) + 1;
    }
    header.replace(place, 1 + below(key.size()), change);
    return with_header(header, std::string(kDataBytes, 'x'));
  }

  std::mt19937_64 random_{test_seed()};
  std::vector<Entry> entries_;
  std::size_t where_ = 0;
};

TEST(StateFileHeader, no_lie_of_a_header_is_believed) {
  EXPECT_FALSE(refused(file_of(kEntries), Checksum::Optional));
  Liar liar;
  std::set<std::string> lies;
  while (lies.size() < 4000) {
    lies.insert(liar.lie());
  }
  const MemoryBound bound(2 * file_of(kEntries).size());
  for (const std::string& bytes : lies) {
    EXPECT_TRUE(refused(bytes, Checksum::Optional)) << bytes;
  }
}

struct BadHeader {
  const char* name;
  std::string header;
  std::string mentions;
};

std::ostream& operator<<(std::ostream& out, const BadHeader& row) {
  return out << row.name;
}

class BadStateFileHeader : public ::testing::TestWithParam<BadHeader> {};

TEST_P(BadStateFileHeader, error_says_what_is_wrong) {
  EXPECT_TRUE(
      refused(with_header(GetParam().header, "12345678"), Checksum::Optional, GetParam().mentions));
}

// A header for one tensor of eight bytes, and more.
std::string with_tensor(const std::string& more) {
  return R"({"a":{"dtype":"F64","shape":[1],"data_offsets":[0,8]})" + more + "}";
}

std::string metadata(const std::string& text) {
  return with_tensor(",\"__metadata__\":" + text);
}

INSTANTIATE_TEST_SUITE_P(
    headers, BadStateFileHeader,
    ::testing::Values(
        BadHeader{"empty", "", "the header is not valid at byte 0: expected '{'"},
        BadHeader{"space", std::string(" ").append(with_tensor("")), "at byte 0: expected '{'"},
        BadHeader{"comma", with_tensor(","), "expected a string in quotes"},
        BadHeader{"after", with_tensor("") + "x", "expected the end, got \"x\""},
        BadHeader{"utf8", with_tensor("\xff"), "byte 53: not UTF-8"},
        BadHeader{
            "bytes", R"({"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}})",
            "tensor \"a\" of dtype F32 and shape [3] takes 12 bytes, but its data_offsets [0, 8] "
            "span 8"},
        BadHeader{
            "outside", R"({"a":{"dtype":"F64","shape":[2],"data_offsets":[0,16]}})",
            "tensor \"a\" has data_offsets [0, 16], outside of 8 bytes of data"},
        BadHeader{
            "hole", R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
            "tensor \"a\" begins at byte 4 of the data, but the one before it ends at 0"},
        BadHeader{
            "overlap",
            R"({"a":{"dtype":"U8","shape":[5],"data_offsets":[0,5]},)"
            R"("b":{"dtype":"U8","shape":[4],"data_offsets":[4,8]}})",
            "tensor \"b\" begins at byte 4 of the data, but the one before it ends at 5"},
        BadHeader{
            "trailing", R"({"a":{"dtype":"U8","shape":[4],"data_offsets":[0,4]}})",
            "the tensors end at byte 4 of the data, but there are 8"},
        BadHeader{
            "dtype", R"({"a":{"dtype":"C128","shape":[1],"data_offsets":[0,8]}})",
            "tensor \"a\" has dtype \"C128\", expected one of F64, F32"},
        BadHeader{
            "bool", R"({"a":{"dtype":"BOOL","shape":[8],"data_offsets":[0,8]}})",
            "tensor \"a\" of dtype BOOL holds 49"},
        BadHeader{
            "product",
            R"({"a":{"dtype":"U8","shape":[4611686018427387904,4,0],"data_offsets":[0,0]}})",
            "whose product overflows"},
        BadHeader{"lacks", R"({"a":{"dtype":"U8","shape":[8]}})", "tensor \"a\" lacks one of"},
        BadHeader{"unknown", R"({"a":{"strides":[8]}})", "tensor \"a\" has an unknown \"strides\""},
        BadHeader{"same_key", R"({"a":{"shape":[8],"shape":[8]}})", "has \"shape\" twice"},
        BadHeader{
            "same_tensor",
            with_tensor(R"(,"\u0061":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})"),
            "two tensors \"a\""},
        BadHeader{"metadata_kind", metadata("[]"), "expected '{'"},
        BadHeader{"metadata_value", metadata(R"({"k":1})"), "expected a string in quotes"},
        BadHeader{"metadata_key", metadata(R"({"k":"1","\u006b":"2"})"), "has \"k\" twice"},
        BadHeader{"metadata_twice", metadata("{},\"__metadata__\":{}"), "\"__metadata__\" twice"},
        BadHeader{
            "checksum_form", metadata(R"({"checksum":"sha256 abc"})"),
            "\"checksum\" is \"sha256 abc\", not \"crc32\" and 2 checksums"},
        BadHeader{
            "checksum_digits", metadata(R"({"checksum":"crc32 0000000g 00000000"})"),
            "has \"0000000g\" for a checksum"},
        BadHeader{
            "checksum_case", metadata(R"({"checksum":"crc32 0000000A 00000000"})"),
            "has \"0000000A\" for a checksum"},
        BadHeader{
            "checksum_value", metadata(R"({"checksum":"crc32 00000000 00000000"})"),
            "the header does not match its checksum"},
        BadHeader{"complex_form", metadata(R"({"complex128":"a"})"), "\"complex128\" is not valid"},
        BadHeader{
            "complex_name", metadata(R"({"complex128":"[\"b\"]"})"),
            "\"complex128\" has \"b\", which is no F64 tensor"},
        BadHeader{
            "complex_shape", metadata(R"({"complex128":"[\"a\"]"})"),
            "which is no F64 tensor with a last dimension of 2"}),
    [](const auto& row) { return row.param.name; });

std::string repeated(std::string_view text, std::size_t count) {
  std::string out;
  out.reserve(text.size() * count);
  for (std::size_t i = 0; i < count; ++i) {
    out += text;
  }
  return out;
}

// Texts that would take far more memory, stack or time than their size, were there no limits.
TEST(StateFileHeader, large_headers_stay_within_time_and_memory) {
  constexpr std::size_t kSize = 30'000'000;
  const std::string empty_tensor = R"(:{"dtype":"U8","shape":[0],"data_offsets":[0,0]},)";
  std::string tensors = "{";
  std::string entries = "{\"__metadata__\":{";
  for (std::size_t i = 0; tensors.size() < kSize; ++i) {
    tensors += '"' + std::to_string(i) + '"' + empty_tensor;
  }
  for (std::size_t i = 0; entries.size() < kSize; ++i) {
    entries += '"' + std::to_string(i) + "\":\"\",";
  }
  const std::string shape = R"({"a":{"dtype":"U8","shape":[)";
  const std::vector<std::pair<std::string, std::string>> headers = {
      {repeated("[", kSize), "expected '{'"},
      {repeated("{\"a\":", kSize / 5), "has an unknown \"a\""},
      {shape + repeated("[", kSize), "expected a number"},
      {shape + repeated("1,", kSize / 2), "more than 64 dimensions"},
      {shape + std::string(kSize, '9'), "expected a whole number"},
      {tensors, "more than 65536 tensors"},
      {entries, "more than 65536 metadata entries"},
      {std::string("{\"").append(kSize, 'x') + "\":{\"dtype\":1}}", "expected a string"},
      {"{\"__metadata__\":{\"a\":\"" + repeated("\\u0041", kSize / 6) + "\"},",
       "expected a string"},
      {"{\"__metadata__\":{\"complex128\":\"[" + repeated("[", kSize) + "\"}}", "16000000 bytes"},
      {std::string("{").append(kSize, ' '), "expected a string"},
      {std::string("{\"a\":").append(kSize, '"'), "expected '{'"}};
  for (const auto& [header, mention] : headers) {
    const std::string bytes = with_header(header, "");
    const MemoryBound bound(bytes.size());
    const auto start = std::chrono::steady_clock::now();
    EXPECT_TRUE(refused(bytes, Checksum::Optional, mention)) << header.substr(0, 100);
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(5));
  }
}

TEST(StateFileHeader, as_many_small_tensors_as_may_be_stay_within_memory) {
  std::string header = "{";
  for (std::size_t i = 0; i < 65'536; ++i) {
    header +=
        c10::str(i == 0 ? "" : ",", '"', i, R"(":{"dtype":"U8","shape":[0],"data_offsets":[0,0]})");
  }
  const std::string bytes = with_header(header + '}', "");
  const MemoryBound bound(bytes.size());
  const detail::StateFile file =
      detail::read_state_bytes(std::as_bytes(std::span(bytes)), Checksum::Optional);
  EXPECT_EQ(file.tensors.size(), 65'536U);
}

} // namespace
} // namespace muon::testing
