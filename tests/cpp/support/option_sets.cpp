#include "support/option_sets.h"

#include <ostream>

#include <ATen/ATen.h>

#include "support/optimizers.h"

namespace muon::testing {
namespace {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

// One group of two parameters of that shape.
OptionSet pair(
    const std::string& name, const MuonOptions& options,
    const std::vector<std::int64_t>& sizes = {6, 4}, c10::ScalarType dtype = at::kFloat) {
  return {
      name, [=] {
        Groups groups;
        groups.push_back(group({parameter(sizes, 1, dtype), parameter(sizes, 2, dtype)}, options));
        return groups;
      }};
}

OptionSet whole_model() {
  return {"whole_model", [] {
            Groups groups;
            groups.push_back(group(
                {parameter({8, 6}, 1), parameter({6, 8}, 2), parameter({8, 6}, 3)},
                MuonOptions(kLr).adjust_lr(AdjustLr::MatchRmsAdamw)));
            groups.push_back(group({parameter({4, 3, 3, 3}, 4)}, MuonOptions(kLr).flatten(true)));
            groups.push_back(group(
                {parameter({8}, 5), parameter({}, 6), parameter({10, 8}, 7)},
                MuonOptions(kLr).algorithm("adamw")));
            return groups;
          }};
}

} // namespace

std::ostream& operator<<(std::ostream& out, const OptionSet& set) {
  return out << set.name;
}

std::vector<OptionSet> option_sets() {
  const MuonOptions muon(kLr);
  return {
      pair("muon", muon),
      pair("float64", muon, {6, 4}, at::kDouble),
      pair("no_momentum", MuonOptions(kLr).momentum(0.0).nesterov(false)),
      pair("no_nesterov", MuonOptions(kLr).nesterov(false)),
      pair("heavy_ball", MuonOptions(kLr).momentum_form(MomentumForm::HeavyBall)),
      pair("polar_express", MuonOptions(kLr).schedule("polar_express")),
      pair("match_rms_adamw", MuonOptions(kLr).adjust_lr(AdjustLr::MatchRmsAdamw)),
      pair("scale_free", MuonOptions(kLr).eps(0.0)),
      pair("cautious", MuonOptions(kLr).cautious(true)),
      pair("adjusted_decay", MuonOptions(kLr).decay_lr(DecayLr::Adjusted)),
      pair("maximize", MuonOptions(kLr).maximize(true)),
      pair("multiplier", MuonOptions(kLr).lr_multiplier(0.5)),
      pair("gram_form", MuonOptions(kLr).form(Form::Gram), {3, 9}),
      pair("one_matrix_a_batch", MuonOptions(kLr).batch_size(1)),
      pair("skip_nonfinite", MuonOptions(kLr).nonfinite(NonFinite::Skip)),
      pair("float64_state", MuonOptions(kLr).state_dtype(at::kDouble)),
      pair("normuon", MuonOptions(kLr).algorithm("normuon")),
      pair("adamw", MuonOptions(kLr).algorithm("adamw")),
      pair("adam", MuonOptions(kLr).algorithm("adam").weight_decay(0.1)),
      pair("amsgrad", MuonOptions(kLr).algorithm("adamw").amsgrad(true)),
      pair("conv", MuonOptions(kLr).flatten(true), {4, 3, 2, 2}),
      pair("experts", MuonOptions(kLr).batch_dims(1), {3, 4, 5}),
      pair("transposed", MuonOptions(kLr).rows({1}).cols({0})),
      pair("split", MuonOptions(kLr).split_sizes({2, 4})),
      pair("normuon_heads", MuonOptions(kLr).algorithm("normuon").num_heads(2)),
      pair("complex", muon, {4, 3}, at::kComplexFloat),
      pair("complex_dim", MuonOptions(kLr).complex_dim(true), {4, 3, 2}),
      pair("row_vector", muon, {1, 5}),
      whole_model(),
  };
}

} // namespace muon::testing
