#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include <ATen/Parallel.h>

namespace muon::detail {

/// Spreads pieces of `sizes` units over the threads, at least `grain` units
/// each: calls `visit(piece, first, last)` with ranges of a piece's units.
template <typename Visit>
void for_each_part(const std::vector<std::int64_t>& sizes, std::int64_t grain, const Visit& visit) {
  std::vector<std::int64_t> ends;
  std::int64_t total = 0;
  for (const std::int64_t size : sizes) {
    total += size;
    ends.push_back(total);
  }
  at::parallel_for(0, total, grain, [&](std::int64_t begin, std::int64_t end) {
    auto piece =
        static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), begin) - ends.begin());
    for (std::int64_t at = begin; at < end; ++piece) {
      const std::int64_t first = ends[piece] - sizes[piece];
      const std::int64_t last = std::min(end, ends[piece]);
      visit(piece, at - first, last - first);
      at = last;
    }
  });
}

} // namespace muon::detail
