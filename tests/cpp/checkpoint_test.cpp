// save_state and load_state: resume by bits, names and places, what is refused.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <random>
#include <sstream>

#include <ATen/ATen.h>
#include <muon/muon.h>
#include <torch/serialize.h>

#include "state/file.h"
#include "support/files.h"

namespace muon {
namespace {

using Params = std::vector<at::Tensor>;

struct Training {
  std::string algorithm;
  std::optional<c10::ScalarType> state_dtype;
  c10::ScalarType dtype;
  bool stochastic = false;
  bool split = false;

  MuonOptions options() const {
    MuonOptions result(0.02);
    result.algorithm(algorithm).state_dtype(state_dtype);
    result.stochastic_rounding(stochastic).split_master(split);
    return result;
  }
};

const std::vector<std::vector<std::int64_t>> kShapes = {{7, 130}, {64, 9}, {5, 3}};

Params make_params(const Training& run) {
  Params params;
  for (const auto& shape : kShapes) {
    params.push_back(at::randn(shape).to(run.dtype).requires_grad_());
  }
  return params;
}

Params copies(const Params& params) {
  Params result;
  for (const at::Tensor& param : params) {
    result.push_back(param.detach().clone().requires_grad_());
  }
  return result;
}

Muon make_optimizer(
    const Params& params, const Training& run, std::vector<std::string> names = {}) {
  auto group = std::make_unique<MuonOptions>(run.options());
  group->param_names(std::move(names));
  return Muon({torch::optim::OptimizerParamGroup(params, std::move(group))}, run.options());
}

void train(Muon& optimizer, const Params& params, std::uint64_t first, std::uint64_t last) {
  for (std::uint64_t step = first; step < last; ++step) {
    torch::manual_seed(100 + step);
    for (const at::Tensor& param : params) {
      param.mutable_grad() = at::randn(param.sizes()).to(param.scalar_type());
    }
    optimizer.step();
  }
}

void expect_equal(const Params& a, const Params& b) {
  for (std::size_t i = 0; i < a.size(); ++i) {
    EXPECT_TRUE(at::equal(a[i], b[i])) << i;
  }
}

class Resume : public ::testing::TestWithParam<Training> {};

// Three steps, `hand_over` to a new optimizer, and three more: the weights of six steps.
void expect_six_steps(
    const Training& training, const std::function<void(Muon& from, Muon& to)>& hand_over) {
  torch::manual_seed(1);
  const Params straight = make_params(training);
  const Params resumed = copies(straight);
  Muon whole = make_optimizer(straight, training);
  train(whole, straight, 0, 6);
  Muon first = make_optimizer(resumed, training);
  train(first, resumed, 0, 3);
  Muon second = make_optimizer(resumed, training);
  hand_over(first, second);
  train(second, resumed, 3, 6);
  expect_equal(straight, resumed);
}

TEST_P(Resume, E3_through_the_state_file_is_bitwise) {
  const testing::TemporaryFolder folder;
  const std::string path = folder.path("state.safetensors");
  expect_six_steps(GetParam(), [&](Muon& from, Muon& to) {
    save_state(from, path);
    load_state(to, path);
  });
}

TEST_P(Resume, E3_through_an_archive_is_bitwise) {
  expect_six_steps(GetParam(), [](Muon& from, Muon& to) {
    std::stringstream archive;
    torch::save(from, archive);
    torch::load(to, archive);
  });
}

std::vector<Training> all_runs() {
  std::vector<Training> runs;
  for (const char* algorithm : {"muon", "normuon", "adamw", "adam"}) {
    for (const c10::ScalarType dtype : {at::kFloat, at::kBFloat16, at::kHalf}) {
      for (const std::optional<c10::ScalarType> state :
           {std::optional<c10::ScalarType>(), std::optional(at::kFloat), std::optional(at::kChar),
            std::optional(at::ScalarType::Int4), std::optional(at::ScalarType::Float8_e4m3fn)}) {
        runs.push_back({algorithm, state, dtype});
      }
    }
    runs.push_back({algorithm, at::kChar, at::kBFloat16, true, false});
    runs.push_back({algorithm, at::kChar, at::kBFloat16, false, true});
  }
  return runs;
}

std::string run_name(const ::testing::TestParamInfo<Training>& info) {
  const Training& run = info.param;
  return c10::str(
      run.algorithm, '_', run.dtype, '_',
      run.state_dtype ? c10::str(*run.state_dtype) : "Gradients",
      run.stochastic ? "_stochastic" : "", run.split ? "_split" : "");
}

INSTANTIATE_TEST_SUITE_P(runs, Resume, ::testing::ValuesIn(all_runs()), run_name);

class StateOfOptimizer : public ::testing::Test {
 protected:
  void SetUp() override {
    torch::manual_seed(2);
    params_ = make_params(run_);
    trained_ = std::make_unique<Muon>(make_optimizer(params_, run_, {"a", "b", "c"}));
    train(*trained_, params_, 0, 2);
    save_state(*trained_, path_);
  }

