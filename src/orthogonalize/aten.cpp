#include <ATen/TensorOperators.h>
#include <ATen/ops/baddbmm.h>
#include <ATen/ops/bmm.h>

#include "orthogonalize/iteration.h"

namespace muon::detail {
namespace {

// Products with operands in the product dtype and float32 accumulation. A CPU
// multiplies 16-bit numbers hundreds of times slower than the float32 numbers
// that they are exactly, so there the operands are rounded and widened again.
class Products {
 public:
  Products(const at::Tensor& matrices, c10::ScalarType product_dtype)
      : is_native_(!matrices.is_cpu()),
        is_rounded_(product_dtype == at::kHalf || product_dtype == at::kBFloat16),
        product_dtype_(product_dtype),
        workspace_dtype_(matrices.scalar_type()) {}

  at::Tensor operand(const at::Tensor& x) const {
    if (!is_rounded_) {
      return x;
    }
    const at::Tensor rounded = x.to(product_dtype_);
    return is_native_ ? rounded : rounded.to(workspace_dtype_);
  }

  // x y, both operands already rounded.
  at::Tensor multiply(const at::Tensor& x, const at::Tensor& y) const {
    return at::bmm(x, y).to(workspace_dtype_);
  }

  // beta c + alpha x y
  at::Tensor multiply_add(const at::Tensor& c, const at::Tensor& x, const at::Tensor& y, double beta, double alpha) const {
    if (is_rounded_) {
      return c * beta + multiply(x, y) * alpha;
    }
    return at::baddbmm(c, x, y, beta, alpha);
  }

 private:
  bool is_native_;
  bool is_rounded_;
  c10::ScalarType product_dtype_;
  c10::ScalarType workspace_dtype_;
};

// Gram matrix on the short side: x x^H, or x^H x for tall matrices.
at::Tensor gram(const Products& products, const at::Tensor& x, bool is_tall) {
  const at::Tensor operand = products.operand(x);
  return is_tall ? products.multiply(operand.mH(), operand) : products.multiply(operand, operand.mH());
}

// a x + q x on the short side (a = 0: q x).
at::Tensor apply(const Products& products, const at::Tensor& q, const at::Tensor& x, double a, bool is_tall) {
  const at::Tensor left = products.operand(is_tall ? x : q);
  const at::Tensor right = products.operand(is_tall ? q : x);
  return a == 0.0 ? products.multiply(left, right) : products.multiply_add(x, left, right, a, 1.0);
}

at::Tensor standard(const Products& products, at::Tensor x, const Iteration& iteration, bool is_tall) {
  for (const auto& [a, b, c] : iteration.coefficients) {
    const at::Tensor g = gram(products, x, is_tall);
    const at::Tensor operand = products.operand(g);
    const at::Tensor polynomial = products.multiply_add(g, operand, operand, b, c);
    x = apply(products, polynomial, x, a, is_tall);
  }
  return x;
}

// The product of the steps' polynomials on the Gram matrix r of the first one:
// q <- q (a + z), z = b r + c r^2, r <- (a + z) r (a + z).
at::Tensor gram_polynomial(const Products& products, at::Tensor r, at::ArrayRef<Coefficients> steps) {
  at::Tensor q;
  for (std::size_t k = 0; k < steps.size(); ++k) {
    const auto& [a, b, c] = steps[k];
    const at::Tensor operand = products.operand(r);
    at::Tensor z = products.multiply_add(r, operand, operand, b, c);
    const at::Tensor z_operand = products.operand(z);
    if (k + 1 < steps.size()) {
      const at::Tensor w = products.multiply_add(r, operand, z_operand, a, 1.0);
      r = products.multiply_add(w, products.operand(w), z_operand, a, 1.0);
    }
    if (q.defined()) {
      q = products.multiply_add(q, products.operand(q), z_operand, a, 1.0);
    } else {
      q = std::move(z);
      q.diagonal(0, -2, -1).add_(a);
    }
  }
  return q;
}

} // namespace

void iterate_aten_(at::Tensor matrices, const Iteration& iteration) {
  const Products products(matrices, iteration.product_dtype);
  const bool is_tall = matrices.size(1) > matrices.size(2);
  const at::ArrayRef<Coefficients> steps(iteration.coefficients);
  if (iteration.form == Form::Standard) {
    matrices.copy_(standard(products, matrices, iteration, is_tall));
    return;
  }
  at::Tensor x = matrices;
  std::size_t first = 0;
  for (const std::size_t length : run_lengths(iteration.form, steps.size())) {
    const at::Tensor q = gram_polynomial(products, gram(products, x, is_tall), steps.slice(first, length));
    x = apply(products, q, x, 0.0, is_tall);
    first += length;
  }
  matrices.copy_(x);
}

} // namespace muon::detail
