#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>
#include <utility>

#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>

#include "state/file_header.h"

namespace muon::detail {
namespace {

constexpr std::size_t kMaxDimensions = 64; // as in torch
// These bound what a small file of many empty things can take.
constexpr std::size_t kMaxMetadata = 65'536;
constexpr std::uint64_t kSmallTensors = 65'536;
constexpr std::uint64_t kBytesPerTensor = 512;
constexpr std::size_t kMaxComplexBytes = 16'000'000;

std::string all_dtypes() {
  std::string names;
  for (const FileDtype& row : kFileDtypes) {
    names += names.empty() ? "" : ", ";
    names += row.name;
  }
  return names;
}

class HeaderReader {
 public:
  HeaderReader(std::string_view text, std::uint64_t data_bytes, const JsonContext& error)
      : text_(text),
        data_bytes_(data_bytes),
        error_(error),
        json_{error.before + "the header", error.after},
        cursor_(text_, json_) {}

  FileHeader read() {
    if (!text_.starts_with('{')) {
      cursor_.fail("expected '{'");
    }
    if (const std::size_t bad = invalid_utf8(text_); bad != std::string_view::npos) {
      fail("the header is not valid at byte ", bad, ": not UTF-8");
    }
    members([&](std::string key) {
      if (key == kMetadataKey) {
        metadata();
      } else {
        tensor(std::move(key));
      }
    });
    cursor_.end();
    check_names();
    check_places();
    mark_complex();
    read_checksums();
    return std::move(header_);
  }

 private:
  template <typename... Parts>
  [[noreturn]] void fail(const Parts&... parts) const {
    TORCH_CHECK_VALUE(false, error_.before, parts..., error_.after);
  }

  template <typename... Parts>
  [[noreturn]] void fail_tensor(const StateFileEntry& entry, const Parts&... parts) const {
    fail("tensor ", quoted(entry.name), " ", parts...);
  }

  // Calls `member(key)` with the cursor at each value of an object.
  template <typename Member>
  void members(Member member) {
    cursor_.expect('{');
    if (cursor_.accept('}')) {
      return;
    }
    do {
      std::string key = cursor_.string();
      cursor_.expect(':');
      member(std::move(key));
    } while (cursor_.accept(','));
    cursor_.expect('}');
  }

  // Calls `item()` with the cursor at each value of an array.
  template <typename Item>
  static void items(JsonCursor& cursor, Item item) {
    cursor.expect('[');
    if (cursor.accept(']')) {
      return;
    }
    do {
      item();
    } while (cursor.accept(','));
    cursor.expect(']');
  }

  void metadata() {
    if (std::exchange(has_metadata_, true)) {
      fail("the header has ", quoted(kMetadataKey), " twice");
    }
    std::size_t count = 0;
    members([&](std::string key) {
      if (++count > kMaxMetadata) {
        fail("there are more than ", kMaxMetadata, " metadata entries");
      }
      bool is_new = true;
      if (key == kChecksumKey) {
        is_new = !checksum_text_;
        checksum_text_ = cursor_.raw_string();
        checksum_end_ = cursor_.position() - 1;
      } else if (key == kComplexKey) {
        is_new = !complex_text_;
        complex_text_ = cursor_.string();
      } else {
        // Does not move from a key that it does not insert.
        is_new = header_.index.metadata.try_emplace(std::move(key), cursor_.string()).second;
      }
      if (!is_new) {
        fail("the metadata has ", quoted(key), " twice");
      }
    });
  }

