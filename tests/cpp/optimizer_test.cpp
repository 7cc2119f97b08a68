// What a step of muon::Muon computes, for every dtype, memory layout and kind of gradient.

#include <functional>
#include <limits>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/adamw.h>

#include <muon/muon.h>

#include "support/optimizers.h"
#include "support/reference.h"

namespace muon::testing {
namespace {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

// --- the definition --------------------------------------------------------------------------------

TEST(MuonStep, A15_A16_twenty_steps_equal_the_definition) {
  const double lr = 0.02;
  const double decay = 0.1;
  const double mu = 0.95;
  const at::Tensor param = parameter({10, 7}, 1, at::kDouble);
  at::Tensor expected = param.detach().clone();
  at::Tensor buffer = at::zeros_like(expected);
  Muon optimizer(std::vector<at::Tensor>{param}, MuonOptions(lr).weight_decay(decay).momentum(mu));
  for (std::uint64_t t = 1; t <= 20; ++t) {
    set_gradients({param}, t);
    const at::Tensor& grad = param.grad();
    buffer = mu * buffer + (1 - mu) * grad;
    const at::Tensor update = exact_orthogonalize(mu * buffer + (1 - mu) * grad, {});
    expected = (1 - lr * decay) * expected - lr * std::sqrt(10.0 / 7.0) * update;
    optimizer.step();
    ASSERT_LE(relative_error(param.detach(), expected), 1e-12) << "step " << t;
    ASSERT_LE(relative_error(state_of(optimizer, param, "momentum_buffer"), buffer), 1e-14);
  }
}

TEST(MuonStep, D7_adamw_groups_are_torchs_AdamW) {
  const std::vector<at::Tensor> ours = {
      parameter({5}, 1, at::kDouble), parameter({3, 4}, 2, at::kDouble)};
  const std::vector<at::Tensor> theirs = clone_parameters(ours);
  Muon optimizer(
      Groups{group(
          ours,
          MuonOptions(1e-2).algorithm("adamw").betas({0.8, 0.9}).weight_decay(0.1).eps(1e-6))});
  torch::optim::AdamW adamw(
      theirs, torch::optim::AdamWOptions(1e-2).betas({0.8, 0.9}).weight_decay(0.1).eps(1e-6));
  for (std::uint64_t t = 1; t <= 10; ++t) {
    set_gradients(ours, t);
    set_gradients(theirs, t);
    optimizer.step();
    adamw.step();
  }
  for (std::size_t i = 0; i < ours.size(); ++i) {
    EXPECT_LE(relative_error(ours[i].detach(), theirs[i].detach()), 1e-13);
  }
}

TEST(MuonStep, D6_a_multiplier_scales_the_update_and_not_the_decay) {
  const std::vector<at::Tensor> params = {parameter({4, 3}, 1, at::kDouble)};
  const std::vector<at::Tensor> twice = clone_parameters(params);
  const at::Tensor start = params[0].detach().clone();
  Muon plain(params, MuonOptions(0.1));
  Muon doubled(twice, MuonOptions(0.1).lr_multiplier(2.0));
  set_gradients(params, 1);
  set_gradients(twice, 1);
  plain.step();
  doubled.step();
  const at::Tensor decayed = start * (1 - 0.1 * 0.1);
  EXPECT_LE(
      relative_error(decayed - twice[0].detach(), 2.0 * (decayed - params[0].detach())), 1e-13);
}

TEST(MuonStep, B13_experts_equal_separate_matrices) {
  const at::Tensor experts = parameter({3, 4, 5}, 1, at::kDouble);
  std::vector<at::Tensor> separate;
  for (std::int64_t i = 0; i < 3; ++i) {
    separate.push_back(experts.detach()[i].clone().requires_grad_());
  }
  Muon together(std::vector<at::Tensor>{experts}, MuonOptions(0.1).batch_dims(1));
  Muon apart(separate, MuonOptions(0.1));
  set_gradients({experts}, 1);
  for (std::int64_t i = 0; i < 3; ++i) {
    separate[static_cast<std::size_t>(i)].mutable_grad() = experts.grad()[i].clone();
  }
  together.step();
  apart.step();
  for (std::int64_t i = 0; i < 3; ++i) {
    EXPECT_LE(
        relative_error(experts.detach()[i], separate[static_cast<std::size_t>(i)].detach()), 1e-14);
  }
}

TEST(MuonStep, B16_unequal_blocks_equal_separate_parameters) {
  const at::Tensor fused = parameter({10, 4}, 1, at::kDouble);
  const std::vector<std::int64_t> sizes = {6, 2, 2};
  std::vector<at::Tensor> separate;
  set_gradients({fused}, 1);
  const auto grads = fused.grad().split_with_sizes(sizes);
  for (const at::Tensor& block : fused.detach().split_with_sizes(sizes)) {
    separate.push_back(block.clone().requires_grad_());
    separate.back().mutable_grad() = grads[separate.size() - 1].clone();
  }
  Muon together(std::vector<at::Tensor>{fused}, MuonOptions(0.1).split_sizes(sizes));
  Muon apart(separate, MuonOptions(0.1));
  together.step();
  apart.step();
  EXPECT_LE(relative_error(fused.detach(), at::cat(separate).detach()), 1e-14);
}

TEST(MuonStep, B1_state_keeps_the_shape_of_a_convolution) {
  const at::Tensor conv = parameter({16, 8, 3, 3});
  Muon optimizer(std::vector<at::Tensor>{conv}, MuonOptions(0.1).flatten(true));
  set_gradients({conv}, 1);
  optimizer.step();
  EXPECT_EQ(state_of(optimizer, conv, "momentum_buffer").sizes(), conv.sizes());
}

struct DtypeMix {
  c10::ScalarType param;
  c10::ScalarType grad;
  std::optional<c10::ScalarType> state;
};

std::ostream& operator<<(std::ostream& out, const DtypeMix& mix) {
  return out << mix.param << " " << mix.grad;
}

class MuonDtypes : public ::testing::TestWithParam<DtypeMix> {};

TEST_P(MuonDtypes, A2_A3_A4_every_mix_steps_and_agrees_with_float64) {
  const DtypeMix mix = GetParam();
  for (const char* algorithm : {"muon", "normuon", "adamw"}) {
    const at::Tensor param = parameter({12, 8}, 1, mix.param);
    const at::Tensor exact = param.detach().to(at::kDouble).requires_grad_();
    const MuonOptions options = MuonOptions(0.1).algorithm(algorithm);
    Muon optimizer(std::vector<at::Tensor>{param}, MuonOptions(options).state_dtype(mix.state));
    Muon reference(std::vector<at::Tensor>{exact}, options);
    const at::Tensor grad = random_tensor({12, 8}, false, 7).to(mix.grad);
    param.mutable_grad() = grad;
    exact.mutable_grad() = grad.to(at::kDouble);
    optimizer.step();
    reference.step();
    const char* key = std::string(algorithm) == "adamw" ? "exp_avg" : "momentum_buffer";
    EXPECT_EQ(param.scalar_type(), mix.param);
    EXPECT_EQ(state_of(optimizer, param, key).scalar_type(), mix.state.value_or(mix.grad));
    // One rounding of the parameter, and of what the lowest precision involved does to the update.
    const auto unit = [](c10::ScalarType dtype) {
      return dtype == at::kBFloat16 ? 0x1p-8 : dtype == at::kHalf ? 0x1p-11 : 0x1p-20;
    };
    const double tolerance =
        unit(mix.param) + 0.5 * std::max(unit(mix.grad), unit(mix.state.value_or(mix.grad)));
    EXPECT_LE(relative_error(param.detach(), exact.detach()), tolerance) << algorithm;
  }
}

std::vector<DtypeMix> dtype_mixes() {
  std::vector<DtypeMix> mixes;
  for (const auto param : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
    mixes.push_back({param, param, std::nullopt});
    if (param != at::kFloat) {
      mixes.push_back({param, at::kFloat, std::nullopt});
    }
    for (const auto state : {at::kDouble, at::kFloat, at::kBFloat16, at::kHalf}) {
      mixes.push_back({param, param, state});
    }
  }
  return mixes;
}

std::string mix_name(const ::testing::TestParamInfo<DtypeMix>& row) {
  const auto& [param, grad, state] = row.param;
  return std::string(c10::toString(param)) + "_" + c10::toString(grad) + "_" +
      (state ? c10::toString(*state) : "none");
}

INSTANTIATE_TEST_SUITE_P(all, MuonDtypes, ::testing::ValuesIn(dtype_mixes()), mix_name);

// --- memory layouts --------------------------------------------------------------------------------

struct Strided {
  const char* name;
  MuonOptions options;
  std::function<at::Tensor(const at::Tensor&)> restride; // same values, other strides
  std::vector<std::int64_t> sizes;
};

std::ostream& operator<<(std::ostream& out, const Strided& row) {
  return out << row.name;
}

class MuonStrides : public ::testing::TestWithParam<Strided> {};

TEST_P(MuonStrides, equals_the_contiguous_parameter) {
  const Strided& layout = GetParam();
  const at::Tensor dense = parameter(layout.sizes, 1);
  const at::Tensor param = layout.restride(dense.detach()).requires_grad_();
  ASSERT_FALSE(param.is_contiguous());
  Muon contiguous(std::vector<at::Tensor>{dense}, layout.options);
  Muon strided(std::vector<at::Tensor>{param}, layout.options);
  for (std::uint64_t t = 1; t <= 3; ++t) {
    set_gradients({dense}, t);
    param.mutable_grad() = t == 2 ? dense.grad().clone() : layout.restride(dense.grad());
    contiguous.step();
    strided.step();
  }
  if (std::as_const(layout.options).algorithm() == "adamw") { // dense ones take torch's own loop
    EXPECT_LE(relative_error(param.detach(), dense.detach()), 1e-6);
  } else {
    EXPECT_TRUE(bit_equal(param.detach().contiguous(), dense.detach()));
  }
}

at::Tensor transposed(const at::Tensor& x) {
  return x.t().contiguous().t();
}

at::Tensor inside_a_larger_one(const at::Tensor& x) {
  const at::Tensor larger = at::full({2 * x.size(0), x.size(1) + 3}, -1.0, x.options());
  const at::Tensor window = larger.slice(0, 0, std::nullopt, 2).slice(1, 2, 2 + x.size(1));
  return window.copy_(x).detach();
}

INSTANTIATE_TEST_SUITE_P(
    all, MuonStrides,
    ::testing::Values(
        Strided{"transposed", MuonOptions(0.1), transposed, {6, 5}},
        Strided{"sliced", MuonOptions(0.1), inside_a_larger_one, {6, 5}},
        Strided{
            "sliced_normuon",
            MuonOptions(0.1).algorithm("normuon"),
            inside_a_larger_one,
            {6, 5}},
        Strided{"sliced_split", MuonOptions(0.1).split_sizes({2, 4}), inside_a_larger_one, {6, 5}},
        Strided{"sliced_adamw", MuonOptions(0.1).algorithm("adamw"), inside_a_larger_one, {6, 5}},
        Strided{
            "channels_last",
            MuonOptions(0.1).flatten(true),
            [](const at::Tensor& x) { return x.contiguous(at::MemoryFormat::ChannelsLast); },
            {4, 3, 2, 2}}),
    [](const auto& row) { return std::string(row.param.name); });

TEST(MuonAliasing, gradients_may_share_memory) {
  const std::vector<at::Tensor> params = {
      parameter({4, 3}, 1), parameter({4, 3}, 2), parameter({4, 3}, 3)};
  const std::vector<at::Tensor> copies = clone_parameters(params);
  const at::Tensor row = random_tensor({1, 3}, false, 1).to(at::kFloat).expand({4, 3});
  const at::Tensor shared = random_tensor({4, 3}, false, 2).to(at::kFloat);
  for (const auto& list : {params, copies}) {
    const bool alias = list[0].is_same(params[0]);
    list[0].mutable_grad() = alias ? shared : shared.clone();
    list[1].mutable_grad() = alias ? shared : shared.clone();
    list[2].mutable_grad() = alias ? row : row.clone();
  }
  Muon aliased(params, MuonOptions(0.1));
  Muon separate(copies, MuonOptions(0.1));
  for (int i = 0; i < 2; ++i) {
    aliased.step();
    separate.step();
  }
  EXPECT_TRUE(same_bits(aliased, separate));
}

TEST(MuonAliasing, parameters_may_be_views_of_one_buffer) {
  const at::Tensor flat = random_tensor({24}).to(at::kFloat);
  const std::vector<at::Tensor> views = {
      flat.slice(0, 0, 12).view({4, 3}).detach().requires_grad_(),
      flat.slice(0, 12, 24).view({4, 3}).detach().requires_grad_()};
  const std::vector<at::Tensor> copies = clone_parameters(views);
  Muon aliased(views, MuonOptions(0.1));
  Muon separate(copies, MuonOptions(0.1));
  set_gradients(views, 1);
  set_gradients(copies, 1);
  aliased.step();
  separate.step();
  EXPECT_TRUE(same_bits(aliased, separate));
}

// --- non-finite gradients and loss scaling ---------------------------------------------------------

TEST(MuonNonFinite, A18_skip_keeps_the_matrix_and_counts_it_by_name) {
  const std::vector<at::Tensor> params = {parameter({4, 3}, 1), parameter({2, 4, 3}, 2)};
  Muon optimizer(
      Groups{
          group({params[0]}, MuonOptions(0.1).param_names({"weight"})),
          group(
              {params[1]},
              MuonOptions(0.1).batch_dims(1).nonfinite(NonFinite::Skip).param_names({"experts"}))});
  for (std::uint64_t t = 1; t <= 2; ++t) {
    set_gradients(params, t);
    params[1].mutable_grad()[1][0][0] = std::numeric_limits<double>::infinity();
    const at::Tensor before = params[1].detach().clone();
    optimizer.step();
    EXPECT_TRUE(bit_equal(params[1].detach()[1], before[1]));
    EXPECT_FALSE(bit_equal(params[1].detach()[0], before[0]));
  }
  optimizer.options(1).batch_size(1); // another plan, the same counts
  optimizer.step();
  const std::vector<std::pair<std::string, std::int64_t>> expected = {{"experts", 3}};
  EXPECT_EQ(optimizer.skipped(), expected);
  EXPECT_TRUE(at::isfinite(params[0]).all().item<bool>());
}

TEST(MuonAmp, H12_the_documented_loop_skips_overflows_and_trains) {
  const at::Tensor param = parameter({4, 4}, 1);
  const at::Tensor twin = param.detach().clone().requires_grad_();
  Muon scaled(std::vector<at::Tensor>{param}, MuonOptions(0.05));
  Muon plain(std::vector<at::Tensor>{twin}, MuonOptions(0.05));
  at::Tensor scale = at::full({1}, 1024.0);
  at::Tensor growth_tracker = at::zeros({1}, at::kInt);
  at::Tensor found_inf = at::zeros({1});
  for (int i = 0; i < 4; ++i) {
    const bool overflow = i == 1;
    param.mutable_grad().reset();
    (param.square().sum() * scale * (overflow ? std::numeric_limits<double>::infinity() : 1.0))
        .backward();
    std::vector<at::Tensor> grads = {param.grad()};
    found_inf.zero_();
    at::_amp_foreach_non_finite_check_and_unscale_(grads, found_inf, scale.reciprocal());
    scaled.scaled_step({}, found_inf);
    at::_amp_update_scale_(scale, growth_tracker, found_inf, 2.0, 0.5, 2000);
    if (!overflow) {
      twin.mutable_grad().reset();
      twin.square().sum().backward();
      plain.step();
    }
  }
  EXPECT_EQ(scale.item<double>(), 512.0);
  EXPECT_TRUE(same_bits(scaled, plain));
}

} // namespace
} // namespace muon::testing
