#include "support/files.h"

#include <malloc.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <span>
#include <stdexcept>

#include <ATen/ATen.h>

#include "support/optimizers.h"
#include "support/reference.h"

namespace muon::testing {
namespace {

std::string_view view(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

// A line of /proc/self/status that counts kB.
std::size_t status_bytes(const std::string& key) {
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(key)) {
      return std::stoul(line.substr(key.size())) * 1024;
    }
  }
  throw std::runtime_error("no " + key + " in /proc/self/status");
}

} // namespace

TemporaryFolder::TemporaryFolder() {
  std::string name = (std::filesystem::temp_directory_path() / "muon-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) {
    throw std::runtime_error("cannot create " + name);
  }
  folder_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_, ignored);
}

std::vector<std::string> TemporaryFolder::names() const {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
    names.push_back(entry.path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

std::string bytes_of(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) {
    throw std::runtime_error("cannot open " + path);
  }
  return {std::istreambuf_iterator<char>(in), {}};
}

void write_bytes(const std::string& path, std::string_view bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!out.flush()) {
    throw std::runtime_error("cannot write " + path);
  }
}

bool same_contents(const detail::StateFile& a, const detail::StateFile& b) {
  return a.metadata == b.metadata &&
      std::equal(
             a.tensors.begin(), a.tensors.end(), b.tensors.begin(), b.tensors.end(),
             [](const auto& left, const auto& right) {
               const at::Tensor x = left.second.resolve_conj().contiguous();
               const at::Tensor y = right.second.resolve_conj().contiguous();
               return left.first == right.first && x.scalar_type() == y.scalar_type() &&
                   x.sizes() == y.sizes() && view(x) == view(y);
             });
}

std::string with_header(std::string_view header, std::string_view data) {
  const std::uint64_t length = header.size();
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  bytes += header;
  bytes += data;
  return bytes;
}

at::Tensor random_bits(c10::IntArrayRef sizes, c10::ScalarType dtype, std::uint64_t salt) {
  const at::Tensor tensor = at::empty(sizes, dtype);
  std::mt19937_64 random(test_seed() * 1000 + salt);
  auto* bytes = static_cast<unsigned char*>(tensor.mutable_data_ptr());
  const unsigned mask = dtype == at::kBool ? 1 : 0xFF;
  std::generate_n(
      bytes, tensor.nbytes(), [&] { return static_cast<unsigned char>(random() & mask); });
  return tensor;
}

detail::StateFile sample_file() {
  detail::StateFile file;
  file.metadata = {
      {"format", "muon"},
      {"", "empty key"},
      {"groups", R"([{"lr":0.02,"params":["a","b"]}])"},
      {"text", std::string("quotes \" \\ \n\t\x01 NUL \0 é € 😀", 32)}};
  std::uint64_t salt = 0;
  for (const auto dtype :
       {at::kComplexDouble, at::kDouble, at::kLong, at::kComplexFloat, at::kFloat, at::kInt,
        at::kHalf, at::kBFloat16, at::kShort, at::kChar, at::kByte, at::kBool,
        at::kFloat8_e4m3fn}) {
    file.tensors.emplace_back(
        c10::str("layer.", c10::toString(dtype)), random_bits({2, 3}, dtype, ++salt));
  }
  const auto add = [&](const char* name, const at::Tensor& tensor) {
    file.tensors.emplace_back(name, tensor);
  };
  add("zero-dimensional", random_bits({}, at::kFloat, ++salt));
  add("complex, zero-dimensional", random_bits({}, at::kComplexDouble, ++salt));
  add("empty", at::empty({0}, at::kFloat));
  add("empty of three dimensions", at::empty({3, 0, 5}, at::kDouble));
  add("transposed", random_bits({3, 5}, at::kFloat, ++salt).t());
  add("every second", random_bits({4, 6}, at::kFloat, ++salt).slice(1, 0, 6, 2));
  add("expanded", random_bits({3, 1}, at::kInt, ++salt).expand({3, 4}));
  add("conjugated", random_bits({2, 2}, at::kComplexFloat, ++salt).conj());
  add("with gradient", at::ones({2, 2}, at::TensorOptions().requires_grad(true)));
  add("name with \"quotes\", \\ and \n é", random_bits({3}, at::kByte, ++salt));
  return file;
}

::testing::AssertionResult refused(
    std::string_view bytes, detail::Checksum checksum, const std::string& mention) {
  try {
    detail::read_state_bytes(std::as_bytes(std::span(bytes)), checksum, "x");
  } catch (const c10::ValueError& error) {
    return mentions(error.msg(), {"muon: cannot read state file \"x\": ", mention});
  }
  return ::testing::AssertionFailure() << "was read";
}

MemoryBound::MemoryBound(std::size_t bytes) : bytes_(bytes) {
  ::malloc_trim(0);
  std::ofstream("/proc/self/clear_refs") << 5; // resets VmHWM
  before_ = status_bytes("VmRSS:");
}

MemoryBound::~MemoryBound() {
#ifndef __SANITIZE_ADDRESS__ // which keeps what is freed
  EXPECT_LE(status_bytes("VmHWM:"), before_ + 2 * bytes_ + std::size_t{64} * 1024 * 1024);
#endif
}

} // namespace muon::testing
