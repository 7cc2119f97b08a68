#include "support/reference.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <limits>
#include <numeric>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

namespace muon::testing {

std::uint64_t test_seed() {
  const char* text = std::getenv("MUON_TEST_SEED");
  return text == nullptr ? 0 : std::strtoull(text, nullptr, 10);
}

at::Tensor random_tensor(c10::IntArrayRef sizes, bool is_complex, std::uint64_t salt) {
  const std::uint64_t hash = std::accumulate(
      sizes.begin(), sizes.end(), test_seed() * 1000003 + salt,
      [](std::uint64_t h, std::int64_t s) { return h * 31 + static_cast<std::uint64_t>(s); });
  auto generator = at::detail::createCPUGenerator(hash);
  return at::randn(sizes, generator, is_complex ? at::kComplexDouble : at::kDouble);
}

at::Tensor with_spectrum(std::int64_t rows, std::int64_t cols, const at::Tensor& singular_values) {
  const std::int64_t k = std::min(rows, cols);
  const at::Tensor u = std::get<0>(at::linalg_qr(random_tensor({rows, k}, false, 1)));
  const at::Tensor v = std::get<0>(at::linalg_qr(random_tensor({cols, k}, false, 2)));
  return at::matmul(u * singular_values, v.mT());
}

at::Tensor exact_orthogonalize(const at::Tensor& x, const OrthogonalizeOptions& options) {
  const at::Tensor wide = x.to(x.is_complex() ? at::kComplexDouble : at::kDouble);
  if (wide.numel() == 0) {
    return wide;
  }
  const auto [u, s, vh] = at::linalg_svd(wide, /*full_matrices=*/false);
  const at::Tensor norm = at::linalg_vector_norm(s, 2, at::IntArrayRef{-1}, true);
  at::Tensor divisor = norm * options.schedule.norm_factor;
  divisor = options.schedule.normalization == Normalization::Add ? divisor + options.eps
                                                                 : divisor.clamp_min(options.eps);
  at::Tensor y = at::where(divisor > 0, s / divisor, 0.0);
  for (const auto& [a, b, c] : options.schedule.take(options.steps)) {
    y = a * y + b * y.pow(3) + c * y.pow(5);
  }
  return at::matmul(u * y.unsqueeze(-2), vh);
}

double steepest_slope(const Schedule& schedule) {
  constexpr int kPoints = 2000;
  double steepest = 1.0;
  for (int i = 0; i <= kPoints; ++i) {
    double x = i / (kPoints * schedule.norm_factor);
    std::vector<double> slopes;
    for (const auto& [a, b, c] : schedule.coefficients) {
      slopes.push_back(a + 3 * b * x * x + 5 * c * std::pow(x, 4));
      x = a * x + b * std::pow(x, 3) + c * std::pow(x, 5);
    }
    double product = 1.0;
    for (std::size_t k = slopes.size(); k-- > 0;) {
      product *= slopes[k];
      steepest = std::max(steepest, std::abs(product));
    }
  }
  return steepest;
}

double relative_error(const at::Tensor& got, const at::Tensor& expected) {
  if (expected.numel() == 0) {
    return 0.0;
  }
  const at::Tensor reference =
      expected.to(expected.is_complex() ? at::kComplexDouble : at::kDouble);
  const double size = reference.norm().item().toComplexDouble().real();
  const double error =
      (got.to(reference.scalar_type()) - reference).norm().item().toComplexDouble().real();
  if (std::isnan(error)) {
    return std::numeric_limits<double>::infinity();
  }
  return size == 0.0 ? error : error / size;
}

OrthogonalizeOptions schedule_options(const std::string& name) {
  OrthogonalizeOptions options;
  options.schedule = find_schedule(name);
  return options;
}

} // namespace muon::testing
