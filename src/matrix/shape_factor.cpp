#include <algorithm>
#include <cmath>

#include <muon/matrix.h>

namespace muon {

double shape_factor(AdjustLr mode, std::int64_t rows, std::int64_t cols) {
  if (rows == 0 || cols == 0) {
    return 1.0;
  }
  const auto r = static_cast<double>(rows);
  const auto c = static_cast<double>(cols);
  switch (mode) {
    case AdjustLr::Original:
      return std::sqrt(std::max(1.0, r / c));
    case AdjustLr::MatchRmsAdamw:
      return 0.2 * std::sqrt(std::max(r, c));
    case AdjustLr::SpectralUnclamped:
      return std::sqrt(r / c);
    case AdjustLr::Unscaled:
      return 1.0;
  }
  return 1.0;
}

} // namespace muon
