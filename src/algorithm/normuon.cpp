#include <ATen/TensorOperators.h>
#include <ATen/ops/linalg_vector_norm.h>
#include <ATen/ops/view_as_real.h>

#include "algorithm/hyper.h"
#include "algorithm/stages.h"

namespace muon::detail {
namespace {

constexpr double kEps = 1e-8; // zichongli5/NorMuon divides by sqrt(v) + eps

// Frobenius norm of each matrix of [batch, rows, cols], as [batch, 1, 1].
at::Tensor frobenius(const at::Tensor& u) {
  return at::linalg_vector_norm(u, 2, at::IntArrayRef{-2, -1}, true);
}

// Rows are divided by the root of their running mean square, then each matrix
// gets its Frobenius norm back. No bias correction (the authors' code).
void normalize_rows_(const at::Tensor& u, const at::Tensor& variance, double beta2) {
  const at::Tensor squared = u.is_complex() ? at::view_as_real(u).square().sum(-1) : u.square();
  variance.lerp_(squared.mean(-1, true).to(variance.scalar_type()), 1.0 - beta2);
  const at::Tensor before = frobenius(u);
  const at::Tensor scaled = u / (variance.sqrt() + kEps).to(before.scalar_type());
  u.copy_(scaled * (before / frobenius(scaled).clamp_min(kEps)));
}

} // namespace

void normuon_(
    at::TensorList matrices, at::TensorList state, const at::Tensor& hyper,
    at::IntArrayRef groups) {
  check_pieces("normuon", matrices, {}, hyper, groups);
  TORCH_CHECK_VALUE(
      state.size() == matrices.size(), "muon: expected row statistics for ", matrices.size(),
      " pieces, got ", state.size(), " (normuon)");
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    const at::Tensor& u = matrices[i];
    TORCH_CHECK_VALUE(
        u.dim() == 3 && state[i].is_floating_point() && state[i].device() == u.device() &&
            state[i].sizes() == at::IntArrayRef({u.size(0), u.size(1), 1}),
        "muon: expected row statistics [batch, rows, 1] of matrices ", u.sizes(), ", got ",
        state[i].scalar_type(), " ", state[i].sizes(), " (normuon)");
  }
  for (std::size_t i = 0; i < matrices.size(); ++i) {
    normalize_rows_(matrices[i], state[i], HyperRow(hyper, groups[i])[Hyper::kMuonBeta2]);
  }
}

} // namespace muon::detail
