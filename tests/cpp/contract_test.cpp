// What every set of options must do, one row a set: the contract of an optimizer.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/schedulers/reduce_on_plateau_scheduler.h>
#include <torch/optim/schedulers/step_lr.h>

#include <muon/muon.h>

#include "support/optimizers.h"
#include "support/option_sets.h"
#include "support/reference.h"

namespace muon::testing {
namespace {

using torch::optim::OptimizerParamGroup;
using Groups = std::vector<OptimizerParamGroup>;

class Contract : public ::testing::TestWithParam<OptionSet> {
 protected:
  static Muon make() {
    return Muon(GetParam().make());
  }

  static void step(Muon& optimizer, std::uint64_t salt) {
    set_gradients(parameters_of(optimizer), salt);
    optimizer.step();
  }

  static void steps(Muon& optimizer, std::uint64_t first, std::uint64_t last) {
    for (std::uint64_t salt = first; salt <= last; ++salt) {
      step(optimizer, salt);
    }
  }
};

// Half the squared distance to zero; maximised where the group says so.
at::Tensor objective(const Muon& optimizer) {
  at::Tensor sum = at::zeros({}, at::kDouble);
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    for (const at::Tensor& param : optimizer.param_groups()[g].params()) {
      const at::Tensor distance = (param * param.conj()).sum();
      const at::Tensor real = distance.is_complex() ? at::real(distance) : distance;
      sum = sum + real.to(at::kDouble) * (optimizer.options(g).maximize() ? -0.5 : 0.5);
    }
  }
  return sum;
}

double distance(const Muon& optimizer) {
  double sum = 0.0;
  for (const at::Tensor& param : parameters_of(optimizer)) {
    sum += param.detach().abs().square().sum().item<double>();
  }
  return sum;
}

TEST_P(Contract, F1_converges_and_is_not_plain_descent) {
  Muon optimizer = make();
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    MuonOptions& options = optimizer.options(g);
    const double factor = optimizer.effective_lr(optimizer.param_groups()[g].params()[0])[0] / kLr;
    options.weight_decay(0.0).lr(0.2 / factor); // one step length for all sets
  }
  const double before = distance(optimizer);
  const auto params = snapshot(parameters_of(optimizer));
  torch::optim::StepLR halve(optimizer, 40, 0.5);
  for (int i = 0; i < 160; ++i) {
    optimizer.zero_grad();
    objective(optimizer).backward();
    optimizer.step();
    halve.step();
    if (i == 0) {
      const at::Tensor moved = params[0] - parameters_of(optimizer)[0].detach();
      const double cosine = (moved * params[0].conj()).sum().abs().item<double>() /
          (moved.norm() * params[0].norm()).abs().item<double>();
      EXPECT_TRUE(params[0].dim() < 2 || params[0].size(0) == 1 || cosine < 0.9999);
    }
  }
  EXPECT_LT(distance(optimizer), 0.1 * before);
}

TEST_P(Contract, E3_three_steps_saved_and_three_more_equal_six) {
  Muon straight = make();
  steps(straight, 1, 6);

  Muon first = make();
  steps(first, 1, 3);
  Muon resumed = make();
  const auto saved = snapshot(parameters_of(first));
  const auto live = parameters_of(resumed);
  for (std::size_t i = 0; i < live.size(); ++i) {
    live[i].detach().copy_(saved[i]);
  }
  load(resumed, save(first));
  steps(resumed, 4, 6);
  EXPECT_TRUE(same_bits(resumed, straight));
}

TEST_P(Contract, E5_saves_and_loads_before_the_first_step) {
  Muon straight = make();
  steps(straight, 1, 2);
  Muon loaded = make();
  load(loaded, save(make()));
  EXPECT_EQ(loaded.state().size(), parameters_of(loaded).size()) << "the file has all state";
  steps(loaded, 1, 2);
  EXPECT_TRUE(same_bits(loaded, straight));
}

TEST_P(Contract, E11_a_load_restores_the_saved_options) {
  Muon optimizer = make();
  const std::string saved = save(optimizer);
  std::vector<MuonOptions> asked;
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    asked.push_back(std::as_const(optimizer).options(g));
    optimizer.options(g).lr(0.75).momentum(0.125).weight_decay(0.5);
  }
  load(optimizer, saved);
  for (std::size_t g = 0; g < asked.size(); ++g) {
    EXPECT_TRUE(std::as_const(optimizer).options(g) == asked[g]) << "group " << g;
  }
}

