// torch::save and torch::load of muon::Muon: what comes back, and what is refused as a whole.

#include <functional>
#include <sstream>

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/optim/sgd.h>
#include <torch/serialize.h>

#include <muon/muon.h>

#include "support/optimizers.h"
#include "support/reference.h"

namespace muon::testing {
namespace {

using Groups = std::vector<torch::optim::OptimizerParamGroup>;

at::Tensor some() {
  return parameter({4, 3});
}

struct BadFile {
  const char* name;
  std::function<std::string()> bytes;
  std::string mentions;
};

// Two groups: named matrices, and a bias with AdamW.
Muon saved_shape(
    const std::vector<std::int64_t>& sizes = {4, 3}, const std::string& algorithm = "muon",
    const std::string& name = "weight") {
  Muon optimizer(
      Groups{
          group(
              {parameter(sizes, 1), parameter({3, 4}, 2)},
              MuonOptions(0.1).algorithm(algorithm).param_names({name, "other"})),
          group({parameter({4}, 3)}, MuonOptions(0.2).algorithm("adamw"))});
  set_gradients(parameters_of(optimizer), 1);
  optimizer.step();
  return optimizer;
}

std::ostream& operator<<(std::ostream& out, const BadFile& row) {
  return out << row.name;
}

class MuonLoadRefuses : public ::testing::TestWithParam<BadFile> {};

TEST_P(MuonLoadRefuses, and_leaves_the_optimizer_as_it_was) {
  Muon optimizer = saved_shape();
  optimizer.options(0).momentum(0.5);
  const std::string before = save(optimizer);
  std::string text;
  try {
    load(optimizer, GetParam().bytes());
    ADD_FAILURE() << "loaded";
  } catch (const std::exception& error) {
    text = error.what();
  }
  EXPECT_TRUE(mentions(text, {GetParam().mentions}));
  EXPECT_EQ(std::as_const(optimizer).options(0).momentum(), 0.5);
  Muon twin = saved_shape();
  load(twin, before);
  EXPECT_TRUE(same_bits(optimizer, twin));
  optimizer.step();
}

INSTANTIATE_TEST_SUITE_P(
    files, MuonLoadRefuses,
    ::testing::Values(
        BadFile{
            "shape", [] { return save(saved_shape({5, 3})); },
            "momentum_buffer of shape [4, 3] for weight"},
        BadFile{
            "algorithm", [] { return save(saved_shape({4, 3}, "normuon")); },
            "algorithm \"normuon\" for a group that this optimizer trains with \"muon\""},
        BadFile{
            "E6_name", [] { return save(saved_shape({4, 3}, "muon", "renamed")); },
            "renamed where this optimizer has weight"},
        BadFile{
            "groups",
            [] {
              return save(
                  Muon(std::vector<at::Tensor>{some(), parameter({3, 4})}, MuonOptions(0.1)));
            },
            "loaded state dict has a different number of parameter groups"},
        BadFile{
            "sizes",
            [] {
              return save(Muon(
                  Groups{
                      group({some()}, MuonOptions(0.1)),
                      group({parameter({4})}, MuonOptions(0.1).algorithm("adamw"))}));
            },
            "loaded state dict contains a parameter group that doesn't match the size"},
        BadFile{
            "other_optimizer",
            [] {
              std::ostringstream out;
              torch::optim::SGD sgd(std::vector<at::Tensor>{some()}, torch::optim::SGDOptions(0.1));
              torch::save(sgd, out);
              return out.str();
            },
            "another optimizer"},
        BadFile{
            "tensor",
            [] {
              std::ostringstream out;
              torch::save(at::ones({3}), out);
              return out.str();
            },
            "expected an archive that torch::save wrote for an optimizer"},
        BadFile{
            "truncated",
            [] {
              const std::string bytes = save(saved_shape());
              return bytes.substr(0, bytes.size() / 2);
            },
            ""},
        BadFile{"empty", [] { return std::string(); }, ""}),
    [](const auto& row) { return std::string(row.param.name); });

TEST(MuonLoad, E10_a_hundred_loads_leave_one_state) {
  Muon optimizer = saved_shape();
  const std::string bytes = save(optimizer);
  for (int i = 0; i < 100; ++i) {
    load(optimizer, bytes);
  }
  EXPECT_EQ(optimizer.state().size(), 3U);
  EXPECT_EQ(optimizer.param_groups().size(), 2U);
  EXPECT_EQ(save(optimizer).size(), bytes.size());
}

TEST(MuonLoad, E14_two_loads_share_no_memory) {
  const std::string bytes = save(saved_shape());
  Muon first = saved_shape();
  Muon second = saved_shape();
  load(first, bytes);
  load(second, bytes);
  const at::Tensor buffer = state_of(second, parameters_of(second)[0], "momentum_buffer");
  const at::Tensor before = buffer.clone();
  first.step();
  EXPECT_TRUE(bit_equal(buffer, before));
}

TEST(MuonLoad, state_gets_the_dtype_that_this_run_creates_and_is_never_rounded) {
  const auto make = [](std::optional<c10::ScalarType> state) {
    return Muon(
        std::vector<at::Tensor>{parameter({4, 3}, 1, at::kBFloat16)},
        MuonOptions(0.1).state_dtype(state));
  };
  Muon wide = make(at::kFloat);
  set_gradients(parameters_of(wide), 1);
  wide.step();
  wide.step();
  const at::Tensor saved = state_of(wide, parameters_of(wide)[0], "momentum_buffer");
  Muon same = make(at::kFloat);
  load(same, save(wide));
  EXPECT_TRUE(bit_equal(state_of(same, parameters_of(same)[0], "momentum_buffer"), saved));
  Muon narrow = make(at::kBFloat16);
  load(narrow, save(wide));
  EXPECT_TRUE(bit_equal(
      state_of(narrow, parameters_of(narrow)[0], "momentum_buffer"), saved.to(at::kBFloat16)));
  EXPECT_EQ(std::as_const(narrow).options(0).state_dtype(), at::kBFloat16);
}

TEST(MuonLoad, M24_how_a_run_computes_is_not_taken_from_the_file) {
  Muon saved(std::vector<at::Tensor>{some()}, MuonOptions(0.1).batch_size(1).form(Form::Standard));
  Muon loading(std::vector<at::Tensor>{some()}, MuonOptions(0.2).batch_size(7).form(Form::Gram));
  load(loading, save(saved));
  EXPECT_EQ(std::as_const(loading).options(0).lr(), 0.1);
  EXPECT_EQ(std::as_const(loading).options(0).batch_size(), 7);
  EXPECT_EQ(std::as_const(loading).options(0).form(), Form::Gram);
}

TEST(MuonLoad, state_that_the_file_does_not_have_is_gone) {
  const at::Tensor frozen = some();
  frozen.set_requires_grad(false);
  const std::string bytes = save(Muon(std::vector<at::Tensor>{frozen}, MuonOptions(0.1)));
  Muon optimizer(std::vector<at::Tensor>{some()}, MuonOptions(0.1));
  set_gradients(parameters_of(optimizer), 1);
  optimizer.step();
  load(optimizer, bytes);
  EXPECT_TRUE(optimizer.state().empty());
}

} // namespace
} // namespace muon::testing