  void tensor(std::string name) {
    StateFileEntry entry;
    entry.name = std::move(name);
    if (header_.index.tensors.size() >= kSmallTensors + data_bytes_ / kBytesPerTensor) {
      fail(
          "there are more than ", header_.index.tensors.size(), " tensors for ", data_bytes_,
          " bytes of data");
    }
    std::array<bool, 3> seen{};
    std::uint64_t end = 0;
    members([&](const std::string& key) {
      constexpr std::array<std::string_view, 3> kKeys = {"dtype", "shape", "data_offsets"};
      const auto which =
          static_cast<std::size_t>(std::find(kKeys.begin(), kKeys.end(), key) - kKeys.begin());
      if (which == kKeys.size()) {
        fail_tensor(entry, "has an unknown ", quoted(key));
      }
      if (std::exchange(seen[which], true)) {
        fail_tensor(entry, "has ", quoted(key), " twice");
      }
      if (which == 0) {
        entry.dtype = dtype(entry);
      } else if (which == 1) {
        shape(entry);
      } else {
        end = offsets(entry);
      }
    });
    if (seen != std::array{true, true, true}) {
      fail_tensor(entry, "lacks one of dtype, shape and data_offsets");
    }
    check_bytes(entry, end);
    header_.index.tensors.push_back(std::move(entry));
  }

  c10::ScalarType dtype(const StateFileEntry& entry) {
    const std::string name = cursor_.string();
    const auto* found = std::find_if(
        kFileDtypes.begin(), kFileDtypes.end(),
        [&](const FileDtype& row) { return row.name == name; });
    if (found == kFileDtypes.end()) {
      fail_tensor(entry, "has dtype ", quoted(name), ", expected one of ", all_dtypes());
    }
    return found->dtype;
  }

  void shape(StateFileEntry& entry) {
    items(cursor_, [&] {
      const std::uint64_t size = cursor_.whole_number();
      if (size > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
        fail_tensor(entry, "has a dimension of size ", size, ", beyond 63 bits");
      }
      if (entry.sizes.size() == kMaxDimensions) {
        fail_tensor(entry, "has more than ", kMaxDimensions, " dimensions");
      }
      entry.sizes.push_back(static_cast<std::int64_t>(size));
    });
  }

  // The end; the beginning goes to the entry.
  std::uint64_t offsets(StateFileEntry& entry) {
    cursor_.expect('[');
    entry.offset = cursor_.whole_number();
    cursor_.expect(',');
    const std::uint64_t end = cursor_.whole_number();
    cursor_.expect(']');
    return end;
  }

  // That the tensor lies in the data and takes what dtype and shape say.
  void check_bytes(StateFileEntry& entry, std::uint64_t end) const {
    if (entry.offset > end || end > data_bytes_) {
      fail_tensor(
          entry, "has data_offsets [", entry.offset, ", ", end, "], outside of ", data_bytes_,
          " bytes of data");
    }
    // A size of 0 counts as 1, since torch multiplies all sizes for the strides.
    auto product = static_cast<std::int64_t>(c10::elementSize(entry.dtype));
    bool empty = false;
    for (const std::int64_t size : entry.sizes) {
      empty |= size == 0;
      if (__builtin_mul_overflow(product, std::max<std::int64_t>(size, 1), &product)) {
        fail_tensor(
            entry, "has shape ", c10::IntArrayRef(entry.sizes), ", whose product overflows");
      }
    }
    const std::uint64_t needed = empty ? 0 : static_cast<std::uint64_t>(product);
    entry.bytes = end - entry.offset;
    if (entry.bytes != needed) {
      fail_tensor(
          entry, "of dtype ", file_dtype_name(entry.dtype), " and shape ",
          c10::IntArrayRef(entry.sizes), " takes ", needed, " bytes, but its data_offsets [",
          entry.offset, ", ", end, "] span ", entry.bytes);
    }
  }

  void check_names() const {
    std::vector<std::string_view> names;
    names.reserve(header_.index.tensors.size());
    for (const StateFileEntry& entry : header_.index.tensors) {
      names.emplace_back(entry.name);
    }
    std::sort(names.begin(), names.end());
    const auto twice = std::adjacent_find(names.begin(), names.end());
    if (twice != names.end()) {
      fail("there are two tensors ", quoted(*twice));
    }
  }

