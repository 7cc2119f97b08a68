#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/adaptive.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/modulelist.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>
#include <torch/nn/modules/rnn.h>

namespace muon::testing {

namespace nn = torch::nn;

inline nn::Linear linear(std::int64_t in, std::int64_t out) {
  return nn::Linear(nn::LinearOptions(in, out).bias(false));
}

// A module that holds what it is given.
struct HolderImpl : nn::Module {
  explicit HolderImpl(const std::map<std::string, std::vector<std::int64_t>>& parameters = {}) {
    for (const auto& [name, sizes] : parameters) {
      register_parameter(name, at::randn(sizes));
    }
  }
  template <typename Module>
  HolderImpl& add(const std::string& name, const Module& module) {
    register_module(name, module);
    return *this;
  }
};

struct Conv1DImpl : nn::Module {
  Conv1DImpl(std::int64_t out, std::int64_t in) {
    register_parameter("weight", at::zeros({in, out}));
    register_parameter("bias", at::zeros({out}));
  }
};

struct PatchEmbeddingImpl : nn::Module {
  PatchEmbeddingImpl() {
    register_parameter("kernel", at::zeros({16, 12}));
  }
};

struct BlockImpl : nn::Module {
  BlockImpl() {
    auto head = std::make_shared<HolderImpl>();
    head->add("key", linear(16, 8));
    register_module("heads", nn::ModuleList(head));
    register_module("fc", linear(16, 16));
    register_module("exit_head", linear(16, 8));
  }
};

// One parameter of every sort; tests/python/routing_models.py has its twin.
struct TwinImpl : nn::Module {
  TwinImpl() {
    nn::Embedding wte(32, 16);
    register_parameter("table", at::zeros({8, 16}));
    register_parameter("tied", wte->weight);
    register_parameter("pos_embed", at::zeros({1, 9, 16}));
    register_parameter("gamma", at::zeros({4, 16}));
    register_parameter("layer_scale", at::zeros({16, 1, 1}));
    register_parameter("broadcast", at::zeros({1, 9, 16}));
    register_parameter("router_bias", at::zeros({4, 16}));
    register_parameter("temperature", at::zeros({}));
    register_module("wte", wte);
    register_module("patch_embed", nn::Conv2d(3, 16, 4));
    register_module("grouped", nn::Conv2d(nn::Conv2dOptions(8, 16, 3).groups(2).bias(false)));
    register_module("depthwise", nn::Conv2d(nn::Conv2dOptions(8, 8, 3).groups(8).bias(false)));
    nn::ConvTranspose2dOptions up(16, 8, 2);
    register_module("upsample", nn::ConvTranspose2d(up.bias(false)));
    register_module("upsample_grouped", nn::ConvTranspose2d(up.groups(2)));
    register_module("norm", nn::BatchNorm2d(16));
    register_module("plane_norm", nn::LayerNorm(nn::LayerNormOptions({8, 8})));
    register_module("attn", nn::MultiheadAttention(16, 4));
    register_module("lstm", nn::LSTM(nn::LSTMOptions(16, 8).proj_size(4)));
    register_module("gru", nn::GRU(16, 8));
    register_module("cell", nn::LSTMCell(16, 8));
    register_module("stored_transposed", std::make_shared<Conv1DImpl>(8, 16));
    register_module("unmasked_proj", linear(16, 16));
    register_module("patches", std::make_shared<PatchEmbeddingImpl>());
    register_module("mixer", std::make_shared<HolderImpl>())->add("fc", linear(16, 16));
    register_module("decoder", std::make_shared<HolderImpl>())->add("up", linear(16, 16));
    register_module("mlp_head", std::make_shared<HolderImpl>())->add("up", linear(16, 16));
    register_module("bottleneck", linear(16, 2));
    register_module("frozen", linear(16, 16))->weight.requires_grad_(false);
    register_module("blocks", nn::ModuleList(std::make_shared<BlockImpl>()));
    register_module("classifier", nn::Sequential(nn::Linear(16, 8)));
    register_module("fc", linear(16, 8));
  }
};

struct ExpertsImpl : HolderImpl {
  ExpertsImpl()
      : HolderImpl(
            {{"down_proj", {4, 8, 8}},
             {"gate_up_proj", {4, 16, 8}},
             {"gate_up_proj_bias", {4, 16}}}) {}
};

} // namespace muon::testing
