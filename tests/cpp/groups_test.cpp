// group_parameters: which parameter goes where, and what it refuses to guess.

#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <muon/groups.h>

#include "support/reference.h"
#include "support/routing_models.h"

namespace muon::testing {
namespace {

// A decision as tests/golden/routing.json writes it.
std::string text_of(const Decision& decision) {
  if (decision.frozen) {
    return "frozen";
  }
  const MuonOptions& options = decision.options;
  std::string text = options.algorithm();
  const auto list = [](const std::vector<std::int64_t>& values) {
    std::string joined;
    for (const std::int64_t value : values) {
      joined += c10::str(joined.empty() ? "" : ",", value);
    }
    return joined;
  };
  const std::vector<std::pair<std::string, std::string>> values = {
      {"rows", list(options.rows())},
      {"cols", list(options.cols())},
      {"flatten", options.flatten() ? "1" : "0"},
      {"batch_dims", std::to_string(options.batch_dims())},
      {"split_sizes", list(options.split_sizes())},
      {"num_heads", std::to_string(options.num_heads())},
      {"split_dim", std::to_string(options.split_dim())},
      {"weight_decay", c10::str(options.weight_decay())}};
  const auto given = options.given();
  for (const auto& [name, value] : values) {
    if (std::find(given.begin(), given.end(), name) != given.end()) {
      text += c10::str(' ', name, '=', value);
    }
  }
  return text;
}

std::map<std::string, std::string> decisions(
    const nn::Module& model, const std::vector<Rule>& rules = {}) {
  std::map<std::string, std::string> texts;
  for (const Decision& decision : route_parameters(model, rules)) {
    texts[decision.name] = text_of(decision);
  }
  return texts;
}

std::string reason_for(
    const std::string& name, const nn::Module& model, const std::vector<Rule>& rules = {}) {
  for (const Decision& decision : route_parameters(model, rules)) {
    if (decision.name == name) {
      return decision.reason;
    }
  }
  return "no such parameter";
}

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

void expect_part(const std::string& text, const std::string& part) {
  EXPECT_NE(text.find(part), std::string::npos) << "expected \"" << part << "\" in:\n" << text;
}

// Gathers warnings while it lives.
class Warnings : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    texts.push_back(warning.msg());
  }
  std::vector<std::string> texts;

 private:
  c10::WarningUtils::WarningHandlerGuard guard_{this};
};

MuonOptions algorithm(const std::string& name) {
  return MuonOptions().algorithm(name);
}

TEST(Groups, every_sort_of_parameter_is_routed_as_in_python) {
  const auto table = nlohmann::json::parse(std::ifstream(MUON_GOLDEN_DIR "/routing.json"));
  std::map<std::string, std::string> expected;
  for (const auto& row : table) {
    expected[row.at(0).get<std::string>()] = row.at(1).get<std::string>();
  }
  EXPECT_EQ(expected.at("tied"), expected.at("wte.weight"));
  expected.erase("wte.weight"); // the same tensor
  EXPECT_EQ(decisions(TwinImpl()), expected);
}

TEST(Groups, groups_are_few_and_hold_every_trainable_parameter_once) {
  const TwinImpl model;
  std::map<at::TensorImpl*, int> held;
  const auto groups = group_parameters(model);
  for (const auto& group : groups) {
    const auto& options = static_cast<const MuonOptions&>(group.options());
    EXPECT_EQ(options.param_names().size(), group.params().size());
    EXPECT_EQ(options.reasons().size(), group.params().size());
    for (const at::Tensor& parameter : group.params()) {
      ++held[parameter.unsafeGetTensorImpl()];
    }
  }
  std::map<at::TensorImpl*, int> expected;
  for (const at::Tensor& parameter : model.parameters()) {
    if (parameter.requires_grad()) {
      expected[parameter.unsafeGetTensorImpl()] = 1;
    }
  }
  EXPECT_EQ(held, expected);
  EXPECT_EQ(groups.size(), 10U); // the distinct decisions of the table
}

TEST(Groups, frozen_parameters_are_reported_and_get_no_group) {
  const TwinImpl model;
  EXPECT_EQ(reason_for("frozen.weight", model), "frozen: requires_grad is false");
  for (const auto& group : group_parameters(model)) {
    for (const at::Tensor& parameter : group.params()) {
      EXPECT_TRUE(parameter.requires_grad());
    }
  }
}

TEST(Groups, nothing_trainable_is_an_error) {
  nn::Linear model = linear(8, 8);
  model->weight.requires_grad_(false);
  expect_part(error_of([&] { group_parameters(*model); }), "no parameter requires a gradient");
}

TEST(Groups, B5_the_optimizer_accepts_what_the_helper_returns) {
  at::manual_seed(test_seed());
  const TwinImpl model;
  Muon optimizer(group_parameters(model), MuonOptions(1e-3));
  std::map<std::string, at::Tensor> before;
  for (const auto& item : model.named_parameters()) {
    before[item.key()] = item.value().detach().clone();
    if (item.value().requires_grad()) {
      item.value().mutable_grad() = at::randn_like(item.value());
    }
  }
  optimizer.step();
  for (const auto& item : model.named_parameters()) {
    EXPECT_EQ(item.value().equal(before[item.key()]), !item.value().requires_grad()) << item.key();
    EXPECT_TRUE(at::isfinite(item.value()).all().item<bool>()) << item.key();
  }
}

