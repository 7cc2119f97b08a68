#include <cmath>
#include <vector>

#include <ATen/Dispatch.h>
#include <ATen/TensorOperators.h>
#include <ATen/ops/maximum.h>

#include "algorithm/adam.h"
#include "state/block_rows.h"
#include "state/quantized.h"
#include "target_clones.h"

namespace muon::detail {
namespace {

// One parameter, in block order.
struct AdamBlocks {
  at::Tensor param, grad;
  BlockState exp_avg, exp_avg_sq;
  BlockState max_exp_avg_sq; // amsgrad only
};

template <typename T>
struct AdamNumbers {
  T grad_factor, keep, couple, beta1, beta2, rate, root, eps;

  AdamNumbers(const AdamRule& rule, const AdamCorrections& corrections, double inverse_scale)
      : grad_factor(static_cast<T>(rule.maximize ? -inverse_scale : inverse_scale)),
        keep(static_cast<T>(rule.decoupled ? 1.0 - rule.shrink : 1.0)),
        couple(static_cast<T>(rule.decoupled ? 0.0 : rule.weight_decay)),
        beta1(static_cast<T>(rule.beta1)),
        beta2(static_cast<T>(rule.beta2)),
        rate(static_cast<T>(corrections.rate)),
        root(static_cast<T>(corrections.root)),
        eps(static_cast<T>(rule.eps)) {}
};

// Moments first: amsgrad's maximum comes between them and the update.
template <typename T>
MUON_ALWAYS_INLINE void moments_body(
    const T* __restrict p, const T* __restrict grad, T* __restrict m, T* __restrict v,
    std::int64_t n, const AdamNumbers<T>& a) {
  for (std::int64_t i = 0; i < n; ++i) {
    const T g = a.grad_factor * grad[i] + a.couple * p[i];
    m[i] = a.beta1 * m[i] + (T{1} - a.beta1) * g;
    v[i] = a.beta2 * v[i] + (T{1} - a.beta2) * g * g;
  }
}

template <typename T>
MUON_ALWAYS_INLINE void update_body(
    T* __restrict p, const T* __restrict m, const T* __restrict v, std::int64_t n,
    const AdamNumbers<T>& a) {
  for (std::int64_t i = 0; i < n; ++i) {
    p[i] = a.keep * p[i] - a.rate * (m[i] / (std::sqrt(v[i]) / a.root + a.eps));
  }
}

MUON_TARGET_CLONES void moments(
    const float* p, const float* g, float* m, float* v, std::int64_t n,
    const AdamNumbers<float>& a) {
  moments_body(p, g, m, v, n, a);
}

MUON_TARGET_CLONES void moments(
    const double* p, const double* g, double* m, double* v, std::int64_t n,
    const AdamNumbers<double>& a) {
  moments_body(p, g, m, v, n, a);
}

MUON_TARGET_CLONES void update(
    float* p, const float* m, const float* v, std::int64_t n, const AdamNumbers<float>& a) {
  update_body(p, m, v, n, a);
}

MUON_TARGET_CLONES void update(
    double* p, const double* m, const double* v, std::int64_t n, const AdamNumbers<double>& a) {
  update_body(p, m, v, n, a);
}

template <typename T>
void step_cpu_(const AdamBlocks& t, const AdamNumbers<T>& numbers) {
  const std::vector<BlockRows> rows{BlockRows(t.param.sizes(), t.exp_avg.scales.dim() - 1)};
  const BlockCodec exp_avg(t.exp_avg, rows[0]);
  const BlockCodec exp_avg_sq(t.exp_avg_sq, rows[0]);
  const bool amsgrad = t.max_exp_avg_sq.codes.defined();
  const BlockCodec largest(amsgrad ? t.max_exp_avg_sq : t.exp_avg_sq, rows[0]);
  const ValueRuns params(t.param);
  const ValueRuns grads(t.grad);
  for_each_unit(rows, [&](std::size_t, const BlockRows::Unit& unit) {
    T p[kRun];
    T grad_buffer[kRun];
    T m[kRun];
    T v[kRun];
    const T* stored = params.load(unit.begin, unit.length, p);
    if (stored != p) {
      std::copy_n(stored, unit.length, p);
    }
    exp_avg.load(unit, m);
    exp_avg_sq.load(unit, v);
    moments(p, grads.load(unit.begin, unit.length, grad_buffer), m, v, unit.length, numbers);
    exp_avg.store(unit, m);
    exp_avg_sq.store(unit, v);
    if (amsgrad) {
      T before[kRun];
      largest.load(unit, before);
      std::transform(v, v + unit.length, before, v, [](T a, T b) { return std::max(a, b); });
      largest.store(unit, v);
    }
    update(p, m, v, unit.length, numbers);
    params.store(unit.begin, unit.length, p);
  });
}

void step_any_(const AdamBlocks& t, const AdamNumbers<double>& a) {
  const auto dtype = t.param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  const at::IntArrayRef sizes = t.param.sizes();
  const at::Tensor p = t.param.to(dtype);
  const at::Tensor g = t.grad.to(dtype) * a.grad_factor + p * a.couple;
  const at::Tensor m = decode_state(t.exp_avg, sizes).to(dtype) * a.beta1 + g * (1.0 - a.beta1);
  at::Tensor v = decode_state(t.exp_avg_sq, sizes).to(dtype) * a.beta2 + g * g * (1.0 - a.beta2);
  encode_state_(t.exp_avg, m);
  encode_state_(t.exp_avg_sq, v);
  if (t.max_exp_avg_sq.codes.defined()) {
    v = at::maximum(v, decode_state(t.max_exp_avg_sq, sizes).to(dtype));
    encode_state_(t.max_exp_avg_sq, v);
  }
  t.param.copy_(p * a.keep - m / (v.sqrt() / a.root + a.eps) * a.rate);
}

} // namespace

void adam_blocks_(
    at::TensorList params, at::TensorList grads, at::TensorList state, const at::Tensor& hyper,
    at::IntArrayRef groups, double inverse_scale, const GroupSpec& spec) {
  const std::size_t slots = spec.amsgrad ? 7 : 5; // codes and scales of each moment, and the step
  for (std::size_t i = 0; i < params.size(); ++i) {
    const at::TensorList own = state.slice(i * slots, slots);
    const auto moment = [&](std::size_t first) {
      return block_states(own.slice(first, 2), {params[i]}).front();
    };
    const AdamBlocks tensors{
        params[i], grads[i], moment(0), moment(2), spec.amsgrad ? moment(5) : BlockState{}};
    const AdamRule rule(HyperRow(hyper, groups[i]), spec);
    const AdamCorrections corrections(rule, own[4]);
    if (!params[i].is_cpu()) {
      step_any_(tensors, AdamNumbers<double>(rule, corrections, inverse_scale));
    } else if (params[i].scalar_type() == at::kDouble) {
      step_cpu_(tensors, AdamNumbers<double>(rule, corrections, inverse_scale));
    } else {
      step_cpu_(tensors, AdamNumbers<float>(rule, corrections, inverse_scale));
    }
  }
}

} // namespace muon::detail
