// What muon::Muon tells about itself.

#include <cmath>
#include <sstream>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/linear.h>

#include <muon/muon.h>

#include "support/optimizers.h"

namespace muon::testing {
namespace {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

Groups described() {
  Groups groups;
  groups.push_back(group(
      {parameter({8, 2}), parameter({12, 2})},
      MuonOptions(0.5)
          .weight_decay(0.5)
          .param_names({"up.weight", "qkv.weight"})
          .reasons({"matrix", "split"})));
  groups.push_back(group(
      {parameter({256, 1, 3, 3})}, MuonOptions(0.5).flatten(true).param_names({"conv.weight"})));
  groups.push_back(
      group({parameter({6, 4, 2})}, MuonOptions(0.5).batch_dims(1).lr_multiplier(2.0)));
  groups.push_back(
      group({parameter({4})}, MuonOptions(0.25).algorithm("adamw").param_names({"bias"})));
  return groups;
}

TEST(MuonReport, B6_D18_effective_learning_rate) {
  const Groups groups = described();
  Muon optimizer(groups, MuonOptions(0.1));
  EXPECT_EQ(
      optimizer.effective_lr(groups[0].params()[0]), std::vector<double>{0.5 * std::sqrt(4.0)});
  EXPECT_DOUBLE_EQ(optimizer.effective_lr(groups[1].params()[0])[0], 0.5 * std::sqrt(256.0 / 9.0));
  EXPECT_EQ(
      optimizer.effective_lr(groups[2].params()[0]),
      std::vector<double>{0.5 * 2.0 * std::sqrt(2.0)});
  EXPECT_EQ(optimizer.effective_lr(groups[3].params()[0]), std::vector<double>{0.25});
  optimizer.options(0).split_sizes({8, 4});
  EXPECT_EQ(optimizer.effective_lr(groups[0].params()[1]).size(), 2U);
  EXPECT_THROW(optimizer.effective_lr(parameter({8, 2})), c10::ValueError);
}

TEST(MuonReport, B2_C3_describe_has_a_line_a_parameter_and_totals) {
  const Groups groups = described();
  groups[3].params()[0].set_requires_grad(false);
  const std::string text = Muon(groups, MuonOptions(0.1)).describe();
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) {
    lines.push_back(line);
  }
  ASSERT_EQ(lines.size(), 2U + 5U + 1U + 2U) << text;
  EXPECT_TRUE(mentions(
      lines[0], {"name", "shape", "matrices", "algorithm", "why", "lr", "lr*wd", "factor"}));
  EXPECT_TRUE(mentions(lines[2], {"up.weight", "8x2", "muon", "matrix", "  1  ", "0.25", "  2"}));
  EXPECT_TRUE(mentions(lines[4], {"conv.weight", "256x1x3x3", "256x9", "2.667", "5.333"}));
  EXPECT_TRUE(mentions(lines[5], {"parameter 0 of group 2", "6x4x2", "6 of 4x2"}));
  EXPECT_TRUE(mentions(lines[6], {"bias", "adamw (frozen)", " - "}));
  EXPECT_EQ(lines[8], "muon: 4 parameters, 2,392 elements");
  EXPECT_EQ(lines[9], "frozen: 1 parameter, 4 elements");
}

TEST(MuonReport, C10_names_come_along_where_there_are_any) {
  const torch::nn::Linear model(torch::nn::LinearOptions(3, 4).bias(false));
  Muon named(model->named_parameters(), MuonOptions(0.1));
  EXPECT_TRUE(mentions(named.describe(), {"weight", "4x3"}));
  Muon unnamed(model->parameters(), 0.1);
  EXPECT_TRUE(mentions(unnamed.describe(), {"parameter 0 of group 0"}));
}

} // namespace
} // namespace muon::testing
