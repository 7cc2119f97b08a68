// What each parameter of a model is. python/libmuon/roles.py takes the same evidence in the same
// order with the same words; a change here belongs there too.
#include <algorithm>
#include <array>
#include <cctype>
#include <string_view>
#include <unordered_map>

#include <c10/util/StringUtil.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/adaptive.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

#include "roles.h"

namespace muon {
namespace {

namespace nn = torch::nn;
using Sizes = at::IntArrayRef;
using Words = std::vector<std::string>;

// A matrix with a shorter side or a larger aspect ratio gains nothing from orthogonalisation.
constexpr std::int64_t kMinSide = 4;
constexpr std::int64_t kMaxAspect = 128;

constexpr std::array<std::string_view, 7> kEmbeddingWords = {
    "emb", "embed", "embeds", "embedding", "embeddings", "wte", "wpe"};
constexpr std::array<std::string_view, 7> kHeadWords = {
    "head", "heads", "lmhead", "classifier", "unembed", "unembedding", "logits"};
// Names that mean the last layer only where the model itself holds it: blocks have an `fc` too.
constexpr std::array<std::string_view, 5> kOutputNames = {
    "fc", "out", "output", "decoder", "score"};
constexpr std::array<std::string_view, 9> kGainWords = {
    "bias", "norm", "layernorm", "rmsnorm", "ln", "scale", "gain", "gamma", "beta"};

template <typename Range>
bool contains(const Range& range, std::string_view text) {
  return std::find(range.begin(), range.end(), text) != range.end();
}

template <typename Range>
bool any_of_words(const Words& words, const Range& range) {
  return std::any_of(
      words.begin(), words.end(), [&](const std::string& word) { return contains(range, word); });
}

bool is_digit(char c) {
  return std::isdigit(static_cast<unsigned char>(c)) != 0;
}

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) {
    return static_cast<char>(std::tolower(c));
  });
  return text;
}

bool is_number(const std::string& part) {
  return !part.empty() && std::all_of(part.begin(), part.end(), is_digit);
}

// The words of a snake_case name, digits dropped: "tok_emb2" -> tok, emb.
Words words_of(const std::string& name) {
  Words words;
  std::string word;
  for (const char c : lower(name) + '_') {
    if (c >= 'a' && c <= 'z') {
      word += c;
    } else if (!word.empty()) {
      words.push_back(std::move(word));
      word.clear();
    }
  }
  return words;
}

Words split_name(const std::string& name) {
  Words parts;
  std::size_t begin = 0;
  for (std::size_t dot = 0; dot != std::string::npos; begin = dot + 1) {
    dot = name.find('.', begin);
    parts.push_back(name.substr(begin, dot == std::string::npos ? dot : dot - begin));
  }
  return parts;
}

template <typename... Impls>
bool is_any(const nn::Module& module) {
  return ((dynamic_cast<const Impls*>(&module) != nullptr) || ...);
}

struct Convolution {
  bool transposed = false;
  std::int64_t groups = 1;
};

template <typename... Impls>
std::optional<Convolution> convolution_among(const nn::Module& module) {
  std::optional<Convolution> found;
  const auto look = [&found](const auto* conv) {
    if (conv != nullptr) {
      found = {conv->options.transposed(), conv->options.groups()};
    }
  };
  (look(dynamic_cast<const Impls*>(&module)), ...);
  return found;
}

std::optional<Convolution> as_convolution(const nn::Module& module) {
  return convolution_among<
      nn::Conv1dImpl, nn::Conv2dImpl, nn::Conv3dImpl, nn::ConvTranspose1dImpl,
      nn::ConvTranspose2dImpl, nn::ConvTranspose3dImpl>(module);
}

bool is_norm(const nn::Module& module) {
  if (is_any<
          nn::BatchNorm1dImpl, nn::BatchNorm2dImpl, nn::BatchNorm3dImpl, nn::InstanceNorm1dImpl,
          nn::InstanceNorm2dImpl, nn::InstanceNorm3dImpl, nn::LayerNormImpl, nn::GroupNormImpl>(
          module)) {
    return true;
  }
  std::string name = lower(class_name(module));
  if (name.size() > 2 && name.back() == 'd' && is_digit(name[name.size() - 2])) {
    name.resize(name.size() - 2); // "2d"
  }
  return name.ends_with("norm");
}

bool is_embedding(const nn::Module& module) {
  const std::string name = lower(class_name(module));
  return is_any<nn::EmbeddingImpl, nn::EmbeddingBagImpl>(module) ||
      ((name.ends_with("embedding") || name.ends_with("embeddingbag")) &&
       name.find("patch") == std::string::npos);
}

