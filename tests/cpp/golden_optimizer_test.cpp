// The optimizer cases of tests/golden through `muon::Muon`: parameters and state after every step.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <muon/optimizer.h>

#include "support/golden.h"

namespace muon::testing {
namespace {

using Params = std::map<std::string, at::Tensor>;

Params read_params(const GoldenCase& golden) {
  Params params;
  for (const auto& [name, value] : golden.inputs.at("params").items()) {
    params[name] = tensor(golden, value).requires_grad_(true);
  }
  return params;
}

// One group of options and one, where the case has them, of AdamW.
std::vector<torch::optim::OptimizerParamGroup> read_groups(
    const GoldenCase& golden, const Params& params) {
  std::vector<torch::optim::OptimizerParamGroup> groups;
  for (const std::string algorithm : {"muon", "adamw"}) {
    std::vector<at::Tensor> members;
    for (const auto& [name, route] : golden.options.at("route").items()) {
      if (route == algorithm) {
        members.push_back(params.at(name));
      }
    }
    if (!members.empty()) {
      const Json& options = golden.options.at(algorithm);
      groups.emplace_back(
          members,
          std::make_unique<MuonOptions>(
              algorithm == "muon" ? muon_options(options, members[0].dim())
                                  : adamw_options(options)));
    }
  }
  return groups;
}

void set_grads(const GoldenCase& golden, const Params& params, const Json& grads) {
  for (const auto& [name, param] : params) {
    param.mutable_grad() = grads.at(name).is_null() ? at::Tensor() : tensor(golden, grads.at(name));
  }
}

at::Tensor state_of(Muon& optimizer, const at::Tensor& param, const std::string& key) {
  const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
  return found == optimizer.state().end() ? at::Tensor()
                                          : static_cast<MuonParamState&>(*found->second).get(key);
}

class GoldenShell : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(GoldenShell, A15_A16_parameters_and_state_after_every_step) {
  const GoldenCase& golden = GetParam();
  if (golden.options.contains("muon") && !is_supported(golden.options.at("muon"))) {
    return; // muonium's own split rule: see the *_fixed cases
  }
  const Params params = read_params(golden);
  Muon optimizer(read_groups(golden, params));
  const Json& steps = golden.expected.at("steps");
  for (std::size_t t = 0; t < steps.size(); ++t) {
    set_grads(golden, params, golden.inputs.at("grads").at(t));
    optimizer.step();
    for (const auto& [name, param] : params) {
      const std::string where = name + " after step " + std::to_string(t + 1);
      const at::Tensor value = param.detach();
      expect_within(golden, value, steps[t].at("params").at(name), "params", where);
      for (const char* key : {"momentum_buffer", "variance_neuron", "exp_avg", "exp_avg_sq"}) {
        if (steps[t].contains(key) && steps[t].at(key).contains(name)) {
          const at::Tensor state = state_of(optimizer, param, key);
          ASSERT_TRUE(state.defined()) << key << " of " << where;
          expect_within(golden, state, steps[t].at(key).at(name), key, where);
        }
      }
    }
  }
}

std::vector<GoldenCase> all_cases() {
  std::vector<GoldenCase> all;
  for (const char* file :
       {"torch_muon", "muonium_muon", "muonium_normuon", "neuralops_qkan_adamw"}) {
    const std::vector<GoldenCase> cases = golden_cases(std::string(file) + ".json");
    all.insert(all.end(), cases.begin(), cases.end());
  }
  return all;
}

INSTANTIATE_TEST_SUITE_P(
    golden, GoldenShell, ::testing::ValuesIn(all_cases()),
    [](const auto& test) { return test_name(test.param); });

} // namespace
} // namespace muon::testing
