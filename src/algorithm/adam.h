#pragma once

#include <cmath>

#include <ATen/core/Tensor.h>

#include <muon/step.h>

#include "algorithm/hyper.h"

namespace muon::detail {

/// What a group's hyperparameters come to in one Adam or AdamW step.
struct AdamRule {
  double lr; // of the update, lr_multiplier included
  double shrink; // decoupled decay: lr * weight_decay without the multiplier
  double weight_decay;
  double beta1;
  double beta2;
  double eps;
  bool maximize;
  bool amsgrad;
  bool decoupled;

  AdamRule(const HyperRow& hyper, const GroupSpec& spec)
      : lr(hyper[Hyper::kLr] * hyper[Hyper::kLrMultiplier]),
        shrink(hyper[Hyper::kLr] * hyper[Hyper::kWeightDecay]),
        weight_decay(hyper[Hyper::kWeightDecay]),
        beta1(hyper[Hyper::kBeta1]),
        beta2(hyper[Hyper::kBeta2]),
        eps(hyper[Hyper::kEps]),
        maximize(hyper.flag(Hyper::kMaximize)),
        amsgrad(spec.amsgrad),
        decoupled(spec.decoupled) {
    // torch's fused kernel decays by its own lr times weight_decay.
    if (decoupled && lr != 0.0) {
      weight_decay = shrink / lr;
    }
  }

  bool is_fusable() const {
    return !decoupled || lr != 0.0 || shrink == 0.0;
  }
};

/// The bias corrections after `step` steps.
struct AdamCorrections {
  double rate; // lr / (1 - beta1^t)
  double root; // sqrt(1 - beta2^t)

  AdamCorrections(const AdamRule& rule, const at::Tensor& step)
      : rate(rule.lr / (1.0 - std::pow(rule.beta1, step.item<double>()))),
        root(std::sqrt(1.0 - std::pow(rule.beta2, step.item<double>()))) {}
};

/// The step on quantised moments: `state` holds codes and scales of each.
void adam_blocks_(
    at::TensorList params, at::TensorList grads, at::TensorList state, const at::Tensor& hyper,
    at::IntArrayRef groups, double inverse_scale, const GroupSpec& spec);

} // namespace muon::detail