TEST_P(Contract, H4_closure_runs_with_gradients_and_its_loss_comes_back) {
  Muon with_closure = make();
  Muon by_hand = make();
  for (int i = 0; i < 3; ++i) {
    const at::Tensor loss = with_closure.step([&] {
      EXPECT_TRUE(at::GradMode::is_enabled());
      with_closure.zero_grad();
      at::Tensor value = objective(with_closure);
      value.backward();
      return value;
    });
    by_hand.zero_grad();
    const at::Tensor expected = objective(by_hand);
    expected.backward();
    EXPECT_FALSE(by_hand.step().defined());
    EXPECT_TRUE(bit_equal(loss, expected));
  }
  EXPECT_TRUE(same_bits(with_closure, by_hand));
  EXPECT_TRUE(at::GradMode::is_enabled());
}

TEST_P(Contract, D9_StepLR_moves_every_group) {
  Muon optimizer = make();
  std::vector<double> before;
  for (auto& group : optimizer.param_groups()) {
    before.push_back(group.options().get_lr());
  }
  torch::optim::StepLR scheduler(optimizer, 1, 0.5);
  scheduler.step();
  scheduler.step();
  for (std::size_t g = 0; g < before.size(); ++g) {
    EXPECT_EQ(std::as_const(optimizer).options(g).lr(), 0.5 * before[g]) << "group " << g;
  }
  // The step uses the rate that the scheduler wrote.
  Muon twin = make();
  for (std::size_t g = 0; g < before.size(); ++g) {
    twin.options(g).lr(0.5 * before[g]);
  }
  step(optimizer, 1);
  step(twin, 1);
  EXPECT_TRUE(same_bits(optimizer, twin));
}

TEST_P(Contract, D9_ReduceLROnPlateau_moves_every_group) {
  Muon optimizer = make();
  using Scheduler = torch::optim::ReduceLROnPlateauScheduler;
  Scheduler scheduler(optimizer, Scheduler::min, /*factor=*/0.5F, /*patience=*/0);
  for (int i = 0; i < 2; ++i) {
    scheduler.step(1.0F);
  }
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    EXPECT_EQ(std::as_const(optimizer).options(g).lr(), 0.5 * kLr) << "group " << g;
  }
}

TEST_P(Contract, D20_a_missing_gradient_leaves_parameter_and_state_alone) {
  Muon optimizer = make();
  step(optimizer, 1);
  const auto params = parameters_of(optimizer);
  const at::Tensor& idle = params.back();
  const at::Tensor value = idle.detach().clone();
  const std::string state = save(optimizer);
  set_gradients(params, 2);
  idle.mutable_grad().reset();
  optimizer.step();
  EXPECT_TRUE(bit_equal(idle, value));
  EXPECT_FALSE(idle.grad().defined());

  Muon before = make();
  load(before, state);
  const auto& now = static_cast<MuonParamState&>(*optimizer.state().at(idle.unsafeGetTensorImpl()));
  for (const auto& [key, tensor] : now.tensors()) {
    EXPECT_TRUE(bit_equal(tensor, state_of(before, parameters_of(before).back(), key))) << key;
  }
  EXPECT_FALSE(bit_equal(params[0], parameters_of(before)[0])) << "the others did move";
}

TEST_P(Contract, A1_zero_gradients_in_the_first_step_only_decay) {
  Muon optimizer = make();
  const auto before = snapshot(parameters_of(optimizer));
  std::size_t i = 0;
  for (std::size_t g = 0; g < optimizer.param_groups().size(); ++g) {
    const MuonOptions& options = std::as_const(optimizer).options(g);
    for (const at::Tensor& param : optimizer.param_groups()[g].params()) {
      param.mutable_grad() = at::zeros_like(param);
    }
    optimizer.step();
    for (const at::Tensor& param : optimizer.param_groups()[g].params()) {
      const bool moves = options.algorithm() == "adam"; // coupled: the decay is a gradient
      const double factor =
          options.decay_lr() == DecayLr::Adjusted ? optimizer.effective_lr(param)[0] : options.lr();
      const double shrink = options.cautious() ? 1.0 : 1.0 - factor * options.weight_decay();
      const double tolerance = param.scalar_type() == at::kDouble ? 1e-15 : 1e-6;
      if (!moves) {
        EXPECT_LE(relative_error(param.detach(), before[i] * shrink), tolerance);
      }
      EXPECT_TRUE(at::isfinite(param).all().item<bool>());
      ++i;
      param.mutable_grad().reset();
    }
  }
}

