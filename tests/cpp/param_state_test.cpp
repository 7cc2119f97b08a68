// When state and plan of muon::Muon come and go.

#include <sstream>
#include <thread>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/serialize/archive.h>

#include <muon/muon.h>

#include "support/optimizers.h"
#include "support/reference.h"

namespace muon::testing {
namespace {

TEST(MuonState, appears_at_the_first_step_for_all_that_require_a_gradient) {
  const std::vector<at::Tensor> params = {
      parameter({4, 3}, 1), parameter({4, 3}, 2), parameter({4, 3}, 3)};
  params[2].set_requires_grad(false);
  Muon optimizer(params, MuonOptions(0.1));
  EXPECT_TRUE(optimizer.state().empty());
  set_gradients({params[0]}, 1);
  optimizer.step();
  EXPECT_TRUE(state_of(optimizer, params[0], "momentum_buffer").defined());
  EXPECT_TRUE(state_of(optimizer, params[1], "momentum_buffer").defined()) << "no gradient yet";
  EXPECT_FALSE(state_of(optimizer, params[2], "momentum_buffer").defined()) << "frozen";
}

TEST(MuonState, a_parameter_may_be_unfrozen_and_frozen) {
  const std::vector<at::Tensor> params = {parameter({4, 3}, 1), parameter({4, 3}, 2)};
  params[1].set_requires_grad(false);
  Muon optimizer(params, MuonOptions(0.1));
  set_gradients({params[0]}, 1);
  optimizer.step();
  params[1].set_requires_grad(true);
  const at::Tensor before = params[1].detach().clone();
  set_gradients(params, 2);
  optimizer.step();
  EXPECT_FALSE(bit_equal(params[1].detach(), before));
  params[1].set_requires_grad(false);
  params[1].mutable_grad().reset();
  const at::Tensor frozen = params[1].detach().clone();
  optimizer.step();
  EXPECT_TRUE(bit_equal(params[1], frozen));
}

TEST(MuonState, a_replaced_parameter_starts_afresh) {
  std::vector<at::Tensor> params = {parameter({4, 3}, 1), parameter({4, 3}, 2)};
  Muon optimizer(params, MuonOptions(0.1));
  set_gradients(params, 1);
  optimizer.step();
  const at::Tensor fresh = parameter({5, 6}, 3);
  optimizer.param_groups()[0].params()[1] = fresh;
  params.clear();
  set_gradients({fresh}, 2);
  optimizer.step();
  EXPECT_EQ(optimizer.state().size(), 2U);
  EXPECT_EQ(state_of(optimizer, fresh, "momentum_buffer").sizes(), fresh.sizes());
}

TEST(MuonState, a_new_parameter_is_never_taken_for_one_that_was_freed) {
  at::Tensor param = parameter({4, 3}, 1);
  Muon optimizer(std::vector<at::Tensor>{param}, MuonOptions(0.1));
  set_gradients({param}, 1);
  optimizer.step();
  const at::TensorImpl* const old = param.unsafeGetTensorImpl();
  param.reset();
  optimizer.param_groups()[0].params().clear();
  std::vector<at::Tensor> fresh;
  for (int i = 0; i < 100; ++i) {
    fresh.push_back(at::zeros({4, 3}));
    EXPECT_NE(fresh.back().unsafeGetTensorImpl(), old) << "it would find another's state";
  }
}

TEST(MuonState, E8_erasing_an_entry_resets_one_parameter) {
  const std::vector<at::Tensor> params = {parameter({4, 3}, 1), parameter({4, 3}, 2)};
  Muon optimizer(params, MuonOptions(0.1));
  set_gradients(params, 1);
  optimizer.step();
  const at::Tensor kept = state_of(optimizer, params[0], "momentum_buffer").clone();
  optimizer.state().erase(params[1].unsafeGetTensorImpl());
  params[0].mutable_grad().reset();
  params[1].mutable_grad() = at::ones({4, 3});
  optimizer.step();
  EXPECT_TRUE(bit_equal(state_of(optimizer, params[0], "momentum_buffer"), kept));
  EXPECT_LE(
      relative_error(state_of(optimizer, params[1], "momentum_buffer"), at::full({4, 3}, 0.05)),
      1e-6);
}

TEST(MuonState, changing_the_algorithm_of_a_group_changes_its_state) {
  const std::vector<at::Tensor> params = {parameter({4, 3}, 1)};
  Muon optimizer(params, MuonOptions(0.1));
  set_gradients(params, 1);
  optimizer.step();
  optimizer.options(0).algorithm("normuon");
  optimizer.step();
  EXPECT_TRUE(state_of(optimizer, params[0], "momentum_buffer").defined());
  EXPECT_TRUE(state_of(optimizer, params[0], "variance_neuron").defined());
}

TEST(MuonParamStateTest, undefined_tensors_are_not_written_and_reading_replaces) {
  MuonParamState state;
  state.tensors()["kept"] = at::arange(3);
  state.tensors()["undefined"] = at::Tensor();
  torch::serialize::OutputArchive out;
  state.serialize(out);
  std::stringstream stream;
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  MuonParamState loaded;
  loaded.tensors()["old"] = at::ones({1});
  loaded.serialize(in);
  EXPECT_EQ(loaded.tensors().size(), 1U);
  EXPECT_TRUE(bit_equal(loaded.get("kept"), at::arange(3)));
  EXPECT_FALSE(loaded.get("old").defined());
}

TEST(MuonPlan, a_schedule_rebuilds_nothing_and_the_plan_goes_with_its_optimizer) {
  const at::Tensor param = parameter({4, 3});
  const auto next_handle = [&] {
    const PlanHandle handle =
        create_plan({param}, std::vector<std::int64_t>{0}, {GroupSpec{}}, {"p"});
    free_plan(handle);
    return handle;
  };
  const PlanHandle first = next_handle();
  {
    Muon optimizer(std::vector<at::Tensor>{param}, MuonOptions(0.1));
    set_gradients({param}, 1);
    for (int i = 0; i < 5; ++i) {
      optimizer.step();
      optimizer.options(0).lr(0.1 / (i + 2)).momentum(0.5).weight_decay(0.0);
    }
    EXPECT_NO_THROW(explain_plan(first + 1));
    EXPECT_EQ(next_handle(), first + 2) << "one plan for five steps";
    optimizer.options(0).ns_steps(3);
    optimizer.step();
    EXPECT_THROW(explain_plan(first + 1), c10::ValueError) << "replaced";
    EXPECT_NO_THROW(explain_plan(first + 3));
  }
  EXPECT_THROW(explain_plan(first + 3), c10::ValueError);
}

TEST(MuonThreads, optimizers_on_their_own_threads_do_not_disturb_each_other) {
  const auto train = [](const at::Tensor& param) {
    Muon optimizer(std::vector<at::Tensor>{param}, MuonOptions(0.1));
    for (std::uint64_t t = 1; t <= 20; ++t) {
      set_gradients({param}, t);
      optimizer.step();
    }
  };
  std::vector<at::Tensor> params;
  for (std::uint64_t i = 0; i < 4; ++i) {
    params.push_back(parameter({8, 6}, i));
  }
  const std::vector<at::Tensor> alone = clone_parameters(params);
  std::vector<std::thread> threads;
  for (const at::Tensor& param : params) {
    threads.emplace_back(train, param);
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  for (std::size_t i = 0; i < params.size(); ++i) {
    train(alone[i]);
    EXPECT_TRUE(bit_equal(params[i].detach(), alone[i].detach())) << i;
  }
}

} // namespace
} // namespace muon::testing
