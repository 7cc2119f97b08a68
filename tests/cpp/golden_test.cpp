// Every case of tests/golden through the functional core, in float64 and in float32.

#include <map>
#include <memory>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <muon/orthogonalize.h>
#include <muon/step.h>

#include "support/golden.h"
#include "support/stepper.h"

namespace muon::testing {
namespace {

std::string name_of(const ::testing::TestParamInfo<GoldenCase>& info) {
  return test_name(info.param);
}

// --- orthogonalisation ---------------------------------------------------------------------------

class GoldenOrthogonalize : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(GoldenOrthogonalize, A5_matches_the_exact_polynomial) {
  const GoldenCase& golden = GetParam();
  const at::Tensor x = tensor(golden, golden.inputs.at("x"));
  const at::Tensor got = orthogonalize(x, orthogonalize_options(golden.options));
  EXPECT_EQ(got.scalar_type(), golden.dtype);
  expect_within(golden, got, golden.expected.at("output"), "output", "");
}

INSTANTIATE_TEST_SUITE_P(
    ns_quintic, GoldenOrthogonalize, ::testing::ValuesIn(golden_cases("ns_quintic.json")), name_of);
INSTANTIATE_TEST_SUITE_P(
    polar_express, GoldenOrthogonalize, ::testing::ValuesIn(golden_cases("polar_express.json")),
    name_of);

// --- shape factors -------------------------------------------------------------------------------

class GoldenScale : public ::testing::TestWithParam<GoldenCase> {};

TEST_P(GoldenScale, D1_factor_of_every_shape) {
  const GoldenCase& golden = GetParam();
  const std::map<std::string, AdjustLr> modes = {
      {"original", AdjustLr::Original},
      {"match_rms_adamw", AdjustLr::MatchRmsAdamw},
      {"spectral_unclamped", AdjustLr::SpectralUnclamped}};
  const auto shapes = golden.inputs.at("shapes").get<std::vector<std::vector<std::int64_t>>>();
  const auto factors = golden.expected.at("factors").get<std::vector<double>>();
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    MatrixLayout layout;
    layout.flatten = golden.options.at("flatten").get<bool>() && shapes[i].size() > 2;
    if (!layout.flatten && shapes[i].size() > 2) {
      layout.batch_dims = static_cast<std::int64_t>(shapes[i].size()) - 2;
    }
    const std::vector<MatrixShape> matrices = matrix_shapes(shapes[i], layout, "weight");
    ASSERT_EQ(matrices.size(), 1U);
    const AdjustLr mode = modes.at(golden.options.at("scale"));
    const double factor = shape_factor(mode, matrices[0].rows, matrices[0].cols);
    EXPECT_NEAR(factor, factors[i], golden.tolerance.at("factors").get<double>());
  }
}

INSTANTIATE_TEST_SUITE_P(
    scale_factors, GoldenScale, ::testing::ValuesIn(golden_cases("scale_factors.json")), name_of);

// --- whole steps ---------------------------------------------------------------------------------

// The parameters of an optimizer case: group 0 is Muon's, group 1 AdamW's.
struct Problem {
  std::vector<std::string> names;
  std::vector<at::Tensor> params;
  std::vector<std::int64_t> groups;
  std::vector<GroupSpec> specs;
  std::vector<at::Tensor> hyper;
};

Problem read_problem(const GoldenCase& golden) {
  Problem problem;
  std::int64_t muon_ndim = 2;
  for (const auto& [name, algorithm] : golden.options.at("route").items()) {
    problem.names.push_back(name);
    problem.params.push_back(tensor(golden, golden.inputs.at("params").at(name)));
    problem.groups.push_back(algorithm == "muon" ? 0 : 1);
    if (algorithm == "muon") {
      muon_ndim = problem.params.back().dim();
    }
  }
  if (golden.options.contains("muon")) {
    problem.specs.push_back(muon_spec(golden.options.at("muon"), muon_ndim));
    problem.hyper.push_back(muon_hyper(golden.options.at("muon")));
  }
  if (golden.options.contains("adamw")) {
    problem.specs.push_back(adamw_spec());
    problem.hyper.push_back(adamw_hyper(golden.options.at("adamw")));
  }
  if (problem.specs.size() == 1) {
    problem.groups.assign(problem.names.size(), 0);
  }
  return problem;
}

std::vector<at::Tensor> read_grads(
    const GoldenCase& golden, const std::vector<std::string>& names, const Json& encoded) {
  std::vector<at::Tensor> grads;
  for (const std::string& name : names) {
    grads.push_back(encoded.at(name).is_null() ? at::Tensor() : tensor(golden, encoded.at(name)));
  }
  return grads;
}

class GoldenOptimizer : public ::testing::TestWithParam<GoldenCase> {
 protected:
  void SetUp() override {
    const Json& options = GetParam().options;
    if (options.contains("muon") && !is_supported(options.at("muon"))) {
      GTEST_SUCCEED() << "muonium's own split rule: see the *_fixed cases";
      unsupported_ = true;
    }
  }

