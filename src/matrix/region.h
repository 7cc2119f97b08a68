#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include <muon/matrix.h>

namespace muon::detail {

/// A batch of equal matrices inside a tensor, independent of its strides.
/// Complex tensors are seen through their real view, whose last dim has size 2.
struct Region {
  std::vector<std::int64_t> dims; // tensor dims of the view after its batch dim
  std::vector<std::int64_t> sizes; // their extents in this region
  std::int64_t batch_dim = -1; // the view's dim 0; -1: a single matrix
  std::vector<std::int64_t> start; // first index along every tensor dim
  MatrixShape shape; // in elements (complex numbers count once)
  bool is_complex = false; // the view ends with a dim of size 2

  // Where the block's statistics sit in a [batch..., rows, k] buffer.
  std::int64_t first_row = 0;
  std::int64_t column_block = 0;
  std::vector<std::int64_t> batch_index; // along all batch dims but the last
  std::size_t split = 0; // which block of the split side this is
};

/// Which tensor dims are the two sides of the matrices, and how they are split.
struct Sides {
  std::vector<std::int64_t> batch, rows, cols;
  std::vector<std::int64_t> row_blocks, col_blocks; // extents; one: not split
};

/// ValueError naming `name` where the layout does not fit.
Sides resolve_sides(
    at::IntArrayRef sizes, bool is_complex, const MatrixLayout& layout, std::string_view name);

/// A tensor as one matrix whose rows are dim 0, whatever its dims: how
/// elementwise algorithms see a parameter.
Region whole_region(at::IntArrayRef sizes, bool is_complex);

/// The regions of a tensor of shape `sizes` in block order; ValueError naming
/// `name` where the layout does not fit. `is_complex`: the dtype is complex.
std::vector<Region> resolve_regions(
    at::IntArrayRef sizes, bool is_complex, const MatrixLayout& layout, std::string_view name);

/// [batch dims..., rows, column blocks]: the shape of per-row statistics.
std::vector<std::int64_t> row_statistics_sizes(
    at::IntArrayRef sizes, const MatrixLayout& layout, std::string_view name);

/// Matrices first .. first + count of a region: [count, rows..., cols..., (2)]
/// over the tensor's own storage, real dtype.
at::Tensor region_view(
    const at::Tensor& tensor, const Region& region, std::int64_t first, std::int64_t count);

/// The same matrices' rows in a statistics buffer: [count, rows, 1].
at::Tensor row_statistics_view(
    const at::Tensor& statistics, const Region& region, std::int64_t first, std::int64_t count);

} // namespace muon::detail
