// How a parameter is a batch of matrices, and the learning-rate factor of a matrix.

#include <cmath>
#include <string>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <muon/matrix.h>

namespace muon {
namespace {

using Sizes = std::vector<std::int64_t>;
using Shapes = std::vector<MatrixShape>;

} // namespace

void PrintTo(const MatrixShape& shape, std::ostream* out) {
  *out << "[" << shape.batch << ", " << shape.rows << ", " << shape.cols << "]";
}

namespace {

Shapes shapes(const Sizes& sizes, const MatrixLayout& layout = {}) {
  return matrix_shapes(sizes, layout, "weight");
}

// The text of the ValueError, which must name the parameter.
std::string refusal(const Sizes& sizes, const MatrixLayout& layout = {}) {
  try {
    static_cast<void>(matrix_shapes(sizes, layout, "blocks.3.weight"));
  } catch (const c10::ValueError& error) {
    EXPECT_NE(std::string(error.what()).find("blocks.3.weight"), std::string::npos) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "no error for sizes " << c10::IntArrayRef(sizes);
  return "";
}

TEST(Matrix, a_2d_parameter_is_one_matrix) {
  EXPECT_EQ(shapes({4, 6}), Shapes({{1, 4, 6}}));
}

TEST(Matrix, B1_flatten_takes_all_dims_but_the_first_as_columns) {
  MatrixLayout layout;
  layout.flatten = true;
  EXPECT_EQ(shapes({16, 8, 3, 3}, layout), Shapes({{1, 16, 72}}));
  EXPECT_EQ(shapes({256, 1, 3, 3}, layout), Shapes({{1, 256, 9}}));
  EXPECT_EQ(shapes({4, 6}, layout), Shapes({{1, 4, 6}}));
}

TEST(Matrix, B13_batch_dims_make_a_batch) {
  MatrixLayout layout;
  layout.batch_dims = 1;
  EXPECT_EQ(shapes({8, 4, 6}, layout), Shapes({{8, 4, 6}}));
  EXPECT_EQ(shapes({8, 4, 6, 2}, layout), Shapes({{8, 4, 12}}));
  layout.batch_dims = 2;
  EXPECT_EQ(shapes({3, 8, 4, 6}, layout), Shapes({{24, 4, 6}}));
  layout.batch_dims = 0;
  EXPECT_EQ(shapes({4, 6}, layout), Shapes({{1, 4, 6}}));
}

TEST(Matrix, rows_and_cols_name_dims_and_the_rest_is_batch) {
  MatrixLayout layout;
  layout.rows = {1};
  layout.cols = {0, 3};
  EXPECT_EQ(shapes({2, 5, 7, 3}, layout), Shapes({{7, 5, 6}}));
  layout.rows = {-2};
  layout.cols = {-1};
  EXPECT_EQ(shapes({2, 5, 7, 3}, layout), Shapes({{10, 7, 3}}));
}

TEST(Matrix, B20_rows_1_cols_0_is_transposed_storage) {
  MatrixLayout layout;
  layout.rows = {1};
  layout.cols = {0};
  EXPECT_EQ(shapes({2, 4}, layout), Shapes({{1, 4, 2}}));
}

TEST(Matrix, one_of_rows_and_cols_implies_the_other) {
  MatrixLayout layout;
  layout.rows = {1};
  EXPECT_EQ(shapes({8, 16, 3, 3}, layout), Shapes({{1, 16, 72}}));
}

TEST(Matrix, complex_dim_is_no_dim_of_the_matrix) {
  MatrixLayout layout;
  layout.complex_dim = true;
  EXPECT_EQ(shapes({4, 6, 2}, layout), Shapes({{1, 4, 6}}));
  layout.batch_dims = 1;
  EXPECT_EQ(shapes({3, 4, 6, 2}, layout), Shapes({{3, 4, 6}}));
}

TEST(Matrix, B16_split_sizes_are_blocks_of_rows_in_order) {
  MatrixLayout layout;
  layout.split_sizes = {4, 1, 1};
  EXPECT_EQ(shapes({6, 5}, layout), Shapes({{1, 4, 5}, {1, 1, 5}, {1, 1, 5}}));
  layout.split_dim = 1;
  EXPECT_EQ(shapes({5, 6}, layout), Shapes({{1, 5, 4}, {1, 5, 1}, {1, 5, 1}}));
}

TEST(Matrix, B16_a_batch_of_split_matrices) {
  MatrixLayout layout;
  layout.batch_dims = 1;
  layout.split_sizes = {4, 2};
  EXPECT_EQ(shapes({3, 6, 5}, layout), Shapes({{3, 4, 5}, {3, 2, 5}}));
}

TEST(Matrix, B18_num_heads_are_equal_blocks) {
  MatrixLayout layout;
  layout.num_heads = 3;
  EXPECT_EQ(shapes({6, 5}, layout), Shapes({{1, 2, 5}, {1, 2, 5}, {1, 2, 5}}));
}

TEST(Matrix, B22_empty_parameters_have_empty_matrices) {
  EXPECT_EQ(shapes({0, 5}), Shapes({{1, 0, 5}}));
  EXPECT_EQ(shapes({5, 0}), Shapes({{1, 5, 0}}));
  MatrixLayout layout;
  layout.batch_dims = 1;
  EXPECT_EQ(shapes({0, 3, 4}, layout), Shapes({{0, 3, 4}}));
}

TEST(Matrix, three_dims_need_a_choice) {
  const std::string text = refusal({2, 3, 4});
  EXPECT_NE(text.find("Muon only supports 2D parameters"), std::string::npos) << text;
  for (const char* way_out : {"rows", "cols", "flatten", "batch_dims"}) {
    EXPECT_NE(text.find(way_out), std::string::npos) << text;
  }
}

TEST(Matrix, B9_fewer_than_two_dims_are_refused) {
  EXPECT_NE(refusal({7}).find("adamw"), std::string::npos);
  refusal({});
  MatrixLayout layout;
  layout.flatten = true;
  refusal({7}, layout);
}

TEST(Matrix, two_choices_at_once_are_refused) {
  MatrixLayout layout;
  layout.flatten = true;
  layout.batch_dims = 1;
  refusal({2, 3, 4}, layout);
  layout = {};
  layout.rows = {0};
  layout.flatten = true;
  refusal({2, 3, 4}, layout);
}

TEST(Matrix, bad_dims_are_refused) {
  MatrixLayout layout;
  layout.rows = {0};
  layout.cols = {0};
  refusal({2, 3}, layout);
  layout.cols = {3};
  EXPECT_NE(refusal({2, 3}, layout).find("3"), std::string::npos);
  layout.rows = {0, 1};
  layout.cols = {};
  refusal({2, 3}, layout);
  layout = {};
  layout.batch_dims = 2;
  refusal({2, 3, 4}, layout);
}

TEST(Matrix, B16_split_sizes_must_be_positive_and_add_up) {
  MatrixLayout layout;
  layout.split_sizes = {4, 1};
  const std::string text = refusal({6, 5}, layout);
  EXPECT_NE(text.find("must sum to dim 0"), std::string::npos) << text;
  layout.split_sizes = {6};
  EXPECT_NE(refusal({6, 5}, layout).find("at least 2"), std::string::npos);
  for (const Sizes& sizes : {Sizes{6, 0}, Sizes{7, -1}}) {
    layout.split_sizes = sizes;
    EXPECT_NE(refusal({6, 5}, layout).find("positive integers"), std::string::npos);
  }
}

TEST(Matrix, B18_num_heads_must_divide_the_rows) {
  MatrixLayout layout;
  for (const std::int64_t heads : {std::int64_t{4}, std::int64_t{-1}}) {
    layout.num_heads = heads;
    refusal({6, 5}, layout);
  }
  layout.num_heads = 2;
  layout.split_sizes = {3, 3};
  refusal({6, 5}, layout);
}

TEST(Matrix, blocks_stay_within_the_leading_dim_of_a_side) {
  MatrixLayout layout;
  layout.rows = {0, 1};
  layout.cols = {2};
  layout.split_sizes = {6, 2};
  EXPECT_EQ(shapes({4, 2, 5}, layout), Shapes({{1, 6, 5}, {1, 2, 5}}));
  layout.split_sizes = {5, 3};
  refusal({4, 2, 5}, layout);
}

TEST(Matrix, complex_dim_must_have_size_two) {
  MatrixLayout layout;
  layout.complex_dim = true;
  refusal({4, 6, 3}, layout);
}

TEST(Matrix, D1_D3_shape_factors) {
  struct Row {
    std::int64_t rows, cols;
    double original, match_rms, spectral;
  };
  const std::vector<Row> table = {
      {4, 4, 1.0, 0.4, 1.0},      {1024, 256, 2.0, 6.4, 2.0},
      {256, 1024, 1.0, 6.4, 0.5}, {256, 9, 16.0 / 3.0, 3.2, 16.0 / 3.0},
      {1, 4, 1.0, 0.4, 0.5},      {4, 1, 2.0, 0.4, 2.0},
  };
  for (const auto& [rows, cols, original, match_rms, spectral] : table) {
    EXPECT_DOUBLE_EQ(shape_factor(AdjustLr::Original, rows, cols), original);
    EXPECT_DOUBLE_EQ(shape_factor(AdjustLr::MatchRmsAdamw, rows, cols), match_rms);
    EXPECT_DOUBLE_EQ(shape_factor(AdjustLr::SpectralUnclamped, rows, cols), spectral);
    EXPECT_DOUBLE_EQ(shape_factor(AdjustLr::Unscaled, rows, cols), 1.0);
  }
}

TEST(Matrix, D1_an_empty_matrix_has_factor_1) {
  for (const AdjustLr mode :
       {AdjustLr::Original, AdjustLr::MatchRmsAdamw, AdjustLr::SpectralUnclamped}) {
    EXPECT_EQ(shape_factor(mode, 0, 5), 1.0);
    EXPECT_EQ(shape_factor(mode, 5, 0), 1.0);
  }
}

} // namespace
} // namespace muon
