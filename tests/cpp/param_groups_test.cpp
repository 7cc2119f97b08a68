// Groups of muon::Muon: the values asked for are the values used.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <muon/muon.h>

#include "support/optimizers.h"
#include "support/reference.h"

namespace muon::testing {
namespace {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

// The options that were asked for, in every group, whatever the defaults say.
void expect_asked_for(const Muon& optimizer) {
  const MuonOptions& first = optimizer.options(0);
  EXPECT_EQ(first.lr(), 0.5);
  EXPECT_EQ(first.momentum(), 0.9) << "inherited";
  EXPECT_EQ(first.weight_decay(), 0.0);
  EXPECT_EQ(first.adjust_lr(), AdjustLr::SpectralUnclamped);
  const MuonOptions& second = optimizer.options(1);
  EXPECT_EQ(second.lr(), 0.1) << "inherited";
  EXPECT_EQ(second.momentum(), 0.95) << "asked for, though it is the initial value";
  EXPECT_FALSE(second.nesterov());
  EXPECT_EQ(second.adjust_lr(), AdjustLr::Original);
  const MuonOptions& third = optimizer.options(2);
  EXPECT_EQ(third.algorithm(), "adamw");
  EXPECT_EQ(third.lr(), 1e-3);
  EXPECT_EQ(third.betas(), (Betas{0.8, 0.9}));
  EXPECT_EQ(third.weight_decay(), 0.01);
  EXPECT_EQ(third.eps(), 1e-8);
}

Groups asked_for(const std::vector<at::Tensor>& params) {
  Groups groups;
  groups.push_back(group(
      {params[0]}, MuonOptions(0.5).weight_decay(0.0).adjust_lr(AdjustLr::SpectralUnclamped)));
  groups.push_back(group({params[1]}, MuonOptions().momentum(0.95).nesterov(false)));
  groups.push_back(group({params[2]}, MuonOptions(1e-3).algorithm("adamw").betas({0.8, 0.9})));
  return groups;
}

const MuonOptions kDefaults = MuonOptions(0.1).momentum(0.9).weight_decay(0.3);

std::vector<at::Tensor> three_parameters() {
  return {parameter({4, 3}, 1), parameter({3, 4}, 2), parameter({5}, 3)};
}

TEST(MuonGroups, E11_values_asked_for_are_the_values_used) {
  const std::vector<at::Tensor> params = three_parameters();
  Muon optimizer(asked_for(params), kDefaults);
  expect_asked_for(optimizer);
  set_gradients(params, 1);
  const at::Tensor before = params[0].detach().clone();
  optimizer.step();
  const at::Tensor update = exact_orthogonalize(params[0].grad(), {});
  const at::Tensor expected = before - 0.5 * std::sqrt(4.0 / 3.0) * update;
  EXPECT_LE(relative_error(params[0].detach(), expected), 1e-5);
}

TEST(MuonGroups, E11_also_in_groups_added_later_and_after_save_and_load) {
  const std::vector<at::Tensor> params = three_parameters();
  Muon optimizer(Groups{}, kDefaults);
  for (const auto& later : asked_for(params)) {
    optimizer.add_param_group(later);
  }
  expect_asked_for(optimizer);
  const std::string saved = save(optimizer);
  expect_asked_for(optimizer);

  Groups plain = asked_for(three_parameters());
  for (auto& other : plain) {
    const bool adam = static_cast<MuonOptions&>(other.options()).algorithm() == "adamw";
    other.set_options(
        std::make_unique<MuonOptions>(
            adam ? MuonOptions(0.25).algorithm("adamw") : MuonOptions(0.25)));
  }
  Muon loaded(plain, MuonOptions(0.75));
  load(loaded, saved);
  expect_asked_for(loaded);
}

TEST(MuonGroups, H2_defaults_fill_groups_without_options) {
  Muon optimizer(Groups{{std::vector<at::Tensor>{parameter({4, 3})}}}, kDefaults);
  EXPECT_EQ(std::as_const(optimizer).options(0).lr(), 0.1);
  EXPECT_EQ(std::as_const(optimizer).options(0).weight_decay(), 0.3);
}

TEST(MuonGroups, an_optimizer_without_parameters_steps_saves_and_loads) {
  Muon optimizer(Groups{}, kDefaults);
  optimizer.step();
  load(optimizer, save(optimizer));
  EXPECT_EQ(optimizer.skipped().size(), 0U);
}

TEST(MuonGroups, the_callers_options_stay_as_they_are) {
  const MuonOptions mine = MuonOptions().momentum(0.5);
  const Groups groups = {group({parameter({4, 3})}, mine)};
  Muon optimizer(groups, kDefaults);
  EXPECT_EQ(static_cast<const MuonOptions&>(groups[0].options()).given(), mine.given());
}

TEST(MuonGroups, C3_adam_groups_need_their_own_lr) {
  const auto bias = [] {
    return group({parameter({4})}, MuonOptions().algorithm("adamw").param_names({"bias"}));
  };
  const std::string text = message_of<c10::ValueError>(
      [&] { Muon(Groups{group({parameter({4, 3})}, {}), bias()}, MuonOptions(0.02)); });
  EXPECT_TRUE(mentions(text, {"adamw", "lr", "MatchRmsAdamw", "group 1", "bias"}));

  const MuonOptions shared = MuonOptions(3e-4).adjust_lr(AdjustLr::MatchRmsAdamw);
  Muon one_lr(Groups{group({parameter({4, 3})}, {}), bias()}, shared);
  EXPECT_EQ(std::as_const(one_lr).options(1).lr(), 3e-4);
  EXPECT_THROW(
      Muon(
          Groups{group({parameter({4, 3})}, MuonOptions().adjust_lr(AdjustLr::Original)), bias()},
          shared),
      c10::ValueError)
      << "one matrix group uses another scale";
}

TEST(MuonGroups, torchs_own_add_param_group_gives_the_defaults) {
  Muon optimizer(std::vector<at::Tensor>{parameter({4, 3})}, kDefaults);
  torch::optim::Optimizer& base = optimizer;
  const at::Tensor added = parameter({3, 4});
  base.add_param_group(torch::optim::OptimizerParamGroup(std::vector<at::Tensor>{added}));
  set_gradients({added}, 1);
  const at::Tensor before = added.detach().clone();
  optimizer.step();
  EXPECT_EQ(std::as_const(optimizer).options(1).lr(), 0.1);
  EXPECT_FALSE(bit_equal(added.detach(), before));
}

TEST(MuonGroups, H10_learning_rates_without_casts) {
  const std::vector<at::Tensor> params = three_parameters();
  Muon optimizer(asked_for(params), kDefaults);
  optimizer.options(1).lr(0.25);
  EXPECT_EQ(optimizer.param_groups()[1].options().get_lr(), 0.25);
  optimizer.set_lr(0.125);
  for (const auto& other : optimizer.param_groups()) {
    EXPECT_EQ(other.options().get_lr(), 0.125);
  }
  EXPECT_THROW(optimizer.options(3), c10::IndexError);
}

TEST(MuonGroups, H10_a_scheduler_of_the_users_own) {
  class Linear : public torch::optim::LRScheduler {
   public:
    using LRScheduler::LRScheduler;

   private:
    std::vector<double> get_lrs() override {
      std::vector<double> lrs = get_current_lrs();
      for (double& lr : lrs) {
        lr -= 0.25 * lr;
      }
      return lrs;
    }
  };
  Muon optimizer(asked_for(three_parameters()), kDefaults);
  Linear scheduler(optimizer);
  scheduler.step();
  EXPECT_EQ(optimizer.param_groups()[0].options().get_lr(), 0.375);
  EXPECT_EQ(optimizer.param_groups()[2].options().get_lr(), 0.75e-3);
}

} // namespace
} // namespace muon::testing
