#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <muon/orthogonalize.h>

namespace muon::detail {

/// What one call of the iteration does, with every choice made.
struct Iteration {
  std::vector<Coefficients> coefficients; // one triple a step
  Normalization normalization = Normalization::Clamp;
  double norm_factor = 1.0;
  Form form = Form::Auto;
  /// Real dtype of the products' operands. A CPU multiplies in the workspace's
  /// dtype whatever this says: 16-bit products are slow on most, and the error
  /// bound of a narrower dtype holds.
  c10::ScalarType product_dtype = c10::ScalarType::Float;
};

/// Resolves the options of a call on matrices of `dtype`; ValueError where a
/// form and a dtype do not go together.
Iteration make_iteration(const OrthogonalizeOptions& options, c10::ScalarType dtype);

/// dtype in which matrices are held between ACCUMULATE and APPLY.
c10::ScalarType workspace_dtype(const Iteration& iteration, bool is_complex);

/// Lengths of the runs of steps between which X is rewritten: every step in
/// standard form, 5 in Gram form, 2, 3, 3, ... with restarts. A run multiplies
/// the rounding errors of its Gram matrix by what its steps multiply small
/// singular values by, squared; more than 5 steps would multiply them beyond 1.
std::vector<std::size_t> run_lengths(Form form, std::size_t steps);

/// Normalises and iterates `matrices` [count, rows, cols], contiguous, in
/// place; `eps[i]` belongs to matrix i.
void orthogonalize_(
    at::Tensor matrices, const Iteration& iteration, const std::vector<double>& eps);

/// Divides each matrix by its normalised norm. Zero matrices stay zero.
void normalize_(at::Tensor matrices, const Iteration& iteration, const std::vector<double>& eps);

/// The iteration on normalised matrices, [count, rows, cols], in place, for any
/// device and dtype, by ATen's batched products.
void iterate_aten_(at::Tensor matrices, const Iteration& iteration);

/// The same for float32 and float64 on a CPU without rounding: symmetric
/// products are computed once, small matrices by kernels of our own.
void iterate_cpu_(at::Tensor matrices, const Iteration& iteration);

/// Whether `iterate_small_` takes matrices of this short side.
bool is_small(std::int64_t n);

/// Small float32 or float64 matrices, one a thread at a time.
void iterate_small_(at::Tensor matrices, const Iteration& iteration);

} // namespace muon::detail
