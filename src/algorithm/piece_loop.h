#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/view_as_real.h>

#include "state/codec.h"
#include "state/parts.h"
#include "state/strided_runs.h"

namespace muon::detail {

/// The pieces as real tensors: complex ones, which stages of somebody else's
/// hand on, seen as pairs.
inline std::vector<at::Tensor> real_pieces(at::TensorList pieces) {
  std::vector<at::Tensor> real(pieces.begin(), pieces.end());
  for (at::Tensor& piece : real) {
    piece = piece.is_complex() ? at::view_as_real(piece) : piece;
  }
  return real;
}

/// Runs `visit(piece, offsets, length)` over all runs of all pieces, spread
/// over the threads by element, runs of at most kRun. `walks[i]` is piece i.
template <std::size_t kTensors, typename Visit>
void for_each_run(const std::vector<StridedRuns<kTensors>>& walks, const Visit& visit) {
  constexpr std::int64_t kGrain = 32768;
  std::vector<std::int64_t> sizes;
  for (const auto& walk : walks) {
    sizes.push_back(walk.numel());
  }
  for_each_part(sizes, kGrain, [&](std::size_t piece, std::int64_t first, std::int64_t last) {
    walks[piece].for_each(first, last, kRun, [&](const auto& offsets, std::int64_t length) {
      visit(piece, offsets, length);
    });
  });
}

} // namespace muon::detail