  bool unsupported_ = false;
};

TEST_P(GoldenOptimizer, A15_A16_parameters_and_state_after_every_step) {
  if (unsupported_) {
    return;
  }
  const GoldenCase& golden = GetParam();
  Problem problem = read_problem(golden);
  Stepper run(problem.names, problem.params, problem.groups, problem.specs, problem.hyper);
  const Json& steps = golden.expected.at("steps");
  for (std::size_t t = 0; t < steps.size(); ++t) {
    run.step(read_grads(golden, problem.names, golden.inputs.at("grads").at(t)));
    const std::string where = "after step " + std::to_string(t + 1);
    for (std::size_t i = 0; i < problem.names.size(); ++i) {
      const std::string& name = problem.names[i];
      expect_within(
          golden, run.params()[i], steps[t].at("params").at(name), "params", name + " " + where);
      for (const char* key : {"momentum_buffer", "variance_neuron", "exp_avg", "exp_avg_sq"}) {
        if (steps[t].contains(key) && steps[t].at(key).contains(name)) {
          expect_within(
              golden, run.state(name, key), steps[t].at(key).at(name), key, name + " " + where);
        }
      }
    }
  }
}

// With lr 1, no factor, no decay and a zero parameter, a step leaves minus its update there.
TEST_P(GoldenOptimizer, update_before_lr_and_decay) {
  const GoldenCase& golden = GetParam();
  if (unsupported_ || !golden.options.contains("muon")) {
    return;
  }
  Problem problem = read_problem(golden);
  problem.specs[0].adjust_lr = AdjustLr::Unscaled;
  problem.hyper[0][Hyper::kLr] = 1.0;
  problem.hyper[0][Hyper::kWeightDecay] = 0.0;
  Stepper run(problem.names, problem.params, problem.groups, problem.specs, problem.hyper);
  const Json& steps = golden.expected.at("steps");
  for (std::size_t t = 0; t < steps.size(); ++t) {
    for (const at::Tensor& param : problem.params) {
      param.zero_();
    }
    run.step(read_grads(golden, problem.names, golden.inputs.at("grads").at(t)));
    for (std::size_t i = 0; i < problem.names.size(); ++i) {
      const std::string& name = problem.names[i];
      if (steps[t].at("update").contains(name)) {
        const std::string where = name + " in step " + std::to_string(t + 1);
        expect_within(
            golden, run.params()[i].neg(), steps[t].at("update").at(name), "update", where);
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    torch_muon, GoldenOptimizer, ::testing::ValuesIn(golden_cases("torch_muon.json")), name_of);
INSTANTIATE_TEST_SUITE_P(
    muonium, GoldenOptimizer, ::testing::ValuesIn(golden_cases("muonium_muon.json")), name_of);
INSTANTIATE_TEST_SUITE_P(
    normuon, GoldenOptimizer, ::testing::ValuesIn(golden_cases("muonium_normuon.json")), name_of);
INSTANTIATE_TEST_SUITE_P(
    neuralops_qkan_adamw, GoldenOptimizer,
    ::testing::ValuesIn(golden_cases("neuralops_qkan_adamw.json")), name_of);

// --- momentum forms ------------------------------------------------------------------------------

class GoldenMomentum : public ::testing::TestWithParam<GoldenCase> {
 protected:
  // A run whose update is what would be orthogonalised: no iterations, and a lower bound of the
  // norm far above every norm, which lr cancels; both are powers of two.
  static std::unique_ptr<Stepper> run_of(const GoldenCase& golden, bool heavy_ball) {
    GroupSpec spec;
    spec.adjust_lr = AdjustLr::Unscaled;
    spec.orthogonalize.steps = 0;
    at::Tensor hyper = at::zeros({Hyper::kCount}, at::kDouble);
    hyper[Hyper::kLr] = 64.0;
    hyper[Hyper::kEps] = 64.0;
    hyper[Hyper::kLrMultiplier] = 1.0;
    hyper[Hyper::kNesterov] = golden.options.at("nesterov").get<bool>() ? 1.0 : 0.0;
    hyper[Hyper::kHeavyBall] = heavy_ball ? 1.0 : 0.0;
    const at::Tensor param = at::zeros_like(tensor(golden, golden.inputs.at("grads").at(0)));
    return std::make_unique<Stepper>(
        std::vector<std::string>{"weight"}, std::vector<at::Tensor>{param},
        std::vector<std::int64_t>{0}, std::vector<GroupSpec>{spec}, std::vector<at::Tensor>{hyper});
  }

  static void step(const GoldenCase& golden, Stepper& run, std::size_t t) {
    run.params()[0].zero_();
    run.hyper()[0][Hyper::kMomentum] = golden.options.at("momentum").at(t).get<double>();
    run.step({tensor(golden, golden.inputs.at("grads").at(t))});
  }
};

TEST_P(GoldenMomentum, D21_both_forms_step_by_step) {
  const GoldenCase& golden = GetParam();
  for (const std::string form : {"heavy_ball", "ema"}) {
    const auto run = run_of(golden, form == "heavy_ball");
    const Json& steps = golden.expected.at("steps");
    for (std::size_t t = 0; t < steps.size(); ++t) {
      step(golden, *run, t);
      const std::string where = "after step " + std::to_string(t + 1);
      const at::Tensor buffer = run->state("weight", "momentum_buffer");
      expect_within(golden, buffer, steps[t].at(form), form, where);
      const std::string input = "ortho_input_" + form;
      expect_within(golden, run->params()[0].neg(), steps[t].at(input), input, where);
    }
  }
}

TEST_P(GoldenMomentum, D21_a_buffer_converts_by_one_minus_mu) {
  const GoldenCase& golden = GetParam();
  const auto after = golden.options.at("convert_after_step").get<std::size_t>();
  const double ratio = 1.0 - golden.options.at("momentum").at(after - 1).get<double>();
  const Json& conversion = golden.expected.at("conversion");
  for (const bool to_ema : {true, false}) {
    const auto from = run_of(golden, to_ema);
    for (std::size_t t = 0; t < after; ++t) {
      step(golden, *from, t);
    }
    const auto into = run_of(golden, !to_ema);
    const at::Tensor old_buffer = from->state("weight", "momentum_buffer");
    at::Tensor buffer = into->state("weight", "momentum_buffer");
    buffer.copy_(to_ema ? old_buffer * ratio : old_buffer / ratio);
    const char* converted = to_ema ? "heavy_ball_as_ema" : "ema_as_heavy_ball";
    expect_within(golden, buffer, conversion.at(converted), "conversion", converted);
    step(golden, *into, after);
    const char* next = to_ema ? "next_ema_after_conversion" : "next_heavy_ball_after_conversion";
    expect_within(golden, buffer, conversion.at(next), "conversion", next);
  }
}

INSTANTIATE_TEST_SUITE_P(
    momentum_conversion, GoldenMomentum,
    ::testing::ValuesIn(golden_cases("momentum_conversion.json")), name_of);

} // namespace
} // namespace muon::testing
