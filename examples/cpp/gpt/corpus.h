#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <nlohmann/json.hpp>

namespace gpt {

/// The token ids that tools/demo_corpus.py wrote: one byte a character.
struct Corpus {
  std::int64_t vocabulary = 0;
  at::Tensor train; ///< uint8 [characters]
  at::Tensor validation;

  explicit Corpus(const std::filesystem::path& folder)
      : train(read(folder / "train.bin")), validation(read(folder / "validation.bin")) {
    std::ifstream file(folder / "corpus.json");
    TORCH_CHECK(file, "cannot read ", folder / "corpus.json");
    vocabulary = count_characters(nlohmann::json::parse(file).at("vocabulary"));
  }

 private:
  static at::Tensor read(const std::filesystem::path& path) {
    std::ifstream file(path, std::ios::binary);
    TORCH_CHECK(file, "cannot read ", path, "; write it with: python tools/demo_corpus.py");
    std::string bytes(std::istreambuf_iterator<char>(file), {});
    return at::from_blob(bytes.data(), static_cast<std::int64_t>(bytes.size()), at::kByte).clone();
  }

  /// Characters, not bytes, of a UTF-8 text.
  static std::int64_t count_characters(const std::string& text) {
    std::int64_t count = 0;
    for (const char byte : text) {
      count += (static_cast<unsigned char>(byte) & 0xC0U) != 0x80U;
    }
    return count;
  }
};

/// Random windows of a text, the same sequence of batches for the same seed.
class Sampler {
 public:
  Sampler(at::Tensor text, std::int64_t batch, std::int64_t context, std::uint64_t seed)
      : text_(std::move(text)),
        batch_(batch),
        window_(at::arange(context + 1, at::kLong)),
        generator_(at::detail::createCPUGenerator(seed)) {
    TORCH_CHECK_VALUE(
        text_.numel() > context, "expected more than ", context, " characters, got ",
        text_.numel());
  }

  /// Inputs and targets, int64 [batch, context]; targets are one character later.
  std::pair<at::Tensor, at::Tensor> next() {
    const auto last = text_.numel() - window_.numel();
    const auto starts = at::randint(0, last + 1, {batch_, 1}, generator_, at::kLong);
    const auto ids = text_.take(starts + window_).to(at::kLong);
    const auto context = window_.numel() - 1;
    return {ids.narrow(1, 0, context).contiguous(), ids.narrow(1, 1, context).contiguous()};
  }

 private:
  at::Tensor text_;
  std::int64_t batch_;
  at::Tensor window_;
  at::Generator generator_;
};

} // namespace gpt
