#include <algorithm>
#include <new>
#include <utility>

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include "state/crc32.h"
#include "state/file.h"
#include "state/file_header.h"
#include "state/replace_file.h"

namespace muon::detail {
namespace {

using Named = std::pair<std::string, at::Tensor>;

// Small enough that a write finds in the cache what the checksum just read.
constexpr std::size_t kChunk = std::size_t{256} * 1024;

void check_tensor(const Named& named, const std::string& before) {
  const auto& [name, tensor] = named;
  TORCH_CHECK_VALUE(tensor.defined(), before, "tensor ", quoted(name), " is undefined");
  TORCH_CHECK_VALUE(
      tensor.layout() == c10::kStrided && !tensor.is_meta(), before, "expected dense tensors, got ",
      tensor.toString(), " for ", quoted(name), " (convert it, or leave it out)");
  TORCH_CHECK_VALUE(
      !file_dtype_name(tensor.scalar_type()).empty(), before,
      "expected a dtype that safetensors has, got ", tensor.scalar_type(), " for ", quoted(name),
      " (convert it, or leave it out)");
}

std::vector<const Named*> in_file_order(const StateFile& file) {
  std::vector<const Named*> order;
  order.reserve(file.tensors.size());
  for (const Named& named : file.tensors) {
    order.push_back(&named);
  }
  std::stable_sort(order.begin(), order.end(), [](const Named* a, const Named* b) {
    return a->second.element_size() > b->second.element_size();
  });
  return order;
}

StateFileIndex index_of(const StateFile& file, const std::vector<const Named*>& order) {
  StateFileIndex index{.metadata = file.metadata, .tensors = {}};
  index.tensors.reserve(order.size());
  std::uint64_t offset = 0;
  for (const Named* named : order) {
    const auto& [name, tensor] = *named;
    const std::uint64_t bytes = tensor.nbytes();
    index.tensors.push_back({name, tensor.scalar_type(), tensor.sizes().vec(), offset, bytes});
    offset += bytes;
  }
  return index;
}

// The header as it will be but for the checksums, known to be readable.
std::string checked_header(const StateFileIndex& index, const JsonContext& error) {
  for (const std::string_view key : {kChecksumKey, kComplexKey}) {
    TORCH_CHECK_VALUE(
        index.metadata.find(std::string(key)) == index.metadata.end(), error.before,
        "the metadata's ", quoted(key), " is taken (use another key)");
  }
  std::string header = make_header(index);
  const std::string_view text = std::string_view(header).substr(kLengthBytes);
  TORCH_CHECK_VALUE(
      text.size() <= kMaxHeaderBytes, error.before, "its header would take ", text.size(),
      " bytes, more than the limit of ", kMaxHeaderBytes);
  const std::uint64_t data_bytes =
      index.tensors.empty() ? 0 : index.tensors.back().offset + index.tensors.back().bytes;
  read_header(text, data_bytes, error);
  return header;
}

std::uint32_t write_tensor(FileReplacement& out, std::uint64_t offset, const at::Tensor& tensor) {
  // Views of complex numbers may only be marked as conjugated or negated.
  const at::Tensor plain = tensor.detach().to(at::kCPU).resolve_conj().resolve_neg().contiguous();
  std::span<const std::byte> rest(
      static_cast<const std::byte*>(plain.const_data_ptr()), plain.nbytes());
  std::uint32_t crc = 0;
  while (!rest.empty()) {
    const auto chunk = rest.first(std::min(rest.size(), kChunk));
    crc = crc32(crc, chunk);
    out.write(offset, chunk);
    offset += chunk.size();
    rest = rest.subspan(chunk.size());
  }
  return crc;
}

void write_all(const std::string& path, const StateFile& file, const JsonContext& error) {
  TORCH_CHECK_VALUE(
      !path.empty() && path.find('\0') == std::string::npos, error.before,
      "expected a path without NUL characters and not empty");
  for (const Named& named : file.tensors) {
    check_tensor(named, error.before);
  }
  const std::vector<const Named*> order = in_file_order(file);
  const StateFileIndex index = index_of(file, order);
  std::string header = checked_header(index, error);
  FileReplacement out(path, error.before);
  std::vector<std::uint32_t> checksums;
  checksums.reserve(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    checksums.push_back(
        write_tensor(out, header.size() + index.tensors[i].offset, order[i]->second));
  }
  set_checksums(header, checksums);
  out.write(0, std::as_bytes(std::span(header)));
  out.commit();
}

} // namespace

void write_state_file(const std::string& path, const StateFile& file) {
  const JsonContext error{
      c10::str("muon: cannot write state file ", quoted(path), ": "), std::string()};
  try {
    write_all(path, file, error);
  } catch (const std::bad_alloc&) {
    TORCH_CHECK(false, error.before, "no memory left (free some, and save again)");
  }
}

} // namespace muon::detail
