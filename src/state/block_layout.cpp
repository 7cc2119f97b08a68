#include "state/block_layout.h"

#include <algorithm>
#include <numeric>

#include <ATen/core/DimVector.h>

#include <muon/algorithm.h>

namespace muon::detail {
namespace {

using Dims = std::vector<std::int64_t>;

bool holds(const Dims& dims, std::int64_t dim) {
  return std::find(dims.begin(), dims.end(), dim) != dims.end();
}

BlockLayout elementwise_blocks(at::IntArrayRef sizes, bool is_complex) {
  const Region whole = whole_region(sizes, is_complex);
  BlockLayout layout;
  layout.sizes = whole.sizes;
  if (sizes.size() > 1) {
    layout.lead = {0};
  }
  layout.segments = {whole.shape.cols * (is_complex ? 2 : 1)};
  return layout;
}

// How many of the region's dims make its rows.
std::size_t row_dim_count(const Region& region, const BlockLayout& layout) {
  const auto is_lead = [&](std::int64_t dim) { return holds(layout.lead, dim); };
  const auto leads =
      static_cast<std::size_t>(std::count_if(region.dims.begin(), region.dims.end(), is_lead));
  const std::size_t pairs = region.is_complex ? 1 : 0;
  return layout.is_side_rows ? region.dims.size() - pairs - leads : leads;
}

// Dims of [batch, rows..., cols..., (2)] with the columns first.
Dims block_order(const BlockLayout& layout, const Region& region) {
  const std::size_t rows = row_dim_count(region, layout);
  const std::size_t matrix_dims = region.dims.size() - (region.is_complex ? 1 : 0);
  Dims order{0};
  for (std::size_t i = 0; i < matrix_dims; ++i) {
    order.push_back(static_cast<std::int64_t>((rows + i) % matrix_dims) + 1);
  }
  if (region.is_complex) {
    order.push_back(static_cast<std::int64_t>(matrix_dims) + 1);
  }
  return order;
}

// [lead..., k] at a piece and a range along the last dim.
at::Tensor compact_view(
    const BlockLayout& layout, const at::Tensor& tensor, const Region& region, std::int64_t first,
    std::int64_t count, std::int64_t last_first, std::int64_t last_count) {
  at::DimVector sizes{count};
  at::DimVector strides{0};
  std::int64_t offset = tensor.storage_offset() + last_first * tensor.strides().back();
  for (std::size_t i = 0; i < layout.lead.size(); ++i) {
    const std::int64_t dim = layout.lead[i];
    offset += region.start[static_cast<std::size_t>(dim)] * tensor.strides()[i];
    if (dim == region.batch_dim) {
      strides[0] = tensor.strides()[i];
      offset += first * strides[0];
    }
  }
  for (std::size_t i = 0; i < region.dims.size(); ++i) {
    const auto found = std::find(layout.lead.begin(), layout.lead.end(), region.dims[i]);
    if (found != layout.lead.end()) {
      sizes.push_back(region.sizes[i]);
      strides.push_back(tensor.strides()[static_cast<std::size_t>(found - layout.lead.begin())]);
    }
  }
  sizes.push_back(last_count);
  strides.push_back(tensor.strides().back());
  return tensor.as_strided(sizes, strides, offset);
}

} // namespace

Dims BlockLayout::code_sizes(StateFormat format) const {
  if (format != StateFormat::Int4) {
    return sizes;
  }
  Dims result;
  for (const std::int64_t dim : lead) {
    result.push_back(sizes[static_cast<std::size_t>(dim)]);
  }
  result.push_back(0);
  for (const std::int64_t segment : segments) {
    result.back() += code_bytes(format, segment);
  }
  return result;
}

Dims BlockLayout::scale_sizes() const {
  Dims result;
  for (const std::int64_t dim : lead) {
    result.push_back(sizes[static_cast<std::size_t>(dim)]);
  }
  result.push_back(0);
  for (const std::int64_t segment : segments) {
    result.back() += block_count(segment);
  }
  return result;
}

BlockLayout resolve_blocks(
    at::IntArrayRef sizes, bool is_complex, const GroupSpec& spec, std::string_view name) {
  if (find_algorithm(spec.algorithm).is_elementwise()) {
    return elementwise_blocks(sizes, is_complex);
  }
  const Sides sides = resolve_sides(sizes, is_complex, spec.layout, name);
  const auto ndim = static_cast<std::int64_t>(sizes.size()) - (spec.layout.complex_dim ? 1 : 0);
  BlockLayout layout;
  layout.sizes = sizes.vec();
  if (is_complex) {
    layout.sizes.push_back(2);
  }
  layout.is_side_rows = holds(sides.rows, ndim - 1);
  const Dims& side = layout.is_side_rows ? sides.rows : sides.cols;
  layout.segments = layout.is_side_rows ? sides.row_blocks : sides.col_blocks;
  for (std::int64_t& segment : layout.segments) {
    segment *= is_complex || spec.layout.complex_dim ? 2 : 1;
  }
  for (std::int64_t dim = 0; dim < ndim; ++dim) {
    if (!holds(side, dim)) {
      layout.lead.push_back(dim);
    }
  }
  return layout;
}

BlockState block_view(
    const BlockLayout& layout, StateFormat format, const at::Tensor& codes,
    const at::Tensor& scales, const Region& region, std::int64_t first, std::int64_t count) {
  const std::size_t segment = layout.segments.size() > 1 ? region.split : 0;
  std::int64_t first_byte = 0;
  std::int64_t first_block = 0;
  for (std::size_t i = 0; i < segment; ++i) {
    first_byte += code_bytes(format, layout.segments[i]);
    first_block += block_count(layout.segments[i]);
  }
  std::int64_t length = layout.segments[segment];
  if (layout.lead.empty() && !region.sizes.empty()) { // a vector, or a slice of it in whole blocks
    const std::int64_t inner = region.is_complex ? 2 : 1;
    first_byte = code_bytes(format, region.start[0] * inner);
    first_block = block_count(region.start[0] * inner);
    length = region.sizes[0] * inner;
  }
  const auto compact = [&](const at::Tensor& tensor, std::int64_t begin, std::int64_t size) {
    return compact_view(layout, tensor, region, first, count, begin, size);
  };
  return {
      format,
      format == StateFormat::Int4
          ? compact(codes, first_byte, code_bytes(format, length))
          : in_block_order(layout, region_view(codes, region, first, count), region),
      compact(scales, first_block, block_count(length))};
}

at::Tensor in_block_order(const BlockLayout& layout, const at::Tensor& view, const Region& region) {
  return layout.is_side_rows ? view.permute(block_order(layout, region)) : view;
}

Dims block_order_sizes(const BlockLayout& layout, at::IntArrayRef sizes, const Region& region) {
  if (!layout.is_side_rows) {
    return sizes.vec();
  }
  Dims result;
  for (const std::int64_t dim : block_order(layout, region)) {
    result.push_back(sizes[static_cast<std::size_t>(dim)]);
  }
  return result;
}

at::Tensor from_block_order(
    const BlockLayout& layout, const at::Tensor& view, const Region& region) {
  if (!layout.is_side_rows) {
    return view;
  }
  const Dims order = block_order(layout, region);
  Dims inverse(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    inverse[static_cast<std::size_t>(order[i])] = static_cast<std::int64_t>(i);
  }
  return view.permute(inverse);
}

} // namespace muon::detail
