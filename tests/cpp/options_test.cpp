// MuonOptions: accessors, inheritance, checks, and what they become in the core.

#include <limits>
#include <sstream>

#include <gtest/gtest.h>
#include <torch/serialize.h>

#include <muon/optimizer.h>

#include "support/optimizers.h"

namespace muon::testing {
namespace {

// Every option with a value that is not its initial one.
MuonOptions unusual() {
  return MuonOptions(0.5)
      .weight_decay(0.25)
      .momentum(0.75)
      .nesterov(false)
      .eps(1e-3)
      .lr_multiplier(2.0)
      .betas({0.5, 0.75})
      .muon_beta2(0.5)
      .algorithm_option("sharpness", 0.5)
      .maximize(true)
      .cautious(true)
      .momentum_form(MomentumForm::HeavyBall)
      .decay_lr(DecayLr::Adjusted)
      .algorithm("normuon")
      .ns_coefficients(std::vector<Coefficients>{{3.0, -4.0, 2.0}, {2.0, -1.5, 0.5}})
      .ns_steps(7)
      .normalization(Normalization::Add)
      .norm_factor(1.5)
      .adjust_lr(AdjustLr::SpectralUnclamped)
      .compute_dtype(at::kDouble)
      .state_dtype(at::ScalarType::Int4)
      .stochastic_rounding(true)
      .split_master(true)
      .offload(true)
      .form(Form::Gram)
      .nonfinite(NonFinite::Skip)
      .batch_size(3)
      .amsgrad(true)
      .rows({0, 1})
      .cols({2})
      .flatten(true)
      .batch_dims(1)
      .complex_dim(true)
      .split_sizes({2, 6})
      .num_heads(4)
      .split_dim(1)
      .param_names({"a", "b"})
      .reasons({"c", "d"});
}

TEST(MuonOptionsTest, D16_defaults_are_those_of_torch) {
  const MuonOptions options;
  EXPECT_EQ(options.lr(), 1e-3);
  EXPECT_EQ(options.weight_decay(), 0.1);
  EXPECT_EQ(options.momentum(), 0.95);
  EXPECT_TRUE(options.nesterov());
  EXPECT_EQ(
      options.schedule().coefficients, std::vector<Coefficients>(5, {3.4445, -4.775, 2.0315}));
  EXPECT_EQ(options.schedule().normalization, Normalization::Clamp);
  EXPECT_EQ(options.eps(), 1e-7);
  EXPECT_EQ(options.ns_steps(), std::nullopt);
  EXPECT_EQ(options.adjust_lr(), AdjustLr::Original);
  EXPECT_FALSE(options.maximize());
  EXPECT_FALSE(options.cautious());
}

TEST(MuonOptionsTest, setters_chain_and_accessors_write) {
  MuonOptions options = MuonOptions(0.5).momentum(0.25).nesterov(false);
  options.weight_decay() = 0.75;
  const MuonOptions& read = options;
  EXPECT_EQ(read.lr(), 0.5);
  EXPECT_EQ(read.momentum(), 0.25);
  EXPECT_FALSE(read.nesterov());
  EXPECT_EQ(read.weight_decay(), 0.75);
}

TEST(MuonOptionsTest, remembers_what_setters_and_mutable_accessors_gave) {
  MuonOptions options = MuonOptions().momentum(0.95);
  options.eps() = 1e-7;
  EXPECT_EQ(std::as_const(options).lr(), 1e-3);
  EXPECT_EQ(options.given(), (std::vector<std::string_view>{"eps", "momentum"}));
  EXPECT_EQ(MuonOptions(1e-3).given(), std::vector<std::string_view>{"lr"});
}

TEST(MuonOptionsTest, a_triple_stands_for_five_iterations) {
  const MuonOptions triple = MuonOptions().ns_coefficients({2.0, -1.5, 0.5});
  EXPECT_EQ(
      triple.schedule().take(triple.ns_steps()), std::vector<Coefficients>(5, {2.0, -1.5, 0.5}));
  const std::vector<Coefficients> list = {{3.0, -4.0, 2.0}, {2.0, -1.5, 0.5}};
  EXPECT_EQ(MuonOptions().ns_coefficients(list).spec().orthogonalize.schedule.coefficients, list);
}

TEST(MuonOptionsTest, H8_schedules_by_name) {
  EXPECT_EQ(MuonOptions().schedule("cans").schedule(), find_schedule("cans"));
  const std::string text = message_of<c10::ValueError>([] { MuonOptions().schedule("polar"); });
  EXPECT_TRUE(mentions(text, {"polar_express", "cans", "\"polar\""}));
}

TEST(MuonOptionsTest, layout_sets_all_of_its_fields) {
  MatrixLayout layout;
  layout.rows = {1};
  layout.cols = {0, 2};
  layout.num_heads = 2;
  layout.split_dim = 1;
  layout.complex_dim = true;
  EXPECT_EQ(MuonOptions().flatten(true).layout(layout).layout(), layout);
}

TEST(MuonOptionsTest, clone_and_copy_are_equal) {
  const MuonOptions options = unusual();
  const std::unique_ptr<torch::optim::OptimizerOptions> clone =
      static_cast<const torch::optim::OptimizerOptions&>(options).clone();
  EXPECT_TRUE(dynamic_cast<const MuonOptions&>(*clone) == options);
  MuonOptions assigned;
  assigned = options;
  EXPECT_TRUE(assigned == options);
  EXPECT_EQ(assigned.given(), options.given());
}

TEST(MuonOptionsTest, every_option_counts_for_equality) {
  const MuonOptions full = unusual();
  for (const std::string_view name : full.given()) {
    MuonOptions other;
#define MUON_TAKE(role, type, option, ...)                             \
  if (name == #option) {                                               \
    other.option(full.option());                                       \
    EXPECT_FALSE(other == MuonOptions()) << name << " is not unusual"; \
  }
    MUON_OPTIONS(MUON_TAKE)
#undef MUON_TAKE
    EXPECT_EQ(other.given(), std::vector<std::string_view>{name});
  }
  EXPECT_TRUE(MuonOptions(1e-3) == MuonOptions()) << "given or not is no difference in value";
}

TEST(MuonOptionsTest, E11_every_option_survives_an_archive) {
  const MuonOptions options = unusual();
#define MUON_STRING(role, type, name, ...) #name,
  const std::vector<std::string_view> all = {MUON_OPTIONS(MUON_STRING)};
#undef MUON_STRING
  ASSERT_EQ(options.given(), all) << "add the new option to unusual()";
  torch::serialize::OutputArchive out;
  options.serialize(out);
  std::stringstream stream;
  out.save_to(stream);
  torch::serialize::InputArchive in;
  in.load_from(stream);
  MuonOptions loaded(0);
  loaded.serialize(in);
  EXPECT_TRUE(loaded == options);
}

TEST(MuonOptionsTest, learning_rate_through_the_base_class) {
  MuonOptions options(0.5);
  torch::optim::OptimizerOptions& base = options;
  EXPECT_EQ(base.get_lr(), 0.5);
  base.set_lr(0.125);
  EXPECT_EQ(std::as_const(options).lr(), 0.125);
}

// --- inheritance ---------------------------------------------------------------------------------

TEST(MuonOptionsResolved, values_not_given_come_from_the_defaults_one_by_one) {
  const MuonOptions defaults = MuonOptions(0.5).momentum(0.75).cautious(true).schedule("you");
  const MuonOptions resolved = MuonOptions().momentum(0.95).resolved(defaults);
  EXPECT_EQ(std::as_const(resolved).lr(), 0.5);
  EXPECT_EQ(resolved.momentum(), 0.95) << "given, though it is the initial value";
  EXPECT_TRUE(resolved.cautious());
  EXPECT_EQ(resolved.schedule().name, "you");
  EXPECT_EQ(resolved.weight_decay(), 0.1);
}

TEST(MuonOptionsResolved, notes_are_not_inherited) {
  const MuonOptions defaults = MuonOptions().param_names({"a"}).reasons({"b"});
  EXPECT_TRUE(MuonOptions().resolved(defaults).param_names().empty());
  EXPECT_TRUE(MuonOptions().resolved(defaults).reasons().empty());
}

TEST(MuonOptionsResolved, D7_decay_and_eps_do_not_cross_kinds_of_algorithms) {
  const MuonOptions muon = MuonOptions(0.5).weight_decay(0.3).eps(1e-3);
  const MuonOptions adamw = MuonOptions().algorithm("adamw").resolved(muon);
  EXPECT_EQ(adamw.weight_decay(), 0.01);
  EXPECT_EQ(adamw.eps(), 1e-8);
  EXPECT_EQ(adamw.betas(), (Betas{0.9, 0.95}));
  const MuonOptions adam = MuonOptions().algorithm("adam").resolved(muon);
  EXPECT_EQ(adam.weight_decay(), 0.0);
  EXPECT_EQ(adam.eps(), 1e-8);
  const MuonOptions normuon = MuonOptions().algorithm("normuon").resolved(muon);
  EXPECT_EQ(normuon.weight_decay(), 0.3) << "NorMuon is a Muon";
  EXPECT_EQ(normuon.eps(), 1e-3);
}

TEST(MuonOptionsResolved, Adam_defaults_do_not_reach_Muon_groups) {
  const MuonOptions adamw = MuonOptions(1e-3)
                                .algorithm("adamw")
                                .weight_decay(0.3)
                                .eps(1e-4)
                                .betas({0.5, 0.6})
                                .amsgrad(true);
  const MuonOptions muon = MuonOptions(0.1).algorithm("muon").resolved(adamw);
  EXPECT_EQ(muon.weight_decay(), 0.1);
  EXPECT_EQ(muon.eps(), 1e-7);
  EXPECT_NO_THROW(muon.check("group"));
  const MuonOptions second = MuonOptions().resolved(adamw);
  EXPECT_EQ(second.betas(), (Betas{0.5, 0.6}));
  EXPECT_TRUE(second.amsgrad());
}

TEST(MuonOptionsResolved, defaults_about_Adam_have_its_decay_and_eps) {
  const MuonOptions adamw = MuonOptions().resolved(MuonOptions(1e-3).algorithm("AdamW"));
  EXPECT_EQ(adamw.algorithm(), "adamw") << "names count in any case";
  EXPECT_EQ(adamw.weight_decay(), 0.01);
  EXPECT_EQ(adamw.eps(), 1e-8);
}

TEST(MuonOptionsResolved, B12_a_choice_of_matrices_replaces_the_defaults_choice) {
  const MuonOptions defaults = MuonOptions().flatten(true).num_heads(4);
  const MuonOptions experts = MuonOptions().batch_dims(1).resolved(defaults);
  EXPECT_FALSE(experts.flatten());
  EXPECT_EQ(experts.batch_dims(), 1);
  EXPECT_EQ(experts.num_heads(), 4);
  EXPECT_FALSE(MuonOptions().rows({1}).resolved(defaults).flatten());
  const MuonOptions blocks = MuonOptions().split_sizes({1, 3}).resolved(defaults);
  EXPECT_TRUE(blocks.flatten());
  EXPECT_EQ(blocks.num_heads(), 0);
}

TEST(MuonOptionsResolved, resolving_again_with_other_defaults_changes_nothing) {
  const MuonOptions once = MuonOptions().algorithm("adamw").lr(0.1).resolved(MuonOptions(0.5));
  EXPECT_TRUE(once.resolved(MuonOptions(0.25).momentum(0.5).weight_decay(0.7)) == once);
}

TEST(MuonOptionsMerge, takes_what_was_given_and_names_a_contradiction) {
  MuonOptions options = MuonOptions(0.5).flatten(true);
  EXPECT_EQ(options.merge(MuonOptions().momentum(0.5).flatten(true)), "");
  EXPECT_EQ(std::as_const(options).momentum(), 0.5);
  const MuonOptions before = options;
  EXPECT_EQ(options.merge(MuonOptions().cautious(true).momentum(0.75)), "momentum");
  EXPECT_TRUE(options == before);
}

// --- checks --------------------------------------------------------------------------------------

struct BadValue {
  const char* name;
  MuonOptions options;
  std::string text; // how the error begins
};

std::ostream& operator<<(std::ostream& out, const BadValue& row) {
  return out << row.name;
}

class MuonOptionsCheck : public ::testing::TestWithParam<BadValue> {};

TEST_P(MuonOptionsCheck, refuses_with_the_value_and_the_group) {
  const std::string text = message_of<c10::ValueError>([] { GetParam().options.check("group 7"); });
  EXPECT_EQ(text.rfind(GetParam().text, 0), 0U) << text;
  EXPECT_TRUE(mentions(text, {"group 7"}));
}

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

INSTANTIATE_TEST_SUITE_P(
    rows, MuonOptionsCheck,
    ::testing::Values(
        BadValue{"lr", MuonOptions(-0.5), "Learning rate should be >= 0 but is: -0.5"},
        BadValue{"lr_nan", MuonOptions(kNaN), "Learning rate should be >= 0 but is: nan"},
        BadValue{
            "lr_infinite", MuonOptions(kInfinity), "Learning rate should be finite but is: inf"},
        BadValue{"momentum", MuonOptions().momentum(-0.5), "momentum should be >= 0 but is: -0.5"},
        BadValue{
            "large_momentum", MuonOptions().momentum(1.5), "momentum should be <= 1 but is: 1.5"},
        BadValue{
            "weight_decay", MuonOptions().weight_decay(-1.0),
            "weight decay should be >= 0 but is: -1"},
        BadValue{"eps", MuonOptions().eps(-1e-7), "eps should be >= 0 but is: -1e-07"},
        BadValue{
            "lr_multiplier", MuonOptions().lr_multiplier(-2.0),
            "lr_multiplier should be >= 0 but is: -2"},
        BadValue{
            "adjust_lr", MuonOptions().adjust_lr(static_cast<AdjustLr>(9)),
            "Adjust learning rate function 9 is not supported"},
        BadValue{"ns_steps", MuonOptions().ns_steps(-3), "ns_steps should be >= 0 but is: -3"},
        BadValue{
            "many_steps", MuonOptions().ns_steps(100),
            "Number of steps must be less than 100 for computational efficiency"},
        BadValue{
            "long_schedule",
            MuonOptions().ns_coefficients(std::vector<Coefficients>(100, {2.0, -1.5, 0.5})),
            "Number of steps must be less than 100 for computational efficiency"},
        BadValue{
            "norm_factor", MuonOptions().norm_factor(0.0), "norm_factor should be > 0 but is: 0"},
        BadValue{"batch_size", MuonOptions().batch_size(-1), "batch_size should be >= 1, or 0"},
        BadValue{
            "compute_dtype", MuonOptions().compute_dtype(at::kInt),
            "muon: expected compute_dtype to be float64"},
        BadValue{
            "state_dtype", MuonOptions().state_dtype(at::kComplexFloat),
            "muon: expected state_dtype to be float64"},
        BadValue{
            "beta1", MuonOptions().algorithm("adamw").betas({1.0, 0.9}),
            "Invalid beta parameter at index 0: 1"},
        BadValue{
            "beta2", MuonOptions().algorithm("adam").betas({0.9, -0.5}),
            "Invalid beta parameter at index 1: -0.5"},
        BadValue{
            "muon_beta2", MuonOptions().algorithm("normuon").muon_beta2(1.0),
            "muon_beta2 should be <"},
        BadValue{
            "foreign_betas", MuonOptions().betas({0.5, 0.6}),
            "betas is an option of \"adam\" and \"adamw\""},
        BadValue{
            "foreign_amsgrad", MuonOptions().algorithm("normuon").amsgrad(true),
            "amsgrad is an option of"},
        BadValue{
            "foreign_muon_beta2", MuonOptions().algorithm("adamw").muon_beta2(0.5),
            "muon_beta2 is an option of \"normuon\""}),
    [](const auto& row) { return std::string(row.param.name); });

TEST(MuonOptionsCheckTest, limits_are_accepted) {
  MuonOptions(0.0).momentum(0.0).weight_decay(0.0).eps(0.0).ns_steps(0).check("group");
  MuonOptions().momentum(1.0).ns_steps(99).check("group");
  MuonOptions().algorithm("adam").betas({0.0, 0.0}).check("group");
}

TEST(MuonOptionsCheckTest, C13_an_unknown_algorithm_lists_the_known_ones) {
  const std::string text =
      message_of<c10::ValueError>([] { MuonOptions().algorithm("lion").resolved({}); });
  EXPECT_TRUE(mentions(text, {"lion", "muon", "normuon", "adamw", "adam"}));
}

// --- what the core gets --------------------------------------------------------------------------

TEST(MuonOptionsSpec, carries_what_shapes_the_plan) {
  const GroupSpec spec = unusual().spec();
  EXPECT_EQ(spec.algorithm, "normuon");
  EXPECT_EQ(spec.layout, unusual().layout());
  EXPECT_EQ(spec.adjust_lr, AdjustLr::SpectralUnclamped);
  EXPECT_EQ(spec.orthogonalize.schedule.coefficients.size(), 2U);
  EXPECT_EQ(spec.orthogonalize.schedule.normalization, Normalization::Add);
  EXPECT_EQ(spec.orthogonalize.schedule.norm_factor, 1.5);
  EXPECT_EQ(spec.orthogonalize.steps, 7);
  EXPECT_EQ(spec.orthogonalize.compute_dtype, at::kDouble);
  EXPECT_EQ(spec.orthogonalize.form, Form::Gram);
  EXPECT_EQ(spec.batch_size, 3);
  EXPECT_EQ(spec.nonfinite, NonFinite::Skip);
  EXPECT_TRUE(spec.amsgrad);
  EXPECT_TRUE(spec.decoupled);
  EXPECT_FALSE(MuonOptions().algorithm("Adam").spec().decoupled);
}

TEST(MuonOptionsSpec, a_schedules_own_normalization_unless_another_is_given) {
  const MuonOptions polar = MuonOptions().schedule("polar_express");
  EXPECT_EQ(polar.spec().orthogonalize.schedule, find_schedule("polar_express"));
}

TEST(MuonOptionsSpec, live_options_do_not_change_the_plan) {
  const MuonOptions base;
  EXPECT_TRUE(base.same_plan(MuonOptions(0.5).momentum(0.5).weight_decay(0.7).nesterov(false)));
  EXPECT_TRUE(base.same_plan(MuonOptions().param_names({"a"})));
  EXPECT_FALSE(base.same_plan(MuonOptions().flatten(true)));
  EXPECT_FALSE(base.same_plan(MuonOptions().batch_size(2)));
  EXPECT_FALSE(base.same_plan(MuonOptions().ns_steps(4)));
}

TEST(MuonOptionsSpec, hyper_row) {
  std::vector<double> row(Hyper::kCount, -1.0);
  unusual().write_hyper(row.data());
  EXPECT_EQ(row, (std::vector<double>{0.5, 0.25, 0.75, 1e-3, 2.0, 0.5, 0.75, 0.5, 0, 1, 1, 1, 1}));
  MuonOptions().write_hyper(row.data());
  EXPECT_EQ(row, (std::vector<double>{1e-3, 0.1, 0.95, 1e-7, 1.0, 0.9, 0.95, 0.95, 1, 0, 0, 0, 0}));
}

} // namespace
} // namespace muon::testing
