#pragma once

#include <cmath>
#include <cstdint>
#include <string_view>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/pimpl.h>

/// A small character-level GPT, op for op the same as examples/python/gpt.py.
namespace gpt {

/// Pre-norm attention and MLP, both without biases.
struct BlockImpl : torch::nn::Module {
  BlockImpl(std::int64_t width, std::int64_t heads) : heads_(heads) {
    norm1 = register_module("norm1", torch::nn::LayerNorm(norm_options(width)));
    query = register_module("query", linear(width, width));
    key = register_module("key", linear(width, width));
    value = register_module("value", linear(width, width));
    proj = register_module("proj", linear(width, width));
    norm2 = register_module("norm2", torch::nn::LayerNorm(norm_options(width)));
    up = register_module("up", linear(width, 4 * width));
    down = register_module("down", linear(4 * width, width));
  }

  at::Tensor forward(const at::Tensor& input) {
    const auto x = input + attention(norm1(input));
    return x + down(at::gelu(up(norm2(x)), "tanh"));
  }

  at::Tensor attention(const at::Tensor& x) {
    const auto batch = x.size(0), length = x.size(1), width = x.size(2);
    const auto split = [&](const at::Tensor& y) {
      return y.view({batch, length, heads_, width / heads_}).transpose(1, 2);
    };
    const auto q = split(query(x));
    const auto k = split(key(x));
    const auto v = split(value(x));
    const auto y = at::scaled_dot_product_attention(
        q, k, v, /*attn_mask=*/{}, /*dropout_p=*/0.0, /*is_causal=*/true);
    return proj(y.transpose(1, 2).reshape({batch, length, width}));
  }

  static torch::nn::LayerNormOptions norm_options(std::int64_t width) {
    return torch::nn::LayerNormOptions({width});
  }

  static torch::nn::Linear linear(std::int64_t in, std::int64_t out) {
    return torch::nn::Linear(torch::nn::LinearOptions(in, out).bias(false));
  }

  torch::nn::LayerNorm norm1 = nullptr, norm2 = nullptr;
  torch::nn::Linear query = nullptr, key = nullptr, value = nullptr, proj = nullptr;
  torch::nn::Linear up = nullptr, down = nullptr;

 private:
  std::int64_t heads_;
};
TORCH_MODULE(Block);

struct Sizes {
  std::int64_t vocabulary;
  std::int64_t context;
  std::int64_t layers;
  std::int64_t width;
  std::int64_t heads;
};

/// Token and position embeddings, `layers` blocks, an untied head.
struct GptImpl : torch::nn::Module {
  explicit GptImpl(const Sizes& sizes) {
    tokens = register_module("tokens", torch::nn::Embedding(sizes.vocabulary, sizes.width));
    positions = register_module("positions", torch::nn::Embedding(sizes.context, sizes.width));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (std::int64_t layer = 0; layer < sizes.layers; ++layer) {
      blocks->push_back(Block(sizes.width, sizes.heads));
    }
    norm = register_module("norm", torch::nn::LayerNorm(BlockImpl::norm_options(sizes.width)));
    head = register_module("head", BlockImpl::linear(sizes.width, sizes.vocabulary));
  }

  /// Draws every matrix from one generator in parameter order; residual
  /// outputs start smaller.
  void initialize(std::uint64_t seed) {
    const at::NoGradGuard no_grad;
    const auto generator = at::detail::createCPUGenerator(seed);
    const double residual_scale = 1.0 / std::sqrt(2.0 * static_cast<double>(blocks->size()));
    for (auto& item : named_parameters()) {
      auto& parameter = item.value();
      if (parameter.dim() < 2) {
        continue;
      }
      parameter.normal_(0.0, 0.02, generator);
      const std::string_view name = item.key();
      if (name.ends_with("proj.weight") || name.ends_with("down.weight")) {
        parameter.mul_(residual_scale);
      }
    }
  }

  /// Logits [batch, length, vocabulary] for token ids [batch, length].
  at::Tensor forward(const at::Tensor& inputs) {
    auto x = tokens(inputs) + positions(at::arange(inputs.size(1), at::kLong));
    for (const auto& block : *blocks) {
      x = block->as<Block>()->forward(x);
    }
    return head(norm(x));
  }

  /// Mean cross entropy in nats per character.
  at::Tensor loss(const at::Tensor& inputs, const at::Tensor& targets) {
    return at::cross_entropy_loss(forward(inputs).flatten(0, 1), targets.flatten());
  }

  torch::nn::Embedding tokens = nullptr, positions = nullptr;
  torch::nn::ModuleList blocks = nullptr;
  torch::nn::LayerNorm norm = nullptr;
  torch::nn::Linear head = nullptr;
};
TORCH_MODULE_IMPL(Gpt, GptImpl);

} // namespace gpt
