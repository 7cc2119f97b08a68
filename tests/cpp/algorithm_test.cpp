// Algorithms that a user's own library registers: stages and whole updates, options, state, errors.

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <muon/muon.h>

#include "support/optimizers.h"
#include "support/reference.h"

namespace muon::testing {
namespace {

// refine: a factor that is the algorithm's first own option, and a row mean in its second slot.
void scale_(
    at::TensorList matrices, at::TensorList state, const at::Tensor& hyper,
    at::IntArrayRef groups) {
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    state[i].copy_(matrices[i].mean({-1}, /*keepdim=*/true));
    matrices[i].mul_(hyper[groups[i]][Hyper::kCount]);
  }
}

// matrix_update: p <- p - lr factor g / step.
void descend_(
    at::TensorList params, at::TensorList grads, at::TensorList state, const at::Tensor& hyper,
    at::IntArrayRef groups, at::ArrayRef<double> factors, const std::optional<at::Tensor>& scale,
    std::string_view spec) {
  EXPECT_FALSE(scale.has_value());
  EXPECT_NE(spec.find("algorithm=test_descend"), std::string_view::npos);
  for (std::size_t i = 0; i < params.size(); ++i) {
    EXPECT_EQ(params[i].dim(), 3);
    params[i].sub_(grads[i] * hyper[groups[i]][Hyper::kLr] * factors[i] / state[i]);
  }
}

TORCH_LIBRARY(muon_test, m) {
  m.def("scale_(Tensor(a!)[] matrices, Tensor(b!)[] state, Tensor hyper, int[] groups) -> ()");
  m.def(
      "descend_(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] state, Tensor hyper, int[] groups, "
      "float[] factors, Tensor? grad_scale, str spec) -> ()");
}

TORCH_LIBRARY_IMPL(muon_test, CompositeExplicitAutograd, m) {
  m.impl("scale_", &scale_);
  m.impl("descend_", &descend_);
}

Algorithm scaled_muon() {
  Algorithm algorithm;
  algorithm.name = "test_scaled";
  algorithm.state = {
      {"momentum_buffer", StateSlot::Kind::LikeParam}, {"row_mean", StateSlot::Kind::PerRow}};
  algorithm.options = {{"scale", 2.0}, {"unread", 0.5}};
  algorithm.refine = "muon_test::scale_";
  return algorithm;
}

Algorithm descent() {
  Algorithm algorithm;
  algorithm.name = "test_descend";
  algorithm.state = {{"steps", StateSlot::Kind::Step}};
  algorithm.matrix_update = "muon_test::descend_";
  return algorithm;
}

class RegisteredAlgorithm : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    register_algorithm(scaled_muon());
    register_algorithm(descent());
  }
};

// What one step with lr 0.1 and no decay takes off a parameter.
at::Tensor change(const MuonOptions& options) {
  at::Tensor param = parameter({4, 3}, 1, at::kDouble);
  const at::Tensor before = param.detach().clone();
  Muon optimizer({param}, MuonOptions(options).lr(0.1).weight_decay(0.0));
  set_gradients({param}, 1);
  optimizer.step();
  return before - param.detach();
}

TEST_F(RegisteredAlgorithm, a_stage_replaces_ours_and_the_others_stay) {
  const at::Tensor muon = change(MuonOptions());
  const at::Tensor scaled = change(MuonOptions().algorithm("test_scaled"));
  EXPECT_TRUE(at::allclose(scaled, 2 * muon, 1e-13, 1e-15));
}

TEST_F(RegisteredAlgorithm, own_options_reach_the_stage_as_the_group_says) {
  const at::Tensor muon = change(MuonOptions());
  const auto options = MuonOptions().algorithm("Test_Scaled").algorithm_option("scale", -3.0);
  EXPECT_TRUE(at::allclose(change(options), -3 * muon, 1e-13, 1e-15));
}

TEST_F(RegisteredAlgorithm, own_options_inherit_one_by_one_and_move_at_once) {
  at::Tensor param = parameter({4, 3});
  const auto defaults = MuonOptions()
                            .algorithm("test_scaled")
                            .algorithm_option("unread", 7.0)
                            .algorithm_option("scale", 4.0);
  Muon optimizer({group({param}, MuonOptions().algorithm_option("scale", 5.0))}, defaults);
  const AlgorithmOptions expected = {{"scale", 5.0}, {"unread", 7.0}};
  EXPECT_EQ(std::as_const(optimizer).options().algorithm_options(), expected);

  optimizer.options().weight_decay(0.0).algorithm_option("scale", 0.0);
  const at::Tensor before = param.detach().clone();
  set_gradients({param}, 1);
  optimizer.step();
  EXPECT_TRUE(at::equal(param.detach(), before));
}

