#include "state/replace_file.h"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>

#include <c10/util/Exception.h>

namespace muon::detail {
namespace {

constexpr int kMaxLinks = 40; // as Linux has it
constexpr int kAttempts = 100;
constexpr std::size_t kNameBytes = 200; // of 255, so that the temporary name fits

// Everything up to the last slash, with it; empty for the working directory.
std::string directory_of(const std::string& path) {
  return path.substr(0, path.rfind('/') + 1);
}

// Where `path` leads, also if nothing is there yet; empty with errno if links go in circles.
std::string follow_links(std::string path) {
  for (int links = 0; links < kMaxLinks; ++links) {
    std::array<char, 4096> text;
    const ssize_t length = ::readlink(path.c_str(), text.data(), text.size());
    if (length < 0) {
      return path; // not a link; what else is wrong shows when it is used
    }
    const std::string link(text.data(), static_cast<std::size_t>(length));
    path = link.starts_with('/') ? link : directory_of(path) + link;
  }
  errno = ELOOP;
  return {};
}

std::string random_digits() {
  std::uint64_t value = 0;
  if (::getrandom(&value, sizeof(value), 0) != sizeof(value)) {
    return {};
  }
  std::array<char, 17> text;
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(value));
  return text.data();
}

} // namespace

FileReplacement::FileReplacement(const std::string& path, std::string before)
    : before_(std::move(before)), target_(follow_links(path)), file_(create()) {}

FileReplacement::~FileReplacement() {
  if (!temporary_.empty()) {
    ::unlink(temporary_.c_str());
  }
}

void FileReplacement::fail(std::string_view what) const {
  const std::string reason = std::strerror(errno);
  TORCH_CHECK(false, before_, what, ": ", reason);
}

// What an ordinary write would refuse is refused, though a rename could replace it.
void FileReplacement::check_target() {
  if (target_.empty()) {
    fail("its symbolic links lead nowhere");
  }
  struct stat status = {};
  if (::stat(target_.c_str(), &status) != 0) {
    if (errno != ENOENT) {
      fail("it cannot be looked at");
    }
    return;
  }
  TORCH_CHECK_VALUE(
      S_ISREG(status.st_mode), before_, "it is ",
      S_ISDIR(status.st_mode) ? "a directory" : "a pipe, device or socket",
      " (expected the path of a file or of nothing)");
  if (::faccessat(AT_FDCWD, target_.c_str(), W_OK, AT_EACCESS) != 0) {
    fail("it may not be replaced");
  }
  exists_ = true;
  mode_ = status.st_mode & mode_t{07777};
}

int FileReplacement::create() {
  check_target();
  const std::string directory = directory_of(target_);
  const std::string name = target_.substr(directory.size(), kNameBytes);
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    const std::string digits = random_digits();
    if (digits.empty()) {
      break;
    }
    const std::string path = directory + '.' + name + '.' + digits + ".tmp";
    // What takes an existing file's place must not be readable for more people meanwhile.
    const mode_t mode = exists_ ? 0600 : 0666;
    const int number = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (number >= 0) {
      temporary_ = path;
      return number;
    }
    if (errno != EEXIST) {
      break;
    }
  }
  fail("no file can be created beside it");
}

void FileReplacement::write(std::uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t count =
        ::pwrite(file_.get(), bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (count < 0 && errno == EINTR) {
      continue;
    }
    if (count <= 0) {
      fail("it cannot be written, and was left as it was");
    }
    offset += static_cast<std::uint64_t>(count);
    bytes = bytes.subspan(static_cast<std::size_t>(count));
  }
}

void FileReplacement::commit() {
  const bool written = (!exists_ || ::fchmod(file_.get(), mode_) == 0) &&
      ::fsync(file_.get()) == 0 && ::close(file_.release()) == 0;
  if (!written || std::rename(temporary_.c_str(), target_.c_str()) != 0) {
    fail("it cannot be replaced, and was left as it was");
  }
  temporary_.clear();
  sync_directory();
}

void FileReplacement::sync_directory() const {
  const std::string path = directory_of(target_);
  const Descriptor directory(
      ::open(path.empty() ? "." : path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // A directory that may not be read, or a file system without the notion, is no failed write.
  if (directory.is_open() && ::fsync(directory.get()) != 0 && errno != EINVAL && errno != EROFS) {
    fail("it was written, but may be lost with the power, since its directory was not synced");
  }
}

} // namespace muon::detail
