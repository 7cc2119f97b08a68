// The forms of the iteration: what every one of them promises, and how one is chosen.

#include <limits>
#include <tuple>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <muon/orthogonalize.h>

#include "support/reference.h"

namespace muon::testing {
namespace {

using Sizes = std::vector<std::int64_t>;

const char* form_name(Form form) {
  switch (form) {
    case Form::Auto:
      return "auto";
    case Form::Standard:
      return "standard";
    case Form::Gram:
      return "gram";
    case Form::GramXRestart:
      return "gram_x_restart";
  }
  return "";
}

// --- what every form promises --------------------------------------------------------------------

class EveryForm : public ::testing::TestWithParam<std::tuple<std::string, Form>> {
 protected:
  static OrthogonalizeOptions options() {
    OrthogonalizeOptions result = schedule_options(std::get<0>(GetParam()));
    result.form = std::get<1>(GetParam());
    return result;
  }
};

TEST_P(EveryForm, B13_B15_a_batch_is_its_matrices_one_by_one) {
  for (const auto& sizes : {Sizes{5, 7, 12}, {3, 80, 70}, {2, 3, 9, 4}, {1, 6, 6}}) {
    const at::Tensor x = random_tensor(sizes).to(at::kFloat);
    const at::Tensor got = orthogonalize(x, options()).reshape({-1, sizes.end()[-2], sizes.back()});
    const at::Tensor flat = x.reshape(got.sizes());
    for (std::int64_t i = 0; i < flat.size(0); ++i) {
      EXPECT_TRUE(at::equal(got[i], orthogonalize(flat[i], options()))) << x.sizes() << " " << i;
    }
  }
}

TEST_P(EveryForm, A1_a_zero_matrix_stays_zero_beside_others) {
  for (const auto& sizes : {Sizes{3, 20, 30}, {3, 70, 66}}) {
    at::Tensor x = random_tensor(sizes).to(at::kFloat);
    const at::Tensor before = orthogonalize(x, options());
    x[1].zero_();
    const at::Tensor after = orthogonalize(x, options());
    EXPECT_TRUE(after[1].eq(0).all().item<bool>());
    EXPECT_TRUE(at::equal(after[0], before[0]));
    EXPECT_TRUE(at::equal(after[2], before[2]));
  }
}

TEST_P(EveryForm, a_non_finite_matrix_leaves_the_others_alone) {
  for (const double bad :
       {std::numeric_limits<double>::quiet_NaN(), std::numeric_limits<double>::infinity()}) {
    at::Tensor x = random_tensor({3, 20, 30}).to(at::kFloat);
    const at::Tensor before = orthogonalize(x, options());
    x[1][7][5] = bad;
    const at::Tensor after = orthogonalize(x, options());
    EXPECT_FALSE(after[1].isfinite().all().item<bool>()) << bad;
    EXPECT_TRUE(at::equal(after[0], before[0])) << bad;
    EXPECT_TRUE(at::equal(after[2], before[2])) << bad;
  }
}

TEST_P(EveryForm, B22_empty_matrices) {
  for (const auto& sizes : {Sizes{0, 5}, {5, 0}, {0, 0}, {0, 3, 4}, {2, 0, 4}, {2, 3, 0}}) {
    const at::Tensor got = orthogonalize(at::empty(sizes), options());
    EXPECT_EQ(got.sizes(), at::IntArrayRef(sizes));
  }
}

TEST_P(EveryForm, A10_any_number_of_steps) {
  const at::Tensor x = random_tensor({12, 20});
  for (const std::int64_t steps : {0, 1, 2, 3, 4, 6, 9}) {
    OrthogonalizeOptions some = options();
    some.steps = steps;
    const at::Tensor got = orthogonalize(x, some);
    EXPECT_LE(relative_error(got, exact_orthogonalize(x, some)), 1e-10) << steps << " steps";
  }
}

TEST_P(EveryForm, the_same_bits_twice) {
  const at::Tensor x = random_tensor({4, 70, 150}).to(at::kFloat);
  EXPECT_TRUE(at::equal(orthogonalize(x, options()), orthogonalize(x, options())));
}

INSTANTIATE_TEST_SUITE_P(
    schedules, EveryForm,
    ::testing::Combine(
        ::testing::ValuesIn(schedule_names()),
        ::testing::Values(Form::Auto, Form::Standard, Form::Gram, Form::GramXRestart)),
    [](const auto& test) {
      return std::get<0>(test.param) + "_" + form_name(std::get<1>(test.param));
    });

// --- choice --------------------------------------------------------------------------------------

TEST(ChooseForm, is_a_pure_function_that_names_a_form) {
  for (const std::int64_t n : {1, 8, 64, 65, 512, 4096}) {
    for (const std::int64_t m : {n, n + n / 4 + 1, 4 * n}) {
      for (const at::ScalarType dtype :
           {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kComplexFloat}) {
        for (const std::int64_t steps : {0, 1, 5, 8}) {
          const Form form = choose_form(at::kCPU, dtype, n, m, steps);
          EXPECT_NE(form, Form::Auto);
          EXPECT_EQ(form, choose_form(at::kCPU, dtype, n, m, steps));
        }
      }
    }
  }
}

TEST(ChooseForm, A13_restarts_where_they_pay_and_never_goes_without) {
  for (const at::ScalarType dtype : {at::kFloat, at::kDouble}) {
    for (const std::int64_t n : {16, 64, 128, 1024}) {
      EXPECT_EQ(choose_form(at::kCPU, dtype, n, 4 * n, 5), Form::GramXRestart) << dtype << " " << n;
      EXPECT_EQ(choose_form(at::kCPU, dtype, n, n, 5), Form::Standard) << dtype << " " << n;
    }
  }
}

TEST(ChooseForm, A6_forms_that_a_dtype_is_too_short_for_are_refused) {
  const auto refuses = [](at::ScalarType input, at::ScalarType compute, Form form) {
    OrthogonalizeOptions options;
    options.compute_dtype = compute;
    options.form = form;
    EXPECT_THROW(orthogonalize(at::zeros({2, 2}, input), options), c10::ValueError)
        << compute << " " << form_name(form);
  };
  refuses(at::kFloat, at::kHalf, Form::Gram);
  refuses(at::kFloat, at::kBFloat16, Form::Gram);
  refuses(at::kFloat, at::kBFloat16, Form::GramXRestart);
  refuses(at::kComplexFloat, at::kHalf, Form::Auto);
}

} // namespace
} // namespace muon::testing
