#include <ATen/TensorOperators.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>

#include "orthogonalize/iteration.h"

namespace muon::detail {
namespace {

// Gram matrix on the short side: x x^H, or x^H x for tall matrices.
at::Tensor gram(const at::Tensor& x, bool is_tall) {
  return is_tall ? at::bmm(x.mH(), x) : at::bmm(x, x.mH());
}

// a x + z x with z = b r + c r^2, r the Gram matrix of x. The identity's part
// stays out of z, which 16-bit numbers could not hold beside it.
at::Tensor standard_step(const at::Tensor& x, const Coefficients& step, bool is_tall) {
  const auto& [a, b, c] = step;
  const at::Tensor r = gram(x, is_tall);
  const at::Tensor z = at::baddbmm(r, r, r, b, c);
  return is_tall ? at::baddbmm(x, x, z, a, 1.0) : at::baddbmm(x, z, x, a, 1.0);
}

// The product of the steps' polynomials on the Gram matrix r of the first one:
// q <- q (a + z), z = b r + c r^2, r <- (a + z) r (a + z).
at::Tensor gram_polynomial(at::Tensor r, at::ArrayRef<Coefficients> steps) {
  at::Tensor q;
  for (std::size_t k = 0; k < steps.size(); ++k) {
    const auto& [a, b, c] = steps[k];
    at::Tensor z = at::baddbmm(r, r, r, b, c);
    if (k + 1 < steps.size()) {
      const at::Tensor w = at::baddbmm(r, r, z, a, 1.0);
      r = at::baddbmm(w, w, z, a, 1.0);
    }
    if (q.defined()) {
      q = at::baddbmm(q, q, z, a, 1.0);
    } else {
      q = std::move(z);
      q.diagonal(0, -2, -1).add_(a);
    }
  }
  return q;
}

} // namespace

void iterate_aten_(at::Tensor matrices, const Iteration& iteration) {
  const bool is_tall = matrices.size(1) > matrices.size(2);
  const at::ArrayRef<Coefficients> steps(iteration.coefficients);
  at::Tensor x = matrices.is_complex() ? matrices : matrices.to(iteration.product_dtype);
  std::size_t first = 0;
  for (const std::size_t length : run_lengths(iteration.form, steps.size())) {
    if (length == 1) {
      x = standard_step(x, steps[first], is_tall);
    } else {
      const at::Tensor q = gram_polynomial(gram(x, is_tall), steps.slice(first, length));
      x = is_tall ? at::bmm(x, q) : at::bmm(q, x);
    }
    first += length;
  }
  matrices.copy_(x);
}

} // namespace muon::detail
