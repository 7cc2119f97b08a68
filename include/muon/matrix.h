#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include <muon/export.h>

namespace muon {

/// How a parameter of any number of dimensions is a batch of matrices.
///
/// A 2D parameter is one matrix by default; three or more dimensions need an
/// explicit choice through `rows`/`cols`, `flatten` or `batch_dims`. Dims may
/// be negative. Dims in neither `rows` nor `cols` are batch dims.
struct MUON_API MatrixLayout {
  std::vector<std::int64_t> rows; ///< dims that make the rows
  std::vector<std::int64_t> cols; ///< dims that make the columns
  bool flatten = false; ///< rows = dim 0, columns = all other dims
  std::int64_t batch_dims = -1; ///< first k dims are batch; -1: not given
  bool complex_dim = false; ///< real tensor, last dim holds (real, imaginary)

  /// Sizes of the blocks along `split_dim` that are matrices of their own;
  /// they must add up to that side. Empty: the matrix is whole.
  std::vector<std::int64_t> split_sizes;
  std::int64_t num_heads = 0; ///< this many equal blocks instead; 0: none
  std::int64_t split_dim = 0; ///< 0: blocks of rows, 1: blocks of columns

  bool operator==(const MatrixLayout&) const = default;
};

/// One batch of equal matrices inside a parameter: [batch, rows, cols].
struct MUON_API MatrixShape {
  std::int64_t batch = 1;
  std::int64_t rows = 0;
  std::int64_t cols = 0;
  bool operator==(const MatrixShape&) const = default;
};

/// The matrices that a parameter of shape `sizes` holds, one entry a block (in
/// order) when the layout splits it, else one entry in all. Throws ValueError
/// naming `name` if the layout does not fit the shape.
MUON_API std::vector<MatrixShape> matrix_shapes(
    at::IntArrayRef sizes, const MatrixLayout& layout, std::string_view name);

/// Factor on the learning rate that depends on a matrix's shape.
enum class AdjustLr : std::uint8_t {
  Original, ///< sqrt(max(1, rows/cols)), KellerJordan/Muon and torch's default
  MatchRmsAdamw, ///< 0.2 sqrt(max(rows, cols)), Moonlight: AdamW's lr fits
  SpectralUnclamped, ///< sqrt(rows/cols)
  Unscaled, ///< 1
};

/// The factor of `mode` for a rows x cols matrix; 1 for an empty matrix.
MUON_API double shape_factor(AdjustLr mode, std::int64_t rows, std::int64_t cols);

} // namespace muon
