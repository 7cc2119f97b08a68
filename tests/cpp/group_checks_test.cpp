// What muon::Muon refuses, how it says so, and that nothing has changed then.

#include <functional>
#include <stdexcept>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>

#include <muon/muon.h>

#include "support/optimizers.h"
#include "support/reference.h"

namespace muon::testing {
namespace {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

// --- groups ----------------------------------------------------------------------------------------

struct BadGroup {
  const char* name;
  std::function<torch::optim::OptimizerParamGroup()> make;
  std::string begins; // the error's first words
  std::string names; // what it must also mention
};

std::ostream& operator<<(std::ostream& out, const BadGroup& row) {
  return out << row.name;
}

class MuonRefuses : public ::testing::TestWithParam<BadGroup> {};

TEST_P(MuonRefuses, at_construction) {
  const BadGroup& bad = GetParam();
  const std::string text = message_of<c10::Error>(
      [&] { Muon(Groups{group({parameter({4, 3})}, MuonOptions(0.1)), bad.make()}); });
  EXPECT_EQ(text.rfind(bad.begins, 0), 0U) << text;
  EXPECT_TRUE(mentions(text, {bad.names}));
}

TEST_P(MuonRefuses, in_add_param_group_and_nothing_has_changed) {
  Muon optimizer(std::vector<at::Tensor>{parameter({4, 3})}, MuonOptions(0.1));
  set_gradients(parameters_of(optimizer), 1);
  optimizer.step();
  const std::string before = save(optimizer);
  EXPECT_THROW(optimizer.add_param_group(GetParam().make()), c10::Error);
  EXPECT_EQ(optimizer.param_groups().size(), 1U);
  Muon twin(std::vector<at::Tensor>{parameter({4, 3})}, MuonOptions(0.1));
  parameters_of(twin)[0].detach().copy_(parameters_of(optimizer)[0].detach());
  load(twin, before);
  EXPECT_TRUE(same_bits(optimizer, twin));
  optimizer.step();
}

at::Tensor some() {
  return parameter({4, 3});
}

INSTANTIATE_TEST_SUITE_P(
    rows, MuonRefuses,
    ::testing::Values(
        BadGroup{
            "B1_conv",
            [] {
              return group({parameter({16, 8, 3, 3})}, MuonOptions().param_names({"conv.weight"}));
            },
            "Muon only supports 2D parameters whereas we found a parameter with size: [16, 8, 3, 3]",
            "conv.weight"},
        BadGroup{
            "B9_bias", [] { return group({parameter({4})}, {}); },
            "Muon only supports 2D parameters whereas we found a parameter with size: [4]",
            "adamw"},
        BadGroup{
            "B9_scalar_with_a_layout",
            [] { return group({parameter({})}, MuonOptions().flatten(true)); },
            "Muon only supports 2D parameters whereas we found a parameter with size: []", "adamw"},
        BadGroup{
            "B16_split_sum",
            [] { return group({some()}, MuonOptions().split_sizes({1, 2}).param_names({"qkv"})); },
            "muon: split_sizes must sum to", "qkv"},
        BadGroup{
            "two_layouts",
            [] { return group({parameter({2, 3, 4})}, MuonOptions().flatten(true).batch_dims(1)); },
            "muon: expected one of rows/cols, flatten and batch_dims", "parameter 0 of group 1"},
        BadGroup{
            "complex_dim_of_a_complex_one",
            [] {
              return group(
                  {parameter({4, 3, 2}, 0, at::kComplexFloat)}, MuonOptions().complex_dim(true));
            },
            "muon: expected complex_dim on a real tensor", "parameter 0"},
        BadGroup{
            "lr", [] { return group({some()}, MuonOptions(-1.0)); },
            "Learning rate should be >= 0 but is: -1", "group 1"},
        BadGroup{
            "C3_adam_without_lr",
            [] { return group({parameter({4})}, MuonOptions().algorithm("adamw")); },
            "muon: expected an lr of its own", "adamw"},
        BadGroup{
            "integers", [] { return group({at::zeros({4, 3}, at::kInt)}, {}); },
            "muon: expected floating point or complex parameters, got Int", "parameter 0"},
        BadGroup{
            "twice",
            [] {
              const at::Tensor param = some();
              return group({param, param}, {});
            },
            "some parameters appear in more than one parameter group", "parameter 1"},
        BadGroup{
            "names", [] { return group({some()}, MuonOptions().param_names({"a", "b"})); },
            "muon: expected one of param_names", "got 2"},
        BadGroup{
            "foreign_options",
            [] {
              return torch::optim::OptimizerParamGroup(
                  std::vector<at::Tensor>{some()}, std::make_unique<torch::optim::SGDOptions>(0.1));
            },
            "muon: expected MuonOptions for group 1", "another optimizer"}),
    [](const auto& row) { return std::string(row.param.name); });

TEST(MuonErrors, types_are_those_of_Python) {
  EXPECT_THROW(Muon(std::vector<at::Tensor>{parameter({4})}), c10::ValueError);
  EXPECT_THROW(Muon(std::vector<at::Tensor>{at::zeros({4, 3}, at::kInt)}), c10::TypeError);
  EXPECT_THROW(Muon(std::vector<at::Tensor>{some()}, MuonOptions(-1.0)), c10::ValueError);
}

TEST(MuonErrors, defaults_are_checked_though_every_group_has_its_own) {
  const std::string text = message_of<c10::ValueError>(
      [] { Muon(Groups{group({some()}, MuonOptions(0.1))}, MuonOptions(-1.0)); });
  EXPECT_TRUE(mentions(text, {"Learning rate should be >= 0", "defaults"}));
}

TEST(MuonErrors, B1_B5_one_error_lists_all_parameters_and_the_choices) {
  const std::string text = message_of<c10::ValueError>([] {
    Muon(
        Groups{
            group(
                {parameter({8, 4, 3, 3}), some()}, MuonOptions(0.1).param_names({"conv", "fine"})),
            group(
                {parameter({2, 4, 3}), parameter({5})},
                MuonOptions(0.1).param_names({"experts", "bias"}))});
  });
  EXPECT_TRUE(mentions(
      text,
      {"conv: [8, 4, 3, 3]", "experts: [2, 4, 3]", "bias: [5]", "rows(", "cols(", "flatten(true)",
       "batch_dims(", "adamw"}));
  EXPECT_FALSE(mentions(text, {"fine"}));
}

TEST(MuonErrors, a_parameter_in_two_groups) {
  const at::Tensor param = some();
  EXPECT_THROW(
      Muon(Groups{group({param}, MuonOptions(0.1)), group({param}, MuonOptions(0.2))}),
      c10::ValueError);
}

TEST(MuonErrors, a_non_leaf_parameter) {
  EXPECT_TRUE(mentions(
      message_of<c10::Error>([] { Muon(std::vector<at::Tensor>{some() * 2.0}); }),
      {"can't optimize a non-leaf Tensor"}));
}

// --- steps -----------------------------------------------------------------------------------------

// A failed step has changed neither parameters nor state.
template <typename Error>
std::string failed_step(Muon& optimizer) {
  const auto params = snapshot(parameters_of(optimizer));
  const std::string saved = save(optimizer);
  const std::string text = message_of<Error>([&] { optimizer.step(); });
  EXPECT_TRUE(bit_equal(snapshot(parameters_of(optimizer)), params));
  Muon twin(clone_parameters(parameters_of(optimizer)), MuonOptions(0.1));
  load(twin, saved);
  EXPECT_TRUE(same_bits(optimizer, twin));
  return text;
}

TEST(MuonErrors, a_sparse_gradient_names_its_parameter) {
  const std::vector<at::Tensor> params = {parameter({4, 3}, 1), parameter({4, 3}, 2)};
  Muon optimizer(params, MuonOptions(0.1));
  set_gradients(params, 1);
  optimizer.step();
  params[1].mutable_grad() = params[1].grad().to_sparse();
  const std::string text = failed_step<c10::Error>(optimizer);
  EXPECT_EQ(text.rfind("Muon does not support sparse gradients", 0), 0U) << text;
  EXPECT_TRUE(mentions(text, {"parameter 1 of group 0"}));
}

TEST(MuonErrors, an_option_changed_to_a_bad_value) {
  const std::vector<at::Tensor> params = {some()};
  Muon optimizer(params, MuonOptions(0.1));
  set_gradients(params, 1);
  optimizer.step();
  optimizer.options(0).momentum() = 1.5;
  const auto before = snapshot(params);
  EXPECT_TRUE(mentions(
      message_of<c10::ValueError>([&] { optimizer.step(); }),
      {"momentum should be <= 1 but is: 1.5"}));
  EXPECT_TRUE(bit_equal(snapshot(params), before));
  optimizer.options(0).momentum(0.5);
  optimizer.step();
}

TEST(MuonErrors, a_layout_changed_to_a_bad_one_fails_at_every_step) {
  const std::vector<at::Tensor> params = {some()};
  Muon optimizer(params, MuonOptions(0.1));
  set_gradients(params, 1);
  optimizer.step();
  optimizer.options(0).split_sizes({1, 1});
  const auto before = snapshot(params);
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(mentions(
        message_of<c10::ValueError>([&] { optimizer.step(); }), {"split_sizes must sum to"}));
  }
  EXPECT_TRUE(bit_equal(snapshot(params), before));
  optimizer.options(0).split_sizes({1, 3});
  optimizer.step();
}

TEST(MuonErrors, a_throwing_closure_changes_nothing) {
  const std::vector<at::Tensor> params = {some()};
  Muon optimizer(params, MuonOptions(0.1));
  set_gradients(params, 1);
  const auto before = snapshot(params);
  EXPECT_THROW(
      optimizer.step([]() -> at::Tensor { throw std::runtime_error("loss"); }), std::runtime_error);
  EXPECT_TRUE(bit_equal(snapshot(params), before));
  EXPECT_TRUE(at::GradMode::is_enabled());
}

} // namespace
} // namespace muon::testing
