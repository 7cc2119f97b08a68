#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/view_as_real.h>

#include "state/codec.h"
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
  std::vector<std::int64_t> ends;
  std::int64_t total = 0;
  for (const auto& walk : walks) {
    total += walk.numel();
    ends.push_back(total);
  }
  at::parallel_for(0, total, kGrain, [&](std::int64_t begin, std::int64_t end) {
    auto piece =
        static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    for (std::int64_t at = begin; at < end; ++piece) {
      const auto& walk = walks[piece];
      const std::int64_t first = ends[piece] - walk.numel();
      const std::int64_t last = std::min(end, ends[piece]);
      walk.for_each(at - first, last - first, kRun, [&](const auto& offsets, std::int64_t length) {
        visit(piece, offsets, length);
      });
      at = last;
    }
  });
}

} // namespace muon::detail
