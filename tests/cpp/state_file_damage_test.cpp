// Reading state files that are damaged or no files: always a ValueError.

#include <sys/stat.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "state/file.h"
#include "support/files.h"
#include "support/optimizers.h"
#include "support/reference.h"

namespace muon::testing {
namespace {

using detail::Checksum;

constexpr std::size_t kMiB = 1048576;

std::optional<std::string> file_refusal(const std::string& path) {
  try {
    detail::read_state_file(path);
  } catch (const c10::ValueError& error) {
    return error.msg();
  }
  return std::nullopt;
}

char flipped(char byte, unsigned bits) {
  return static_cast<char>(static_cast<unsigned char>(byte) ^ bits);
}

std::string sample_bytes() {
  const TemporaryFolder folder;
  detail::write_state_file(folder.path("a"), sample_file());
  return bytes_of(folder.path("a"));
}

TEST(StateFileDamage, every_flipped_bit_is_noticed) {
  std::string bytes = sample_bytes();
  const MemoryBound bound(bytes.size());
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    for (const unsigned flip : {0x01U, 0x20U, 0x80U}) {
      const char before = std::exchange(bytes[i], flipped(bytes[i], flip));
      EXPECT_TRUE(refused(bytes, Checksum::Required)) << "byte " << i;
      bytes[i] = before;
    }
  }
}

TEST(StateFileDamage, every_truncation_is_noticed) {
  const std::string bytes = sample_bytes();
  for (std::size_t size = 0; size < bytes.size(); ++size) {
    EXPECT_TRUE(refused(std::string_view(bytes).substr(0, size), Checksum::Required)) << size;
  }
}

TEST(StateFileDamage, names_the_tensor_whose_bytes_changed) {
  const std::string bytes = sample_bytes();
  const auto index = [&] {
    const TemporaryFolder folder;
    write_bytes(folder.path("a"), bytes);
    return detail::read_state_file_index(folder.path("a"));
  }();
  const std::uint64_t data =
      bytes.size() - (index.tensors.back().offset + index.tensors.back().bytes);
  for (const detail::StateFileEntry& entry : index.tensors) {
    if (entry.bytes > 0 && entry.dtype != at::kBool && entry.name.find('"') == std::string::npos) {
      std::string damaged = bytes;
      char& last = damaged[data + entry.offset + entry.bytes - 1];
      last = flipped(last, 4);
      EXPECT_TRUE(refused(
          damaged, Checksum::Required,
          "the bytes of tensor \"" + entry.name + "\" do not match their checksum"));
    }
  }
}

// A sparse file takes no room on disk, whatever its size.
TEST(StateFileDamage, lengths_beyond_the_limits_are_refused_before_memory_is_taken) {
  const TemporaryFolder folder;
  const std::string path = folder.path("a");
  const std::uint64_t length = kMiB * kMiB;
  write_bytes(path, std::string(reinterpret_cast<const char*>(&length), sizeof(length)));
  const MemoryBound bound(8);
  EXPECT_TRUE(
      mentions(file_refusal(path).value_or(""), {"1099511627776 bytes", "the 0 that follow"}));
  std::filesystem::resize_file(path, 2 * length);
  EXPECT_TRUE(
      mentions(file_refusal(path).value_or(""), {"1099511627776 bytes", "the limit of 100000000"}));
}

TEST(StateFileDamage, what_is_no_file_is_refused_at_once) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder.path("d"));
  ASSERT_EQ(::mkfifo(folder.path("f").c_str(), 0600), 0);
  write_bytes(folder.path("e"), "");
  const auto expect = [&](const std::string& path, const std::string& mention) {
    EXPECT_TRUE(mentions(
        file_refusal(path).value_or("read"),
        {"muon: cannot read state file \"" + path + "\": ", mention}));
  };
  expect(folder.path("d"), "it is a directory (expected the path of a state file)");
  expect(folder.path("f"), "it is a pipe, device or socket");
  expect("/dev/zero", "it is a pipe, device or socket");
  expect("", "No such file or directory");
  expect(folder.path("missing"), "No such file or directory");
  expect(folder.path("e"), "it has 0 bytes");
  EXPECT_TRUE(mentions(file_refusal(std::string("a\0b", 3)).value_or(""), {"a NUL character"}));
}

TEST(StateFileDamage, file_that_shrinks_while_it_is_read_is_whole_or_refused) {
  const TemporaryFolder folder;
  const std::string path = folder.path("a");
  const detail::StateFile file = {
      .metadata = {}, .tensors = {{"a", random_bits({4'000'000}, at::kByte, 1)}}};
  detail::write_state_file(path, file);
  const std::string bytes = bytes_of(path);
  std::mt19937_64 random(test_seed());
  for (int i = 0; i < 50; ++i) {
    write_bytes(path, bytes);
    std::atomic<bool> started = false;
    std::thread shrink([&, wait = random() % 3000, size = random() % bytes.size()] {
      started = true;
      std::this_thread::sleep_for(std::chrono::microseconds(wait));
      std::filesystem::resize_file(path, size);
    });
    while (!started) {
    }
    try {
      EXPECT_TRUE(same_contents(detail::read_state_file(path), file));
    } catch (const c10::ValueError& error) {
      EXPECT_TRUE(mentions(error.msg(), {"muon: cannot read state file \"" + path + "\": "}));
    }
    shrink.join();
  }
}

} // namespace
} // namespace muon::testing