std::int64_t gates_of(const nn::Module& module) {
  if (is_any<nn::LSTMImpl, nn::LSTMCellImpl>(module)) {
    return 4;
  }
  return is_any<nn::GRUImpl, nn::GRUCellImpl>(module) ? 3 : 1;
}

// A use with what its name and module say, taken apart once.
struct Evidence {
  const nn::Module& module;
  Words parts; // of the full name
  std::string attribute; // what the module calls the parameter
  std::string holder; // the name of the module, numbers skipped
  std::string owner; // its class
  std::optional<Convolution> convolution;

  explicit Evidence(const Use& use)
      : module(*use.module),
        parts(split_name(use.name)),
        attribute(parts.back()),
        owner(class_name(module)),
        convolution(as_convolution(module)) {
    const auto named = std::find_if(
        parts.rbegin() + 1, parts.rend(), [](const std::string& part) { return !is_number(part); });
    holder = named == parts.rend() ? "" : *named;
    if (!attribute.starts_with("weight")) {
      convolution.reset();
    }
  }

  bool is_depthwise(Sizes sizes) const {
    return convolution && convolution->groups > 1 && sizes[1] == 1;
  }
};

// Embedding or head by whole words of the name. The name of the holding module counts (numbers
// skipped), the parameter's own, and for heads also those of enclosing modules outside numbered
// blocks: `head.0.weight` is a layer of the head, `blocks.0.heads.1.key.weight` is not.
std::string vocabulary_by_name(const Evidence& evidence) {
  Words names = {evidence.attribute, evidence.holder};
  for (const std::string& name : names) {
    const Words words = words_of(name);
    if (any_of_words(words, kEmbeddingWords) && !contains(words, "patch")) {
      return "embedding (named " + name + ")";
    }
  }
  const Words& parts = evidence.parts;
  const auto modules_end = parts.end() - 1;
  names.insert(names.end(), parts.begin(), std::find_if(parts.begin(), modules_end, is_number));
  for (const std::string& name : names) {
    const Words words = words_of(name);
    if (!words.empty() && contains(kHeadWords, words.back())) {
      return "head (named " + name + ")";
    }
  }
  const bool is_output = parts.size() == 2 && contains(kOutputNames, parts.front());
  return is_output ? "head (named " + parts.front() + ")" : "";
}

std::string vocabulary_of(const Evidence& evidence, bool in_adaptive_softmax) {
  if (in_adaptive_softmax) {
    return "head (AdaptiveLogSoftmaxWithLoss)";
  }
  return is_embedding(evidence.module) ? "embedding (" + evidence.owner + ")"
                                       : vocabulary_by_name(evidence);
}

// How a parameter is matrices (nullopt: cannot be told), and the reason.
std::pair<std::optional<MatrixLayout>, std::string> layout_of(
    const Evidence& evidence, Sizes sizes) {
  const std::string& owner = evidence.owner;
  MatrixLayout layout;
  if (evidence.convolution) {
    // The groups of a convolution are maps of their own, as the heads of an attention are.
    const std::int64_t groups = evidence.is_depthwise(sizes) ? 1 : evidence.convolution->groups;
    layout.num_heads = groups > 1 ? groups : 0;
    if (evidence.convolution->transposed) {
      layout.rows = {1};
      layout.cols = {0};
      for (std::int64_t dim = 2; dim < static_cast<std::int64_t>(sizes.size()); ++dim) {
        layout.cols.push_back(dim);
      }
      layout.split_dim = groups > 1 ? 1 : 0;
    } else {
      layout.flatten = true;
    }
    return {layout, owner + ": rows are output channels"};
  }
  if (sizes.size() > 2) {
    return {std::nullopt, c10::str(sizes.size(), "D parameter of ", owner)};
  }
  if (is_any<nn::MultiheadAttentionImpl>(evidence.module) &&
      evidence.attribute == "in_proj_weight") {
    layout.num_heads = 3;
    return {layout, owner + ": query, key and value are matrices of their own"};
  }
  const std::int64_t gates = gates_of(evidence.module);
  if (gates > 1 &&
      (evidence.attribute.starts_with("weight_ih") ||
       evidence.attribute.starts_with("weight_hh"))) {
    layout.num_heads = gates;
    return {layout, c10::str(owner, ": each of ", gates, " gates is a matrix of its own")};
  }
  if (lower(owner) == "conv1d" && evidence.attribute == "weight") {
    layout.rows = {1};
    layout.cols = {0};
    return {layout, "Conv1D: stored transposed"};
  }
  return {layout, "2D weight of " + owner};
}

