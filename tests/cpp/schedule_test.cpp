// The named schedules by value and by what they do to singular values, and the rule for steps.

#include <algorithm>
#include <cmath>
#include <limits>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <muon/schedule.h>

namespace muon {
namespace {

// The polynomial of a schedule at a singular value of the normalised matrix.
double polynomial(const Schedule& schedule, double sigma, std::optional<std::int64_t> steps = {}) {
  double x = sigma / schedule.norm_factor;
  for (const auto& [a, b, c] : schedule.take(steps)) {
    x = a * x + b * std::pow(x, 3) + c * std::pow(x, 5);
  }
  return x;
}

struct Band {
  double low = std::numeric_limits<double>::infinity();
  double high = -std::numeric_limits<double>::infinity();
};

// Range of the polynomial over [from, to], on a grid that is fine in sigma and in log sigma.
Band band(
    const Schedule& schedule, double from, double to, std::optional<std::int64_t> steps = {}) {
  Band result;
  constexpr int kPoints = 20000;
  for (int i = 0; i <= kPoints; ++i) {
    const double t = static_cast<double>(i) / kPoints;
    for (const double sigma : {from + (to - from) * t, from * std::pow(to / from, t)}) {
      const double y = polynomial(schedule, sigma, steps);
      result.low = std::min(result.low, y);
      result.high = std::max(result.high, y);
    }
  }
  return result;
}

void expect_rows(const Schedule& schedule, const std::vector<Coefficients>& rows) {
  ASSERT_EQ(schedule.coefficients.size(), rows.size()) << schedule.name;
  for (std::size_t k = 0; k < rows.size(); ++k) {
    for (std::size_t i = 0; i < 3; ++i) {
      // the paper's safety factor is a division, so not every value is a literal
      EXPECT_DOUBLE_EQ(schedule.coefficients[k][i], rows[k][i]) << schedule.name << " row " << k;
    }
  }
}

TEST(Schedule, names_in_documentation_order) {
  const std::vector<std::string> expected = {
      "muon", "polar_express", "polar_express_paper", "you", "cans"};
  EXPECT_EQ(schedule_names(), expected);
  for (const std::string& name : expected) {
    EXPECT_EQ(find_schedule(name).name, name);
    EXPECT_FALSE(find_schedule(name).source.empty()) << name;
  }
}

TEST(Schedule, A11_muon_is_torchs_triple_five_times) {
  const Schedule& schedule = find_schedule("muon");
  expect_rows(schedule, std::vector<Coefficients>(5, {3.4445, -4.7750, 2.0315}));
  EXPECT_EQ(schedule.normalization, Normalization::Clamp);
  EXPECT_EQ(schedule.norm_factor, 1.0);
}

TEST(Schedule, A11_polar_express_is_the_five_step_table_with_a_safety_of_two_percent) {
  const Schedule& schedule = find_schedule("polar_express");
  expect_rows(
      schedule,
      {{8.156554524902461, -22.48329292557795, 15.878769915207462},
       {4.042929935166739, -2.808917465908714, 0.5000178451051316},
       {3.8916678022926607, -2.772484153217685, 0.5060648178503393},
       {3.285753657755655, -2.3681294933425376, 0.46449024233003106},
       {2.3465413258596377, -1.7097828382687081, 0.42323551169305323}});
  EXPECT_EQ(schedule.normalization, Normalization::Add);
  EXPECT_EQ(schedule.norm_factor, 1.02);
}

TEST(Schedule, A11_polar_express_paper_is_listing_1_with_its_safety_factor) {
  const Schedule& schedule = find_schedule("polar_express_paper");
  // arXiv 2505.16932, algorithm 1: every row but the last is evaluated at x / 1.01
  std::vector<Coefficients> rows = {
      {8.28721201814563, -23.595886519098837, 17.300387312530933},
      {4.107059111542203, -2.9478499167379106, 0.5448431082926601},
      {3.9486908534822946, -2.908902115962949, 0.5518191394370137},
      {3.3184196573706015, -2.488488024314874, 0.51004894012372},
      {2.300652019954817, -1.6689039845747493, 0.4188073119525673},
      {1.891301407787398, -1.2679958271945868, 0.37680408948524835},
      {1.8750014808534479, -1.2500016453999487, 0.3750001645474248},
      {1.875, -1.25, 0.375}};
  for (std::size_t k = 0; k + 1 < rows.size(); ++k) {
    rows[k][0] /= 1.01;
    rows[k][1] /= std::pow(1.01, 3);
    rows[k][2] /= std::pow(1.01, 5);
  }
  expect_rows(schedule, rows);
  EXPECT_EQ(schedule.normalization, Normalization::Add);
  EXPECT_EQ(schedule.norm_factor, 1.01);
}

TEST(Schedule, A11_you_and_cans_by_value) {
  const Schedule& you = find_schedule("you");
  expect_rows(
      you,
      {{4.0848, -6.8946, 2.9270},
       {3.9505, -6.3029, 2.6377},
       {3.7418, -5.5913, 2.3037},
       {2.8769, -3.1427, 1.2046},
       {2.8366, -3.0525, 1.2012}});
  const Schedule& cans = find_schedule("cans");
  expect_rows(
      cans,
      {{8.4703, -25.1081, 18.6293},
       {4.1828, -3.1087, 0.5806},
       {3.9619, -2.9541, 0.5630},
       {3.2866, -2.4647, 0.5074},
       {2.2737, -1.6447, 0.4162}});
  for (const Schedule* schedule : {&you, &cans}) {
    EXPECT_EQ(schedule->normalization, Normalization::Clamp) << schedule->name;
  }
  EXPECT_EQ(you.norm_factor, 1.0);
  EXPECT_EQ(cans.norm_factor, 1.01) << "its polynomials diverge just above 1";
}

// The bands are computed from the polynomials in float64; a wrong digit in a table leaves them.
TEST(Schedule, A11_singular_values_end_in_the_schedules_band) {
  struct Expected {
    const char* name;
    double low;
    double high;
  };
  const std::vector<Expected> table = {
      {"muon", 0.68183, 1.13436},        {"polar_express", 0.85887, 1.14113},
      {"polar_express_paper", 1.0, 1.0}, {"you", 0.97775, 1.03178},
      {"cans", 0.88437, 1.11984},
  };
  for (const auto& [name, low, high] : table) {
    const Band range = band(find_schedule(name), 0.01, 1.0);
    EXPECT_NEAR(range.low, low, 2e-5) << name;
    EXPECT_NEAR(range.high, high, 2e-5) << name;
  }
}

TEST(Schedule, A20_five_quintic_steps_take_one_to_0_6964) {
  EXPECT_NEAR(polynomial(find_schedule("muon"), 1.0), 0.6964, 5e-5);
}

// Rounding a matrix of rank one to bfloat16 lifts its only singular value by up to 2^-8.
TEST(Schedule, A7_no_schedule_runs_away_just_above_one) {
  for (const std::string& name : schedule_names()) {
    const Band range = band(find_schedule(name), 1.0, 1.0 + 1.0 / 256);
    EXPECT_GT(range.low, 0.68) << name;
    EXPECT_LT(range.high, 1.15) << name;
  }
}

TEST(Schedule, A10_fewer_steps_are_the_first_rows_and_more_repeat_the_last) {
  std::vector<Coefficients> rows;
  for (int k = 0; k < 8; ++k) {
    rows.push_back({1.0 + k, 2.0 + k, 3.0 + k});
  }
  const Schedule schedule = Schedule::custom(rows);
  EXPECT_EQ(schedule.take({}), rows);
  EXPECT_EQ(schedule.take(0), std::vector<Coefficients>());
  EXPECT_EQ(schedule.take(5), std::vector<Coefficients>(rows.begin(), rows.begin() + 5));
  std::vector<Coefficients> longer = rows;
  longer.insert(longer.end(), 2, rows.back());
  EXPECT_EQ(schedule.take(10), longer);
}

TEST(Schedule, negative_steps_are_an_error_that_names_them) {
  try {
    static_cast<void>(find_schedule("muon").take(-3));
    FAIL() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("-3"), std::string::npos) << error.what();
  }
}

TEST(Schedule, custom_is_normalised_as_torch_does) {
  const Schedule schedule = Schedule::custom({{1.5, -0.5, 0.0}});
  EXPECT_EQ(schedule.name, "custom");
  EXPECT_EQ(schedule.normalization, Normalization::Clamp);
  EXPECT_EQ(schedule.norm_factor, 1.0);
}

TEST(Schedule, custom_refuses_what_is_no_polynomial) {
  EXPECT_THROW(Schedule::custom({}), c10::ValueError);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const double infinity = std::numeric_limits<double>::infinity();
  EXPECT_THROW(Schedule::custom({{nan, 0.0, 0.0}}), c10::ValueError);
  EXPECT_THROW(Schedule::custom({{1.0, infinity, 0.0}}), c10::ValueError);
}

TEST(Schedule, an_unknown_name_is_an_error_that_lists_the_known_ones) {
  try {
    find_schedule("polar_expres");
    FAIL() << "no error";
  } catch (const c10::ValueError& error) {
    const std::string text = error.what();
    EXPECT_NE(text.find("polar_expres\""), std::string::npos) << text;
    for (const std::string& name : schedule_names()) {
      EXPECT_NE(text.find(name), std::string::npos) << text;
    }
  }
}

} // namespace
} // namespace muon
