#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <muon/matrix.h>

namespace muon {

/// What a parameter is; of the roles of a shared one the smallest decides.
enum class Kind : std::uint8_t {
  Vocabulary, ///< embedding or head: AdamW
  Gain, ///< norm, bias, scalar, broadcast vector: AdamW without decay
  Small, ///< a matrix that Muon does not help: AdamW
  Matrix, ///< Muon
  Unknown, ///< three or more dimensions whose meaning cannot be told
};

/// A kind, why, and how the parameter is matrices (nullopt: cannot be told).
struct Role {
  Kind kind = Kind::Unknown;
  std::string reason;
  std::optional<MatrixLayout> layout;
};

/// One place where a parameter is registered.
struct Use {
  std::string name;
  const torch::nn::Module* module = nullptr;
  bool in_adaptive_softmax = false;
};

struct ModelParameter {
  at::Tensor tensor;
  std::vector<Use> uses;
};

/// Every parameter once, in model order, with all places where it is used.
std::vector<ModelParameter> collect_parameters(const torch::nn::Module& model);

/// The role of a parameter, the union of its roles where it is shared.
Role role_of(const ModelParameter& parameter);

/// The name of a module's class, without namespaces and "Impl".
std::string class_name(const torch::nn::Module& module);

} // namespace muon