  // Sorts the tensors by their place; there may be neither holes nor overlaps.
  void check_places() {
    std::vector<StateFileEntry>& tensors = header_.index.tensors;
    std::stable_sort(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
      return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
    });
    std::uint64_t end = 0;
    for (const StateFileEntry& entry : tensors) {
      if (entry.offset != end) {
        fail_tensor(
            entry, "begins at byte ", entry.offset, " of the data, but the one before it ends at ",
            end);
      }
      end += entry.bytes;
    }
    if (end != data_bytes_) {
      fail("the tensors end at byte ", end, " of the data, but there are ", data_bytes_);
    }
  }

  void mark_complex() {
    if (!complex_text_) {
      return;
    }
    if (complex_text_->size() > kMaxComplexBytes) {
      fail("the metadata's ", quoted(kComplexKey), " takes more than ", kMaxComplexBytes, " bytes");
    }
    std::vector<StateFileEntry*> tensors;
    tensors.reserve(header_.index.tensors.size());
    for (StateFileEntry& entry : header_.index.tensors) {
      tensors.push_back(&entry);
    }
    std::sort(tensors.begin(), tensors.end(), [](const auto* a, const auto* b) {
      return a->name < b->name;
    });
    const JsonContext context{
        c10::str(error_.before, "the metadata's ", quoted(kComplexKey)), error_.after};
    JsonCursor cursor(*complex_text_, context);
    items(cursor, [&] {
      const std::string name = cursor.string();
      const auto found = std::lower_bound(
          tensors.begin(), tensors.end(), name,
          [](const StateFileEntry* entry, const std::string& key) { return entry->name < key; });
      const bool fits = found != tensors.end() && (*found)->name == name &&
          (*found)->dtype == c10::ScalarType::Double && !(*found)->sizes.empty() &&
          (*found)->sizes.back() == 2;
      if (!fits) {
        fail(
            "the metadata's ", quoted(kComplexKey), " has ", quoted(name),
            ", which is no F64 tensor with a last dimension of 2, or occurs twice");
      }
      (*found)->dtype = c10::ScalarType::ComplexDouble;
      (*found)->sizes.pop_back();
    });
    cursor.end();
  }

  void read_checksums() {
    if (!checksum_text_) {
      return;
    }
    const std::size_t count = header_.index.tensors.size() + 1;
    const std::size_t width = kNoDigits.size() + 1;
    std::string_view rest = *checksum_text_;
    if (rest.size() != kChecksumName.size() + count * width || !rest.starts_with(kChecksumName)) {
      fail(
          "the metadata's ", quoted(kChecksumKey), " is ", quoted(rest), ", not \"", kChecksumName,
          "\" and ", count, " checksums of eight digits");
    }
    rest.remove_prefix(kChecksumName.size());
    header_.index.has_checksum = true;
    header_.checksum_position = checksum_end_ - count * width + 1;
    header_.checksum = checksum(rest);
    header_.tensor_checksums.reserve(count - 1);
    for (rest.remove_prefix(width); !rest.empty(); rest.remove_prefix(width)) {
      header_.tensor_checksums.push_back(checksum(rest));
    }
  }

  // The checksum at the front of `text`, after a space.
  std::uint32_t checksum(std::string_view text) const {
    const std::string_view digits = text.substr(1, kNoDigits.size());
    std::uint32_t value = 0;
    // One form a value, so that no change of a byte goes unnoticed.
    if (text.front() != ' ' ||
        digits.find_first_not_of("0123456789abcdef") != std::string_view::npos) {
      fail("the metadata's ", quoted(kChecksumKey), " has ", quoted(digits), " for a checksum");
    }
    std::from_chars(digits.data(), digits.data() + digits.size(), value, 16);
    return value;
  }

  std::string_view text_;
  std::uint64_t data_bytes_;
  const JsonContext& error_;
  JsonContext json_;
  JsonCursor cursor_;
  FileHeader header_;
  bool has_metadata_ = false;
  std::optional<std::string_view> checksum_text_; // as it stands
  std::size_t checksum_end_ = 0;
  std::optional<std::string> complex_text_;
};

} // namespace

FileHeader read_header(std::string_view text, std::uint64_t data_bytes, const JsonContext& error) {
  return HeaderReader(text, data_bytes, error).read();
}

} // namespace muon::detail
