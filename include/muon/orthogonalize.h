#pragma once

#include <cstdint>
#include <optional>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <muon/export.h>
#include <muon/matrix.h>
#include <muon/schedule.h>

namespace muon {

/// How the iteration is carried out. All forms compute the same polynomial.
enum class Form : std::uint8_t {
  Auto, ///< chosen by `choose_form` from device, dtype, shape and schedule
  Standard, ///< A = XX^H, X <- aX + (bA + cA^2)X in every step
  Gram, ///< 5 steps on one Gram matrix (float64 on a CPU), X read twice
  GramXRestart, ///< Gram, with X rewritten after 2 steps, then every 3
};

struct MUON_API OrthogonalizeOptions {
  Schedule schedule = find_schedule("muon");
  std::optional<std::int64_t> steps; ///< nullopt: the schedule's own length
  double eps = 1e-7; ///< lower bound of the norm; 0: scale-free
  /// dtype whose error bound the result meets; nullopt: float64 for float64
  /// and complex128 input, float32 (complex64) for everything else on a CPU.
  std::optional<c10::ScalarType> compute_dtype;
  Form form = Form::Auto;
};

/// The form that `Form::Auto` stands for. A pure function: it depends on its
/// arguments alone, never on timing or on how many matrices share a batch.
/// `n` is the short side and `m` the long side of a matrix.
MUON_API Form choose_form(
    c10::DeviceType device, c10::ScalarType compute_dtype, std::int64_t n, std::int64_t m,
    std::int64_t steps);

/// Newton-Schulz orthogonalisation of the matrices in `x`, shape
/// [..., rows, cols] (or any shape that `layout` turns into matrices), any
/// strides, real or complex. Returns a new tensor of x's shape and dtype whose
/// matrices have x's singular vectors and singular values p(s / |X|_F).
/// Zero matrices stay zero; a non-finite matrix gives non-finite values and
/// leaves the others of its batch alone. Source: arXiv 2409.20325 and
/// KellerJordan/Muon for the iteration, arXiv 2505.16932 for Polar Express.
MUON_API at::Tensor orthogonalize(const at::Tensor& x, const OrthogonalizeOptions& options = {});

MUON_API at::Tensor orthogonalize(
    const at::Tensor& x, const OrthogonalizeOptions& options, const MatrixLayout& layout);

/// x x^H of the matrices [..., rows, cols] of `x`: [..., rows, rows] in its dtype,
/// exactly Hermitian. ValueError for fewer than two dims.
MUON_API at::Tensor gram(const at::Tensor& x);

} // namespace muon
