// How a state file takes the place of another: wholly or not at all.

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "state/file.h"
#include "support/files.h"
#include "support/optimizers.h"
#include "support/reference.h"

namespace muon::testing {
namespace {

using detail::read_state_file;
using detail::StateFile;
using detail::write_state_file;
using Names = std::vector<std::string>;

StateFile one_tensor(const at::Tensor& tensor) {
  return {.metadata = {}, .tensors = {{"a", tensor}}};
}

// The text of the error, of any of torch's types.
std::string write_error(const std::string& path, const StateFile& file = {}) {
  try {
    write_state_file(path, file);
  } catch (const c10::Error& error) {
    return error.msg();
  }
  return "no error";
}

TEST(ReplaceFile, replaces_what_is_there_and_keeps_its_mode) {
  const TemporaryFolder folder;
  const std::string path = folder.path("a");
  const mode_t before = ::umask(027);
  write_state_file(path, sample_file());
  ::umask(before);
  EXPECT_EQ(std::filesystem::status(path).permissions(), std::filesystem::perms{0640});
  std::filesystem::permissions(path, std::filesystem::perms{0604});
  write_state_file(path, one_tensor(at::ones({2})));
  EXPECT_EQ(std::filesystem::status(path).permissions(), std::filesystem::perms{0604});
  EXPECT_TRUE(same_contents(read_state_file(path), one_tensor(at::ones({2}))));
  EXPECT_EQ(folder.names(), Names{"a"});
}

TEST(ReplaceFile, follows_links_to_what_they_name) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder.path("inside"));
  std::filesystem::create_symlink("inside/link", folder.path("link"));
  std::filesystem::create_symlink("../file", folder.path("inside/link"));
  for (const double value : {1.0, 2.0}) { // nothing there yet, then a file
    const StateFile file = one_tensor(at::full({2}, value));
    write_state_file(folder.path("link"), file);
    EXPECT_TRUE(same_contents(read_state_file(folder.path("file")), file));
    EXPECT_TRUE(std::filesystem::is_symlink(folder.path("link")));
    EXPECT_TRUE(std::filesystem::is_symlink(folder.path("inside/link")));
  }
  EXPECT_EQ(folder.names(), (Names{"file", "inside", "link"}));
  std::filesystem::create_symlink("circle", folder.path("circle"));
  EXPECT_TRUE(mentions(
      write_error(folder.path("circle")),
      {"cannot write state file", "/circle\"", "Too many levels of symbolic links"}));
}

TEST(ReplaceFile, takes_names_as_long_as_the_system_does) {
  const TemporaryFolder folder;
  const std::string name(255, 'n');
  write_state_file(folder.path(name), {});
  EXPECT_EQ(folder.names(), Names{name});
}

TEST(ReplaceFile, relative_paths_are_of_the_working_directory) {
  const TemporaryFolder folder;
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(folder.path(""));
  write_state_file("a", sample_file());
  const StateFile back = read_state_file("a");
  std::filesystem::current_path(before);
  EXPECT_EQ(back.tensors.size(), sample_file().tensors.size());
}

TEST(ReplaceFile, names_path_and_reason_where_it_cannot_write) {
  const TemporaryFolder folder;
  const std::string missing = folder.path("missing/a");
  EXPECT_TRUE(mentions(
      write_error(missing),
      {"muon: cannot write state file \"" + missing + "\": ", "No such file or directory"}));
  std::filesystem::create_directory(folder.path("d"));
  EXPECT_TRUE(mentions(write_error(folder.path("d")), {"it is a directory"}));
  ASSERT_EQ(::mkfifo(folder.path("f").c_str(), 0600), 0);
  EXPECT_TRUE(mentions(write_error(folder.path("f")), {"it is a pipe, device or socket"}));
  EXPECT_TRUE(mentions(write_error(""), {"not empty"}));
  EXPECT_TRUE(mentions(write_error(std::string("a\0b", 3)), {"NUL"}));
  EXPECT_EQ(folder.names(), (Names{"d", "f"}));
}

// What a process may write, with what the system does to it at the limit.
void limit_file_size(rlim_t bytes, void (*at_limit)(int)) {
  ::signal(SIGXFSZ, at_limit);
  rlimit limit = {};
  ::getrlimit(RLIMIT_FSIZE, &limit);
  limit.rlim_cur = bytes;
  ::setrlimit(RLIMIT_FSIZE, &limit);
}

// Runs `act` in a child process; what waitpid says of its end.
int in_child(const std::function<void()>& act, const std::function<void(pid_t)>& meanwhile = {}) {
  const pid_t child = ::fork();
  if (child == 0) {
    act();
    ::_exit(0);
  }
  if (meanwhile) {
    meanwhile(child);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  return status;
}

TEST(ReplaceFile, failed_write_leaves_the_old_file_and_nothing_else) {
  const TemporaryFolder folder;
  const std::string path = folder.path("a");
  write_state_file(path, sample_file());
  const std::string old = bytes_of(path);
  const StateFile file = one_tensor(random_bits({2'000'000}, at::kByte, 1));
  const int status = in_child([&] {
    limit_file_size(1'000'000, SIG_IGN);
    const std::string text = write_error(path, file);
    ::_exit(mentions(text, {path, "left as it was", "File too large"}) ? 7 : 8);
  });
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 7);
  EXPECT_EQ(bytes_of(path), old);
  EXPECT_EQ(folder.names(), Names{"a"});
}

// A save over an old file, and what the path holds after it was killed.
class KilledSave : public ::testing::Test {
 protected:
  KilledSave() {
    write_state_file(path_, old_);
  }
  void save() const {
    write_state_file(path_, new_);
  }
  // Whether the path holds the new file, else the old one; puts the old one back.
  bool is_new() {
    const StateFile found = read_state_file(path_);
    const bool result = same_contents(found, new_);
    EXPECT_TRUE(result || same_contents(found, old_));
    if (result) {
      write_state_file(path_, old_);
    }
    return result;
  }

  TemporaryFolder folder_;
  std::string path_ = folder_.path("a");
  StateFile old_ = one_tensor(random_bits({300'000}, at::kFloat, 1));
  StateFile new_ = one_tensor(random_bits({500'000}, at::kFloat, 2));
};

TEST_F(KilledSave, at_any_byte_leaves_the_old_file) {
  std::mt19937_64 random(test_seed());
  for (int i = 0; i < 50; ++i) {
    const rlim_t bytes = random() % 2'000'000;
    const int status = in_child([&] {
      limit_file_size(bytes, SIG_DFL);
      save();
    });
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGXFSZ) << bytes;
    EXPECT_FALSE(is_new()) << bytes;
  }
  EXPECT_EQ(folder_.names().size(), 51U) << "each left a temporary file that did no harm";
}

TEST_F(KilledSave, at_any_moment_leaves_the_old_file_or_the_new_one) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  EXPECT_EQ(in_child([&] { save(); }), 0);
  const auto whole = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - start);
  EXPECT_TRUE(is_new());
  std::mt19937_64 random(test_seed());
  for (int i = 0; i < 200; ++i) {
    const auto wait = random() % static_cast<std::uint64_t>(whole.count() * 3 / 2 + 1);
    in_child(
        [&] { save(); },
        [&](pid_t child) {
          ::usleep(static_cast<useconds_t>(wait));
          ::kill(child, SIGKILL);
        });
    is_new();
  }
}

} // namespace
} // namespace muon::testing