TEST(Groups, B9_a_vector_is_refused_on_muon) {
  nn::Linear model(8, 8);
  expect_part(
      error_of([&] { group_parameters(*model, {{"bias", algorithm("muon")}}); }),
      "\"bias\" of shape [8] on \"muon\", which needs matrices");
}

TEST(Groups, B10_thin_shapes_go_to_adamw) {
  const HolderImpl model(
      {{"a", {4, 2048}}, {"b", {4, 512}}, {"c", {3, 64}}, {"d", {1, 196, 768}}, {"e", {64, 1, 1}}});
  const std::map<std::string, std::string> expected = {
      {"a", "adamw"}, {"b", "muon"}, {"c", "adamw"}, {"d", "adamw"}, {"e", "adamw weight_decay=0"}};
  EXPECT_EQ(decisions(model), expected);
}

TEST(Groups, B14_the_axis_of_a_stack_is_never_guessed) {
  HolderImpl model({{"other", {2, 3, 4, 5}}});
  model.add("moe", std::make_shared<ExpertsImpl>());
  const std::string text = error_of([&] { group_parameters(model); });
  expect_part(text, "// moe.gate_up_proj of Experts, shape [4, 16, 8]");
  expect_part(
      text, "{\"moe.down_proj\", muon::MuonOptions().batch_dims(1)}, // 4 matrices of 8 x 8");
  expect_part(
      text, "{\"moe.down_proj\", muon::MuonOptions().flatten(true)}, // one matrix of 4 x 64");
  expect_part(text, "{\"other\", muon::MuonOptions().batch_dims(2)}, // 6 matrices of 4 x 5");
  EXPECT_EQ(text.find("_bias"), std::string::npos) << text;
  const auto got = decisions(
      model, {{"moe.*_proj", MuonOptions().batch_dims(1)}, {"other", MuonOptions().flatten(true)}});
  EXPECT_EQ(got.at("moe.down_proj"), "muon batch_dims=1");
  EXPECT_EQ(got.at("other"), "muon flatten=1");
}

TEST(Groups, C1_embeddings_and_heads_stay_off_muon) {
  HolderImpl model;
  model.add("a", nn::Embedding(32, 8)).add("b", nn::EmbeddingBag(32, 8)).add("c", linear(8, 8));
  model.add("d", nn::AdaptiveLogSoftmaxWithLoss(16, 64, std::vector<std::int64_t>{8, 32}));
  for (const auto& [name, decision] : decisions(model)) {
    EXPECT_EQ(decision, name == "c.weight" ? "muon" : "adamw") << name;
  }
}

TEST(Groups, C2_a_shared_weight_takes_the_union_of_its_roles) {
  const TwinImpl model;
  EXPECT_EQ(reason_for("tied", model), "shared with wte.weight: embedding (Embedding)");
  // Rules see a shared weight under each of its names.
  EXPECT_EQ(
      reason_for("tied", model, {{"wte.weight", MuonOptions().lr(1.0)}}),
      "shared with wte.weight: embedding (Embedding); options of rule 0 (wte.weight)");
}

TEST(Groups, C3_excluded_matrices_can_have_their_own_lr) {
  HolderImpl model;
  model.add("vocab_map", linear(8, 32)).add("hidden", linear(8, 8));
  const Rule rule("vocab_map.*", algorithm("adamw").lr(0.0125).weight_decay(0.4));
  const std::string text = Muon(group_parameters(model, {rule}), MuonOptions(3e-4)).describe();
  const std::size_t begin = text.find("vocab_map.weight");
  ASSERT_NE(begin, std::string::npos) << text;
  const std::string line = text.substr(begin, text.find('\n', begin) - begin);
  expect_part(line, "0.0125");
  expect_part(line, "0.005"); // lr * weight decay
  expect_part(line, "rule 0 (vocab_map.*)");
}

TEST(Groups, C4_a_rule_that_matches_nothing_is_an_error) {
  nn::Linear model(8, 8);
  const auto never = [](const std::string&, const at::Tensor& parameter, const nn::Module&) {
    return parameter.dim() > 2;
  };
  const std::vector<Rule> rules = {
      {"wieght", algorithm("adamw")},
      {never, algorithm("adamw")},
      Rule::of<nn::Conv2dImpl>(algorithm("adamw"))};
  for (const Rule& rule : rules) {
    const std::string text =
        error_of([&] { group_parameters(*model, {{"bias", MuonOptions(1.0)}, rule}); });
    expect_part(text, "rule 1 (");
    expect_part(
        text, "matches no parameter; globs must fit the whole name. The names are: weight, bias");
  }
}