// One matrix under the layouts that layout_of gives.
MatrixShape block_of(Sizes sizes, const MatrixLayout& layout) {
  std::int64_t rows = layout.rows.empty() ? sizes[0] : sizes[1];
  std::int64_t cols = rows == 0 ? 0 : c10::multiply_integers(sizes) / rows;
  (layout.split_dim == 1 ? cols : rows) /= std::max<std::int64_t>(layout.num_heads, 1);
  return {1, rows, cols};
}

bool is_vector(Sizes sizes) {
  return sizes.size() <= 1 ||
      (sizes.size() > 2 &&
       c10::multiply_integers(sizes) == *std::max_element(sizes.begin(), sizes.end()));
}

Role role_of_use(const at::Tensor& parameter, const Use& use) {
  const Sizes sizes = parameter.sizes();
  if (is_vector(sizes)) {
    return {
        Kind::Gain,
        sizes.empty()           ? "scalar"
            : sizes.size() == 1 ? "1D"
                                : "a vector in shape",
        {}};
  }
  const Evidence evidence(use);
  auto [layout, reason] = layout_of(evidence, sizes);
  if (std::string vocabulary = vocabulary_of(evidence, use.in_adaptive_softmax);
      !vocabulary.empty()) {
    return {Kind::Vocabulary, std::move(vocabulary), layout};
  }
  if (is_norm(evidence.module)) {
    return {Kind::Gain, "norm (" + evidence.owner + ")", layout};
  }
  const bool is_weight = evidence.convolution ||
      (is_any<nn::LinearImpl>(evidence.module) && evidence.attribute.starts_with("weight"));
  if (!is_weight &&
      (any_of_words(words_of(evidence.attribute), kGainWords) ||
       any_of_words(words_of(evidence.holder), kGainWords))) {
    return {Kind::Gain, "norm, bias or gain by name", layout};
  }
  if (!layout) {
    if (sizes[0] == 1 || sizes[1] == 1) {
      return {Kind::Small, "broadcast over a leading dimension of size 1", layout};
    }
    return {Kind::Unknown, std::move(reason), layout};
  }
  if (evidence.is_depthwise(sizes)) {
    return {Kind::Small, "depthwise kernel (" + evidence.owner + ")", layout};
  }
  const auto [batch, rows, cols] = block_of(sizes, *layout);
  const std::int64_t side = std::min(rows, cols);
  if (side < kMinSide || std::max(rows, cols) > kMaxAspect * side) {
    return {Kind::Small, c10::str("too thin for Muon: ", rows, " x ", cols), layout};
  }
  return {Kind::Matrix, std::move(reason), layout};
}

struct Collector {
  std::vector<ModelParameter> found;
  std::unordered_map<const at::TensorImpl*, std::size_t> index;

  void visit(const nn::Module& module, const std::string& prefix, bool in_adaptive_softmax) {
    in_adaptive_softmax |= is_any<nn::AdaptiveLogSoftmaxWithLossImpl>(module);
    for (const auto& item : module.named_parameters(/*recurse=*/false)) {
      const auto [place, is_new] = index.emplace(item.value().unsafeGetTensorImpl(), found.size());
      if (is_new) {
        found.push_back({item.value(), {}});
      }
      found[place->second].uses.push_back({prefix + item.key(), &module, in_adaptive_softmax});
    }
    for (const auto& child : module.named_children()) {
      visit(*child.value(), prefix + child.key() + ".", in_adaptive_softmax);
    }
  }
};

} // namespace

std::string class_name(const nn::Module& module) {
  std::string name = module.name();
  name.erase(0, name.rfind(':') + 1);
  if (name.ends_with("Impl")) {
    name.resize(name.size() - 4);
  }
  return name;
}

std::vector<ModelParameter> collect_parameters(const nn::Module& model) {
  Collector collector;
  collector.visit(model, "", false);
  return std::move(collector.found);
}

Role role_of(const ModelParameter& parameter) {
  Role decisive = role_of_use(parameter.tensor, parameter.uses.front());
  for (std::size_t i = 1; i < parameter.uses.size(); ++i) {
    Role role = role_of_use(parameter.tensor, parameter.uses[i]);
    if (role.kind < decisive.kind) {
      role.reason = "shared with " + parameter.uses[i].name + ": " + role.reason;
      decisive = std::move(role);
    }
  }
  return decisive;
}

} // namespace muon
