#include <algorithm>
#include <cmath>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/imag.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/view_as_real.h>

#include "matrix/region.h"
#include "orthogonalize/iteration.h"

namespace muon {
namespace detail {

void orthogonalize_(
    at::Tensor matrices, const Iteration& iteration, const std::vector<double>& eps) {
  if (matrices.numel() == 0) {
    return;
  }
  normalize_(matrices, iteration, eps);
  const std::int64_t n = std::min(matrices.size(1), matrices.size(2));
  const std::int64_t m = std::max(matrices.size(1), matrices.size(2));
  Iteration chosen = iteration;
  if (matrices.is_cpu()) {
    chosen.product_dtype = c10::toRealValueType(matrices.scalar_type());
  }
  if (chosen.form == Form::Auto) {
    const auto steps = static_cast<std::int64_t>(chosen.coefficients.size());
    chosen.form = choose_form(matrices.device().type(), chosen.product_dtype, n, m, steps);
  }
  if (matrices.is_cpu() && !matrices.is_complex()) {
    iterate_cpu_(matrices, chosen);
  } else {
    iterate_aten_(matrices, chosen);
  }
}

namespace {

// Matrices of one region, copied into a workspace, orthogonalized, copied out.
void orthogonalize_region(
    const at::Tensor& x, at::Tensor& out, const Region& region, const Iteration& iteration,
    double eps) {
  const MatrixShape& shape = region.shape;
  at::Tensor matrices = at::empty(
      {shape.batch, shape.rows, shape.cols},
      x.options().dtype(workspace_dtype(iteration, region.is_complex)));
  const at::Tensor source = region_view(x, region, 0, shape.batch);
  at::Tensor real = region.is_complex ? at::view_as_real(matrices) : matrices;
  real.view(source.sizes()).copy_(source);
  orthogonalize_(
      matrices, iteration, std::vector<double>(static_cast<std::size_t>(shape.batch), eps));
  region_view(out, region, 0, shape.batch).copy_(real.view(source.sizes()));
}

} // namespace
} // namespace detail

at::Tensor orthogonalize(
    const at::Tensor& input, const OrthogonalizeOptions& options, const MatrixLayout& layout) {
  TORCH_CHECK_TYPE(
      input.is_floating_point() || input.is_complex(),
      "muon: expected a floating point or complex tensor to orthogonalize, got ",
      input.scalar_type());
  TORCH_CHECK_VALUE(
      std::isfinite(options.eps) && options.eps >= 0.0,
      "muon: expected eps to be finite and >= 0, got ", options.eps);
  TORCH_CHECK_VALUE(
      input.layout() == c10::kStrided, "muon: expected a dense tensor to orthogonalize, got ",
      input.layout());
  const at::NoGradGuard no_grad;
  const at::Tensor x = input.resolve_conj().resolve_neg();
  const c10::ScalarType dtype =
      layout.complex_dim ? c10::toComplexType(x.scalar_type()) : x.scalar_type();
  const auto iteration = detail::make_iteration(options, dtype);
  at::Tensor out = at::empty_like(x);
  for (const auto& region : detail::resolve_regions(x.sizes(), x.is_complex(), layout, "x")) {
    if (region.shape.batch * region.shape.rows * region.shape.cols > 0) {
      detail::orthogonalize_region(x, out, region, iteration, options.eps);
    }
  }
  return out;
}

at::Tensor orthogonalize(const at::Tensor& x, const OrthogonalizeOptions& options) {
  MatrixLayout layout;
  if (x.dim() > 2) {
    layout.batch_dims = x.dim() - 2;
  }
  return orthogonalize(x, options, layout);
}

at::Tensor gram(const at::Tensor& x) {
  TORCH_CHECK_VALUE(
      x.dim() >= 2, "muon: expected matrices [..., rows, cols], got shape ", x.sizes());
  // A library may round an entry and its mirror image differently.
  const at::Tensor product = at::matmul(x, x.mH());
  at::Tensor result = product.tril() + product.tril(-1).mH();
  if (result.is_complex()) {
    at::imag(result.diagonal(0, -2, -1)).zero_();
  }
  return result;
}

} // namespace muon
