#include <cmath>
#include <map>
#include <vector>

#include <ATen/TensorOperators.h>
#include <ATen/ops/_fused_adam.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/maximum.h>
#include <ATen/ops/view_as_real.h>

#include "algorithm/adam.h"
#include "algorithm/hyper.h"
#include "algorithm/stages.h"

namespace muon::detail {
namespace {

struct AdamTensors {
  at::Tensor param;
  at::Tensor grad;
  at::Tensor exp_avg;
  at::Tensor exp_avg_sq;
  at::Tensor step;
  at::Tensor max_exp_avg_sq; // amsgrad only
};

at::Tensor real_view(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

template <typename Predicate>
bool all_match(const AdamTensors& t, Predicate matches) {
  return matches(t.grad) && matches(t.exp_avg) && matches(t.exp_avg_sq) &&
      (!t.max_exp_avg_sq.defined() || matches(t.max_exp_avg_sq));
}

bool has_one_dtype(const AdamTensors& t) {
  return all_match(
      t, [&](const at::Tensor& other) { return other.scalar_type() == t.param.scalar_type(); });
}

// torch's fused kernel reads all tensors of a parameter as one dense run.
bool has_one_layout(const AdamTensors& t) {
  return t.param.is_non_overlapping_and_dense() &&
      all_match(t, [&](const at::Tensor& other) { return other.strides() == t.param.strides(); });
}

void fused_(const std::vector<AdamTensors>& tensors, const AdamRule& rule) {
  if (tensors.empty()) {
    return;
  }
  std::vector<at::Tensor> params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps;
  for (const AdamTensors& t : tensors) {
    params.push_back(t.param);
    grads.push_back(t.grad);
    exp_avgs.push_back(t.exp_avg);
    exp_avg_sqs.push_back(t.exp_avg_sq);
    steps.push_back(t.step.to(t.param.device()));
    if (rule.amsgrad) {
      max_exp_avg_sqs.push_back(t.max_exp_avg_sq);
    }
  }
  const auto update = [&](auto fused) {
    fused(
        params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, rule.lr, rule.beta1,
        rule.beta2, rule.weight_decay, rule.eps, rule.amsgrad, rule.maximize, std::nullopt,
        std::nullopt);
  };
  if (rule.decoupled) {
    update([](auto&&... args) { at::_fused_adamw_(args...); });
  } else {
    update([](auto&&... args) { at::_fused_adam_(args...); });
  }
}

// Tensors of different strides give the same bits as contiguous ones.
void fused_on_copies_(const AdamTensors& t, const AdamRule& rule) {
  const at::Tensor max_exp_avg_sq =
      t.max_exp_avg_sq.defined() ? t.max_exp_avg_sq.contiguous() : at::Tensor();
  const AdamTensors copies{
      t.param.contiguous(),
      t.grad.contiguous(),
      t.exp_avg.contiguous(),
      t.exp_avg_sq.contiguous(),
      t.step,
      max_exp_avg_sq};
  fused_({copies}, rule);
  t.param.copy_(copies.param);
  t.exp_avg.copy_(copies.exp_avg);
  t.exp_avg_sq.copy_(copies.exp_avg_sq);
  if (t.max_exp_avg_sq.defined()) {
    t.max_exp_avg_sq.copy_(copies.max_exp_avg_sq);
  }
}

// Any mix of dtypes, computed in float32 or float64.
void single_(const AdamTensors& t, const AdamRule& rule) {
  const auto dtype = t.param.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
  at::Tensor p = t.param.to(dtype);
  at::Tensor g = t.grad.to(dtype);
  if (rule.maximize) {
    g = g.neg();
  }
  if (rule.decoupled) {
    p = p * (1.0 - rule.shrink);
  } else if (rule.weight_decay != 0.0) {
    g = g + p * rule.weight_decay;
  }
  const at::Tensor m = t.exp_avg.to(dtype) * rule.beta1 + g * (1.0 - rule.beta1);
  const at::Tensor v = t.exp_avg_sq.to(dtype) * rule.beta2 + g * g * (1.0 - rule.beta2);
  t.exp_avg.copy_(m);
  t.exp_avg_sq.copy_(v);
  at::Tensor second = v;
  if (rule.amsgrad) {
    t.max_exp_avg_sq.copy_(at::maximum(t.max_exp_avg_sq.to(dtype), v));
    second = t.max_exp_avg_sq.to(dtype);
  }
  const AdamCorrections corrections(rule, t.step);
  t.param.copy_(p - m / (second.sqrt() / corrections.root + rule.eps) * corrections.rate);
}

} // namespace

void adam_(
    at::TensorList params, at::TensorList grads, at::TensorList state, const at::Tensor& hyper,
    at::IntArrayRef groups, const std::optional<at::Tensor>& grad_scale,
    std::string_view spec_text) {
  const GroupSpec spec = parse_group_spec(spec_text);
  if (spec.state_format != StateFormat::Plain) {
    adam_blocks_(params, grads, state, hyper, groups, inverse_scale(grad_scale), spec);
    return;
  }
  const std::size_t slots = spec.amsgrad ? 4 : 3;
  const double inverse = inverse_scale(grad_scale);
  std::map<std::int64_t, std::vector<AdamTensors>> fusable; // by group
  for (std::size_t i = 0; i < params.size(); ++i) {
    const auto slot = [&](std::size_t k) { return real_view(state[i * slots + k]); };
    // The caller's gradient is never written, so it is unscaled in a copy.
    const at::Tensor grad = inverse == 1.0 ? real_view(grads[i]) : real_view(grads[i]) * inverse;
    const AdamTensors tensors{
        real_view(params[i]),
        grad,
        slot(0),
        slot(1),
        state[i * slots + 2],
        spec.amsgrad ? slot(3) : at::Tensor()};
    if (tensors.param.numel() == 0) {
      continue;
    }
    const AdamRule rule(HyperRow(hyper, groups[i]), spec);
    if (!has_one_dtype(tensors) || !rule.is_fusable()) {
      single_(tensors, rule);
    } else if (has_one_layout(tensors)) {
      fusable[groups[i]].push_back(tensors);
    } else {
      fused_on_copies_(tensors, rule);
    }
  }
  for (const auto& [group, tensors] : fusable) {
    fused_(tensors, AdamRule(HyperRow(hyper, group), spec));
  }
}

} // namespace muon::detail
