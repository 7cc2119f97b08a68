// `orthogonalize` against its definition: shapes, dtypes, strides and the edges of range.

#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <muon/orthogonalize.h>

#include "support/reference.h"

namespace muon::testing {
namespace {

using Sizes = std::vector<std::int64_t>;

// What rounding may cost on Gaussian matrices (the spectra that make the forms differ are the
// stability suite's): singular values move by some eps and the result by that times the slope of
// the polynomial. Without restart a Gram matrix takes more, by what its run multiplies it by.
double tolerance(at::ScalarType dtype, const OrthogonalizeOptions& options = {}) {
  const double eps = c10::toRealValueType(dtype) == at::kDouble
      ? std::numeric_limits<double>::epsilon()
      : static_cast<double>(std::numeric_limits<float>::epsilon());
  return (options.form == Form::Gram ? 500.0 : 5.0) * steepest_slope(options.schedule) * eps;
}

// --- values --------------------------------------------------------------------------------------

class EverySchedule : public ::testing::TestWithParam<std::string> {
 protected:
  // Every form in float64 and float32; the decomposition is what takes time.
  static void expect_exact(const at::Tensor& x) {
    for (const at::ScalarType dtype : {at::kDouble, at::kFloat}) {
      const at::Tensor input = x.to(dtype);
      OrthogonalizeOptions options = schedule_options(GetParam());
      const at::Tensor expected = exact_orthogonalize(input, options);
      for (const Form form : {Form::Auto, Form::Standard, Form::Gram, Form::GramXRestart}) {
        options.form = form;
        const at::Tensor got = orthogonalize(input, options);
        ASSERT_EQ(got.sizes(), x.sizes());
        ASSERT_EQ(got.scalar_type(), dtype);
        EXPECT_LE(relative_error(got, expected), tolerance(dtype, options))
            << x.sizes() << " " << dtype << " form " << static_cast<int>(form);
      }
    }
  }
};

TEST_P(EverySchedule, A5_every_small_shape) {
  for (std::int64_t n = 1; n <= 18; ++n) {
    for (const std::int64_t m : {n, n + 1, 2 * n + 3, std::int64_t{33}}) {
      expect_exact(random_tensor({n, m}));
      expect_exact(random_tensor({m, n}));
    }
  }
}

TEST_P(EverySchedule, A5_larger_shapes_and_their_neighbours) {
  const std::vector<Sizes> shapes = {{63, 65},   {64, 64}, {65, 64}, {64, 200}, {129, 128},
                                     {131, 140}, {1, 500}, {500, 1}, {2, 333}};
  for (const Sizes& sizes : shapes) {
    expect_exact(random_tensor(sizes));
  }
}

INSTANTIATE_TEST_SUITE_P(
    schedules, EverySchedule, ::testing::ValuesIn(schedule_names()),
    [](const auto& test) { return test.param; });

TEST(Orthogonalize, A20_a_row_vector_shrinks_to_0_6964) {
  const at::Tensor got = orthogonalize(at::tensor({3.0, 4.0}, at::kDouble).reshape({1, 2}));
  EXPECT_NEAR(got[0][0].item<double>(), 0.41786, 5e-6);
  EXPECT_NEAR(got[0][1].item<double>(), 0.55715, 5e-6);
}

TEST(Orthogonalize, a_known_spectrum_goes_through_the_polynomial) {
  const at::Tensor sigma = at::tensor({0.8, 0.5, 0.25, 0.1, 0.01}, at::kDouble);
  const at::Tensor x = with_spectrum(5, 9, sigma);
  const OrthogonalizeOptions options;
  const at::Tensor got = orthogonalize(x, options);
  at::Tensor y = sigma / sigma.norm();
  for (const auto& [a, b, c] : options.schedule.coefficients) {
    y = a * y + b * y.pow(3) + c * y.pow(5);
  }
  EXPECT_LE(relative_error(got, with_spectrum(5, 9, y)), 1e-12);
}

// --- range and eps -------------------------------------------------------------------------------

TEST(Orthogonalize, A8_a_power_of_two_changes_no_bit) {
  const at::Tensor x = random_tensor({30, 50}).to(at::kFloat);
  const at::Tensor expected = orthogonalize(x);
  for (const double scale : {0x1p-10, 0x1p7, 0x1p60}) {
    EXPECT_TRUE(at::equal(orthogonalize(x * scale), expected)) << scale;
  }
  EXPECT_LE(relative_error(orthogonalize(x * 100.0), expected), tolerance(at::kFloat));
}

TEST(Orthogonalize, entries_at_the_edges_of_the_range) {
  OrthogonalizeOptions options;
  options.eps = 0.0;
  const at::Tensor x = random_tensor({30, 50});
  const at::Tensor expected = exact_orthogonalize(x, options);
  struct Edge {
    at::ScalarType dtype;
    double scale;
    double bound;
  };
  // below the smallest normal number entries lose bits: 1e-38 / 2^-149 has 23 of them left
  const std::vector<Edge> edges = {
      {at::kFloat, 1e38 / 8, 1e-4}, {at::kFloat, 1e-38, 1e-4},    {at::kFloat, 1e-30, 1e-4},
      {at::kDouble, 1e300, 1e-11},  {at::kDouble, 1e-300, 1e-11}, {at::kBFloat16, 1e38 / 8, 0.03},
      {at::kBFloat16, 1e-37, 0.03}, {at::kHalf, 8000.0, 0.01},
  };
  for (const auto& [dtype, scale, bound] : edges) {
    const at::Tensor got = orthogonalize((x * scale).to(dtype), options);
    EXPECT_LE(relative_error(got, expected), bound) << dtype << " " << scale;
  }
}

TEST(Orthogonalize, eps_bounds_the_norm_from_below) {
  OrthogonalizeOptions options;
  options.eps = 1e-3;
  const at::Tensor x = random_tensor({6, 10});
  for (const double scale : {1.0, 1e-4, 1e-6, 1e-20}) {
    for (const Normalization normalization : {Normalization::Clamp, Normalization::Add}) {
      options.schedule.normalization = normalization;
      const at::Tensor got = orthogonalize(x * scale, options);
      EXPECT_LE(relative_error(got, exact_orthogonalize(x * scale, options)), 1e-11) << scale;
    }
  }
}

TEST(Orthogonalize, without_eps_zero_stays_zero) {
  OrthogonalizeOptions options;
  options.eps = 0.0;
  for (const Normalization normalization : {Normalization::Clamp, Normalization::Add}) {
    options.schedule.normalization = normalization;
    EXPECT_TRUE(orthogonalize(at::zeros({4, 6}), options).eq(0).all().item<bool>());
  }
}

// --- dtypes --------------------------------------------------------------------------------------

TEST(Orthogonalize, A2_half_precision_in_and_out_costs_one_rounding) {
  const at::Tensor x = random_tensor({40, 70});
  for (const at::ScalarType dtype : {at::kHalf, at::kBFloat16}) {
    const at::Tensor input = x.to(dtype);
    const at::Tensor got = orthogonalize(input);
    EXPECT_EQ(got.scalar_type(), dtype);
    const double bound = dtype == at::kHalf ? 0x1p-11 : 0x1p-8;
    EXPECT_LE(relative_error(got, exact_orthogonalize(input, {})), bound + 1e-4) << dtype;
  }
}

TEST(Orthogonalize, A6_compute_dtype_decides_the_error) {
  const at::Tensor x = random_tensor({40, 70}).to(at::kFloat);
  const at::Tensor expected = exact_orthogonalize(x, {});
  struct Choice {
    at::ScalarType dtype;
    double bound;
  };
  const std::vector<Choice> choices = {
      {at::kDouble, 0x1p-23},
      {at::kFloat, 1e-4},
      {at::kHalf, 0.01},
      {at::kBFloat16, 0.06},
  };
  for (const auto& [dtype, bound] : choices) {
    OrthogonalizeOptions options;
    options.compute_dtype = dtype;
    const at::Tensor got = orthogonalize(x, options);
    EXPECT_EQ(got.scalar_type(), at::kFloat);
    EXPECT_LE(relative_error(got, expected), bound) << dtype;
  }
}

TEST(Orthogonalize, A9_complex_matrices) {
  for (const auto& sizes : {Sizes{6, 6}, {5, 9}, {9, 5}, {70, 90}, {1, 4}, {3, 5, 7}}) {
    for (const at::ScalarType dtype : {at::kComplexDouble, at::kComplexFloat}) {
      const at::Tensor x = random_tensor(sizes, true).to(dtype);
      const at::Tensor got = orthogonalize(x);
      EXPECT_EQ(got.scalar_type(), dtype);
      EXPECT_LE(relative_error(got, exact_orthogonalize(x, {})), tolerance(dtype)) << x.sizes();
    }
  }
}

TEST(Orthogonalize, A9_complex_result_follows_unitary_rotations) {
  const at::Tensor x = random_tensor({6, 9}, true);
  const at::Tensor u = std::get<0>(at::linalg_qr(random_tensor({6, 6}, true, 3)));
  const at::Tensor v = std::get<0>(at::linalg_qr(random_tensor({9, 9}, true, 4)));
  const auto rotated = [&](const at::Tensor& y) { return at::matmul(at::matmul(u, y), v); };
  EXPECT_LE(relative_error(orthogonalize(rotated(x)), rotated(orthogonalize(x))), 1e-12);
}

TEST(Orthogonalize, a_complex_dim_is_a_complex_matrix) {
  MatrixLayout layout;
  layout.complex_dim = true;
  const at::Tensor x = random_tensor({5, 9}, true);
  const at::Tensor got = orthogonalize(at::view_as_real(x), {}, layout);
  EXPECT_LE(relative_error(at::view_as_complex(got), orthogonalize(x)), 1e-14);
}

TEST(Orthogonalize, conjugate_and_negative_views) {
  const at::Tensor x = random_tensor({5, 9}, true);
  const at::Tensor lazy = x.mH();
  ASSERT_TRUE(lazy.is_conj());
  EXPECT_TRUE(at::equal(orthogonalize(lazy), orthogonalize(lazy.resolve_conj().contiguous())));
  const at::Tensor negative = at::imag(x.conj());
  ASSERT_TRUE(negative.is_neg());
  EXPECT_TRUE(at::equal(orthogonalize(negative), orthogonalize(negative.resolve_neg())));
}

// --- memory --------------------------------------------------------------------------------------

TEST(Orthogonalize, any_strides_give_the_same_bits) {
  const at::Tensor base = random_tensor({3, 40, 60}).to(at::kFloat);
  const at::Tensor views[] = {
      base.transpose(1, 2),       base.permute({1, 0, 2}),
      base.slice(1, 5, 37, 2),    base.slice(2, 3, 50, 3),
      base[1].slice(0, 1),        base[0].expand({4, 40, 60}),
      base[0][0].expand({7, 60}), base[0].slice(1, 0, 1).expand({40, 9}),
  };
  for (const at::Tensor& view : views) {
    const at::Tensor copy = view.clone(at::MemoryFormat::Contiguous);
    const at::Tensor got = orthogonalize(view);
    EXPECT_TRUE(at::equal(got, orthogonalize(copy))) << view.sizes() << " " << view.strides();
    EXPECT_TRUE(at::equal(view, copy)) << "the input changed";
  }
}

TEST(Orthogonalize, B1_channels_last_and_flatten) {
  MatrixLayout layout;
  layout.flatten = true;
  const at::Tensor x = random_tensor({16, 8, 3, 3}).to(at::kFloat);
  const at::Tensor expected = orthogonalize(x.reshape({16, 72})).reshape(x.sizes());
  EXPECT_TRUE(at::equal(orthogonalize(x, {}, layout), expected));
  const at::Tensor channels_last = x.contiguous(at::MemoryFormat::ChannelsLast);
  EXPECT_TRUE(at::equal(orthogonalize(channels_last, {}, layout), expected));
}

TEST(Orthogonalize, B20_transposed_storage) {
  MatrixLayout layout;
  layout.rows = {1};
  layout.cols = {0};
  const at::Tensor x = random_tensor({12, 20}).to(at::kFloat);
  EXPECT_LE(relative_error(orthogonalize(x, {}, layout), orthogonalize(x)), tolerance(at::kFloat));
}

TEST(Orthogonalize, B16_blocks_are_matrices_of_their_own) {
  MatrixLayout layout;
  layout.split_sizes = {5, 3, 4};
  const at::Tensor x = random_tensor({12, 20}).to(at::kFloat);
  const at::Tensor got = orthogonalize(x, {}, layout);
  std::int64_t first = 0;
  for (const std::int64_t height : layout.split_sizes) {
    const at::Tensor block = x.narrow(0, first, height);
    EXPECT_TRUE(at::equal(got.narrow(0, first, height), orthogonalize(block))) << first;
    first += height;
  }
}

TEST(Orthogonalize, no_graph_is_recorded) {
  const at::Tensor x = random_tensor({4, 6}).requires_grad_(true);
  EXPECT_FALSE(orthogonalize(x).requires_grad());
}

// --- errors --------------------------------------------------------------------------------------

template <typename Error>
std::string refusal(const at::Tensor& x, const OrthogonalizeOptions& options = {}) {
  try {
    static_cast<void>(orthogonalize(x, options));
  } catch (const Error& error) {
    return error.what();
  }
  ADD_FAILURE() << "no such error for " << x.scalar_type() << x.sizes();
  return "";
}

TEST(Orthogonalize, wrong_inputs_are_refused) {
  EXPECT_NE(refusal<c10::TypeError>(at::zeros({2, 2}, at::kInt)).find("Int"), std::string::npos);
  refusal<c10::ValueError>(at::zeros({4}));
  refusal<c10::ValueError>(at::zeros({}));
  OrthogonalizeOptions options;
  options.eps = -1.0;
  EXPECT_NE(refusal<c10::ValueError>(at::zeros({2, 2}), options).find("-1"), std::string::npos);
  options.eps = std::numeric_limits<double>::quiet_NaN();
  refusal<c10::ValueError>(at::zeros({2, 2}), options);
  options = {};
  options.steps = -1;
  refusal<c10::ValueError>(at::zeros({2, 2}), options);
}

} // namespace
} // namespace muon::testing