TEST_F(RegisteredAlgorithm, own_options_and_state_are_saved_and_loaded) {
  const auto options = MuonOptions().algorithm("test_scaled").algorithm_option("scale", 3.0);
  Muon saved({parameter({4, 3}, 1)}, options);
  set_gradients(parameters_of(saved), 1);
  saved.step();
  Muon loaded({parameter({4, 3}, 2)}, MuonOptions().algorithm("test_scaled"));
  load(loaded, save(saved));
  EXPECT_EQ(std::as_const(loaded).options().algorithm_options().at("scale"), 3.0);
  const at::Tensor param = parameters_of(saved)[0], other = parameters_of(loaded)[0];
  for (const char* key : {"momentum_buffer", "row_mean"}) {
    EXPECT_TRUE(bit_equal(state_of(loaded, other, key), state_of(saved, param, key))) << key;
  }
}

TEST_F(RegisteredAlgorithm, a_whole_update_gets_matrices_factors_and_counted_steps) {
  at::Tensor param = parameter({6, 3}, 1, at::kDouble);
  at::Tensor expected = param.detach().clone();
  Muon optimizer({param}, MuonOptions(0.1).algorithm("test_descend").split_sizes({2, 4}));
  set_gradients({param}, 1);
  for (const double step : {1.0, 2.0}) {
    optimizer.step();
    expected.narrow(0, 0, 2).sub_(param.grad().narrow(0, 0, 2) * 0.1 / step);
    expected.narrow(0, 2, 4).sub_(param.grad().narrow(0, 2, 4) * 0.1 * std::sqrt(4.0 / 3.0) / step);
  }
  EXPECT_TRUE(at::allclose(param.detach(), expected, 1e-14, 1e-14));
}

TEST_F(RegisteredAlgorithm, the_same_definition_may_be_registered_again) {
  EXPECT_NO_THROW(register_algorithm(scaled_muon()));
}

TEST_F(RegisteredAlgorithm, replacing_one_leaves_the_plans_made_before) {
  Algorithm algorithm = scaled_muon();
  algorithm.name = "test_replaced";
  register_algorithm(algorithm);
  at::Tensor param = parameter({4, 3});
  Muon optimizer({param}, MuonOptions().algorithm("test_replaced"));
  set_gradients({param}, 1);
  optimizer.step();
  algorithm.options.pop_back();
  register_algorithm(algorithm, /*replace=*/true);
  EXPECT_NO_THROW(optimizer.step());
}

void expect_refused(const Algorithm& algorithm, const std::string& part, bool replace = false) {
  const std::vector<std::string> before = registered_algorithms();
  const auto call = [&] { register_algorithm(algorithm, replace); };
  EXPECT_TRUE(mentions(message_of<c10::ValueError>(call), {part}));
  EXPECT_EQ(registered_algorithms(), before);
}

TEST_F(RegisteredAlgorithm, M20_a_taken_name_is_refused) {
  Algorithm other = scaled_muon();
  other.options.clear();
  expect_refused(other, "registered already");
  other.name = "AdamW";
  expect_refused(other, "registered already", /*replace=*/true);
}

TEST_F(RegisteredAlgorithm, incomplete_definitions_are_refused) {
  Algorithm unnamed = scaled_muon();
  unnamed.name = "";
  expect_refused(unnamed, "algorithm with a name");
  Algorithm no_op = scaled_muon();
  no_op.name = "test_no_op";
  no_op.refine = "muon_test::missing_";
  expect_refused(no_op, "muon_test::missing_");
  Algorithm no_momentum = scaled_muon();
  no_momentum.name = "test_no_momentum";
  no_momentum.state = {{"row", StateSlot::Kind::PerRow}};
  expect_refused(no_momentum, "first state slot is the momentum");
  Algorithm twice = scaled_muon();
  twice.name = "test_twice";
  twice.options.push_back({"scale", 1.0});
  expect_refused(twice, "options of different names, got \"scale\"");
}

TEST_F(RegisteredAlgorithm, unknown_and_wrong_own_options_are_refused) {
  const auto refused = [](const MuonOptions& options, const std::string& part) {
    const auto call = [&] { const Muon optimizer({parameter({4, 3})}, options); };
    EXPECT_TRUE(mentions(message_of<c10::ValueError>(call), {part}));
  };
  refused(MuonOptions().algorithm_option("scale", 1.0), "algorithm \"muon\", got \"scale\"");
  refused(
      MuonOptions().algorithm("test_scaled").algorithm_option("slope", 1.0),
      "algorithm \"test_scaled\", got \"slope\"");
  refused(
      MuonOptions()
          .algorithm("test_scaled")
          .algorithm_option("scale", std::numeric_limits<double>::quiet_NaN()),
      "scale should be finite");
  refused(MuonOptions().algorithm("test_unknown"), "must be registered first");
}

} // namespace
} // namespace muon::testing
