#include <ATen/Dispatch.h>
#include <ATen/TensorOperators.h>

#include "algorithm/hyper.h"
#include "algorithm/piece_loop.h"
#include "algorithm/stages.h"
#include "target_clones.h"

namespace muon::detail {
namespace {

// b <- keep b + blend g, q = nesterov ? look b + blend g : b, with g already
// scaled: EMA has blend = 1 - momentum, heavy ball 1 (seeds: keep = look).
struct Momentum {
  double grad_factor = 1.0; // unscales, and negates to maximize
  double keep = 0.0;
  double blend = 1.0;
  bool nesterov = false;

  Momentum(const HyperRow& hyper, double inverse_scale)
      : grad_factor(hyper.flag(Hyper::kMaximize) ? -inverse_scale : inverse_scale),
        keep(hyper[Hyper::kMomentum]),
        blend(hyper.flag(Hyper::kHeavyBall) ? 1.0 : 1.0 - hyper[Hyper::kMomentum]),
        nesterov(hyper.flag(Hyper::kNesterov)) {}
};

template <typename T>
MUON_ALWAYS_INLINE void momentum_body(
    const T* __restrict g, T* __restrict b, T* __restrict q, std::int64_t n, T factor, T keep,
    T blend, T look, T add) {
  for (std::int64_t i = 0; i < n; ++i) {
    const T grad = factor * g[i];
    const T momentum = keep * b[i] + blend * grad;
    b[i] = momentum;
    q[i] = look * momentum + add * grad;
  }
}

MUON_TARGET_CLONES void momentum_run(
    const float* g, float* b, float* q, std::int64_t n, float factor, float keep, float blend,
    float look, float add) {
  momentum_body(g, b, q, n, factor, keep, blend, look, add);
}

MUON_TARGET_CLONES void momentum_run(
    const double* g, double* b, double* q, std::int64_t n, double factor, double keep, double blend,
    double look, double add) {
  momentum_body(g, b, q, n, factor, keep, blend, look, add);
}

template <typename T>
void accumulate_cpu_(
    at::TensorList grads, at::TensorList state, at::TensorList matrices,
    const std::vector<Momentum>& rules) {
  std::vector<StridedRuns<3>> walks;
  for (std::size_t i = 0; i < grads.size(); ++i) {
    walks.emplace_back(std::array<const at::Tensor*, 3>{&state[i], &grads[i], &matrices[i]});
  }
  for_each_run(walks, [&](std::size_t i, const StridedRuns<3>::Offsets& at, std::int64_t n) {
    const auto& strides = walks[i].run_strides();
    T grad_buffer[kRun];
    T momentum_buffer[kRun];
    T matrix_buffer[kRun];
    const T* g = load_run(
        grads[i].scalar_type(), grads[i].const_data_ptr(), at[1], strides[1], n, grad_buffer);
    const T* stored = load_run(
        state[i].scalar_type(), state[i].const_data_ptr(), at[0], strides[0], n, momentum_buffer);
    if (stored != momentum_buffer) {
      std::copy(stored, stored + n, momentum_buffer);
    }
    const Momentum& rule = rules[i];
    const T keep = static_cast<T>(rule.keep);
    const T blend = static_cast<T>(rule.blend);
    momentum_run(
        g, momentum_buffer, matrix_buffer, n, static_cast<T>(rule.grad_factor), keep, blend,
        rule.nesterov ? keep : T{1}, rule.nesterov ? blend : T{0});
    store_run(
        state[i].scalar_type(), state[i].mutable_data_ptr(), at[0], strides[0], n, momentum_buffer);
    store_run(
        matrices[i].scalar_type(), matrices[i].mutable_data_ptr(), at[2], strides[2], n,
        matrix_buffer);
  });
}

void accumulate_any_(
    at::TensorList grads, at::TensorList state, at::TensorList matrices,
    const std::vector<Momentum>& rules) {
  for (std::size_t i = 0; i < grads.size(); ++i) {
    const Momentum& rule = rules[i];
    const at::Tensor grad = grads[i].to(matrices[i].scalar_type()) * rule.grad_factor;
    const at::Tensor momentum = state[i].to(grad.scalar_type()) * rule.keep + grad * rule.blend;
    state[i].copy_(momentum);
    matrices[i].copy_(rule.nesterov ? momentum * rule.keep + grad * rule.blend : momentum);
  }
}

} // namespace

void accumulate_(
    at::TensorList given_grads, at::TensorList given_state, at::TensorList given_matrices,
    const at::Tensor& hyper, at::IntArrayRef groups, const std::optional<at::Tensor>& grad_scale) {
  const auto grads = real_pieces(given_grads);
  const auto state = real_pieces(given_state);
  const auto matrices = real_pieces(given_matrices);
  check_pieces("accumulate", matrices, {grads, state}, hyper, groups);
  const double inverse = inverse_scale(grad_scale);
  std::vector<Momentum> rules;
  for (const std::int64_t group : groups) {
    rules.emplace_back(HyperRow(hyper, group), inverse);
  }
  if (!matrices[0].is_cpu()) {
    accumulate_any_(grads, state, matrices, rules);
    return;
  }
  AT_DISPATCH_FLOATING_TYPES(matrices[0].scalar_type(), "muon_accumulate", [&] {
    accumulate_cpu_<scalar_t>(grads, state, matrices, rules);
  });
}

} // namespace muon::detail