  // Everything that a load could change, as text.
  static std::string snapshot(const Muon& optimizer) {
    std::stringstream text;
    torch::save(optimizer, text);
    return text.str();
  }

  void expect_refused(Muon& optimizer, const std::string& path, const std::string& mention) {
    const std::string before = snapshot(optimizer);
    try {
      load_state(optimizer, path);
      ADD_FAILURE() << "loaded: " << mention;
    } catch (const c10::ValueError& error) {
      EXPECT_NE(std::string(error.what()).find(mention), std::string::npos)
          << '"' << mention << "\" is not in: " << error.what();
    }
    EXPECT_EQ(snapshot(optimizer), before);
  }

  std::string rewritten(const std::function<void(detail::StateFile&)>& change) {
    detail::StateFile file = detail::read_state_file(path_);
    change(file);
    std::string path = folder_.path("changed.safetensors");
    detail::write_state_file(path, file);
    return path;
  }

  const Training run_{"normuon", at::kChar, at::kFloat};
  testing::TemporaryFolder folder_;
  std::string path_ = folder_.path("state.safetensors");
  Params params_;
  std::unique_ptr<Muon> trained_;
};

TEST_F(StateOfOptimizer, E11_options_are_those_of_the_file) {
  Training other = run_;
  other.state_dtype = std::nullopt;
  Muon optimizer = make_optimizer(copies(params_), other, {"a", "b", "c"});
  trained_->options()
      .lr(0.5)
      .momentum(0.25)
      .weight_decay(0.125)
      .schedule("polar_express")
      .ns_steps(3);
  save_state(*trained_, path_);
  load_state(optimizer, path_);
  EXPECT_EQ(optimizer.options().lr(), 0.5);
  EXPECT_EQ(optimizer.options().momentum(), 0.25);
  EXPECT_EQ(optimizer.options().weight_decay(), 0.125);
  EXPECT_EQ(optimizer.options().schedule(), find_schedule("polar_express"));
  EXPECT_EQ(optimizer.options().ns_steps(), 3);
  EXPECT_EQ(optimizer.options().state_dtype(), std::nullopt); // this run's
}

TEST_F(StateOfOptimizer, E6_parameters_are_found_by_name_wherever_they_stand) {
  const Params moved = copies({params_[2], params_[0], params_[1]});
  Muon optimizer = make_optimizer(moved, run_, {"c", "a", "b"});
  load_state(optimizer, path_);
  train(optimizer, {moved[1], moved[2], moved[0]}, 2, 4);
  train(*trained_, params_, 2, 4);
  expect_equal(params_, {moved[1], moved[2], moved[0]});
}

TEST_F(StateOfOptimizer, without_names_the_place_counts) {
  const Params same = copies(params_);
  Muon optimizer = make_optimizer(same, run_);
  load_state(optimizer, path_);
  train(optimizer, same, 2, 4);
  train(*trained_, params_, 2, 4);
  expect_equal(params_, same);
}

TEST_F(StateOfOptimizer, E5_saving_before_the_first_step_works) {
  const Params fresh = copies(params_);
  save_state(make_optimizer(fresh, run_, {"a", "b", "c"}), path_);
  Muon optimizer = make_optimizer(fresh, run_, {"a", "b", "c"});
  EXPECT_NO_THROW(load_state(optimizer, path_));
}

TEST_F(StateOfOptimizer, E6_what_differs_is_named) {
  Muon renamed = make_optimizer(copies(params_), run_, {"a", "b", "d"});
  expect_refused(
      renamed, path_,
      "it has no state for d, but it has state for c, which this optimizer has not");
  Muon fewer = make_optimizer(copies({params_[0], params_[1]}), run_, {"a", "b"});
  expect_refused(fewer, path_, "it has state for c");
  Params reshaped = copies(params_);
  reshaped[1] = at::randn({9, 64}).requires_grad_();
  Muon other_shape = make_optimizer(reshaped, run_, {"a", "b", "c"});
  expect_refused(other_shape, path_, "it has b of shape [64, 9], expected [9, 64]");
  Training adam = run_;
  adam.algorithm = "adamw";
  Muon other_algorithm = make_optimizer(copies(params_), adam, {"a", "b", "c"});
  expect_refused(
      other_algorithm, path_, "algorithm \"normuon\" for a, which this optimizer trains");
}

TEST_F(StateOfOptimizer, a_group_whose_parameters_had_different_options_is_refused) {
  const Params split = copies(params_);
  auto first = std::make_unique<MuonOptions>(run_.options());
  first->param_names({"a"});
  auto second = std::make_unique<MuonOptions>(run_.options());
  second->param_names({"b", "c"}).lr(0.25);
  std::vector<torch::optim::OptimizerParamGroup> groups;
  groups.emplace_back(Params{split[0]}, std::move(first));
  groups.emplace_back(Params{split[1], split[2]}, std::move(second));
  save_state(Muon(groups, run_.options()), path_);
  expect_refused(
      *trained_, path_, "it has different options for a and b, which are both in group 0");
}

TEST_F(StateOfOptimizer, files_that_say_something_else_are_refused) {
  const auto with = [&](const char* key, const std::string& text) {
    return rewritten([&](detail::StateFile& file) { file.metadata[key] = text; });
  };
  const auto groups = [&](const std::string& from, const std::string& to) {
    return rewritten([&](detail::StateFile& file) {
      std::string& text = file.metadata["groups"];
      const std::size_t at = text.find(from);
      ASSERT_NE(at, std::string::npos) << text;
      text.replace(at, from.size(), to);
    });
  };
  Muon& optimizer = *trained_;
  expect_refused(optimizer, with("format", "pt"), "it is no state of libmuon's");
  expect_refused(optimizer, with("version", "2"), "its version is \"2\"");
  expect_refused(optimizer, with("groups", "{}"), "expected a list, got an object");
  expect_refused(optimizer, with("groups", "["), "its groups is not valid");
  expect_refused(optimizer, with("groups", std::string(5000, '[')), "its groups is not valid");
  expect_refused(optimizer, with("groups", "[{}]"), "options is missing");
  expect_refused(optimizer, groups("\"nesterov\":", "\"nesterow\":"), "\"nesterow\" is no option");
  expect_refused(optimizer, groups("\"nesterov\":true", "\"nesterov\":1"), "true or false, got 1");
  expect_refused(optimizer, groups("\"lr\":0.02", "\"lr\":-1"), "Learning rate");
  expect_refused(optimizer, groups("\"lr\":0.02", "\"lr\":\"x\""), "expected lr to be a number");
  expect_refused(optimizer, groups("\"normuon\"", "\"ada\""), "Unknown algorithm \"ada\"");
  expect_refused(
      optimizer, groups("\"name\":\"a\"", "\"name\":\"b\""), "two parameters are called");
  expect_refused(optimizer, groups("[7,130]", "[7,-1]"), "a shape holds -1");
  expect_refused(
      optimizer, groups("\"muon\"", "[[1,2]]"), "to be a schedule's name or a list of triples");
}

TEST_F(StateOfOptimizer, tensors_that_do_not_fit_are_refused) {
  const auto replace = [](detail::StateFile& file, const std::string& name, const at::Tensor& to) {
    for (auto& [key, tensor] : file.tensors) {
      tensor = key == name ? to : tensor;
    }
  };
  Muon& optimizer = *trained_;
  const auto refuse = [&](const std::string& name, const at::Tensor& to, const char* mention) {
    expect_refused(
        optimizer, rewritten([&](detail::StateFile& file) { replace(file, name, to); }), mention);
  };
  refuse("a/momentum_buffer", at::zeros({7, 129}, at::kChar), "(a)");
  refuse("a/momentum_buffer_scale", at::zeros({7, 3}), "(a)");
  refuse("a/momentum_buffer", at::zeros({7, 130}, at::kLong), "Long");
  refuse("b/variance_neuron", at::zeros({64, 2}), "expected variance_neuron");
  expect_refused(
      optimizer, rewritten([](detail::StateFile& file) {
        file.tensors.emplace_back("a/exp_avg", at::zeros({7, 130}));
      }),
      "the saved state has \"exp_avg\" for a");
  expect_refused(
      optimizer, rewritten([](detail::StateFile& file) {
        file.tensors.emplace_back("z/exp_avg", at::zeros({7, 130}));
      }),
      "tensor \"z/exp_avg\" belongs to none");
  expect_refused(
      optimizer, rewritten([](detail::StateFile& file) { file.tensors.pop_back(); }), "has no");
}

TEST_F(StateOfOptimizer, damaged_files_change_nothing) {
  std::ifstream in(path_, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  const std::string before = snapshot(*trained_);
  std::mt19937 random(3); // NOLINT(bugprone-random-generator-seed): the same damage in every run
  const std::string path = folder_.path("damaged.safetensors");
  for (int i = 0; i < 2000; ++i) {
    std::string damaged = bytes;
    if (i % 2 == 0) {
      damaged.resize(random() % damaged.size());
    } else {
      char& byte = damaged[random() % damaged.size()];
      byte = static_cast<char>(static_cast<unsigned char>(byte) ^ (1U << (random() % 8U)));
    }
    std::ofstream(path, std::ios::binary) << damaged;
    EXPECT_THROW(load_state(*trained_, path), c10::ValueError) << i;
  }
  EXPECT_EQ(snapshot(*trained_), before);
}

TEST_F(StateOfOptimizer, E10_loading_many_times_keeps_one_state) {
  for (int i = 0; i < 100; ++i) {
    load_state(*trained_, path_);
  }
  EXPECT_EQ(trained_->state().size(), params_.size());
}

} // namespace
} // namespace muon
