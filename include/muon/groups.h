#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/optim/optimizer.h>

#include <muon/export.h>
#include <muon/optimizer.h>

namespace muon {

/// What a user says about some parameters of a model. Each is offered under
/// every name that it has, with the module that holds it there.
class MUON_API Rule {
 public:
  using Match = std::function<bool(
      const std::string& name, const at::Tensor& parameter, const torch::nn::Module& module)>;
  using Choice = std::function<std::optional<MuonOptions>(
      const std::string& name, const at::Tensor& parameter, const torch::nn::Module& module)>;

  /// `options` for the parameters whose whole name fits a glob; `*` crosses
  /// dots. What was not given in `options` is left as it is.
  Rule(const std::string& glob, const MuonOptions& options);
  Rule(const char* glob, const MuonOptions& options);
  /// `options` for the parameters of which `match` is true.
  Rule(Match match, const MuonOptions& options);
  /// The options that `choice` returns, or no opinion; may concern no parameter.
  explicit Rule(Choice choice);

  /// `options` for the parameters that a module of type `Impl` holds itself.
  template <typename Impl>
  static Rule of(const MuonOptions& options) {
    return Rule(
        [](const std::string&, const at::Tensor&, const torch::nn::Module& module) {
          return dynamic_cast<const Impl*>(&module) != nullptr;
        },
        options);
  }

 private:
  friend class RuleSet;
  Choice choice_;
  std::string label_;
  bool must_match_ = true;
};

/// What was decided about one parameter.
struct MUON_API Decision {
  std::string name;
  at::Tensor parameter;
  MuonOptions options; ///< the given ones are the group's; none if it is frozen
  std::string reason;
  bool frozen = false; ///< takes no part: no group, no state
};

/// The decision on every parameter of a model, in model order, frozen ones
/// included. Throws what group_parameters throws.
MUON_API std::vector<Decision> route_parameters(
    const torch::nn::Module& model, const std::vector<Rule>& rules = {});

/// Splits a model's parameters into groups for muon::Muon, one a distinct set
/// of options, each with its parameters' names and the reasons.
///
/// Weights that are matrices go to Muon, with AdjustLr::MatchRmsAdamw so that
/// one learning rate serves all; embeddings, heads, norms, biases, scalars,
/// depthwise kernels and matrices with a side under 4 or an aspect ratio over
/// 128 go to AdamW, one-dimensional ones without weight decay. Convolutions are
/// flattened (each group of a grouped one is a matrix of its own), transposed
/// ones read along their output dim, and the stacked weights of
/// MultiheadAttention, LSTM and GRU split into their blocks. A shared weight is
/// an embedding or a head if it is one anywhere.
///
/// Rules come before everything else; all rules that match a parameter add
/// their options to it, and a layout in a rule means Muon. ValueError if a rule
/// matches nothing, if two rules contradict each other, if nothing is
/// trainable, or, once for all such parameters, if a parameter of three or more
/// dimensions is matrices in a way that only the user can know. Python's
/// libmuon.group_parameters decides alike.
MUON_API std::vector<torch::optim::OptimizerParamGroup> group_parameters(
    const torch::nn::Module& model, const std::vector<Rule>& rules = {});

} // namespace muon