TEST_P(Contract, zero_gradients_at_lr_zero_leave_every_bit) {
  Muon optimizer = make();
  optimizer.set_lr(0.0);
  const auto params = parameters_of(optimizer);
  const auto before = snapshot(params);
  for (const at::Tensor& param : params) {
    param.mutable_grad() = at::zeros_like(param);
  }
  optimizer.step();
  EXPECT_TRUE(bit_equal(snapshot(params), before));
  for (const auto& [key, state] : optimizer.state()) {
    for (const auto& [name, tensor] : static_cast<MuonParamState&>(*state).tensors()) {
      EXPECT_TRUE(at::isfinite(tensor).all().item<bool>()) << name;
    }
  }
}

TEST_P(Contract, maximize_is_a_step_on_the_negated_gradient) {
  Muon up = make();
  Muon down = make();
  for (std::size_t g = 0; g < up.param_groups().size(); ++g) {
    up.options(g).maximize(!std::as_const(down).options(g).maximize());
  }
  for (std::uint64_t salt = 1; salt <= 2; ++salt) {
    set_gradients(parameters_of(up), salt);
    set_gradients(parameters_of(down), salt);
    for (const at::Tensor& param : parameters_of(down)) {
      param.mutable_grad().neg_();
    }
    up.step();
    down.step();
  }
  EXPECT_TRUE(bit_equal(snapshot(parameters_of(up)), snapshot(parameters_of(down))));
}

TEST_P(Contract, H6_gradients_keep_their_bits) {
  Muon optimizer = make();
  const auto params = parameters_of(optimizer);
  set_gradients(params, 1);
  std::vector<at::Tensor> grads;
  for (const at::Tensor& param : params) {
    grads.push_back(param.grad());
  }
  const auto before = snapshot(grads);
  optimizer.step();
  EXPECT_TRUE(bit_equal(snapshot(grads), before));
}

TEST_P(Contract, empty_groups_do_nothing) {
  Groups groups = GetParam().make();
  groups.insert(groups.begin(), group({}, MuonOptions(0.5)));
  groups.push_back(group({}, MuonOptions(0.5).algorithm("adamw")));
  Muon with_empty(groups);
  Muon without = make();
  steps(with_empty, 1, 2);
  steps(without, 1, 2);
  EXPECT_TRUE(same_bits(with_empty, without));
  load(with_empty, save(with_empty));
  EXPECT_TRUE(same_bits(with_empty, without));
}

TEST_P(Contract, groups_added_later_equal_groups_given_at_once) {
  Muon at_once = make();
  Muon later = Muon(Groups{});
  for (const OptimizerParamGroup& group : GetParam().make()) {
    later.add_param_group(group);
  }
  for (std::size_t g = 0; g < at_once.param_groups().size(); ++g) {
    EXPECT_TRUE(std::as_const(later).options(g) == std::as_const(at_once).options(g));
  }
  steps(at_once, 1, 3);
  steps(later, 1, 3);
  EXPECT_TRUE(same_bits(later, at_once));
}

TEST_P(Contract, a_moved_optimizer_goes_on) {
  Muon straight = make();
  steps(straight, 1, 4);
  Muon first = make();
  steps(first, 1, 2);
  Muon second(std::move(first));
  step(second, 3);
  Muon third = make();
  third = std::move(second);
  step(third, 4);
  EXPECT_TRUE(same_bits(third, straight));
}

TEST_P(Contract, H12_a_scaled_step_equals_the_unscaled_one) {
  Muon scaled = make();
  Muon plain = make();
  const at::Tensor scale = at::full({1}, 4.0);
  const at::Tensor found_inf = at::zeros({1});
  for (std::uint64_t salt = 1; salt <= 2; ++salt) {
    step(plain, salt);
    set_gradients(parameters_of(scaled), salt);
    for (const at::Tensor& param : parameters_of(scaled)) {
      param.mutable_grad().mul_(4.0);
    }
    scaled.scaled_step(scale, found_inf);
  }
  EXPECT_TRUE(same_bits(scaled, plain));
}

TEST_P(Contract, H12_found_inf_leaves_no_trace) {
  Muon optimizer = make();
  step(optimizer, 1);
  const auto params = snapshot(parameters_of(optimizer));
  const std::string saved = save(optimizer);
  set_gradients(parameters_of(optimizer), 2);
  optimizer.scaled_step(at::full({1}, 4.0), at::ones({1}));
  EXPECT_TRUE(bit_equal(snapshot(parameters_of(optimizer)), params));
  Muon before = make();
  const auto live = parameters_of(before);
  for (std::size_t i = 0; i < live.size(); ++i) {
    live[i].detach().copy_(params[i]);
  }
  load(before, saved);
  EXPECT_TRUE(same_bits(optimizer, before));
}

INSTANTIATE_TEST_SUITE_P(every, Contract, ::testing::ValuesIn(option_sets()), [](const auto& row) {
  return row.param.name;
});

} // namespace
} // namespace muon::testing
