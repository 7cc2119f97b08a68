#include "matrix/region.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include <ATen/core/DimVector.h>
#include <ATen/ops/view_as_real.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

namespace muon::detail {
namespace {

using Dims = std::vector<std::int64_t>;

std::int64_t extent(at::IntArrayRef sizes, const Dims& dims) {
  return std::accumulate(
      dims.begin(), dims.end(), std::int64_t{1}, [&](std::int64_t product, std::int64_t dim) {
        return product * sizes[static_cast<std::size_t>(dim)];
      });
}

Dims range(std::int64_t begin, std::int64_t end) {
  Dims dims(static_cast<std::size_t>(std::max<std::int64_t>(0, end - begin)));
  std::iota(dims.begin(), dims.end(), begin);
  return dims;
}

Dims normalize_dims(
    const Dims& dims, std::int64_t ndim, const char* option, std::string_view name) {
  Dims result;
  for (const std::int64_t dim : dims) {
    TORCH_CHECK_VALUE(
        dim >= -ndim && dim < ndim, "muon: expected ", option, " to hold dims of a tensor with ",
        ndim, " matrix dims, got ", dim, " (", name, ")");
    result.push_back(dim < 0 ? dim + ndim : dim);
  }
  return result;
}

Dims all_but(std::int64_t ndim, const Dims& taken) {
  Dims rest;
  for (const std::int64_t dim : range(0, ndim)) {
    if (std::find(taken.begin(), taken.end(), dim) == taken.end()) {
      rest.push_back(dim);
    }
  }
  return rest;
}

Sides explicit_sides(const MatrixLayout& layout, std::int64_t ndim, std::string_view name) {
  Sides sides;
  sides.rows = normalize_dims(layout.rows, ndim, "rows", name);
  sides.cols = normalize_dims(layout.cols, ndim, "cols", name);
  if (sides.rows.empty()) {
    sides.rows = all_but(ndim, sides.cols);
  } else if (sides.cols.empty()) {
    sides.cols = all_but(ndim, sides.rows);
  }
  Dims taken = sides.rows;
  taken.insert(taken.end(), sides.cols.begin(), sides.cols.end());
  std::sort(taken.begin(), taken.end());
  TORCH_CHECK_VALUE(
      std::adjacent_find(taken.begin(), taken.end()) == taken.end(),
      "muon: expected every dim in rows or cols at most once, got rows=", layout.rows,
      ", cols=", layout.cols, " (", name, ")");
  TORCH_CHECK_VALUE(
      !sides.rows.empty() && !sides.cols.empty(),
      "muon: expected at least one dim each for rows and cols, got rows=", layout.rows,
      ", cols=", layout.cols, " for ", ndim, " dims (", name, ")");
  sides.batch = all_but(ndim, taken);
  return sides;
}

Sides batch_dims_sides(const MatrixLayout& layout, std::int64_t ndim, std::string_view name) {
  TORCH_CHECK_VALUE(
      layout.batch_dims <= ndim - 2,
      "muon: expected batch_dims to leave at least two dims for the matrix, got batch_dims=",
      layout.batch_dims, " for ", ndim, " dims (", name, ")");
  Sides sides;
  sides.batch = range(0, layout.batch_dims);
  sides.rows = {layout.batch_dims};
  sides.cols = range(layout.batch_dims + 1, ndim);
  return sides;
}

Sides resolve_dims(const MatrixLayout& layout, at::IntArrayRef sizes, std::string_view name) {
  const auto ndim = static_cast<std::int64_t>(sizes.size());
  TORCH_CHECK_VALUE(
      ndim >= 2, "muon: expected a parameter with at least 2 dims to take as matrices, got shape ",
      sizes, " (", name, "); give it to an elementwise algorithm, algorithm=\"adamw\"");
  const bool by_dims = !layout.rows.empty() || !layout.cols.empty();
  const int choices = int{by_dims} + int{layout.flatten} + int{layout.batch_dims >= 0};
  TORCH_CHECK_VALUE(
      choices <= 1, "muon: expected one of rows/cols, flatten and batch_dims, got ", choices,
      " of them (", name, ")");
  if (by_dims) {
    return explicit_sides(layout, ndim, name);
  }
  if (layout.flatten) {
    return {{}, {0}, range(1, ndim), {}, {}};
  }
  if (layout.batch_dims >= 0) {
    return batch_dims_sides(layout, ndim, name);
  }
  TORCH_CHECK_VALUE(
      ndim == 2, "Muon only supports 2D parameters whereas we found a parameter with size: ", sizes,
      " (", name,
      "); say how it is matrices: rows=(...) and cols=(...), flatten=True (rows = dim 0, columns = the "
      "rest) or batch_dims=k (the first k dims are a batch)");
  return {{}, {0}, {1}, {}, {}};
}

// Extents of the blocks along the split side; one entry when nothing is split.
Dims block_sizes(const MatrixLayout& layout, std::int64_t side, std::string_view name) {
  const char* what = layout.split_dim == 0 ? "rows" : "columns";
  TORCH_CHECK_VALUE(
      layout.split_dim == 0 || layout.split_dim == 1,
      "muon: expected split_dim 0 (blocks of rows) or 1 (blocks of columns), got ",
      layout.split_dim, " (", name, ")");
  TORCH_CHECK_VALUE(
      layout.split_sizes.empty() || layout.num_heads == 0,
      "muon: expected split_sizes or num_heads, got both (", name, ")");
  if (layout.num_heads != 0) {
    TORCH_CHECK_VALUE(
        layout.num_heads > 0 && side % layout.num_heads == 0,
        "muon: expected num_heads to divide the ", side, " ", what,
        ", got num_heads=", layout.num_heads, " (", name, ")");
    return Dims(static_cast<std::size_t>(layout.num_heads), side / layout.num_heads);
  }
  if (layout.split_sizes.empty()) {
    return {side};
  }
  TORCH_CHECK_VALUE(
      layout.split_sizes.size() >= 2,
      "muon: expected split_sizes with at least 2 block sizes, got ", layout.split_sizes, " (",
      name, ")");
  for (const std::int64_t size : layout.split_sizes) {
    TORCH_CHECK_VALUE(
        size > 0, "muon: expected split_sizes to be positive integers, got ", layout.split_sizes,
        " (", name, ")");
  }
  const std::int64_t sum =
      std::accumulate(layout.split_sizes.begin(), layout.split_sizes.end(), std::int64_t{0});
  TORCH_CHECK_VALUE(
      sum == side, "muon: split_sizes must sum to dim ", layout.split_dim, " of the matrix, ", side,
      " ", what, ", got ", layout.split_sizes, " with sum ", sum, " (", name, ")");
  return layout.split_sizes;
}

// Narrows the first dim of the split side to one block.
void narrow(
    Region& region, at::IntArrayRef sizes, const Dims& side_dims, std::size_t position,
    std::int64_t first, std::int64_t length, std::string_view name) {
  const Dims inner(side_dims.begin() + 1, side_dims.end());
  const std::int64_t unit = extent(sizes, inner);
  TORCH_CHECK_VALUE(
      unit > 0 && first % unit == 0 && length % unit == 0,
      "muon: expected blocks that are multiples of the ", unit,
      " entries of the side's inner dims, got a block of ", length, " at ", first, " (", name, ")");
  region.start[static_cast<std::size_t>(side_dims.front())] = first / unit;
  region.sizes[position] = length / unit;
}

// Calls `visit` with every index over all batch dims but the last.
void for_each_outer_batch(
    at::IntArrayRef sizes, const Dims& batch, const std::function<void(const Dims&)>& visit) {
  const Dims outer(batch.begin(), batch.empty() ? batch.end() : batch.end() - 1);
  const std::int64_t count = extent(sizes, outer);
  for (std::int64_t linear = 0; linear < count; ++linear) {
    Dims index(outer.size());
    std::int64_t rest = linear;
    for (std::size_t i = outer.size(); i-- > 0;) {
      const std::int64_t size = sizes[static_cast<std::size_t>(outer[i])];
      index[i] = rest % size;
      rest /= size;
    }
    visit(index);
  }
}

at::IntArrayRef matrix_sizes(
    at::IntArrayRef sizes, const MatrixLayout& layout, bool is_complex, std::string_view name) {
  if (!layout.complex_dim) {
    return sizes;
  }
  TORCH_CHECK_VALUE(
      !is_complex && !sizes.empty() && sizes.back() == 2,
      "muon: expected complex_dim on a real tensor whose last dim has size 2, got shape ", sizes,
      is_complex ? " of a complex dtype (" : " (", name, ")");
  return sizes.slice(0, sizes.size() - 1);
}

} // namespace

Sides resolve_sides(
    at::IntArrayRef all_sizes, bool is_complex, const MatrixLayout& layout, std::string_view name) {
  const at::IntArrayRef sizes = matrix_sizes(all_sizes, layout, is_complex, name);
  Sides sides = resolve_dims(layout, sizes, name);
  const std::int64_t rows = extent(sizes, sides.rows);
  const std::int64_t cols = extent(sizes, sides.cols);
  const bool by_rows = layout.split_dim == 0;
  const Dims blocks = block_sizes(layout, by_rows ? rows : cols, name);
  sides.row_blocks = by_rows ? blocks : Dims{rows};
  sides.col_blocks = by_rows ? Dims{cols} : blocks;
  return sides;
}

std::vector<Region> resolve_regions(
    at::IntArrayRef all_sizes, bool is_complex, const MatrixLayout& layout, std::string_view name) {
  const at::IntArrayRef sizes = matrix_sizes(all_sizes, layout, is_complex, name);
  const Sides sides = resolve_sides(all_sizes, is_complex, layout, name);
  const std::int64_t rows = extent(sizes, sides.rows);
  const std::int64_t cols = extent(sizes, sides.cols);
  const bool by_rows = layout.split_dim == 0;
  const Dims& blocks = by_rows ? sides.row_blocks : sides.col_blocks;

  Region whole;
  whole.is_complex = is_complex || layout.complex_dim;
  whole.dims = sides.rows;
  whole.dims.insert(whole.dims.end(), sides.cols.begin(), sides.cols.end());
  for (const std::int64_t dim : whole.dims) {
    whole.sizes.push_back(sizes[static_cast<std::size_t>(dim)]);
  }
  if (whole.is_complex) {
    whole.dims.push_back(static_cast<std::int64_t>(sizes.size()));
    whole.sizes.push_back(2);
  }
  whole.batch_dim = sides.batch.empty() ? -1 : sides.batch.back();
  whole.start.assign(sizes.size() + (whole.is_complex ? 1 : 0), 0);
  whole.shape = {
      sides.batch.empty() ? 1 : sizes[static_cast<std::size_t>(sides.batch.back())], rows, cols};

  std::vector<Region> regions;
  std::int64_t first = 0;
  for (std::size_t b = 0; b < blocks.size(); ++b) {
    Region block = whole;
    block.split = b;
    if (blocks.size() > 1) {
      const Dims& side = by_rows ? sides.rows : sides.cols;
      narrow(block, sizes, side, by_rows ? 0 : sides.rows.size(), first, blocks[b], name);
      (by_rows ? block.shape.rows : block.shape.cols) = blocks[b];
      (by_rows ? block.first_row : block.column_block) =
          by_rows ? first : static_cast<std::int64_t>(b);
    }
    first += blocks[b];
    for_each_outer_batch(sizes, sides.batch, [&](const Dims& index) {
      Region region = block;
      region.batch_index = index;
      for (std::size_t i = 0; i < index.size(); ++i) {
        region.start[static_cast<std::size_t>(sides.batch[i])] = index[i];
      }
      regions.push_back(std::move(region));
    });
  }
  return regions;
}

Region whole_region(at::IntArrayRef sizes, bool is_complex) {
  const auto ndim = static_cast<std::int64_t>(sizes.size());
  Region region;
  region.dims = range(0, ndim + (is_complex ? 1 : 0));
  region.sizes = sizes.vec();
  if (is_complex) {
    region.sizes.push_back(2);
  }
  region.start.assign(region.sizes.size(), 0);
  const std::int64_t rows = ndim > 1 ? sizes[0] : 1;
  region.shape = {1, rows, rows == 0 ? 0 : extent(sizes, range(0, ndim)) / rows};
  region.is_complex = is_complex;
  return region;
}

std::vector<std::int64_t> row_statistics_sizes(
    at::IntArrayRef all_sizes, const MatrixLayout& layout, std::string_view name) {
  const at::IntArrayRef sizes = matrix_sizes(all_sizes, layout, false, name);
  const Sides sides = resolve_sides(all_sizes, false, layout, name);
  Dims result;
  for (const std::int64_t dim : sides.batch) {
    result.push_back(sizes[static_cast<std::size_t>(dim)]);
  }
  result.push_back(extent(sizes, sides.rows));
  result.push_back(static_cast<std::int64_t>(sides.col_blocks.size()));
  return result;
}

at::Tensor region_view(
    const at::Tensor& tensor, const Region& region, std::int64_t first, std::int64_t count) {
  const at::Tensor real = tensor.is_complex() ? at::view_as_real(tensor) : tensor;
  const at::IntArrayRef strides = real.strides();
  std::int64_t offset = real.storage_offset();
  for (std::size_t dim = 0; dim < region.start.size(); ++dim) {
    offset += region.start[dim] * strides[dim];
  }
  at::DimVector view_sizes{count};
  at::DimVector view_strides{0};
  if (region.batch_dim >= 0) {
    view_strides[0] = strides[static_cast<std::size_t>(region.batch_dim)];
    offset += first * view_strides[0];
  }
  view_sizes.append(region.sizes.begin(), region.sizes.end());
  for (const std::int64_t dim : region.dims) {
    view_strides.push_back(strides[static_cast<std::size_t>(dim)]);
  }
  return real.as_strided(view_sizes, view_strides, offset);
}

at::Tensor row_statistics_view(
    const at::Tensor& statistics, const Region& region, std::int64_t first, std::int64_t count) {
  at::Tensor view = statistics;
  for (const std::int64_t index : region.batch_index) {
    view = view.select(0, index);
  }
  if (region.batch_dim < 0) {
    view = view.unsqueeze(0);
  }
  return view.narrow(0, first, count)
      .narrow(1, region.first_row, region.shape.rows)
      .narrow(2, region.column_block, 1);
}

} // namespace muon::detail

namespace muon {

std::vector<MatrixShape> matrix_shapes(
    at::IntArrayRef sizes, const MatrixLayout& layout, std::string_view name) {
  std::vector<MatrixShape> shapes;
  for (const auto& region : detail::resolve_regions(sizes, false, layout, name)) {
    const bool same_block = std::any_of(
        region.batch_index.begin(), region.batch_index.end(), [](auto i) { return i > 0; });
    if (same_block) {
      shapes.back().batch += region.shape.batch;
    } else {
      shapes.push_back(region.shape);
    }
  }
  return shapes;
}

} // namespace muon
