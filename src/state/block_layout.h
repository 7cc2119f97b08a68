#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>

#include "matrix/region.h"
#include "state/format.h"

namespace muon::detail {

/// Where the blocks of a quantised state tensor are: along one side of its
/// matrices, the one that holds the tensor's last dim, so that every matrix,
/// and every block of a split one, has blocks of its own. Elementwise
/// algorithms: along all dims but the first. Complex numbers count as pairs.
struct BlockLayout {
  std::vector<std::int64_t> sizes; // of the tensor, real
  std::vector<std::int64_t> lead; // its dims outside the side, in order
  std::vector<std::int64_t> segments; // extents along the side; no block crosses their ends
  bool is_side_rows = false; // of the matrices' sides

  /// Shape of the codes: `sizes`, in int4 [lead..., bytes].
  std::vector<std::int64_t> code_sizes(StateFormat format) const;
  /// [lead..., blocks].
  std::vector<std::int64_t> scale_sizes() const;
};

BlockLayout resolve_blocks(
    at::IntArrayRef sizes, bool is_complex, const GroupSpec& spec, std::string_view name);

/// Quantised state as the loops take it: views in block order.
struct BlockState {
  StateFormat format = StateFormat::Plain;
  at::Tensor codes; // [batch, lead..., side...], in int4 [batch, lead..., bytes]
  at::Tensor scales; // [batch, lead..., blocks]
};

/// Matrices first .. first + count of a region.
BlockState block_view(
    const BlockLayout& layout, StateFormat format, const at::Tensor& codes,
    const at::Tensor& scales, const Region& region, std::int64_t first, std::int64_t count);

/// A view [batch, rows..., cols..., (2)] as [batch, lead..., side..., (2)], its
/// sizes, and the way back.
at::Tensor in_block_order(const BlockLayout& layout, const at::Tensor& view, const Region& region);
std::vector<std::int64_t> block_order_sizes(
    const BlockLayout& layout, at::IntArrayRef sizes, const Region& region);
at::Tensor from_block_order(
    const BlockLayout& layout, const at::Tensor& view, const Region& region);

} // namespace muon::detail
