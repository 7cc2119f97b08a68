#include <array>
#include <cmath>

#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/tensor.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/where.h>

#include "orthogonalize/iteration.h"
#include "target_clones.h"

namespace muon::detail {
namespace {

constexpr std::int64_t kBlock = 8192; // entries a partial sum; fixed, so that sums are reproducible
constexpr std::int64_t kLanes = 16;

template <typename T>
MUON_ALWAYS_INLINE double sum_of_squares_body(const T* x, std::int64_t n) {
  std::array<double, kLanes> lanes{};
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (std::int64_t l = 0; l < kLanes; ++l) {
      const double value = static_cast<double>(x[i + l]);
      lanes[static_cast<std::size_t>(l)] += value * value;
    }
  }
  for (; i < n; ++i) {
    lanes[0] += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  }
  double sum = 0.0;
  for (const double lane : lanes) {
    sum += lane;
  }
  return sum;
}

MUON_TARGET_CLONES double sum_of_squares(const float* x, std::int64_t n) {
  return sum_of_squares_body(x, n);
}

MUON_TARGET_CLONES double sum_of_squares(const double* x, std::int64_t n) {
  return sum_of_squares_body(x, n);
}

template <typename T>
MUON_ALWAYS_INLINE void scale_body(T* x, std::int64_t n, T factor) {
  for (std::int64_t i = 0; i < n; ++i) {
    x[i] *= factor;
  }
}

MUON_TARGET_CLONES void scale_run(float* x, std::int64_t n, float factor) {
  scale_body(x, n, factor);
}

MUON_TARGET_CLONES void scale_run(double* x, std::int64_t n, double factor) {
  scale_body(x, n, factor);
}

template <typename T>
double blocked_sum_of_squares(const T* x, std::int64_t n) {
  double sum = 0.0;
  for (std::int64_t first = 0; first < n; first += kBlock) {
    sum += sum_of_squares(x + first, std::min(kBlock, n - first));
  }
  return sum;
}

// x * 2^exponent, exact but for subnormal results.
template <typename T>
void scale_by_power_of_two(T* x, std::int64_t n, int exponent) {
  for (std::int64_t i = 0; i < n; ++i) {
    x[i] = std::ldexp(x[i], exponent);
  }
}

// |x|_F. Squares of float64 entries may leave the range: then x is first
// brought to entries of order 1 by a power of two, whose exponent is returned.
template <typename T>
double prescaled_norm(T* x, std::int64_t n, int& exponent) {
  exponent = 0;
  const double sum = blocked_sum_of_squares(x, n);
  if (std::isnan(sum) || (std::isfinite(sum) && sum > 1e-280)) {
    return std::sqrt(sum);
  }
  double largest = 0.0;
  for (std::int64_t i = 0; i < n; ++i) {
    largest = std::max(largest, std::abs(static_cast<double>(x[i])));
  }
  if (largest == 0.0 || std::isinf(largest)) {
    return largest;
  }
  exponent = -std::ilogb(largest);
  scale_by_power_of_two(x, n, exponent);
  return std::sqrt(blocked_sum_of_squares(x, n));
}

double denominator(double norm, double eps, const Iteration& iteration) {
  const double scaled = iteration.norm_factor * norm;
  if (iteration.normalization == Normalization::Add) {
    return scaled + eps;
  }
  return scaled < eps ? eps : scaled;
}

template <typename T>
void normalize_matrix(T* x, std::int64_t n, double eps, const Iteration& iteration) {
  int exponent = 0;
  const double norm = prescaled_norm(x, n, exponent);
  const double divisor = denominator(norm, std::ldexp(eps, exponent), iteration);
  if (divisor == 0.0) {
    return;
  }
  const double factor = 1.0 / divisor;
  const double largest = static_cast<double>(std::numeric_limits<T>::max());
  const double smallest = static_cast<double>(std::numeric_limits<T>::min());
  if (std::isnan(factor) || (factor <= largest && factor >= smallest)) {
    scale_run(x, n, static_cast<T>(factor));
    return;
  }
  for (std::int64_t i = 0; i < n; ++i) {
    x[i] = static_cast<T>(static_cast<double>(x[i]) / divisor);
  }
}

void normalize_cpu_(
    const at::Tensor& real, std::int64_t count, const Iteration& iteration,
    const std::vector<double>& eps) {
  const std::int64_t n = real.numel() / count;
  AT_DISPATCH_FLOATING_TYPES(real.scalar_type(), "muon_normalize", [&] {
    auto* data = real.mutable_data_ptr<scalar_t>();
    at::parallel_for(
        0, count, std::max<std::int64_t>(1, kBlock / n), [&](std::int64_t begin, std::int64_t end) {
          for (std::int64_t i = begin; i < end; ++i) {
            normalize_matrix(data + i * n, n, eps[static_cast<std::size_t>(i)], iteration);
          }
        });
  });
}

// Any device, without a host sync: norms in float64 need no prescale for
// float32 entries; float64 entries beyond 1e150 are out of its range.
void normalize_any_(
    at::Tensor& matrices, const at::Tensor& real, const Iteration& iteration,
    const std::vector<double>& eps) {
  const std::int64_t count = matrices.size(0);
  at::Tensor norms =
      at::linalg_vector_norm(real.reshape({count, -1}), 2, at::IntArrayRef{1}, true, at::kDouble);
  const at::Tensor bounds =
      at::tensor(eps, norms.options().device(at::kCPU)).to(norms.device()).unsqueeze(1);
  norms = norms * iteration.norm_factor;
  norms = iteration.normalization == Normalization::Add ? norms + bounds
                                                        : at::where(norms < bounds, bounds, norms);
  norms = at::where(norms == 0, 1.0, norms);
  at::Tensor flat = real.view({count, -1});
  flat.copy_(flat / norms);
}

} // namespace

void normalize_(at::Tensor matrices, const Iteration& iteration, const std::vector<double>& eps) {
  const at::Tensor real = matrices.is_complex() ? at::view_as_real(matrices) : matrices;
  if (matrices.is_cpu()) {
    normalize_cpu_(real, matrices.size(0), iteration, eps);
  } else {
    normalize_any_(matrices, real, iteration, eps);
  }
}

} // namespace muon::detail
