#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <c10/util/Exception.h>

#include "state/crc32.h"
#include "state/descriptor.h"
#include "state/file.h"
#include "state/file_header.h"

namespace muon::detail {
namespace {

// Small enough that the checksum finds in the cache what was just read.
constexpr std::size_t kChunk = std::size_t{256} * 1024;
constexpr std::string_view kDamaged =
    " (the file is damaged or no state file: read another copy, or save again)";
constexpr std::string_view kExpectedFile = " (expected the path of a state file)";

JsonContext reading(std::string_view name) {
  return {c10::str("muon: cannot read state file ", quoted(name), ": "), std::string(kDamaged)};
}

// Bytes of a known number.
class Source {
 public:
  Source(std::uint64_t size, JsonContext error) : size_(size), error_(std::move(error)) {}
  Source(const Source&) = delete;
  Source& operator=(const Source&) = delete;
  virtual ~Source() = default;

  std::uint64_t size() const {
    return size_;
  }
  const JsonContext& error() const {
    return error_;
  }
  template <typename... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    TORCH_CHECK_VALUE(false, error_.before, parts..., error_.after);
  }
  // Fills `out` with the bytes from `offset` on, which lie within size().
  virtual void read(std::uint64_t offset, std::span<std::byte> out) const = 0;

 private:
  std::uint64_t size_;
  JsonContext error_;
};

class MemorySource final : public Source {
 public:
  MemorySource(std::span<const std::byte> bytes, std::string_view name)
      : Source(bytes.size(), reading(name)), bytes_(bytes) {}

  void read(std::uint64_t offset, std::span<std::byte> out) const override {
    const auto part = bytes_.subspan(offset, out.size());
    std::copy(part.begin(), part.end(), out.begin());
  }

 private:
  std::span<const std::byte> bytes_;
};

int open_file(const std::string& path) {
  const std::string before = reading(path).before;
  TORCH_CHECK_VALUE(
      path.find('\0') == std::string::npos, before, "a NUL character in the path", kExpectedFile);
  // O_NONBLOCK: opening a pipe must not wait for its other end.
  const int number = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  TORCH_CHECK_VALUE(number >= 0, before, std::strerror(errno), kExpectedFile);
  return number;
}

std::uint64_t file_size(const Descriptor& file, const std::string& path) {
  struct stat status = {};
  const std::string before = reading(path).before;
  TORCH_CHECK_VALUE(::fstat(file.get(), &status) == 0, before, std::strerror(errno), kExpectedFile);
  TORCH_CHECK_VALUE(
      S_ISREG(status.st_mode), before, "it is ",
      S_ISDIR(status.st_mode) ? "a directory" : "a pipe, device or socket", kExpectedFile);
  return static_cast<std::uint64_t>(status.st_size);
}

class FileSource final : public Source {
 public:
  FileSource(const Descriptor& file, const std::string& path)
      : Source(file_size(file, path), reading(path)), file_(file) {}

  void read(std::uint64_t offset, std::span<std::byte> out) const override {
    while (!out.empty()) {
      const ssize_t count =
          ::pread(file_.get(), out.data(), out.size(), static_cast<off_t>(offset));
      if (count < 0 && errno == EINTR) {
        continue;
      }
      TORCH_CHECK_VALUE(
          count >= 0, error().before, std::strerror(errno), " at byte ", offset,
          " (read another copy, or save again)");
      if (count == 0) {
        fail("it had ", size(), " bytes at first and ends at ", offset, " now");
      }
      offset += static_cast<std::uint64_t>(count);
      out = out.subspan(static_cast<std::size_t>(count));
    }
  }