TEST(Groups, C4_contradictory_rules_are_an_error) {
  nn::Linear model(8, 8);
  const std::vector<Rule> rules = {
      {"weight", algorithm("adamw")}, Rule::of<nn::LinearImpl>(algorithm("normuon"))};
  expect_part(
      error_of([&] { group_parameters(*model, rules); }),
      "contradictory rules for \"weight\": rule 1 (a predicate) gives algorithm another value than "
      "rule 0 (weight)");
}

TEST(Groups, C4_rules_that_agree_add_up) {
  nn::Linear model = linear(8, 8);
  const std::vector<Rule> rules = {
      {"weight", algorithm("NorMuon")}, {"*", algorithm("normuon").lr(0.1)}};
  const auto decision = route_parameters(*model, rules).at(0);
  EXPECT_EQ(decision.options, algorithm("normuon").lr(0.1).adjust_lr(AdjustLr::MatchRmsAdamw));
  EXPECT_EQ(decision.reason, "rule 0 (weight), rule 1 (*)");
}

TEST(Groups, C6_nothing_on_muon_warns) {
  Warnings warnings;
  group_parameters(TwinImpl());
  EXPECT_TRUE(warnings.texts.empty());
  group_parameters(HolderImpl({{"hidden", {8}}}));
  ASSERT_EQ(warnings.texts.size(), 1U);
  expect_part(warnings.texts[0], "no parameter is on Muon: all 1 go to other algorithms");
}

TEST(Groups, C12_the_head_is_found_by_its_full_name) {
  for (const std::string name : {"head", "lm_head", "cls_head", "classifier", "unembed", "score"}) {
    HolderImpl model;
    model.add("body", linear(8, 8)).add(name, linear(8, 8));
    EXPECT_EQ(decisions(model).at(name + ".weight"), "adamw") << name;
    EXPECT_EQ(decisions(model).at("body.weight"), "muon") << name;
  }
}

TEST(Groups, Q3_whole_words_of_names_count) {
  HolderImpl model;
  for (const std::string name : {"unmasked_proj", "tok_emb", "head", "patch_embed"}) {
    model.add(name, linear(8, 16));
  }
  const std::map<std::string, std::string> expected = {
      {"unmasked_proj.weight", "muon"},
      {"tok_emb.weight", "adamw"},
      {"head.weight", "adamw"},
      {"patch_embed.weight", "muon"}};
  EXPECT_EQ(decisions(model), expected);
}

TEST(Groups, rules_match_by_name_type_predicate_and_function) {
  HolderImpl model;
  model.add("a", nn::Linear(8, 8)).add("b", nn::Conv1d(8, 8, 3)).add("c", linear(8, 16));
  const auto is_square = [](const std::string&, const at::Tensor& parameter, const nn::Module&) {
    return parameter.dim() == 2 && parameter.size(0) == parameter.size(1);
  };
  const auto of_c = [](const std::string& name, const at::Tensor&,
                       const nn::Module&) -> std::optional<MuonOptions> {
    return name == "c.weight" ? std::optional(MuonOptions().eps(0.5)) : std::nullopt;
  };
  std::map<std::string, MuonOptions> got;
  for (Decision& decision : route_parameters(
           model,
           {{"a.*", MuonOptions().lr(0.5)},
            Rule::of<nn::Conv1dImpl>(MuonOptions().momentum(0.5)),
            {is_square, MuonOptions().lr_multiplier(0.5)},
            Rule(of_c)})) {
    got[decision.name] = decision.options;
  }
  EXPECT_EQ(std::as_const(got["a.weight"]).lr(), 0.5);
  EXPECT_EQ(std::as_const(got["a.weight"]).lr_multiplier(), 0.5);
  EXPECT_EQ(std::as_const(got["a.bias"]).lr(), 0.5);
  EXPECT_EQ(std::as_const(got["a.bias"]).lr_multiplier(), 1.0);
  EXPECT_EQ(std::as_const(got["b.bias"]).momentum(), 0.5);
  EXPECT_EQ(std::as_const(got["c.weight"]).eps(), 0.5);
  EXPECT_EQ(std::as_const(got["c.weight"]).momentum(), 0.95);
}

TEST(Groups, a_rule_replaces_the_layout_that_the_module_suggests) {
  HolderImpl model;
  model.add("conv", nn::Conv2d(nn::Conv2dOptions(8, 16, 3).groups(2).bias(false)));
  model.add("attn", nn::MultiheadAttention(16, 4)).add("wte", nn::Embedding(32, 8));
  const auto got = decisions(
      model,
      {{"conv.weight", MuonOptions().batch_dims(2)},
       {"attn.in_proj_weight", MuonOptions().split_sizes({16, 32})},
       {"wte.weight", MuonOptions().num_heads(2)}});
  EXPECT_EQ(got.at("conv.weight"), "muon batch_dims=2");
  EXPECT_EQ(got.at("attn.in_proj_weight"), "muon split_sizes=16,32");
  EXPECT_EQ(got.at("wte.weight"), "muon num_heads=2"); // a layout in a rule means Muon
}

} // namespace
} // namespace muon::testing