 private:
  const Descriptor& file_;
};

struct Contents {
  FileHeader header;
  std::uint64_t data_offset = 0;
};

void check_header_checksum(
    const Source& source, std::string_view text, const FileHeader& header, Checksum checksum) {
  if (!header.index.has_checksum) {
    TORCH_CHECK_VALUE(
        checksum == Checksum::Optional, source.error().before, "its metadata has no ",
        quoted(kChecksumKey),
        " (the file is damaged, or another program's: reading it without verification must be "
        "asked for)");
  } else if (header_checksum(text, header.checksum_position) != header.checksum) {
    source.fail("the header does not match its checksum");
  }
}

Contents read_contents(const Source& source, Checksum checksum) {
  if (source.size() < kLengthBytes) {
    source.fail("it has ", source.size(), " bytes, fewer than a state file's first number");
  }
  std::uint64_t length = 0;
  source.read(0, std::as_writable_bytes(std::span(&length, 1)));
  const std::uint64_t rest = source.size() - kLengthBytes;
  if (length > std::min(rest, kMaxHeaderBytes)) {
    source.fail(
        "its header should take ", length, " bytes, more than ",
        length > rest ? c10::str("the ", rest, " that follow")
                      : c10::str("the limit of ", kMaxHeaderBytes));
  }
  std::string text(length, '\0');
  source.read(kLengthBytes, std::as_writable_bytes(std::span(text)));
  Contents contents{read_header(text, rest - length, source.error()), kLengthBytes + length};
  check_header_checksum(source, text, contents.header, checksum);
  return contents;
}

at::Tensor new_tensor(const Source& source, const StateFileEntry& entry) {
  try {
    // Past the dispatcher: these are real bytes even where torch makes tensors of other kinds.
    return at::Tensor(at::detail::empty_cpu(entry.sizes, entry.dtype));
  } catch (const c10::Error&) {
    TORCH_CHECK_VALUE(
        false, source.error().before, "no memory for the ", entry.bytes, " bytes of tensor ",
        quoted(entry.name), " (read it where more is free)");
  }
}

// A bool that is neither 0 nor 1 is undefined behaviour to whoever reads it.
void check_bools(
    const Source& source, const StateFileEntry& entry, std::span<const std::byte> bytes) {
  if (entry.dtype != c10::ScalarType::Bool) {
    return;
  }
  const auto other = std::find_if(
      bytes.begin(), bytes.end(), [](std::byte value) { return value > std::byte{1}; });
  if (other != bytes.end()) {
    source.fail(
        "tensor ", quoted(entry.name), " of dtype BOOL holds ", std::to_integer<int>(*other));
  }
}

// Reads one tensor's bytes and returns their checksum.
std::uint32_t fill(
    const Source& source, const StateFileEntry& entry, std::uint64_t offset, at::Tensor& tensor) {
  std::span<std::byte> rest(static_cast<std::byte*>(tensor.mutable_data_ptr()), entry.bytes);
  std::uint32_t crc = 0;
  while (!rest.empty()) {
    const auto chunk = rest.first(std::min(rest.size(), kChunk));
    source.read(offset, chunk);
    check_bools(source, entry, chunk);
    crc = crc32(crc, chunk);
    offset += chunk.size();
    rest = rest.subspan(chunk.size());
  }
  return crc;
}

StateFile read_all(const Source& source, Checksum checksum) {
  auto [header, data_offset] = read_contents(source, checksum);
  StateFile file{.metadata = std::move(header.index.metadata), .tensors = {}};
  file.tensors.reserve(header.index.tensors.size());
  for (std::size_t i = 0; i < header.index.tensors.size(); ++i) {
    StateFileEntry& entry = header.index.tensors[i];
    at::Tensor tensor = new_tensor(source, entry);
    const std::uint32_t crc = fill(source, entry, data_offset + entry.offset, tensor);
    if (header.index.has_checksum && crc != header.tensor_checksums[i]) {
      source.fail("the bytes of tensor ", quoted(entry.name), " do not match their checksum");
    }
    file.tensors.emplace_back(std::move(entry.name), std::move(tensor));
  }
  return file;
}

// The library raises no exceptions but torch's.
template <typename Read>
auto with_memory(std::string_view name, Read read) {
  try {
    return read();
  } catch (const std::bad_alloc&) {
    TORCH_CHECK_VALUE(false, reading(name).before, "no memory left (read it where more is free)");
  }
}

} // namespace

StateFile read_state_file(const std::string& path, Checksum checksum) {
  return with_memory(path, [&] {
    const Descriptor file(open_file(path));
    return read_all(FileSource(file, path), checksum);
  });
}

StateFile read_state_bytes(
    std::span<const std::byte> bytes, Checksum checksum, std::string_view name) {
  return with_memory(name, [&] { return read_all(MemorySource(bytes, name), checksum); });
}

StateFileIndex read_state_file_index(const std::string& path, Checksum checksum) {
  return with_memory(path, [&] {
    const Descriptor file(open_file(path));
    return std::move(read_contents(FileSource(file, path), checksum).header.index);
  });
}

} // namespace muon::detail
